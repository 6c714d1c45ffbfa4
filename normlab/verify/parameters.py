"""Check learned numbers and buffers: where they start, where they must lie, and how they are updated.

A formula is evaluated with the model's own numbers, so it cannot show where these come from.

Shapes: L blocks, l the number of a block from 1, D width.
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

from normlab.errors import ConfigError
from normlab.model.small import (
    VOCAB,
    build_small,
    extra_parameters,
    fill,
    hashed_numbers,
    restored_buffers,
    small_config,
)
from normlab.norms.base import NORMS, NormConfig
from normlab.placements.algebra import AlgebraPlacement
from normlab.placements.base import Placement, projects
from normlab.placements.table import ROWS
from normlab.placements.wiring import Branch
from normlab.plugins import starts_line
from normlab.verify.check import Check, LargestError
from normlab.verify.variants import is_valid, label_of, variants

AXES = {"rows": -1, "columns": -2}
"""The axis along which the vectors of a matrix lie."""
DEPTHS = (1, 2, 5, 18, 19, 24, 25)
"""LayerScale's start changes after 18 and after 24 blocks."""


def start_check(norm: NormConfig, subject: str, width: int) -> Iterator[Check]:
    """Check the initial parameters and buffers of each variant against `starts`, with the same random generator."""
    largest, declared, found = LargestError(1e-6), norm.all_starts(), set[str]()
    for variant in variants(norm, width):
        options = _options(variant)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            module = variant.build(width)
            torch.default_generator.manual_seed(0)
            starting = _parameters_and_buffers(module)
            if missing := {name: _expression(value, width) for name, value in starting if name not in declared}:
                line = starts_line({**vars(type(norm)).get("starts", {}), **missing})
                result = f"{', '.join(missing)}: not in `starts`; write in class {type(norm).__name__}: {line}"
                yield Check(subject=subject, claim="declares where it starts", passed=False, result=result)
                return
            for name, value in starting:
                found.add(name)
                error, reason = _start_error(value.detach(), declared[name], {**options, "D": width})
                largest.add(error, f"{name} of {label_of(variant)}{reason}")
    if declared:
        absent = ", ".join(sorted(declared.keys() - found))
        result = f"no options give it {absent}" if absent else str(largest)
        passed = largest.passed and not absent
        yield Check(subject=subject, claim="starts where it declares", passed=passed, result=result)


def _expression(value: Tensor, width: int) -> str:
    """Suggest an expression for `starts`; `...` is for the author to fill in."""
    same = value.numel() and bool((value == value.flatten()[0]).all())
    number = f"{float(value.detach().flatten()[0]):g}" if same else "..."
    return number if value.dim() == 0 else f"[{number}] * D" if value.shape == (width,) and same else "..."


def running_statistics_check(norm: NormConfig, subject: str, width: int) -> Iterator[Check]:
    """Check that running mean and variance move towards those of all tokens of the batch, by the momentum."""
    largest = LargestError(1e-10)
    for variant in variants(norm, width) if norm.batch_statistics else ():
        options = _options(variant)
        if not {"momentum", "running_var"} <= options.keys():
            continue
        for shape in ((3, 5), (1, 1), (1, 2)):
            module = variant.build(width).double().train()
            x = (hashed_numbers("kept", *shape, width) + 0.5).requires_grad_()
            module(x)
            tokens = x.detach().flatten(0, 1)
            correction = int(options["running_var"] == "unbiased" and len(tokens) > 1)
            batch = {"running_mean": tokens.mean(0), "running_var": tokens.var(0, correction=correction)}
            for start, (name, value) in enumerate(batch.items()):
                expected = (1 - options["momentum"]) * start + options["momentum"] * value
                buffer = module.get_buffer(name)
                largest.add(float((buffer - expected).abs().max()), f"{name} of {label_of(variant)}")
                if buffer.shape != expected.shape:
                    largest.add(math.inf, f"the shape of {name} of {label_of(variant)}")
                if buffer.requires_grad:
                    largest.add(math.inf, f"{name} of {label_of(variant)} keeps the graph of every batch")
    if largest.count:
        claim = "updates its running statistics from the batch"
        yield Check(subject=subject, claim=claim, passed=largest.passed, result=str(largest))


def shape_check(norm: NormConfig, subject: str, width: int) -> Iterator[Check]:
    """Check that all axes before the last are tokens, that one channel is enough, and that float64 is kept."""
    largest = LargestError(1e-10)
    for size in (width, 1, 2):
        x = hashed_numbers("shapes", 2, 6, size) + 0.5
        for variant in variants(norm, width):
            if getattr(variant, "eps", 1) == 0 or not is_valid(variant, size):
                continue  # with eps=0 one token without variance is 0 / 0
            module = variant.build(size)
            weights = {name: value.detach().double() for name, value in _parameters_and_buffers(module)}
            for y, training in product((x[0], x.unflatten(1, (3, 2)), x[:, :1]), (True, False)):
                try:
                    expected = (variant.reference if training else variant.reference_evaluated)(y, weights)
                except NotImplementedError:
                    return
                with restored_buffers(module):
                    found = module.train(training)(y).detach()
                # Where the formula is 0 / 0, the eps makes the result finite.
                error = (found - expected).abs().max() if expected.isfinite().all() else 0 * found.abs().max()
                mode = "training" if training else "evaluation"
                largest.add(float(error), f"shape {tuple(y.shape)} of {label_of(variant)} in {mode}")
    claim = "takes any number of axes, and one channel"
    yield Check(subject=subject, claim=claim, passed=largest.passed, result=str(largest))


def _parameters_and_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _options(entry: NormConfig | Placement) -> dict[str, Any]:
    return {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}


def wiring_check(placement: Placement, subject: str) -> Iterator[Check]:
    """Check which parameters a model has outside norms and linear layers, and where they start, at several depths."""
    declared, largest = placement.starts, LargestError(1e-6)
    for depth, norm in product(DEPTHS if declared else DEPTHS[:3], _norms_for(placement)):
        small = build_small(small_config(norm, placement, depth=depth, mlp="swiglu"), filled=False)
        model = small.config.model
        sizes = {"L": depth, "D": model.width, "M": model.mlp_width, "H": model.heads, "V": VOCAB}
        known = _options(placement) | _options(norm) | sizes
        of_norms = {parameter for module in small.norms for parameter in module.parameters()}
        found: set[str] = set()
        for layer, name, value in extra_parameters(small.gpt):
            if name in declared:
                error, reason = _start_error(value.detach(), declared[name], {**known, "l": layer})
                largest.add(error, f"{name}, block {layer} of {depth}{reason}")
            if name in declared or value not in of_norms:
                found.add(name)
        if found != declared.keys():
            result = ", ".join(sorted(found ^ declared.keys()))
            yield Check(subject=subject, claim="learns what it declares", passed=False, result=result)
            return
    if declared:
        yield Check(subject=subject, claim="starts where it declares", passed=largest.passed, result=str(largest))


def factor_check(placement: Placement, subject: str) -> Iterator[Check]:
    """Check a row's factors: in every block if one of them is not 1, since all blocks share a compiled graph.

    A factor must not widen the dtype of the stream.
    """
    if not isinstance(placement, AlgebraPlacement):
        return
    wrong, count, make_norm = [], 0, _norms_for(placement)[0].build
    x_BTD = hashed_numbers("stream", 1, 2, 16).bfloat16()
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
    result = f"not so: {', '.join(wrong[:4])}" if wrong else f"{count} factors"
    yield Check(subject=subject, claim="has a factor where it is not 1", passed=not wrong, result=result)


def inside_check(placement: Placement, subject: str) -> Iterator[Check]:
    """Check that the modules inside the sub-layers keep the dtype and round no more often than necessary.

    Queries and keys are rounded once; hidden activations and logits twice, because their factor is rounded too.
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
        x = hashed_numbers(name, *shape).bfloat16()
        found = module(x).detach()
        expected = copy.deepcopy(module).double()(x.double()).detach()
        allowed = roundings / 256 * expected.abs()
        if found.dtype != x.dtype or bool(((found - expected).abs() > allowed).any()):
            wrong.append(name)
    if any(module is not None for module, _, _ in parts.values()):
        claim = "keeps bfloat16 inside, and rounds no more than necessary"
        result = f"not so: {', '.join(wrong)}" if wrong else ", ".join(parts)
        yield Check(subject=subject, claim=claim, passed=not wrong, result=result)


def ends_check(placement: Placement, subject: str) -> Iterator[Check]:
    """Check that a row has a norm before the head exactly if its stream does not end in one, and none before block 1.

    The formula covers one block; the model's ends are set by switches, which this check compares with the formula.
    """
    if placement.name not in {row.name for row in ROWS} or not isinstance(placement, AlgebraPlacement):
        return
    last = placement.formula.rpartition(" = ")[2].rpartition(" else ")[2]
    needed = "N(" in placement.formula and not last.startswith("N(")
    passed = bool(placement.closes) == needed and not placement.opens
    claim = f"has {'a' if needed else 'no'} norm before the head, and none on the embeddings"
    result = f"{placement.opens or 'nothing'}, {placement.closes or 'nothing'}"
    yield Check(subject=subject, claim=claim, passed=passed, result=result)


def unit_length_check(placement: Placement, subject: str) -> Iterator[Check]:
    """Check that a placement's projection gives its matrices unit length, run by run, and changes no other weight."""
    if not projects(placement):
        return
    largest = LargestError(1e-12)
    config = small_config(_norms_for(placement)[0], placement, depth=2, mlp="swiglu", tie_embeddings=False)
    shapes = {name: weight.shape for name, weight in build_small(config).gpt.named_parameters()}
    weights = {name: hashed_numbers(name, 2, *shape) for name, shape in shapes.items()}
    projected = {name: weight.clone() for name, weight in weights.items()}
    placement.project(projected)
    for name, weight in weights.items():
        last = name.removesuffix(".weight").rpartition(".")[2]
        axes = [AXES[which] for which, names in placement.unit_length.items() if last in names.split()]
        length = torch.linalg.vector_norm(weight, dim=axes[0], keepdim=True) if axes else 1.0
        largest.add(float((projected[name] - weight / length).abs().max()), name)
    yield Check(subject=subject, claim="keeps its matrices on the sphere", passed=largest.passed, result=str(largest))


def _norms_for(placement: Placement) -> list[NormConfig]:
    """Return no norm, so that only the placement has parameters; or norms with gains, if it sets where these start."""
    none = NORMS["none"]()  # pyright: ignore[reportCallIssue]
    try:
        placement.check_norm(none)
    except ConfigError:
        return [NORMS["rmsnorm"](unit_offset=offset) for offset in (False, True)]  # pyright: ignore[reportCallIssue]
    return [none]


def _start_error(value: Tensor, text: str, known: Mapping[str, Any]) -> tuple[float, str]:
    """Return the largest error against an expression of `starts`, relative to the expression's largest number.

    The error is infinite, with the reason, if the expression cannot be evaluated or gives another shape.
    """
    names = {"sqrt": math.sqrt, "max": max, "normal": torch.randn, **known}
    try:
        start = torch.as_tensor(eval(text, {"__builtins__": {}}, names), dtype=torch.float64)  # noqa: S307
    except Exception as error:  # a plugin's expression may raise anything
        reason = f"`{text}` cannot be evaluated ({type(error).__name__}: {error}); it may use {', '.join(names)}"
        return math.inf, f": {reason}"
    if value.shape != start.shape:
        return math.inf, f": `{text}` has shape {list(start.shape)}, the parameter {list(value.shape)}"
    return float((value - start).abs().max() / (start.abs().max() or 1.0)), ""
