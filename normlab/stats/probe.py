"""Declares the probe statistics: expensive ones, measured at a few steps, in float32 and on few examples.

`stats/measure/probe.py` computes them. `normlab probe` (signal propagation at initialisation) is another thing.

Shapes: N tokens, D width, L blocks, x_l the stream that enters block l, x_{L+1} the stream that enters the head.
"""

from __future__ import annotations

from normlab.stats.statistic import PROBE, Statistic, register

for name, of, formula, unit, question, source in (
    (
        "sharpness", "model", "largest eigenvalue of the loss's Hessian, to a relative error of about 1e-3",
        "nats / of w^2", "How sharp is the minimum? Gradient descent hovers near 2 / learning rate.",
        "Cohen et al. 2021, arXiv:2103.00065; by Lanczos, at most 20 products",
    ),
    (
        "sharpness_pre", "model", "largest eigenvalue of P^(-1/2) H P^(-1/2), H the Hessian, P Adam's sqrt(v^) + eps",
        "nats", "How sharp is the minimum in Adam's preconditioned coordinates?",
        "after Cohen et al. 2022, arXiv:2207.14484; by Lanczos, at most 20 products",
    ),
    (
        "layer_drop", "block", "loss without the block - loss", "nats", "How much does the block lower the loss?",
        "after Men et al. 2024, arXiv:2403.03853",
    ),
    (
        "angular", "block", "mean_N arccos(cos(x_l, x_{l+n})) / pi, the site being n", "half turns",
        "Which n consecutive blocks could be removed?", "Gromov et al. 2024, arXiv:2403.17887, of all tokens",
    ),
    (
        "erank", "resid", "exp(-sum p log p), p the eigenvalues of the tokens' covariance over their sum", "1",
        "How many directions does the stream use?", "Roy & Vetterli 2007 (effective rank)",
    ),
    (
        "jac_gain", "resid", "mean |J^T v|^2 / |v|^2 of 4 Gaussian v, J the Jacobian of x_{L+1} by block l's x_l", "1",
        "How much does the rest of the model amplify a change of the stream?",
        "after Pennington et al. 2017, arXiv:1711.04735",
    ),
    (
        "spec_norm", "parameter", "largest singular value of each matrix", "of w",
        "By what factor can the matrix stretch a vector at most?", "folklore",
    ),
    (
        "stable_rank", "parameter", "|w|_F^2 / spec_norm^2 of each matrix", "1",
        "In how many directions does the matrix act?", "Rudelson & Vershynin 2007",
    ),
):  # fmt: skip
    register(
        Statistic(
            name=name, tier=PROBE, of=of, formula=formula, unit=unit, merge="pass", question=question, source=source
        )
    )
