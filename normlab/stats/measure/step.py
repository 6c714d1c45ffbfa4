"""The core statistics of a measured step, as one vector.

The segments return their statistics, the backward pass gives the stream's gradient where it is tapped, and the
parameters are measured before and after the update. The names that come with the first step's values define the
columns of all steps; a missing statistic is an error.

Shapes: R runs, L blocks, P parameters, D width, K statistics; `...R` marks an axis that only stacked runs have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.model.runner import ModelRunner, SegmentStatistics
from normlab.norms.affine import Affine
from normlab.stats.instrument import Selection, norm_site, select
from normlab.stats.measure.columns import SegmentNames, check_segments, parameter_column, segment_columns
from normlab.stats.profiles import Column
from normlab.stats.registry import NEEDS_PARAMETER_COPY, STATISTICS
from normlab.stats.views import View


class Measurement(NamedTuple):
    """Values of statistics and their columns."""

    columns: tuple[Column, ...]
    values: Tensor
    """(K, ...R), on the device."""


class MicroBatch(NamedTuple):
    """The measurements of one micro-batch."""

    statistics: Sequence[SegmentStatistics]
    """One for each segment."""
    squares: Tensor | None
    """The mean square of the gradient at each tap, (L + 1, ...R), of the step's loss summed over its tokens; None
    without taps."""

    def values(self) -> Tensor:
        """Return all values, (K, ...R)."""
        parts = [segment.values for segment in self.statistics]
        return torch.cat(parts if self.squares is None else [*parts, self.squares])


class BeforeUpdate(NamedTuple):
    """The measurements that need the parameters before the update."""

    values: list[Tensor]
    """Gradient norms, parameter norms and statistics of gains."""
    copies: list[Tensor]
    """The parameters of each shape, stacked."""


class _Columns(NamedTuple):
    """The columns of a step's vector, and how to reduce its values."""

    columns: tuple[Column, ...]
    is_max: Tensor
    """Whether a value of a micro-batch merges by maximum; the others merge by mean."""
    is_root: Tensor
    """Whether a column is the root of the merged value."""


@dataclass(slots=True)
class Measure:
    """Computes the statistics of these names for the steps of one model runner."""

    runner: ModelRunner
    names: frozenset[str]
    selection: Selection = field(init=False)
    _gains: list[tuple[Column, str, bool]] = field(init=False)
    """Every gain: its column, its parameter's name, and whether it has a unit offset."""
    _columns: dict[SegmentNames, _Columns] = field(default_factory=dict, init=False)
    _by_shape: list[list[int]] = field(init=False)
    """The indices of the parameters of each shape."""
    _order: Tensor = field(init=False)
    """The permutation from the order of `_by_shape` to the parameters' order."""
    _copies: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Find the norms' gains, and group the parameters by shape."""
        self.selection = select(self.names)
        shapes: dict[torch.Size, list[int]] = {}
        for index, p in enumerate(self.runner.params.values()):
            shapes.setdefault(p.shape, []).append(index)
        self._by_shape = list(shapes.values())
        self._order = self._tensor([index for group in self._by_shape for index in group], torch.int64).argsort()
        self._gains = []
        for layer, (prefix, segment) in enumerate(self.runner.model.segments()):
            for name, module in segment.named_modules():
                if isinstance(module, Affine) and module.gain is not None:
                    site = norm_site(name.removesuffix(".affine").removesuffix("affine"))
                    self._gains.append((Column("", site, layer), f"{prefix}{name}.gain", module.unit_offset))

    @property
    def taps(self) -> bool:
        """Whether the stream's gradient is needed."""
        return "dresid_rms" in self.names

    @torch.no_grad()
    def before_update(self, grad_norms: Tensor) -> BeforeUpdate:
        """Measure what the update will change.

        Args:
            grad_norms: The norm of each parameter's gradient before clipping, (P, ...R).
        """
        values, copies = [], self._copy_parameters() if self.names & set(NEEDS_PARAMETER_COPY) else []
        if "grad_norm" in self.names:
            values.append(grad_norms)
        if "param_norm" in self.names:
            values.append(self._norms(copies))
        values += [value for _, value in self._gain_statistics()]
        return BeforeUpdate(values, copies)

    @torch.no_grad()
    def after_update(self, micro_batches: Sequence[MicroBatch], before: BeforeUpdate) -> Measurement:
        """Return all core statistics of the step.

        Args:
            micro_batches: The measurements of each micro-batch.
            before: The result of `before_update`.

        Raises:
            StatisticsError: A statistic was not measured.
        """
        columns, is_max, is_root = self._find_columns(tuple(part.names for part in micro_batches[0].statistics))
        values = torch.stack([micro_batch.values() for micro_batch in micro_batches])
        if len(micro_batches) > 1:
            # The mean is right for the tapped gradients too: the loss of a micro-batch is 1 / parts of the mean over
            # its own tokens, so N times its gradient is the gradient of the sum over them.
            values = torch.where(self._per_run(is_max), values.amax(0), values.mean(0))
        else:
            values = values[0]
        parts = [values, *before.values]
        if "update_norm" in self.names:
            params = list(self.runner.params.values())
            old_params = [copy for stack in before.copies for copy in stack.unbind()]
            torch._foreach_sub_(old_params, [params[index] for group in self._by_shape for index in group])
            parts.append(self._norms(before.copies))
        merged = torch.cat([part.to(values.dtype) for part in parts])
        return Measurement(columns, torch.where(self._per_run(is_root), merged.sqrt(), merged))

    def _tensor(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=next(iter(self.runner.params.values())).device)

    def _per_run(self, mask: Tensor) -> Tensor:
        return mask.view(-1, *[1] * len(self.runner.run_shape))

    def _copy_parameters(self) -> list[Tensor]:
        """Return copies of the parameters, stacked by shape, always in the same memory.

        Stacked, because most are small: one operation each would cost more than the copy. In the same memory, because
        on a CPU the pages of freed memory would have to fault in again.
        """
        params = list(self.runner.params.values())
        groups = [[params[index] for index in group] for group in self._by_shape]
        if not self._copies:
            self._copies = [torch.stack(group) for group in groups]
        else:
            for group, copy in zip(groups, self._copies, strict=True):
                torch.stack(group, out=copy)
        return self._copies

    def _norms(self, stacks: list[Tensor]) -> Tensor:
        """Return the L2 norm of every parameter of the stacks, in the parameters' order, (P, ...R)."""
        lead = 1 + len(self.runner.run_shape)
        flat = [stack.flatten(lead) if stack.dim() > lead else stack.unsqueeze(-1) for stack in stacks]
        return torch.cat([torch.linalg.vector_norm(stack, dim=-1) for stack in flat])[self._order]

    def _gain_statistics(self) -> Iterable[tuple[list[Column], Tensor]]:
        """Yield the columns and values of every statistic of the gains of each width."""
        statistics = self.selection.get("gain", ())
        by_width: dict[int, list[tuple[Column, Tensor]]] = {}
        for column, name, unit_offset in self._gains if statistics else ():
            gain = self.runner.params[name].detach()
            by_width.setdefault(gain.shape[-1], []).append((column, gain + 1 if unit_offset else gain))
        for group in by_width.values():
            view = View(torch.stack([gain for _, gain in group]))
            for name, value in statistics:
                yield [column._replace(statistic=name) for column, _ in group], value(view)

    def _find_columns(self, names: SegmentNames) -> _Columns:
        """Return the columns of a step whose segments have these statistics; computed once."""
        if names in self._columns:
            return self._columns[names]
        columns = segment_columns(names)
        check_segments(self.runner.model, self.selection, set(columns))
        depth = len(self.runner.model.blocks)
        if self.taps:
            columns += [Column("dresid_rms", "", layer) for layer in range(1, depth + 2)]
        per_micro_batch = len(columns)
        parameters = [parameter_column(name, depth) for name in self.runner.params]
        for name in ("grad_norm", "param_norm"):
            if name in self.names:
                columns += [column._replace(statistic=name) for column in parameters]
        columns += [column for group, _ in self._gain_statistics() for column in group]
        if "update_norm" in self.names:
            columns += [column._replace(statistic="update_norm") for column in parameters]
        merges = [STATISTICS[column.statistic].merge for column in columns]
        is_max = self._tensor([merge == "max" for merge in merges[:per_micro_batch]], torch.bool)
        is_root = self._tensor([merge == "rms" for merge in merges], torch.bool)
        self._columns[names] = _Columns(tuple(columns), is_max, is_root)
        return self._columns[names]
