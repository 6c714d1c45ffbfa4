"""The probe's statistics: dear ones, of a few moments of a run, in float32 and on few examples.

Shapes: N tokens, D width, L blocks, x_l the stream that enters block l, x_{L+1} that which enters the head.
"""

from __future__ import annotations

from normlab.stats.statistic import PROBE, Statistic, register

for name, of, formula, unit, question, source in (
    (
        "sharpness", "model", "largest eigenvalue of the loss's Hessian, to about 1e-3 of itself", "nats / of w^2",
        "How sharp is the valley? Gradient descent hovers where it is about 2 / learning rate.",
        "Cohen et al. 2021, arXiv:2103.00065; by Lanczos, at most 20 products",
    ),
    (
        "sharpness_pre", "model", "largest eigenvalue of P^(-1/2) H P^(-1/2), H the Hessian, P Adam's sqrt(v^) + eps",
        "nats", "How sharp is it in the measure that Adam goes by?",
        "after Cohen et al. 2022, arXiv:2207.14484; by Lanczos, at most 20 products",
    ),
    (
        "layer_drop", "block", "loss without the block, less the loss", "nats", "What would be lost without it?",
        "after Men et al. 2024, arXiv:2403.03853",
    ),
    (
        "angular", "block", "mean_N arccos(cos(x_l, x_{l+n})) / pi, the site being n", "half turns",
        "Which n blocks in a row could be left out?", "Gromov et al. 2024, arXiv:2403.17887, of all tokens",
    ),
    (
        "erank", "resid", "exp(-sum p log p), p the eigenvalues of the tokens' covariance over their sum", "1",
        "How many directions does the stream use?", "Roy & Vetterli 2007 (effective rank)",
    ),
    (
        "jac_gain", "resid", "mean |J^T v|^2 / |v|^2 of 4 Gaussian v, J the Jacobian of x_{L+1} by block l's x_l", "1",
        "How much does the rest of the model magnify what goes through it?",
        "after Pennington et al. 2017, arXiv:1711.04735",
    ),
    (
        "spec_norm", "parameter", "largest singular value of each matrix", "of w", "How much can it magnify at most?",
        "folklore",
    ),
    (
        "stable_rank", "parameter", "|w|_F^2 / spec_norm^2 of each matrix", "1", "In how many directions does it act?",
        "Rudelson & Vershynin 2007",
    ),
):  # fmt: skip
    register(
        Statistic(
            name=name, tier=PROBE, of=of, formula=formula, unit=unit, merge="pass", question=question, source=source
        )
    )
