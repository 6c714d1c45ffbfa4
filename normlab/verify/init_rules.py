"""Init rules against their closed forms, written a second time: in every weight of models of two depths and widths.

And which rule each placement belongs to, written a second time, with whose choice that is.

Shapes: L blocks, l one of them counted from 1, D width, I a matrix's inputs, O its outputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch

from normlab.config import RunConfig
from normlab.init_rules import standard_deviations
from normlab.model.init import build_model, derive_seed
from normlab.norms.base import NORMS
from normlab.placements.base import PLACEMENTS, Placement
from normlab.verify.check import Check, Worst
from normlab.verify.small import VOCAB, config_of

XAVIER = "(2 / (I + O)) ** 0.5"
CLOSED_FORMS = {
    "gpt2": ("0.02",) * 5,
    "gpt2_scaled": (*["0.02"] * 4, "0.02 * (2 * L) ** -0.5"),
    "xavier": ("0.02", "0.02", XAVIER, XAVIER, XAVIER),
    "xavier_scaled": ("0.02", "0.02", *[f"{XAVIER} * L ** -0.5"] * 3),
    "deepnorm": ("0.02", "0.02", XAVIER, *[f"{XAVIER} * (8 * L) ** -0.25"] * 2),
    "sub_ln": ("0.02", "0.02", XAVIER, *[f"{XAVIER} * ln(2 * L) ** 0.5"] * 2),
    "smallinit": ("(0.4 / D) ** 0.5",) * 5,
    "smallinit_scaled": (*["(0.4 / D) ** 0.5"] * 4, "(0.2 / (D * L)) ** 0.5"),
    "depth_scaled": (*["0.02"] * 4, "0.02 * (2 * l) ** -0.5"),
    "tinyinit": ("0.5", "0.02", *["(2 * D * L) ** -0.5"] * 3),
}
"""Standard deviations by rule: of the token embedding; of positions and head; of queries and keys; of values and what
the MLP reads with; of what writes to the stream."""
GROUPS = (("tokens",), ("positions", "head"), ("q", "k"), ("v", "up", "gate"), ("out", "down"))
SIZES = ((2, 16), (7, 24))
"""Depths and widths."""

UNDONE = "our choice: the norm after the branch undoes smaller outputs, and the first gradients grow with them"
FROM_NOTHING = "our choice: branches start at 0, and so any rule will do at the start"
PLAIN = "our choice: the plain rule; we know of no other in its source"
HYBRID = "the public code of Zhuo et al. 2025, arXiv:2503.04598"
AS_PRE = "our choice: that of pre, which it is but for where attention and the MLP read"
BELONGS: dict[str, tuple[str, str]] = {
    "pre": ("gpt2_scaled", "GPT-2: Radford et al. 2019, section 2.3"),
    "post": ("xavier", "Xiong et al. 2020, arXiv:2002.04745, section 3"),
    "peri": ("gpt2", UNDONE),
    "sandwich": ("gpt2", UNDONE),
    "depth_scaled_sandwich": ("gpt2", f"{UNDONE}; its paper's own, tinyinit, is known from a secondary source"),
    "res_post": ("gpt2", "OLMo 2, arXiv:2501.00656: N(0, 0.02) for every matrix"),
    "mix_ln": ("gpt2", "our choice: its first blocks are post, its others pre, and neither's rule is for both"),
    "deepnorm": ("deepnorm", "Wang et al. 2022, arXiv:2203.00555"),
    "keel": ("gpt2", "a public torchtitan fork of arXiv:2601.19895: N(0, 0.02) for linear layers and embeddings"),
    "lns": ("gpt2", "the authors' README (arXiv:2502.05795): no scaled outputs, 1 / sqrt(l) does that"),
    "skipinit": ("xavier", FROM_NOTHING),
    "rezero": ("xavier", FROM_NOTHING),
    "layerscale": ("gpt2", PLAIN),
    "pre_post": ("xavier", "our choice: that of post, whose norm on the stream it has"),
    "sub_ln": ("sub_ln", "Wang et al. 2022, arXiv:2210.06423"),
    "hybridnorm": ("smallinit_scaled", HYBRID),
    "hybridnorm_star": ("smallinit_scaled", HYBRID),
    "normformer": ("gpt2", "our choice: of its two branches one ends in a norm, which undoes smaller outputs"),
    "b2t": ("xavier_scaled", "after the public code of Takase et al. 2022, arXiv:2206.00330"),
    "gpas": ("gpt2", PLAIN),
    "ngpt": ("gpt2", "our choice: rows are brought to length 1, and so the rule decides nothing"),
    "parallel": ("gpt2_scaled", AS_PRE),
    "parallel_two_norms": ("gpt2_scaled", AS_PRE),
    "resi_dual": ("xavier", "our choice: that of post; the authors' code leaves fairseq's as it is (arXiv:2304.14802)"),
    "siamese": (
        "gpt2_scaled",
        "our choice: that of pre, with whose recipes it agrees by its abstract (arXiv:2602.08064)",
    ),
    "x0_lambdas": ("gpt2_scaled", "our choice: in nanochat outputs start at zero, for which there is no rule"),
}
"""The rule by placement, and whose choice it is: a second time, so that a row's `init` is held against something."""


def belongs_check(placement: Placement) -> Iterator[Check]:
    """A placement belongs to the rule that the table has for it. One that is not there, a plugin's, has no check."""
    if placement.name not in BELONGS:
        return
    rule, why = BELONGS[placement.name]
    passed = placement.init_rule == rule
    seen = why if passed else f"{placement.init_rule}, not {rule} ({why})"
    yield Check(of=f"placement {placement.name}", check=f"belongs to init={rule}", passed=passed, seen=seen)


def rule_checks(rule: str) -> Iterator[Check]:
    """Each weight that the rule draws is the standard normal numbers of its name, times the closed form.

    There is none of a plugin's rule: of that it is checked that it gives numbers which can be drawn with.
    """
    if rule not in CLOSED_FORMS:
        yield _drawable_check(rule)
        return
    worst = Worst(1e-6)
    for depth, width in SIZES:
        layernorm, pre = NORMS["layernorm"](), PLACEMENTS["pre"]  # pyright: ignore[reportCallIssue]
        config = config_of(layernorm, pre, depth=depth, mlp="swiglu", tie_embeddings=False)
        model = dataclasses.replace(config.model, width=width, heads=2, mlp_width=3 * width)
        for name, error in _errors(dataclasses.replace(config, model=model, init=rule)):
            worst.add(error, f"{name} of {depth} blocks of width {width}")
    parts = "token embedding, positions and head, queries and keys, values and MLP, outputs"
    check = f"draws {parts} with {', '.join(CLOSED_FORMS[rule])}"
    yield Check(of=f"init {rule}", check=check, kind="self", passed=worst.passed, seen=str(worst))


def _drawable_check(rule: str) -> Check:
    """A rule gives a finite number, no smaller than 0, for each matrix of models of two depths and widths."""
    stds = [std for depth, width in SIZES for std in _stds(rule, depth, width)]
    wrong = [std for std in stds if not (isinstance(std, (int, float)) and math.isfinite(std) and std >= 0)]
    seen = f"otherwise: {wrong[0]!r}" if wrong else f"{len(stds)} numbers; we know no closed form to hold them against"
    check = "gives each matrix a standard deviation"
    return Check(of=f"init {rule}", check=check, passed=not wrong, seen=seen)


def _stds(rule: str, depth: int, width: int) -> list[float]:
    return standard_deviations(rule, depth=depth, width=width, mlp_width=3 * width, vocab_size=VOCAB)


def _errors(config: RunConfig) -> Iterator[tuple[str, float]]:
    for name, weight in build_model(config, VOCAB).named_parameters():
        part = name.removesuffix(".weight").rpartition(".")[2]
        forms = [form for group, form in zip(GROUPS, CLOSED_FORMS[config.init], strict=True) if part in group]
        if weight.dim() != 2:
            continue
        outputs, inputs = weight.shape
        layer = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
        known = {
            "L": config.model.depth,
            "l": layer,
            "D": config.model.width,
            "I": inputs,
            "O": outputs,
            "ln": math.log,
        }
        std = eval(forms[0], {"__builtins__": {}}, known)  # noqa: S307
        generator = np.random.Generator(np.random.Philox(key=derive_seed(config.seed, name)))
        drawn = torch.from_numpy(generator.standard_normal(weight.numel(), dtype=np.float32)).view_as(weight)
        yield name, float((weight.detach() - std * drawn).abs().max() / (std * drawn).abs().max())
