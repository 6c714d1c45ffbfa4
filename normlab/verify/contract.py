"""Check that a norm's module runs in a pack and leaves its input unchanged, and that its references are independent.

A pack is a stack of runs under `torch.func.vmap`, which forbids reading a number from a tensor and branching on it.

Shapes: R runs, B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from normlab.model.small import hashed_numbers
from normlab.norms.base import NormConfig
from normlab.verify.check import Check, LargestError
from normlab.verify.norms import batch_size, input_of, module_of
from normlab.verify.variants import label_of, variants

RUNS = 2


def pack_check(norm: NormConfig, subject: str, width: int) -> Iterator[Check]:
    """Check that each run of a pack gets the output of a single run, and that the input stays unchanged."""
    claim = "trains in a pack as it does alone"
    largest, changed = LargestError(1e-12), []
    for variant in variants(norm, width):
        modules = [module_of(variant, width).train() for _ in range(RUNS)]
        with torch.no_grad():
            for run, module in enumerate(modules):
                for name, parameter in module.named_parameters():
                    parameter.add_(0.1 * run * hashed_numbers(f"run/{name}", *parameter.shape))
        x_RBTD = hashed_numbers("pack", RUNS, batch_size(norm), 6, width) + 0.5
        before = x_RBTD.clone()
        params, buffers = (
            {name: t.detach().clone() for name, t in kind.items()} for kind in stack_module_state(modules)
        )
        try:
            packed_RBTD = vmap(partial(_call, modules[0]), randomness="same")(params, buffers, x_RBTD)
        except RuntimeError as error:  # torch cannot batch an operation of the module
            result = f"{label_of(variant)}: {' '.join(str(error).split()).partition('.')[0]}"
            yield Check(subject=subject, claim=claim, passed=False, result=result)
            return
        for run, module in enumerate(modules):
            error = float((packed_RBTD[run] - module(x_RBTD[run])).detach().abs().max())
            largest.add(error, label_of(variant))
        if not torch.equal(x_RBTD, before):
            changed.append(label_of(variant))
    yield Check(subject=subject, claim=claim, passed=largest.passed, result=str(largest))
    result = f"changed by {changed[0]}" if changed else f"{largest.count // RUNS} variants"
    yield Check(subject=subject, claim="leaves its input unchanged", passed=not changed, result=result)


def _call(module: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
    return functional_call(module, (params, buffers), (x_BTD,))


def independence_check(norm: NormConfig, subject: str, width: int) -> Iterator[Check]:
    """Check that no module of the norm runs while its references do: such a reference would agree with anything."""
    circular, count = [], 0
    for variant in variants(norm, width):
        try:
            ran = _modules_run_by_references(variant, width)
        except NotImplementedError:
            return  # `oracle_checks` reports the missing reference
        count += 1
        if ran:
            circular.append(f"{ran[0]} of {label_of(variant)}")
    claim = "has a reference that does not call its module"
    result = f"called: {'; '.join(circular)}" if circular else f"{count} variants"
    yield Check(subject=subject, claim=claim, passed=not circular, result=result)


def _modules_run_by_references(norm: NormConfig, width: int) -> list[str]:
    module = module_of(norm, width)
    weights = dict(module.named_parameters()) | dict(module.named_buffers())
    ran: list[str] = []
    with ExitStack() as patches:
        for kind in {type(part) for part in module.modules()}:
            patches.enter_context(patch.object(kind, "forward", _recording(kind, ran)))
        for reference in (norm.reference, norm.reference_evaluated):
            reference(input_of(width), weights)
    return ran


def _recording(kind: type[nn.Module], ran: list[str]) -> Callable[..., Any]:
    forward = kind.forward

    def recording(*args: Any, **options: Any) -> Any:
        ran.append(kind.__name__)
        return forward(*args, **options)

    return recording
