"""The core statistics of a measured step: one vector, and each value's column.

The segments return their statistics, the backward pass gives the stream's gradient where it is tapped, and the
parameters are measured before and after the update. The first step defines the columns of all steps; a missing
statistic is an error.

Shapes: R runs, L blocks, P parameters, D width, K statistics; `...R` marks an axis that only stacked runs have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.errors import StatisticsError
from normlab.model.gpt import GPT
from normlab.model.runner import ModelRunner, SegmentStatistics
from normlab.norms.affine import Affine
from normlab.ranks import Ranks
from normlab.stats.instrument import InstrumentedNorm, Selection, norm_site, select
from normlab.stats.profiles import Column
from normlab.stats.registry import NEEDS_PARAMETER_COPY, STATISTICS
from normlab.stats.statistic import OF
from normlab.stats.views import View


class Measurement(NamedTuple):
    """Values of statistics and their columns."""

    columns: tuple[Column, ...]
    values: Tensor
    """(K, ...R) for K columns and R stacked runs, on the device."""


SegmentNames = tuple[tuple[tuple[str, str], ...], ...]
"""For each segment the (statistic, site) of its values, in order."""


class MicroBatch(NamedTuple):
    """The statistics of one micro-batch."""

    names: SegmentNames
    values: Tensor
    """The segments' statistics, then the mean square of the gradient at each tap; (K, ...R)."""


class _Columns(NamedTuple):
    """The columns of a step's vector, and how to reduce its values."""

    columns: tuple[Column, ...]
    is_max: Tensor
    """Whether a value of a micro-batch merges by maximum; the others merge by mean."""
    is_root: Tensor
    """Whether a column is the root of the merged value."""


class CoreStatistics:
    """Computes the named core statistics for the steps of one model runner."""

    def __init__(self, runner: ModelRunner, names: frozenset[str], ranks: Ranks | None = None):
        self.runner = runner
        self.ranks = ranks or Ranks()
        self.names = names
        self.selection = select(names)
        self.taps = "dresid_rms" in names
        """Whether the stream's gradient is needed."""
        self._columns: dict[SegmentNames, _Columns] = {}
        self._copies: list[Tensor] = []
        """The parameters before the update, stacked by shape."""
        by_shape: dict[torch.Size, list[int]] = {}
        for index, p in enumerate(runner.params.values()):
            by_shape.setdefault(p.shape, []).append(index)
        self._by_shape = list(by_shape.values())
        """The indices of the parameters of each shape."""
        self._order = self._tensor([index for group in self._by_shape for index in group], torch.int64).argsort()
        """The permutation from the order of `_by_shape` to the parameters' order."""
        self._gains = [
            (Column("", norm_site(name.removesuffix("affine").strip(".")), layer), f"{prefix}{name}.gain", module)
            for layer, (prefix, segment) in enumerate(runner.model.segments())
            for name, module in segment.named_modules()
            if isinstance(module, Affine) and module.gain is not None
        ]
        """Every gain: its column, its parameter's name, and its module."""

    @torch.no_grad()
    def of_micro_batch(
        self, statistics: Sequence[SegmentStatistics], tap_grads: Sequence[Tensor], tokens: int
    ) -> MicroBatch:
        """Return the statistics of one micro-batch.

        Args:
            statistics: The statistics of each segment.
            tap_grads: The gradient at each tap; empty without taps.
            tokens: The number of tokens of the whole step, N; the gradients are those of the mean loss over them.
        """
        values = [segment.values for segment in statistics]
        if tap_grads:
            g, lead = tap_grads[0], len(self.runner.run_shape)
            axes, dtype = tuple(range(lead, g.dim())), torch.promote_types(g.dtype, torch.float32)
            norms = torch.stack([torch.linalg.vector_norm(grad, dim=axes, dtype=dtype) for grad in tap_grads])
            values.append(norms.square() / math.prod(g.shape[lead:]) * tokens**2)
        return MicroBatch(tuple(segment.names for segment in statistics), torch.cat(values))

    @torch.no_grad()
    def before_update(self, grad_norms: Tensor | None) -> list[Tensor]:
        """Return gradient norms, parameter norms and gain statistics from before the update.

        Args:
            grad_norms: The norm of each parameter's gradient before clipping, (P, ...R), if it is a statistic.
        """
        if self.names & set(NEEDS_PARAMETER_COPY):
            self._copy_parameters()
        values = [grad_norms] if grad_norms is not None and "grad_norm" in self.names else []
        if "param_norm" in self.names:
            values.append(self._norms_of_copies())
        return values + [value for _, value in self._gain_statistics()]

    @torch.no_grad()
    def after_update(self, micro_batches: Sequence[MicroBatch], before: Sequence[Tensor]) -> Measurement:
        """Return all core statistics of the step.

        Args:
            micro_batches: The statistics of each micro-batch.
            before: The result of `before_update`.

        Raises:
            StatisticsError: A statistic was not measured.
        """
        columns, is_max, is_root = self._find_columns(micro_batches[0].names)
        values = micro_batches[0].values
        if len(micro_batches) > 1:
            # The mean squares of the tapped gradients are averaged too: N times the gradient of a micro-batch's loss,
            # which is divided by the number of micro-batches, is the gradient of the summed loss of its tokens.
            stacked = torch.stack([micro_batch.values for micro_batch in micro_batches])
            values = torch.where(self._per_run(is_max), stacked.amax(0), stacked.mean(0))
        values = self.ranks.merge(values, self._per_run(is_max))
        parts = [values, *before]
        if "update_norm" in self.names:
            params = list(self.runner.params.values())
            old_params = [copy for stack in self._copies for copy in stack.unbind()]
            torch._foreach_sub_(old_params, [params[index] for group in self._by_shape for index in group])
            parts.append(self._norms_of_copies())
        merged = torch.cat([part.to(values.dtype) for part in parts])
        return Measurement(columns, torch.where(self._per_run(is_root), merged.sqrt(), merged))

    def _tensor(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=next(iter(self.runner.params.values())).device)

    def _per_run(self, mask: Tensor) -> Tensor:
        return mask.view(-1, *[1] * len(self.runner.run_shape))

    def _copy_parameters(self) -> None:
        """Copy the parameters, stacked by shape, always into the same memory.

        Most parameters are small, and one operation for each would cost more than the copy. On a CPU, new memory would
        also cost page faults.
        """
        params = list(self.runner.params.values())
        groups = [[params[index] for index in group] for group in self._by_shape]
        if not self._copies:
            self._copies = [torch.stack(group) for group in groups]
        else:
            for group, copy in zip(groups, self._copies, strict=True):
                torch.stack(group, out=copy)

    def _norms_of_copies(self) -> Tensor:
        """Return the L2 norm of every tensor in the copies, in the parameters' order, (P, ...R)."""
        lead = 1 + len(self.runner.run_shape)
        flat = [stack.flatten(lead) if stack.dim() > lead else stack.unsqueeze(-1) for stack in self._copies]
        return torch.cat([torch.linalg.vector_norm(stack, dim=-1) for stack in flat])[self._order]

    def _gain_statistics(self) -> Iterable[tuple[list[Column], Tensor]]:
        """Yield the columns and values of every statistic of the gains of each width."""
        statistics = self.selection.get("gain", ())
        by_width: dict[int, list[tuple[Column, Tensor]]] = {}
        for column, name, module in self._gains if statistics else ():
            gain = self.runner.params[name].detach()
            by_width.setdefault(gain.shape[-1], []).append((column, gain + 1 if module.unit_offset else gain))
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
        for statistic in ("grad_norm", "param_norm"):
            if statistic in self.names:
                columns += [parameter_column(name, depth, statistic) for name in self.runner.params]
        columns += [column for group, _ in self._gain_statistics() for column in group]
        if "update_norm" in self.names:
            columns += [parameter_column(name, depth, "update_norm") for name in self.runner.params]
        merges = [STATISTICS[column.statistic].merge for column in columns]
        is_max = self._tensor([merge == "max" for merge in merges[:per_micro_batch]], torch.bool)
        is_root = self._tensor([merge == "rms" for merge in merges], torch.bool)
        self._columns[names] = _Columns(tuple(columns), is_max, is_root)
        return self._columns[names]


def segment_columns(names: SegmentNames) -> list[Column]:
    """Return the columns of the segments' values, concatenated in order."""
    return [Column(*name, layer) for layer, segment in enumerate(names) for name in segment]


def parameter_column(name: str, depth: int, statistic: str = "") -> Column:
    """Return the column of a parameter's statistic.

    The site is the parameter's name in its block or in the model.
    """
    part, _, rest = name.partition(".")
    if part == "blocks":
        layer, _, site = rest.partition(".")
        return Column(statistic, site, int(layer) + 1)
    return Column(statistic, name, 0 if part == "embed" else depth + 1)


def parameter_families(model: GPT) -> dict[str, str]:
    """Return the family of each parameter site: embed, attn, mlp, norm, wiring or head."""
    families: dict[str, str] = {}
    norms = (module for module in model.modules() if isinstance(module, InstrumentedNorm))
    norm_parameters = {id(p) for norm in norms for p in norm.parameters()}
    for name, parameter in model.named_parameters():
        site = parameter_column(name, len(model.blocks)).site
        part = site.partition(".")[0]
        family = part if part in ("embed", "head", "attn", "mlp") else "wiring"
        families[site] = "norm" if id(parameter) in norm_parameters else family
    return families


def check_segments(model: GPT, selection: Selection, columns: Collection[Column]) -> None:
    """Check that every block, the head and every norm have their selected statistics.

    Raises:
        StatisticsError: A statistic is missing.
    """
    depth = len(model.blocks)
    for layer, (_, segment) in enumerate(model.segments()):
        sites = dict.fromkeys(("attn", "mlp", "block", "attention", "hidden"), [""] * (0 < layer <= depth))
        sites |= {"resid": [""] * (layer > 0), "head": [""] * (layer > depth)}
        sites["norm"] = [module.site for module in segment.modules() if isinstance(module, InstrumentedNorm)]
        for kind, statistics in selection.items():
            for (name, _), site in product(statistics, sites.get(kind, ())):
                if Column(name, site, layer) not in columns:
                    of = f"{name} at {site}" if site else name
                    raise StatisticsError(
                        f"statistic {of}, layer {layer}: was not measured, since the model never computed "
                        f"{OF[kind]}; fix the placement, or train with stats.without=[{name}]"
                    )


def check_statistics(names: Iterable[str], columns: Iterable[Column]) -> None:
    """Check that every statistic has at least one value.

    Raises:
        StatisticsError: A statistic is missing.
    """
    for name in sorted(set(names) - {column.statistic for column in columns}):
        raise StatisticsError(f"statistic {name}: was not measured; train with stats.without=[{name}]")
