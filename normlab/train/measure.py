"""What a measured step takes home: the statistics of every block, parameter and norm, as one vector.

The segments return what was seen of them, backward the stream's gradient where it was tapped, and the rest is made of
the parameters around the update. What each number is is known from the names that came with it, once for all steps;
one that should have come and did not is an error.

Shapes: R runs (absent for a lone run), L blocks, P parameters, D width, K numbers; `...R` marks an axis that only a
pack has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from normlab.norms.affine import Affine
from normlab.stats.parameters import BY_A_COPY
from normlab.stats.profiles import Column
from normlab.stats.show import Wanted, site_of, wanted
from normlab.stats.statistic import STATISTICS
from normlab.stats.views import View
from normlab.train.bound import Bound, Report
from normlab.train.columns import Names, column_of, columns_of, refuse_missing


class Measured(NamedTuple):
    """What a measured step saw inside."""

    columns: tuple[Column, ...]
    values: Tensor
    """(K, ...R), on the device."""


class Pass(NamedTuple):
    """What was seen of a micro-batch, forward and backward."""

    reports: Sequence[Report]
    """Of each segment."""
    squares: Tensor | None
    """The mean square of the gradient at each tap, (L + 1, ...R), if asked for: of the step's loss summed over its
    tokens."""

    def values(self) -> Tensor:
        """All of them, (K, ...R)."""
        parts = [report.values for report in self.reports]
        return torch.cat(parts if self.squares is None else [*parts, self.squares])


class Before(NamedTuple):
    """What is taken before the update, for what is measured after it."""

    values: list[Tensor]
    """Of what there is no more afterwards: lengths of the parameters, their gains."""
    copies: list[Tensor]
    """The parameters of each shape, stacked."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the vector of a step is made of, known once the segments have run."""

    columns: tuple[Column, ...]
    largest: Tensor
    """Which of the micro-batches' numbers are merged by taking the largest."""
    roots: Tensor
    """Which of all numbers are roots of what was measured."""


@dataclass(slots=True)
class Measure:
    """Measures the steps of one model, for the statistics of these names."""

    bound: Bound
    names: frozenset[str]
    wanted: Wanted = field(init=False)
    _gains: list[tuple[Column, str, bool]] = field(init=False)
    """Every gain: its place, its parameter, and whether it has a unit offset."""
    _layouts: dict[Names, _Layout] = field(default_factory=dict, init=False)
    _shapes: list[list[int]] = field(init=False)
    """The parameters of each shape, by their number."""
    _order: Tensor = field(init=False)
    """Where each parameter is among those of all shapes."""
    _copies: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Find the norms' gains, and the parameters that are alike."""
        self.wanted = wanted(self.names)
        shapes: dict[torch.Size, list[int]] = {}
        for index, p in enumerate(self.bound.params.values()):
            shapes.setdefault(p.shape, []).append(index)
        self._shapes = list(shapes.values())
        device = next(iter(self.bound.params.values())).device
        self._order = torch.tensor([index for group in self._shapes for index in group], device=device).argsort()
        self._gains = []
        for place, (prefix, segment) in enumerate(self.bound.model.segments()):
            for name, module in segment.named_modules():
                if isinstance(module, Affine) and module.gain is not None:
                    owner = site_of(name.removesuffix(".affine").removesuffix("affine"))
                    self._gains.append((Column("", owner, place), f"{prefix}{name}.gain", module.unit_offset))

    @property
    def taps(self) -> bool:
        """Whether the stream's gradient is asked for."""
        return "dresid_rms" in self.names

    @torch.no_grad()
    def before(self, grad_norms: Tensor) -> Before:
        """What the update will change.

        Args:
            grad_norms: Each parameter's, before clipping, (P, ...R).
        """
        values, copies = [], self._copied() if self.names & set(BY_A_COPY) else []
        if "grad_norm" in self.names:
            values.append(grad_norms)
        if "param_norm" in self.names:
            values.append(self._lengths(copies))
        values += [value for _, value in self._of_gains()]
        return Before(values, copies)

    @torch.no_grad()
    def after(self, passes: Sequence[Pass], before: Before) -> Measured:
        """Everything that was measured, once the parameters have been updated.

        Args:
            passes: What was seen of each micro-batch.
            before: What `before` took.

        Raises:
            StatisticsError: A statistic was not measured.
        """
        layout = self._layout(tuple(report.names for report in passes[0].reports))
        values = torch.stack([own.values() for own in passes])
        if len(passes) > 1:
            # The mean of the tap's squares too: each pass's loss is 1 / parts of its own tokens' mean, so that
            # N times its gradient is the gradient of their sum.
            largest = layout.largest.view(-1, *[1] * len(self.bound.lead))
            values = torch.where(largest, values.amax(0), values.mean(0))
        else:
            values = values[0]
        parts = [values, *before.values]
        if "update_norm" in self.names:
            params = list(self.bound.params.values())
            parts_of = [part for copy in before.copies for part in copy.unbind()]
            torch._foreach_sub_(parts_of, [params[index] for group in self._shapes for index in group])
            parts.append(self._lengths(before.copies))
        whole = torch.cat([part.to(values.dtype) for part in parts])
        roots = layout.roots.view(-1, *[1] * len(self.bound.lead))
        return Measured(layout.columns, torch.where(roots, whole.sqrt(), whole))

    def _copied(self) -> list[Tensor]:
        """The parameters of each shape, stacked, always in the same memory.

        Stacked, because most are small and there are many, so that an operation each would cost more than it does; in
        the same memory, because what is freed has to be faulted in again, on a CPU.
        """
        params = list(self.bound.params.values())
        groups = [[params[index] for index in group] for group in self._shapes]
        if not self._copies:
            self._copies = [torch.stack(group) for group in groups]
        else:
            for group, copy in zip(groups, self._copies, strict=True):
                torch.stack(group, out=copy)
        return self._copies

    def _lengths(self, stacks: list[Tensor]) -> Tensor:
        """The L2 norm of every parameter in stacks, in the parameters' order, (P, ...R)."""
        lead = 1 + len(self.bound.lead)
        flat = [stack.flatten(lead) if stack.dim() > lead else stack.unsqueeze(-1) for stack in stacks]
        return torch.cat([torch.linalg.vector_norm(stack, dim=-1) for stack in flat])[self._order]

    def _of_gains(self) -> Iterable[tuple[list[Column], Tensor]]:
        """What each number is, and the values, of every statistic of the gains of each width."""
        made = self.wanted.get("gain", ())
        widths: dict[int, list[tuple[Column, Tensor]]] = {}
        for column, name, unit_offset in self._gains if made else ():
            gain = self.bound.params[name].detach()
            widths.setdefault(gain.shape[-1], []).append((column, gain + 1 if unit_offset else gain))
        for group in widths.values():
            view = View(torch.stack([gain for _, gain in group]))
            for name, value in made:
                yield [column._replace(statistic=name) for column, _ in group], value(view)

    def _layout(self, names: Names) -> _Layout:
        if names in self._layouts:
            return self._layouts[names]
        seen = columns_of(names)
        refuse_missing(self.bound.model, self.wanted, seen)
        depth, columns = len(self.bound.model.blocks), list(seen)
        if "dresid_rms" in self.names:
            columns += [Column("dresid_rms", "", place) for place in range(1, depth + 2)]
        of_passes = len(columns)
        of_parameters = [column_of(name, depth) for name in self.bound.params]
        for name in ("grad_norm", "param_norm"):
            if name in self.names:
                columns += [column._replace(statistic=name) for column in of_parameters]
        columns += [column for group, _ in self._of_gains() for column in group]
        if "update_norm" in self.names:
            columns += [column._replace(statistic="update_norm") for column in of_parameters]
        device = next(iter(self.bound.params.values())).device
        merges = [STATISTICS[column.statistic].merge for column in columns]
        layout = _Layout(
            tuple(columns),
            torch.tensor([merge == "max" for merge in merges[:of_passes]], dtype=torch.bool, device=device),
            torch.tensor([merge == "rms" for merge in merges], dtype=torch.bool, device=device),
        )
        self._layouts[names] = layout
        return layout
