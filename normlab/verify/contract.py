"""What a norm's module must bear, whatever it computes: to be one of a pack, and to read what others read too.

A pack is many runs under `torch.func.vmap`: there is no number to look at in a tensor, and no branch on one.

Shapes: R runs, B batch, T time, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from normlab.norms.base import NormConfig
from normlab.verify.check import Check, Worst
from normlab.verify.norms import module_of, sequences
from normlab.verify.small import numbers
from normlab.verify.variants import called, variants

RUNS = 2


def contract_check(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """In a pack each run gets what it gets alone, and what a module is given it leaves as it was."""
    worst, touched = Worst(1e-12), []
    for each in variants(norm, width):
        modules = [module_of(each, width).train() for _ in range(RUNS)]
        with torch.no_grad():
            for number, module in enumerate(modules):
                for name, parameter in module.named_parameters():
                    parameter.add_(0.1 * number * numbers(f"run/{name}", *parameter.shape))
        x_RBTD = numbers("pack", RUNS, sequences(norm), 6, width) + 0.5
        given = x_RBTD.clone()
        params, buffers = (
            {name: t.detach().clone() for name, t in kind.items()} for kind in stack_module_state(modules)
        )
        try:
            packed_RBTD = vmap(partial(_run, modules[0]), randomness="same")(params, buffers, x_RBTD)
        except RuntimeError as error:  # torch's, of what it cannot do with a stack
            seen = f"{called(each)}: {' '.join(str(error).split()).partition('.')[0]}"
            yield Check(of=of, check="trains in a pack as it does alone", passed=False, seen=seen)
            return
        for number, module in enumerate(modules):
            worst.add(float((packed_RBTD[number] - module(x_RBTD[number])).detach().abs().max()), called(each))
        if not torch.equal(x_RBTD, given):
            touched.append(called(each))
    yield Check(of=of, check="trains in a pack as it does alone", passed=worst.passed, seen=str(worst))
    seen = f"not that of {touched[0]}" if touched else f"{worst.count // RUNS} variants"
    yield Check(of=of, check="leaves its input as it was", passed=not touched, seen=seen)


def _run(shell: nn.Module, params: dict[str, Tensor], buffers: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
    """The module with one run's parameters and buffers."""
    return functional_call(shell, (params, buffers), (x_BTD,))
