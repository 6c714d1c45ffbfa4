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

from normlab.catalogue.statistics.profiles import StatisticColumn
from normlab.catalogue.statistics.statistic import OF
from normlab.config.memory import STACK_BYTES
from normlab.model.instrument import Observation, StatisticsSelection
from normlab.model.views import AttentionView, View

StackRow = tuple[Any, int]
"""A stack and a row of it."""
_Request = tuple[StatisticColumn, tuple[StackRow, ...]]
"""A column, and the rows of the arguments from which its value is computed."""


def share_of_stack(observations: Sequence[Observation]) -> float:
    """Return the observed tensors' share of the largest stack; those that are observed twice count twice."""
    tensors: list[Tensor] = []
    for observation in observations:
        tensors += [x for x in observation.tensors if isinstance(x, Tensor)]
    if not tensors:
        return 0.0
    return sum(x.nbytes for x in tensors) / STACK_BYTES[tensors[0].device.type]


@torch.no_grad()
def compute(
    selection: StatisticsSelection, observations: Sequence[Observation], lead: int = 0, *, together: bool = False
) -> dict[StatisticColumn, Tensor]:
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
    selection: StatisticsSelection, observations: Sequence[Observation], lead: int, *, together: bool
) -> dict[StatisticColumn, Tensor]:
    results: dict[StatisticColumn, Tensor] = {}
    tensors: dict[Any, list[Tensor]] = {}
    """The tensors of each stack."""
    rows: dict[Any, StackRow] = {}
    """The row of each tensor, by its memory."""

    def row_of(x: Tensor) -> StackRow:
        # The input of a norm, or the stream after a block, is often a tensor that another kind has already. One that is
        # not stacked has a stack of its own.
        memory: Any = len(rows)
        stack: Any = memory
        if together:
            memory, stack = _memory(x), (x.shape[:lead], x.shape[lead:-1].numel(), x.shape[-1])
        if memory not in rows:
            of_stack = tensors.setdefault(stack, [])
            rows[memory] = stack, len(of_stack)
            of_stack.append(x.flatten(lead, -2))
        return rows[memory]

    # One kind after another, so that most functions need adjacent rows.
    requests: dict[Any, list[_Request]] = {}
    """What each function is asked for, by the function and the stacks of its arguments."""
    for kind in OF:
        of_kind = [observation for observation in observations if observation.kind == kind]
        if kind not in selection or not of_kind:
            continue
        if kind == "attention":
            for observation in of_kind:
                view = AttentionView(*observation.tensors)
                for name, value in selection[kind]:
                    results[StatisticColumn(name, observation.site, observation.layer)] = value(view)
            continue
        # Argument by argument: the first arguments of a kind are then adjacent rows of their stack, and so on.
        by_argument: list[list[StackRow]] = []
        for number in range(len(of_kind[0].tensors)):
            by_argument.append([row_of(observation.tensors[number]) for observation in of_kind])
        for observation, argument_rows in zip(of_kind, zip(*by_argument, strict=True), strict=True):
            stacks = tuple(stack for stack, _ in argument_rows)
            for name, value in selection[kind]:
                column = StatisticColumn(name, observation.site, observation.layer)
                requests.setdefault((value, stacks), []).append((column, argument_rows))
    views = {stack: View(_stack(of_stack)) for stack, of_stack in tensors.items()}
    calls = [_call(function, stacks, columns, views) for (function, stacks), columns in requests.items()]
    return results | _average(calls, lead)


def _call(
    function: Any, stacks: tuple[Any, ...], requests: list[_Request], views: Mapping[Any, View]
) -> tuple[Tensor, dict[StatisticColumn, int]]:
    """Return the values of a function of rows of stacks, and the index of each column's value."""
    if len(stacks) == 1:
        # Columns may share a row, such as the stream after a block: its value is computed once.
        rows = sorted({row for _, ((_, row),) in requests})
        positions = {row: position for position, row in enumerate(rows)}
        return function(views[stacks[0]].rows(rows)), {column: positions[row] for column, ((_, row),) in requests}
    arguments: list[View] = []
    for number, stack in enumerate(stacks):
        rows = [argument_rows[number][1] for _, argument_rows in requests]
        arguments.append(views[stack].rows(rows))
    return function(*arguments), {column: index for index, (column, _) in enumerate(requests)}


def _average(calls: list[tuple[Tensor, dict[StatisticColumn, int]]], lead: int) -> dict[StatisticColumn, Tensor]:
    """Return each column's value; values of tokens are averaged, those of as many tokens by one operation."""
    results: dict[StatisticColumn, Tensor] = {}
    by_tokens: dict[int, list[tuple[Tensor, dict[StatisticColumn, int]]]] = {}
    for values, index in calls:
        # A function has a value for each tensor, (S, ...R), or one for each token, (S, ...R, N).
        tokens = 0
        if values.dim() > 1 + lead:
            tokens = values.shape[-1]
        by_tokens.setdefault(tokens, []).append((values, index))
    for tokens, group in by_tokens.items():
        means: Sequence[Tensor] = [values for values, _ in group]
        if tokens:
            sizes = [len(values) for values in means]
            means = torch.cat(list(means)).mean(-1).split(sizes)
        for of_call, (_, index) in zip(means, group, strict=True):
            of_row = of_call.unbind()
            for column, position in index.items():
                results[column] = of_row[position]
    return results


def _stack(tensors: list[Tensor]) -> Tensor:
    """Return tensors of one shape in float32 or better, (S, *shape): one copy for each of their dtypes."""
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0)
    dtypes = dict.fromkeys(x.dtype for x in tensors)
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    stack = tensors[0].new_empty((len(tensors), *tensors[0].shape), dtype=dtype)
    rows = stack.unbind()
    for source_dtype in dtypes:
        numbers = [number for number, x in enumerate(tensors) if x.dtype == source_dtype]
        torch._foreach_copy_([rows[number] for number in numbers], [tensors[number] for number in numbers])
    return stack


def _memory(x: Tensor) -> Any:
    """Return a key that tensors share if they are the same part of the same memory."""
    return StorageWeakRef(x.untyped_storage()).cdata, x.storage_offset(), x.shape, x.stride()
