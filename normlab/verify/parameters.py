"""What is learned or kept beside the formulas: where it starts, where it must lie, and how it is updated.

A formula is evaluated with a model's own numbers, and so it does not see where they came from.

Shapes: L blocks, l one of them counted from 1, D width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normlab.errors import ConfigError
from normlab.norms.base import NORMS, NormConfig
from normlab.placements.algebra import ROWS, AlgebraPlacement
from normlab.placements.base import Placement, projects
from normlab.verify.check import Check, Worst
from normlab.verify.small import built, config_of, numbers
from normlab.verify.variants import called, variants

NORM_STARTS = {
    "affine.gain": "1 - unit_offset",
    "affine.bias": "0",
    "running_mean": "0",
    "running_var": "1",
    "alpha": "alpha",
    "shift": "0",
    "beta": "0",
    "gamma": "1 - unit_offset",
    "lam": "lam",
    "radius": "radius or sqrt(D)",
}
"""By the name of a parameter or buffer, in the norm's options and D. What is drawn is not there."""
WIRING_STARTS: dict[str, dict[str, str]] = {
    "skipinit": {"wiring.attn.scale": "0", "wiring.mlp.scale": "0"},
    "rezero": {"wiring.attn.scale": "0"},
    "layerscale": dict.fromkeys(
        ("wiring.attn.scale", "wiring.mlp.scale"), "0.1 if L <= 18 else 0.00001 if L <= 24 else 0.000001"
    ),
    "normformer": {"attn.head_scale": "1"},
    "depth_scaled_sandwich": dict.fromkeys(
        ("wiring.attn.norms.out.affine.gain", "wiring.mlp.norms.out.affine.gain"), "L ** -0.5"
    ),
    "gpas": {"wiring.gate": "0"},
    "x0_lambdas": {
        "wiring.r": "1.15 - 0.10 * (l - 1) / (L - 1) if L > 1 else 1.15",
        "wiring.z": "0.20 - 0.15 * (l - 1) / (L - 1) if L > 1 else 0.20",
    },
    "ngpt": {
        **dict.fromkeys(("wiring.attn.alpha", "wiring.mlp.alpha", "attn.rotated.scale"), "D ** -0.5"),
        "mlp.of_up.scale": "1",
    },
}
"""By placement: what a block learns beside its norms and its linear layers."""
LOGIT_STARTS = {"ngpt": "D ** -0.5"}
"""By placement: what the logits are scaled by."""
VECTORS = ("layerscale", "normformer", "ngpt", "depth_scaled_sandwich")
"""Placements in which these are vectors, and no single numbers."""
UNIT_AXES = {
    "ngpt": {
        -1: (*(f"{name}.weight" for name in ("tokens", "positions", "q", "k", "v", "up", "gate", "head")),),
        -2: ("attn.out.weight", "mlp.down.weight"),
    }
}  # fmt: skip
"""By placement: the matrices that are kept at length 1, by the axis along which they are."""
DEPTHS = (1, 2, 5, 18, 19, 24, 25)


def start_check(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """Where a norm's parameters and buffers start, with each of its options."""
    worst = Worst(1e-6)
    own = NORMS.get(norm.name) is type(norm) and type(norm).__module__.startswith("normlab.norms.")
    for each in variants(norm, width) if own else ():
        module = each.build(width)
        options = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if name in NORM_STARTS:
                start = _value(NORM_STARTS[name], {**options, "D": width})
                worst.add(float((value.detach() - start).abs().max()), f"{name} of {called(each)}")
    if worst.count:
        yield Check(of=of, check="starts where it is said to", passed=worst.passed, seen=str(worst))


def kept_check(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """Running statistics move towards the batch's by the momentum: mean and variance of all its tokens."""
    worst = Worst(1e-10)
    for each in variants(norm, width) if norm.batch_statistics else ():
        options = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
        if not {"momentum", "running_var"} <= options.keys():
            continue
        for shape in ((3, 5), (1, 1), (1, 2)):
            module = each.build(width).double().train()
            x = numbers("kept", *shape, width) + 0.5
            module(x)
            tokens = x.flatten(0, 1)
            correction = int(options["running_var"] == "unbiased" and len(tokens) > 1)
            batch = {"running_mean": tokens.mean(0), "running_var": tokens.var(0, correction=correction)}
            for start, (name, value) in enumerate(batch.items()):
                kept = (1 - options["momentum"]) * start + options["momentum"] * value
                worst.add(float((module.get_buffer(name) - kept).abs().max()), f"{name} of {called(each)}")
    if worst.count:
        yield Check(of=of, check="keeps running statistics of the batch", passed=worst.passed, seen=str(worst))


def shape_check(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """Axes before the last are tokens, however many there are."""
    worst = Worst(1e-10)
    x = numbers("shapes", 2, 6, width) + 0.5
    for each in variants(norm, width):
        if getattr(each, "eps", 1) == 0:
            continue  # 0 / 0 where one token has no variance, by the formula
        module = each.build(width).double().train()
        weights = dict(module.named_parameters()) | dict(module.named_buffers())
        for y in (x[0], x.unflatten(1, (3, 2)), x[:, :1]):
            try:
                theirs = each.reference(y, weights)
            except NotImplementedError:
                return
            worst.add(float((module(y) - theirs).detach().abs().max()), f"shape {tuple(y.shape)} of {called(each)}")
    yield Check(of=of, check="takes any number of axes", passed=worst.passed, seen=str(worst))


def wiring_check(placement: Placement, of: str) -> Iterator[Check]:
    """A block learns what it is said to beside norms and linear layers, and starts it there, at several depths."""
    if not _is_ours(placement):
        return
    told, worst = WIRING_STARTS.get(placement.name, {}), Worst(1e-6)
    for depth in DEPTHS:
        config = config_of(_norm_for(placement), placement, depth=depth)
        model, _ = built(config, filled=False)
        for name, value in model.head.logits.named_parameters() if model.head.logits is not None else ():
            start = _value(LOGIT_STARTS.get(placement.name, "nan"), {"D": config.model.width, "nan": math.nan})
            worst.add(float((value.detach() / start - 1).abs().max()), f"{name} of the logits")
        for layer, block in enumerate(model.blocks, start=1):
            own = {name: value for name, value in _own(block) if "affine" not in name or name in told}
            if own.keys() != told.keys():
                seen = ", ".join(sorted(own.keys() ^ told.keys()))
                yield Check(of=of, check="learns what it is said to", passed=False, seen=seen)
                return
            for name, value in own.items():
                if value.dim() != (placement.name in VECTORS):
                    worst.add(float("inf"), f"the shape of {name}")
                start = _value(told[name], {"L": depth, "l": layer, "D": config.model.width})
                worst.add(float((value / start - 1 if start else value).abs().max()), f"{name}, {layer} of {depth}")
    if told:
        yield Check(of=of, check="starts where it is said to", passed=worst.passed, seen=str(worst))


def ends_check(placement: Placement, of: str) -> Iterator[Check]:
    """A row has a norm before the head where its stream does not end in one, and it has norms at all; none before.

    The formula of a row is one block's, and what it says of the two ends is read from the switches that make them.
    """
    if not isinstance(placement, AlgebraPlacement) or not _is_ours(placement):
        return
    last = placement.formula.rpartition(" = ")[2].rpartition(" else ")[2]
    needed = "N(" in placement.formula and not last.startswith("N(")
    passed = bool(placement.closes) == needed and not placement.opens
    check = f"has {'a' if needed else 'no'} norm before the head, and none on the embeddings"
    seen = f"{placement.opens or 'nothing'}, {placement.closes or 'nothing'}"
    yield Check(of=of, check=check, passed=passed, seen=seen)


def unit_check(placement: Placement, of: str) -> Iterator[Check]:
    """What a placement keeps on the sphere lies there, of each run of a pack, and it moves nothing else."""
    if not projects(placement) or placement.name not in UNIT_AXES:
        return
    norm = NORMS["none"]()  # pyright: ignore[reportCallIssue]
    worst = Worst(1e-12)
    model, _ = built(config_of(norm, placement, depth=2, mlp="swiglu", tie_embeddings=False))
    weights = {name: numbers(name, 2, *weight.shape) for name, weight in model.named_parameters()}
    moved = {name: weight.clone() for name, weight in weights.items()}
    placement.project(moved)
    for name, weight in weights.items():
        axes = [axis for axis, names in UNIT_AXES[placement.name].items() if name.endswith(names)]
        length = torch.linalg.vector_norm(weight, dim=axes[0], keepdim=True) if axes else 1.0
        worst.add(float((moved[name] - weight / length).abs().max()), name)
    yield Check(of=of, check="keeps its matrices on the sphere", passed=worst.passed, seen=str(worst))


def _norm_for(placement: Placement) -> NormConfig:
    """None, so that all that is learned is the placement's; a norm where the placement is about what norms learn."""
    none = NORMS["none"]()  # pyright: ignore[reportCallIssue]
    try:
        placement.fits(none)
    except ConfigError:
        return NORMS["rmsnorm"]()  # pyright: ignore[reportCallIssue]
    return none


def _is_ours(placement: Placement) -> bool:
    """Whether it is of the package, and no plugin's."""
    known = placement.name in {row.name for row in ROWS} or not isinstance(placement, AlgebraPlacement)
    return known and type(placement).__module__.startswith("normlab.placements.")


def _own(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a block that are of no linear layer."""
    for name, parameter in block.named_parameters():
        if not isinstance(block.get_submodule(name.rpartition(".")[0]), nn.Linear):
            yield name, parameter.detach()


def _value(text: str, known: Mapping[str, Any]) -> float:
    return float(eval(text, {"__builtins__": {}}, {"sqrt": math.sqrt, **known}))  # noqa: S307
