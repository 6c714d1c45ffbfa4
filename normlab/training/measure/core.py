"""The core statistics of a measured step: one vector, and each value's column.

The segments return their statistics, the backward pass gives the stream's gradient where it is tapped, and the
parameters are measured before and after the update. A layer whose wiring lacks a tensor lacks its statistics.

Shapes: R runs, L blocks, P parameters, D width, K statistics; `...R` marks an axis that only stacked runs have.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.catalogue.norms.affine import Affine
from normlab.catalogue.statistics.profiles import Column
from normlab.catalogue.statistics.registry import NEEDS_PARAMETER_COPY, STATISTICS
from normlab.model.gpt import GPT
from normlab.model.instrument import InstrumentedNorm, norm_site, select
from normlab.model.runner import ModelRunner
from normlab.model.stack import norms_of_each, storages, zeros_like
from normlab.model.views import View
from normlab.system.ranks import Ranks


class Measurement(NamedTuple):
    columns: tuple[Column, ...]
    values: Tensor
    """(K, ...R) for K columns and R stacked runs, on the device."""


class _Order(NamedTuple):
    columns: tuple[Column, ...]
    """Those that merge by maximum, then by mean, then the means of squares."""
    maxima: int
    means: int


class CoreStatistics:
    def __init__(self, runner: ModelRunner, names: frozenset[str], ranks: Ranks | None = None):
        self.runner = runner
        self.ranks = ranks or Ranks()
        self.names = names
        self.selection = select(names)
        self.taps = "dresid_rms" in names
        """Whether the stream's gradient is needed."""
        self._orders: dict[tuple[Column, ...], _Order] = {}
        self._copies: dict[str, Tensor] | None = None
        """The parameters before the update, always in the same memory: on a CPU, new memory costs page faults."""
        depth = len(runner.model.blocks)
        self._parameter_columns = {
            statistic: tuple(parameter_column(name, depth, statistic) for name in runner.params)
            for statistic in ("grad_norm", "param_norm", "update_norm")
        }
        by_width: dict[int, list[tuple[Column, str, bool]]] = {}
        for layer, (prefix, segment) in enumerate(runner.model.segments()):
            for name, module in segment.named_modules():
                if isinstance(module, Affine) and module.gain is not None:
                    column = Column("", norm_site(name.removesuffix("affine").strip(".")), layer)
                    gain = column, f"{prefix}{name}.gain", module.unit_offset
                    by_width.setdefault(module.gain.shape[-1], []).append(gain)
        self._gains = [
            (
                [(name, has_offset) for _, name, has_offset in group],
                {name: tuple(column._replace(statistic=name) for column, _, _ in group) for name in names},
            )
            for group in by_width.values()
        ]
        """For the gains of each width, the parameters' names and whether 1 is added, and the columns by statistic."""

    @torch.no_grad()
    def of_micro_batch(
        self, statistics: Mapping[Column, Tensor], tap_grads: Sequence[Tensor], tokens: int, scale: Tensor | None = None
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
            rows |= {Column("dresid_rms", "", layer): row for layer, row in enumerate(squares.unbind(), start=1)}
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
            self._copies = zeros_like(params) if self._copies is None else self._copies
            torch._foreach_copy_(storages(self._copies), storages(params))
        return [*measured, *self._gain_statistics()]

    @torch.no_grad()
    def after_update(self, micro_batches: Sequence[Measurement], before: Sequence[Measurement]) -> Measurement:
        """Return all core statistics of the step."""
        columns, maxima, means = self._order(micro_batches[0].columns)
        values = micro_batches[0].values
        if len(micro_batches) > 1:
            # The mean squares of the tapped gradients are averaged too: N times the gradient of a micro-batch's loss,
            # which is divided by the number of micro-batches, is the gradient of the summed loss of its tokens.
            stacked = torch.stack([micro_batch.values for micro_batch in micro_batches])
            values = torch.cat([stacked[:, :maxima].amax(0), stacked[:, maxima:].mean(0)])
        values = self.ranks.merge(values, maxima)
        values[maxima + means :].sqrt_()
        parts = [Measurement(columns, values), *before]
        if self._copies is not None:
            torch._foreach_sub_(storages(self._copies), storages(self.runner.params))
            parts.append(self._of_parameters("update_norm", norms_of_each(self._copies)))
        dtype = parts[-1].values.dtype if not columns else values.dtype
        return Measurement(
            tuple(column for part in parts for column in part.columns),
            torch.cat([part.values.to(dtype) for part in parts]),
        )

    def _stack(self, rows: list[Tensor]) -> Tensor:
        """Return values as (K, ...R), on the device even if there are none."""
        device = next(iter(self.runner.params.values())).device
        return torch.stack(rows) if rows else torch.zeros(0, *self.runner.run_shape, device=device)

    def _of_parameters(self, statistic: str, values: Tensor) -> Measurement:
        return Measurement(self._parameter_columns[statistic], values)

    def _gain_statistics(self) -> Iterable[Measurement]:
        statistics = self.selection.get("gain", ())
        for gains, columns in self._gains if statistics else ():
            params = [(self.runner.params[name].detach(), has_offset) for name, has_offset in gains]
            view = View(torch.stack([gain + 1 if has_offset else gain for gain, has_offset in params]))
            for name, value in statistics:
                yield Measurement(columns[name], value(view))

    def _order(self, columns: tuple[Column, ...]) -> _Order:
        """Return the order of the statistics of a micro-batch; sorted once."""
        if columns not in self._orders:
            by_merge: dict[str, list[Column]] = {"max": [], "mean": [], "rms": []}
            names = list(STATISTICS)  # their order does not depend on which tensors were stacked
            for column in sorted(columns, key=lambda each: (names.index(each.statistic), each.site, each.layer)):
                by_merge[STATISTICS[column.statistic].merge].append(column)
            ordered = tuple(column for group in by_merge.values() for column in group)
            order = _Order(ordered, len(by_merge["max"]), len(by_merge["mean"]))
            self._orders[columns] = self._orders[ordered] = order
        return self._orders[columns]


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
