"""Compute the statistics of observed tensors, those of many sites at once.

Small tensors cost the start of an operation rather than its work. Tensors of one shape are therefore copied into one
stack, whatever their site and layer, and each function of the registry runs once on the rows that need it.

Shapes: S tensors of a stack, N tokens, D width; `...R` marks an axis that only stacked runs have.
"""

from __future__ import annotations  # torch's compiler cannot trace the annotations of a nested function

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from normlab.catalogue.statistics.profiles import Column
from normlab.catalogue.statistics.statistic import OF
from normlab.model.instrument import Observation, Selection
from normlab.model.views import AttentionView, View

STACK_BYTES = {"cpu": 2**21, "cuda": 5 * 2**25}
"""Most bytes of observed tensors that are stacked. It limits the memory of the stack, and that of the tensors that
autograd does not keep; on a device, the work on larger tensors takes longer than its start."""

Row = tuple[Any, int]
"""A stack and a row of it."""


def share_of_stack(observations: Sequence[Observation]) -> float:
    """Return the observed tensors' share of the largest stack; those that are observed twice count twice."""
    tensors = [x for each in observations for x in each.tensors if isinstance(x, Tensor)]
    return sum(x.nbytes for x in tensors) / STACK_BYTES[tensors[0].device.type] if tensors else 0.0


@torch.no_grad()
def compute(
    selection: Selection, observations: Sequence[Observation], lead: int = 0, *, together: bool = False
) -> dict[Column, Tensor]:
    """Return the selected statistics of observed tensors, (...R) each.

    Autocast, in which the forward pass may be, would round the products of matrices.

    Args:
        lead: The number of axes of runs.
        together: Whether to stack tensors of at most `STACK_BYTES`; False under `vmap`, where tensors have no memory to
            compare.
    """
    if not observations:
        return {}
    device = next(x.device.type for x in observations[0].tensors if isinstance(x, Tensor))
    with torch.autocast(device, enabled=False):
        return _compute(selection, observations, lead, together=together and share_of_stack(observations) <= 1)


def _compute(
    selection: Selection, observations: Sequence[Observation], lead: int, *, together: bool
) -> dict[Column, Tensor]:
    results: dict[Column, Tensor] = {}
    tensors: dict[Any, list[Tensor]] = {}
    rows: dict[Any, Row] = {}

    def row_of(x: Tensor) -> Row:
        # The input of a norm, or the stream after a block, is often a tensor that another kind has already.
        memory = _memory(x) if together else len(rows)
        if memory not in rows:
            stack = (x.shape[:lead], x.shape[lead:-1].numel(), x.shape[-1]) if together else memory
            rows[memory] = stack, len(tensors.setdefault(stack, []))
            tensors[stack].append(x.flatten(lead, -2))
        return rows[memory]

    # One kind after another, so that most functions need adjacent rows.
    kinds = {kind: [each for each in observations if each.kind == kind] for kind in OF if kind in selection}
    calls: dict[Any, list[tuple[Column, tuple[Row, ...]]]] = {}
    for kind, of_kind in ((kind, of_kind) for kind, of_kind in kinds.items() if of_kind):
        if kind == "attention":
            for each in of_kind:
                view = AttentionView(*each.tensors)
                results |= {Column(name, each.site, each.layer): value(view) for name, value in selection[kind]}
        else:
            arguments = [[row_of(each.tensors[i]) for each in of_kind] for i in range(len(of_kind[0].tensors))]
            for each, places in zip(of_kind, zip(*arguments, strict=True), strict=True):
                for name, value in selection[kind]:
                    key = value, tuple(stack for stack, _ in places)
                    calls.setdefault(key, []).append((Column(name, each.site, each.layer), places))
    views = {stack: View(_stack(of_stack)) for stack, of_stack in tensors.items()}
    return results | _average(
        [_call(function, stacks, columns, views) for (function, stacks), columns in calls.items()], lead
    )


def _call(
    function: Any, stacks: tuple[Any, ...], requests: list[tuple[Column, tuple[Row, ...]]], views: Mapping[Any, View]
) -> tuple[Tensor, dict[Column, int]]:
    """Return the values of a function of rows of stacks, and the index of each column's value."""
    if len(stacks) == 1:
        wanted = sorted({row for _, ((_, row),) in requests})
        index = {row: position for position, row in enumerate(wanted)}
        return function(views[stacks[0]].rows(wanted)), {column: index[row] for column, ((_, row),) in requests}
    by_argument = zip(*([row for _, row in places] for _, places in requests), strict=True)
    arguments = [views[stack].rows(wanted) for stack, wanted in zip(stacks, by_argument, strict=True)]
    return function(*arguments), {column: position for position, (column, _) in enumerate(requests)}


def _average(calls: list[tuple[Tensor, dict[Column, int]]], lead: int) -> dict[Column, Tensor]:
    """Return each column's value; values of tokens are averaged, those of as many tokens by one operation."""
    results: dict[Column, Tensor] = {}
    by_tokens: dict[int, list[tuple[Tensor, dict[Column, int]]]] = {}
    for values, index in calls:
        tokens = values.shape[-1] if values.dim() > 1 + lead else 0
        by_tokens.setdefault(tokens, []).append((values, index))
    for tokens, group in by_tokens.items():
        values = [values for values, _ in group]
        means = torch.cat(values).mean(-1).split([len(each) for each in values]) if tokens else values
        for of_call, (_, index) in zip(means, group, strict=True):
            of_row = of_call.unbind()
            results |= {column: of_row[position] for column, position in index.items()}
    return results


def _stack(tensors: list[Tensor]) -> Tensor:
    """Return tensors of one shape in float32 or better, (S, *shape): one copy for each of their dtypes."""
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0)
    dtypes = dict.fromkeys(x.dtype for x in tensors)
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    stack = tensors[0].new_empty((len(tensors), *tensors[0].shape), dtype=dtype)
    rows = stack.unbind()
    for each in dtypes:
        chosen = [number for number, x in enumerate(tensors) if x.dtype == each]
        torch._foreach_copy_([rows[number] for number in chosen], [tensors[number] for number in chosen])
    return stack


def _memory(x: Tensor) -> Any:
    """Return a key that tensors share if they are the same part of the same memory."""
    return StorageWeakRef(x.untyped_storage()).cdata, x.storage_offset(), x.shape, x.stride()
