"""That what a norm is held against is something else: a reference that calls the norm's module agrees with anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch import nn

from normlab.norms.base import NormConfig
from normlab.verify.check import Check
from normlab.verify.norms import input_of, module_of
from normlab.verify.variants import called, variants


def independence_check(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """No module of the classes that the norm is built of runs while its references do, with any of its options."""
    circular, count = [], 0
    for each in variants(norm, width):
        try:
            ran = _modules_run_by_references(each, width)
        except NotImplementedError:
            return  # there is none, which is said where it is looked for first
        count += 1
        if ran:
            circular.append(f"{ran[0]} of {called(each)}")
    seen = f"called: {'; '.join(circular)}" if circular else f"{count} variants"
    yield Check(of=of, check="has a reference that does not call its module", passed=not circular, seen=seen)


def _modules_run_by_references(norm: NormConfig, width: int) -> list[str]:
    module = module_of(norm, width)
    weights = dict(module.named_parameters()) | dict(module.named_buffers())
    ran: list[str] = []
    with ExitStack() as patches:
        for kind in {type(part) for part in module.modules()}:
            patches.enter_context(patch.object(kind, "forward", _counted(kind, ran)))
        for reference in (norm.reference, norm.reference_evaluated):
            reference(input_of(width), weights)
    return ran


def _counted(kind: type[nn.Module], ran: list[str]) -> Callable[..., Any]:
    forward = kind.forward

    def counted(*args: Any, **options: Any) -> Any:
        ran.append(kind.__name__)
        return forward(*args, **options)

    return counted
