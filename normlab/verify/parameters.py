"""What is learned or kept beside the formulas: where it starts, where it must lie, and how it is updated.

A formula is evaluated with a model's own numbers, and so it does not see where they came from.

Shapes: L blocks, l one of them counted from 1, D width.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from normlab.config import RunConfig
from normlab.errors import ConfigError
from normlab.norms.base import NORMS, NormConfig
from normlab.placements.algebra import ROWS, AlgebraPlacement
from normlab.placements.base import Placement, projects
from normlab.placements.wiring import Branch
from normlab.source import starts_line
from normlab.verify.check import Check, Worst
from normlab.verify.small import VOCAB, built, config_of, fill, numbers
from normlab.verify.variants import allowed, called, variants

AXES = {"rows": -1, "columns": -2}
"""Along which the vectors of a matrix lie."""
DEPTHS = (1, 2, 5, 18, 19, 24, 25)


def start_check(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """Where a norm's parameters and buffers start, with each of its options; drawn ones by the same generator."""
    worst, told, found = Worst(1e-6), norm.all_starts(), set[str]()
    for each in variants(norm, width):
        known = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            module = each.build(width)
            torch.default_generator.manual_seed(0)
            starting = _numbers_of(module)
            if missing := {name: _expression(value, width) for name, value in starting if name not in told}:
                line = starts_line({**vars(type(norm)).get("starts", {}), **missing})
                seen = f"{', '.join(missing)}: not in `starts`; write in class {type(norm).__name__}: {line}"
                yield Check(of=of, check="says where it starts", passed=False, seen=seen)
                return
            for name, value in starting:
                found.add(name)
                error, reason = _distance(value.detach(), told[name], {**known, "D": width})
                worst.add(error, f"{name} of {called(each)}{reason}")
    if told:
        never = ", ".join(sorted(told.keys() - found))
        seen = f"there is no {never}, whatever the options" if never else str(worst)
        yield Check(of=of, check="starts where it is said to", passed=worst.passed and not never, seen=seen)


def _expression(value: Tensor, width: int) -> str:
    """What `starts` may say of a parameter with one value in all places; `...` is for the author to fill in."""
    same = value.numel() and bool((value == value.flatten()[0]).all())
    one = f"{float(value.detach().flatten()[0]):g}" if same else "..."
    return one if value.dim() == 0 else f"[{one}] * D" if value.shape == (width,) and same else "..."


def kept_check(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """Running statistics move towards the batch's by the momentum: mean and variance of all its tokens."""
    worst = Worst(1e-10)
    for each in variants(norm, width) if norm.batch_statistics else ():
        options = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
        if not {"momentum", "running_var"} <= options.keys():
            continue
        for shape in ((3, 5), (1, 1), (1, 2)):
            module = each.build(width).double().train()
            x = (numbers("kept", *shape, width) + 0.5).requires_grad_()
            module(x)
            tokens = x.detach().flatten(0, 1)
            correction = int(options["running_var"] == "unbiased" and len(tokens) > 1)
            batch = {"running_mean": tokens.mean(0), "running_var": tokens.var(0, correction=correction)}
            for start, (name, value) in enumerate(batch.items()):
                kept = (1 - options["momentum"]) * start + options["momentum"] * value
                found = module.get_buffer(name)
                worst.add(float((found - kept).abs().max()), f"{name} of {called(each)}")
                if found.shape != kept.shape:
                    worst.add(math.inf, f"the shape of {name} of {called(each)}")
                if found.requires_grad:
                    worst.add(math.inf, f"{name} of {called(each)} drags every batch's graph along")
    if worst.count:
        yield Check(of=of, check="keeps running statistics of the batch", passed=worst.passed, seen=str(worst))


def shape_check(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """Axes before the last are tokens, however many there are; one channel will do; float64 stays float64."""
    worst = Worst(1e-10)
    for size in (width, 1, 2):
        x = numbers("shapes", 2, 6, size) + 0.5
        for each in variants(norm, width):
            if getattr(each, "eps", 1) == 0 or not allowed(each, size):
                continue  # 0 / 0 where one token has no variance, by the formula
            for y, training in product((x[0], x.unflatten(1, (3, 2)), x[:, :1]), (True, False)):
                module = each.build(size).train(training)
                weights = {name: value.detach().double() for name, value in _numbers_of(module)}
                try:
                    theirs = (each.reference if training else each.reference_evaluated)(y, weights)
                except NotImplementedError:
                    return
                ours = module(y).detach()
                # Where the reference is 0 / 0, an eps is there to mend that.
                error = (ours - theirs).abs().max() if theirs.isfinite().all() else 0 * ours.abs().max()
                mode = "training" if training else "evaluation"
                worst.add(float(error), f"shape {tuple(y.shape)} of {called(each)} in {mode}")
    yield Check(of=of, check="takes any number of axes, and one channel", passed=worst.passed, seen=str(worst))


def _numbers_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers."""
    return [*module.named_parameters(), *module.named_buffers()]


def wiring_check(placement: Placement, of: str) -> Iterator[Check]:
    """A model learns what it is said to beside norms and linear layers, and starts it there, at several depths."""
    told, worst = placement.starts, Worst(1e-6)
    for depth in DEPTHS:
        for norm in _norms_for(placement):
            config = config_of(norm, placement, depth=depth, mlp="swiglu")
            model, norms = built(config, filled=False)
            sizes = {"L": depth, "D": config.model.width, "M": config.model.mlp_width, "H": config.model.heads}
            options = {
                field.name: getattr(one, field.name) for one in (placement, norm) for field in dataclasses.fields(one)
            }
            known = options | sizes | {"V": VOCAB}
            theirs = {parameter for each in norms for parameter in each.parameters()}
            found: set[str] = set()
            for layer, name, value in _beside_linear(model):
                if name in told:
                    error, reason = _distance(value.detach(), told[name], {**known, "l": layer})
                    worst.add(error, f"{name}, block {layer} of {depth}{reason}")
                if name in told or value not in theirs:
                    found.add(name)
            if found != told.keys():
                seen = ", ".join(sorted(found ^ told.keys()))
                yield Check(of=of, check="learns what it is said to", passed=False, seen=seen)
                return
    if told:
        yield Check(of=of, check="starts where it is said to", passed=worst.passed, seen=str(worst))


def factor_check(placement: Placement, of: str) -> Iterator[Check]:
    """A row's factor is in every block if it is not 1 in some, so that all share one graph; and widens no stream."""
    if not isinstance(placement, AlgebraPlacement):
        return
    wrong, count, make_norm = [], 0, _norms_for(placement)[0].build
    x_BTD = numbers("stream", 1, 2, 16).bfloat16()
    for depth in DEPTHS:
        wirings = [placement.wire(layer, depth, 16, make_norm) for layer in range(depth)]
        for layer, (wiring, subs) in enumerate(zip(wirings, placement.layers(depth), strict=True), start=1):
            for part, sub in zip(("attn", "mlp"), subs, strict=True):
                for name, factor in zip(("skip", "branch", "shrink"), sub.factors, strict=True):
                    needed = any(factor(other, depth) != 1 for other in range(1, depth + 1))
                    count += 1
                    if needed != (wiring.get_submodule(part).get_buffer(name) is not None):
                        wrong.append(f"{part}.{name} of block {layer} of {depth}")
            if wiring(x_BTD, Branch(torch.neg), Branch(torch.neg)).dtype != x_BTD.dtype:
                wrong.append(f"the stream's dtype after block {layer} of {depth}")
    seen = f"not so: {', '.join(wrong[:4])}" if wrong else f"{count} factors"
    yield Check(of=of, check="has a factor where it does something", passed=not wrong, seen=seen)


def inside_check(placement: Placement, of: str) -> Iterator[Check]:
    """What queries, keys, hidden activations and logits pass through keeps their dtype, and rounds as often as it may.

    Queries and keys are rounded once; the rest is a factor, which is rounded too.
    """
    parts = {
        "queries and keys": (placement.qk_transform(2, 8), (2, 2, 6, 8), 1),
        "hidden activations": (placement.hidden_transform("up", 16, 32), (2, 6, 32), 2),
        "logits": (placement.logits_transform(VOCAB, 16), (2, 6, VOCAB), 2),
    }
    wrong = []
    for name, (module, shape, roundings) in parts.items():
        if module is None:
            continue
        fill(module, name)
        x = numbers(name, *shape).bfloat16()
        ours = module(x).detach()
        theirs = copy.deepcopy(module).double()(x.double()).detach()
        if ours.dtype != x.dtype or bool(((ours - theirs).abs() > roundings / 256 * theirs.abs()).any()):
            wrong.append(name)
    if any(module is not None for module, _, _ in parts.values()):
        seen = f"not so: {', '.join(wrong)}" if wrong else ", ".join(parts)
        yield Check(of=of, check="keeps bfloat16 inside, and rounds as little as it can", passed=not wrong, seen=seen)


def ends_check(placement: Placement, of: str) -> Iterator[Check]:
    """A row has a norm before the head where its stream does not end in one, and it has norms at all; none before.

    The formula of a row is one block's, and what it says of the two ends is read from the switches that make them.
    """
    if placement.name not in {row.name for row in ROWS} or not isinstance(placement, AlgebraPlacement):
        return
    last = placement.formula.rpartition(" = ")[2].rpartition(" else ")[2]
    needed = "N(" in placement.formula and not last.startswith("N(")
    passed = bool(placement.closes) == needed and not placement.opens
    check = f"has {'a' if needed else 'no'} norm before the head, and none on the embeddings"
    seen = f"{placement.opens or 'nothing'}, {placement.closes or 'nothing'}"
    yield Check(of=of, check=check, passed=passed, seen=seen)


def unit_check(placement: Placement, of: str) -> Iterator[Check]:
    """What a placement keeps on the sphere lies there, of each run of a pack, and it moves nothing else."""
    if not projects(placement):
        return
    worst = Worst(1e-12)
    model, _ = built(config_of(_norms_for(placement)[0], placement, depth=2, mlp="swiglu", tie_embeddings=False))
    weights = {name: numbers(name, 2, *weight.shape) for name, weight in model.named_parameters()}
    moved = {name: weight.clone() for name, weight in weights.items()}
    placement.project(moved)
    for name, weight in weights.items():
        last = name.removesuffix(".weight").rpartition(".")[2]
        axes = [AXES[which] for which, names in placement.unit_length.items() if last in names.split()]
        length = torch.linalg.vector_norm(weight, dim=axes[0], keepdim=True) if axes else 1.0
        worst.add(float((moved[name] - weight / length).abs().max()), name)
    yield Check(of=of, check="keeps its matrices on the sphere", passed=worst.passed, seen=str(worst))


def _norms_for(placement: Placement) -> list[NormConfig]:
    """None, so that all that is learned is the placement's; norms with gains where the placement starts these."""
    none = NORMS["none"]()  # pyright: ignore[reportCallIssue]
    try:
        placement.check_norm(none)
    except ConfigError:
        return [NORMS["rmsnorm"](unit_offset=offset) for offset in (False, True)]  # pyright: ignore[reportCallIssue]
    return [none]


def starts_of(config: RunConfig) -> dict[str, list[float]]:
    """The initial values of a small model's parameters, those of linear layers and tables excepted, by name."""
    model, _ = built(config, filled=False)
    return {f"{layer} {name}": value.flatten().tolist() for layer, name, value in _beside_linear(model)}


def _beside_linear(model: nn.Module) -> Iterator[tuple[int, str, Tensor]]:
    """The parameters of a model that are of no linear layer and no table: block (0 for none), name in it, value."""
    for name, parameter in model.named_parameters():
        if isinstance(model.get_submodule(name.rpartition(".")[0]), (nn.Linear, nn.Embedding)):
            continue
        words = name.split(".", 2)
        yield (int(words[1]) + 1, words[2], parameter) if words[0] == "blocks" else (0, name, parameter)


def _distance(value: Tensor, text: str, known: Mapping[str, Any]) -> tuple[float, str]:
    """Return the largest error of numbers beside their expression in `starts`, relative to its largest number.

    Infinite, and with the reason, where the expression cannot be evaluated or gives another shape.
    """
    names = {"sqrt": math.sqrt, "max": max, "normal": torch.randn, **known}
    try:
        start = torch.as_tensor(eval(text, {"__builtins__": {}}, names), dtype=torch.float64)  # noqa: S307
    except Exception as error:  # a plugin's expression may raise anything
        return (
            math.inf,
            f": `{text}` cannot be evaluated ({type(error).__name__}: {error}); it may use {', '.join(names)}",
        )
    if value.shape != start.shape:
        return math.inf, f": `{text}` has shape {list(start.shape)}, the parameter {list(value.shape)}"
    return float((value - start).abs().max() / (start.abs().max() or 1.0)), ""
