"""The core statistics of a measured step: one vector, and each value's column.

The segments return their statistics, the backward pass gives the stream's gradient where it is tapped, and the
parameters are measured before and after the update. A layer whose wiring lacks a tensor lacks its statistics.

Shapes: R runs, L blocks, P parameters, D width, K statistics; `...R` marks an axis that only stacked runs have.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.catalogue.norms.affine import Affine
from normlab.catalogue.statistics.profiles import StatisticColumn
from normlab.catalogue.statistics.registry import NEEDS_PARAMETER_COPY, STATISTICS
from normlab.model.gpt import GPT
from normlab.model.instrument import InstrumentedNorm, norm_site, select
from normlab.model.runner import ModelRunner
from normlab.model.stack import norms_of_each, storages, zeros_like
from normlab.model.views import View
from normlab.system.ranks import Ranks


class Measurement(NamedTuple):
    columns: tuple[StatisticColumn, ...]
    values: Tensor
    """(K, ...R) for K columns and R stacked runs, on the device."""


class _Order(NamedTuple):
    columns: tuple[StatisticColumn, ...]
    """Those that merge by maximum, then by mean, then the means of squares."""
    maxima: int
    means: int


class _Gains(NamedTuple):
    """The gains of all norms of one width, which are measured by one operation."""

    names: list[str]
    """The names of the parameters."""
    has_offset: list[bool]
    """Whether the norm multiplies by 1 + gain."""
    columns: dict[str, tuple[StatisticColumn, ...]]
    """By statistic."""


class CoreStatistics:
    def __init__(self, runner: ModelRunner, names: frozenset[str], ranks: Ranks | None = None):
        self.runner = runner
        self.ranks = ranks or Ranks()
        self.names = names
        self.selection = select(names)
        self.taps = "dresid_rms" in names
        """Whether the stream's gradient is needed."""
        self._orders: dict[tuple[StatisticColumn, ...], _Order] = {}
        self._copies: dict[str, Tensor] | None = None
        """The parameters before the update, always in the same memory: on a CPU, new memory costs page faults."""
        depth = len(runner.model.blocks)
        self._parameter_columns: dict[str, tuple[StatisticColumn, ...]] = {}
        for statistic in ("grad_norm", "param_norm", "update_norm"):
            columns = [parameter_column(name, depth, statistic) for name in runner.params]
            self._parameter_columns[statistic] = tuple(columns)
        self._gains = _gains_of(runner.model, names)

    @torch.no_grad()
    def of_micro_batch(
        self,
        statistics: Mapping[StatisticColumn, Tensor],
        tap_grads: Sequence[Tensor],
        tokens: int,
        scale: Tensor | None = None,
    ) -> Measurement:
        """Return the statistics of one micro-batch: of the segments, and mean squares of the gradients at the taps.

        Args:
            tap_grads: The gradient at each tap; empty without taps.
            tokens: The number of tokens of the whole step, N; the gradients are those of the mean loss over them.
            scale: The factor by which the loss was multiplied before the backward pass.
        """
        rows = dict(statistics)
        if tap_grads:
            lead = len(self.runner.run_shape)
            grads = [grad.flatten(lead) for grad in tap_grads]
            dtype = torch.promote_types(grads[0].dtype, torch.float32)
            if lead == 0:
                norms = torch.stack(torch._foreach_norm(grads, dtype=dtype))
            else:
                norms = torch.stack([torch.linalg.vector_norm(grad, dim=-1, dtype=dtype) for grad in grads])
            if scale is not None:
                norms = norms / scale
            squares = norms.square() * (tokens**2 / grads[0].shape[-1])
            for layer, row in enumerate(squares.unbind(), start=1):
                rows[StatisticColumn("dresid_rms", "", layer)] = row
        order = self._order(tuple(rows))
        return Measurement(order.columns, self._stack([rows[column] for column in order.columns]))

    @torch.no_grad()
    def before_update(self, grad_norms: Tensor | None) -> list[Measurement]:
        """Return gradient norms, parameter norms and gain statistics from before the update.

        Args:
            grad_norms: The norm of each parameter's gradient before clipping, (P, ...R), if it is a statistic.
        """
        params = self.runner.params
        measured: list[Measurement] = []
        if grad_norms is not None and "grad_norm" in self.names:
            measured.append(self._of_parameters("grad_norm", grad_norms))
        if "param_norm" in self.names:
            measured.append(self._of_parameters("param_norm", norms_of_each(params)))
        if self.names & set(NEEDS_PARAMETER_COPY):
            if self._copies is None:
                self._copies = zeros_like(params)
            torch._foreach_copy_(storages(self._copies), storages(params))
        return [*measured, *self._gain_statistics()]

    @torch.no_grad()
    def after_update(self, micro_batches: Sequence[Measurement], before: Sequence[Measurement]) -> Measurement:
        """Return all core statistics of the step."""
        # Those of the micro-batches, merged over them and over the ranks. The root comes last: the mean of squares is
        # that of the whole batch, the mean of roots is not.
        columns, maxima, means = self._order(micro_batches[0].columns)
        values = micro_batches[0].values
        if len(micro_batches) > 1:
            # The mean squares of the tapped gradients are averaged too: N times the gradient of a micro-batch's loss,
            # which is divided by the number of micro-batches, is the gradient of the summed loss of its tokens.
            stacked = torch.stack([micro_batch.values for micro_batch in micro_batches])
            values = torch.cat([stacked[:, :maxima].amax(0), stacked[:, maxima:].mean(0)])
        values = self.ranks.merge(values, maxima)
        values[maxima + means :].sqrt_()

        # Those of the parameters.
        parts = [Measurement(columns, values), *before]
        if self._copies is not None:
            torch._foreach_sub_(storages(self._copies), storages(self.runner.params))
            parts.append(self._of_parameters("update_norm", norms_of_each(self._copies)))

        # One vector; statistics of the parameters alone keep the dtype of these.
        dtype = values.dtype if columns else parts[-1].values.dtype
        all_columns: list[StatisticColumn] = []
        for part in parts:
            all_columns += part.columns
        return Measurement(tuple(all_columns), torch.cat([part.values.to(dtype) for part in parts]))

    def _stack(self, rows: list[Tensor]) -> Tensor:
        """Return values as (K, ...R), on the device even if there are none."""
        if rows:
            return torch.stack(rows)
        device = next(iter(self.runner.params.values())).device
        return torch.zeros(0, *self.runner.run_shape, device=device)

    def _of_parameters(self, statistic: str, values: Tensor) -> Measurement:
        return Measurement(self._parameter_columns[statistic], values)

    def _gain_statistics(self) -> Iterable[Measurement]:
        statistics = self.selection.get("gain", ())
        if not statistics:
            return
        for gains in self._gains:
            factors: list[Tensor] = []
            for name, has_offset in zip(gains.names, gains.has_offset, strict=True):
                gain = self.runner.params[name].detach()
                factors.append(gain + 1 if has_offset else gain)
            view = View(torch.stack(factors))
            for name, value in statistics:
                yield Measurement(gains.columns[name], value(view))

    def _order(self, columns: tuple[StatisticColumn, ...]) -> _Order:
        """Return the order of the statistics of a micro-batch; sorted once."""
        if columns not in self._orders:
            by_merge: dict[str, list[StatisticColumn]] = {"max": [], "mean": [], "rms": []}
            # By the registry, so that the order does not depend on which tensors were stacked.
            names = list(STATISTICS)
            for column in sorted(
                columns, key=lambda column: (names.index(column.statistic), column.site, column.layer)
            ):
                by_merge[STATISTICS[column.statistic].merge].append(column)
            ordered = (*by_merge["max"], *by_merge["mean"], *by_merge["rms"])
            order = _Order(ordered, len(by_merge["max"]), len(by_merge["mean"]))
            self._orders[columns] = self._orders[ordered] = order
        return self._orders[columns]


def _gains_of(model: GPT, statistics: Collection[str]) -> list[_Gains]:
    """Return the gains of all norms of a model, those of each width together."""
    by_width: dict[int, list[tuple[StatisticColumn, str, bool]]] = {}
    for layer, (prefix, segment) in enumerate(model.segments()):
        for name, module in segment.named_modules():
            if isinstance(module, Affine) and module.gain is not None:
                column = StatisticColumn("", norm_site(name.removesuffix("affine").strip(".")), layer)
                gain = column, f"{prefix}{name}.gain", module.unit_offset
                by_width.setdefault(module.gain.shape[-1], []).append(gain)

    gains: list[_Gains] = []
    for of_width in by_width.values():
        columns, names, has_offset = zip(*of_width, strict=True)
        by_statistic: dict[str, tuple[StatisticColumn, ...]] = {}
        for statistic in statistics:
            by_statistic[statistic] = tuple(column._replace(statistic=statistic) for column in columns)
        gains.append(_Gains(list(names), list(has_offset), by_statistic))
    return gains


def parameter_column(name: str, depth: int, statistic: str = "") -> StatisticColumn:
    """Return the column of a parameter's statistic.

    The site is the parameter's name in its block or in the model.
    """
    segment, _, in_segment = name.partition(".")
    if segment == "blocks":
        layer, _, site = in_segment.partition(".")
        return StatisticColumn(statistic, site, int(layer) + 1)
    # The embeddings are layer 0, and the head is the one after the blocks.
    return StatisticColumn(statistic, name, 0 if segment == "embed" else depth + 1)


def parameter_families(model: GPT) -> dict[str, str]:
    """Return the family of each parameter site: embed, attn, mlp, norm, wiring or head."""
    # A norm may be a module of any other part, so its parameters are known by their identity.
    norm_parameters: set[int] = set()
    for module in model.modules():
        if isinstance(module, InstrumentedNorm):
            norm_parameters.update(map(id, module.parameters()))
    families: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        site = parameter_column(name, len(model.blocks)).site
        part = site.partition(".")[0]
        if id(parameter) in norm_parameters:
            families[site] = "norm"
        elif part in ("embed", "head", "attn", "mlp"):
            families[site] = part
        else:
            families[site] = "wiring"
    return families
