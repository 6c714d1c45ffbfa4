"""Init rules against their closed forms, written a second time: in every weight of models of two depths and widths.

Shapes: L blocks, l one of them counted from 1, D width, I a matrix's inputs, O its outputs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch

from normlab.config import RunConfig
from normlab.model.init import build_model, seed_of
from normlab.norms.base import NORMS
from normlab.placements.base import PLACEMENTS
from normlab.verify.check import Check, Worst
from normlab.verify.small import VOCAB, config_of

XAVIER = "(2 / (I + O)) ** 0.5"
CLOSED_FORMS = {
    "gpt2": ("0.02", "0.02", "0.02", "0.02"),
    "gpt2_scaled": ("0.02", "0.02", "0.02", "0.02 * (2 * L) ** -0.5"),
    "xavier": ("0.02", XAVIER, XAVIER, XAVIER),
    "xavier_scaled": ("0.02", *[f"{XAVIER} * L ** -0.5"] * 3),
    "deepnorm": ("0.02", XAVIER, *[f"{XAVIER} * (8 * L) ** -0.25"] * 2),
    "sub_ln": ("0.02", XAVIER, *[f"{XAVIER} * ln(2 * L) ** 0.5"] * 2),
    "smallinit": ("(0.4 / D) ** 0.5",) * 4,
    "smallinit_scaled": (*["(0.4 / D) ** 0.5"] * 3, "(0.2 / (D * L)) ** 0.5"),
    "depth_scaled": ("0.02", "0.02", "0.02", "0.02 * (2 * l) ** -0.5"),
}
"""Standard deviations by rule: of embeddings and head; of queries and keys; of values and what the MLP reads with; of
what writes to the stream."""
GROUPS = (("tokens", "positions", "head"), ("q", "k"), ("v", "up", "gate"), ("out", "down"))
SIZES = ((2, 16), (7, 24))
"""Depths and widths."""


def rule_checks(rule: str) -> Iterator[Check]:
    """Each weight that the rule draws is the standard normal numbers of its name, times the closed form.

    A rule without one, a plugin's, has no check.
    """
    if rule not in CLOSED_FORMS:
        return
    worst = Worst(1e-6)
    for depth, width in SIZES:
        layernorm, pre = NORMS["layernorm"](), PLACEMENTS["pre"]  # pyright: ignore[reportCallIssue]
        config = config_of(layernorm, pre, depth=depth, mlp="swiglu", tie_embeddings=False)
        model = dataclasses.replace(config.model, width=width, heads=2, mlp_width=3 * width)
        for name, error in _errors(dataclasses.replace(config, model=model, init=rule)):
            worst.add(error, f"{name} of {depth} blocks of width {width}")
    check = "draws embeddings and head, queries and keys, values and MLP, outputs with " + ", ".join(CLOSED_FORMS[rule])
    yield Check(of=f"init {rule}", check=check, kind="self", passed=worst.passed, seen=str(worst))


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
        generator = np.random.Generator(np.random.Philox(key=seed_of(config.seed, name)))
        drawn = torch.from_numpy(generator.standard_normal(weight.numel(), dtype=np.float32)).view_as(weight)
        yield name, float((weight.detach() - std * drawn).abs().max() / (std * drawn).abs().max())
