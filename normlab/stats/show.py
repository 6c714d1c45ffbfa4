"""How what is inside a model is seen: the model shows tensors, and whoever looks takes numbers of them.

    with looking(wanted) as seen:
        y = segment(x)          # calls show("attn", "", branch) and the like
    names, values = seen.taken()

Unless somebody is looking `show` does nothing, so that the same code is the plain step. It works eager, compiled
(a compiled function opens the look itself, and returns what was taken) and under vmap, where each run shows its own.

Shapes: K numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from normlab.stats.statistic import STATISTICS
from normlab.stats.views import VIEWS, View

Wanted = Mapping[str, tuple[tuple[str, Any], ...]]
"""What is made of what is shown, by what it is (`statistic.OF`): the names of statistics and their functions."""


def wanted(names: frozenset[str]) -> Wanted:
    """The statistics of these names that are made of what a model shows."""
    made: dict[str, tuple[tuple[str, Any], ...]] = {}
    for name, statistic in STATISTICS.items():
        if name in names and statistic.value is not None:
            made[statistic.of] = (*made.get(statistic.of, ()), (name, statistic.value))
    return made


class Seen:
    """What was taken while a segment ran."""

    def __init__(self, wanted: Wanted):
        self.wanted = wanted
        self._names: list[tuple[str, str]] = []
        self._values: list[Tensor] = []
        self._views: list[View] = []
        self._times: dict[tuple[str, str], int] = {}

    def take(self, of: str, site: str, *tensors: Any) -> None:
        """Make what is wanted of what is shown."""
        made = self.wanted.get(of, ())
        views = [VIEWS[of](*tensors)] if made and of in VIEWS else [self._view(x) for x in tensors if made]
        for name, value in made:
            self._names.append((name, self._own(name, site)))
            self._values.append(value(*views))

    def taken(self) -> tuple[tuple[tuple[str, str], ...], Tensor]:
        """Statistics and their sites, and a number for each, (K,): the mean where there is a number a token.

        Those of one shape are averaged at once, and stand together: an operation each would cost more.
        """
        groups: dict[torch.Size, list[int]] = {}
        for index, value in enumerate(self._values):
            groups.setdefault(value.shape, []).append(index)
        names: list[tuple[str, str]] = []
        parts: list[Tensor] = []
        for shape, members in groups.items():
            names += [self._names[index] for index in members]
            same = torch.stack([self._values[index] for index in members])
            parts.append(same.flatten(1).mean(-1) if shape else same)
        return tuple(names), torch.cat(parts) if parts else torch.zeros(0)

    def _own(self, name: str, site: str) -> str:
        """The site, numbered where a norm is run a second time in one segment."""
        times = self._times[name, site] = self._times.get((name, site), 0) + 1
        return f"{site}#{times}" if times > 1 else site

    def _view(self, x: Tensor) -> View:
        """What enters a norm is often the stream that was just shown."""
        for view in self._views:
            if view.shown is x:
                return view
        self._views.append(View(x))
        return self._views[-1]


_seen: Seen | None = None


class looking:
    """While it is open, what is shown is taken. Looks do not nest."""

    def __init__(self, wanted: Wanted):
        self.seen = Seen(wanted)

    def __enter__(self) -> Seen:
        """Begin."""
        global _seen
        _seen = self.seen
        return self.seen

    def __exit__(self, *error: object) -> None:
        """End, however it went."""
        global _seen
        _seen = None


def show(of: str, site: str, *tensors: Any) -> None:
    """Show tensors to whoever is looking.

    Args:
        of: What they are: a key of `statistic.OF`.
        site: Which of several, where a block has several.
        tensors: As the statistics of that kind take them; of attention queries, keys and the scale of their product.
    """
    if _seen is not None:
        _seen.take(of, site, *tensors)


class Watched(nn.Module):
    """What every norm of a model is, besides what it is: it shows what enters it and what leaves it."""

    site: str = ""
    """Which norm of the segment it is."""

    def forward(self, x: Tensor) -> Tensor:
        """The norm's own output."""
        y = super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]
        show("norm", self.site, x, y)
        return y


def watched(norm: nn.Module) -> nn.Module:
    """The same module, which from now on shows what it does; its parameters keep their names."""
    if not isinstance(norm, nn.Identity | Watched):  # the first is no norm
        norm.__class__ = _watched_class(type(norm))
    return norm


@cache
def _watched_class(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (Watched, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def name_sites(segment: nn.Module) -> None:
    """Tell every norm of a block, or of an end of the model, where in it it stands."""
    for name, module in segment.named_modules():
        if isinstance(module, Watched):
            module.site = site_of(name)


def site_of(name: str) -> str:
    """A norm's name in its segment without the words that all have: `attn.in`, `mlp.in`, `attn.q`, `close`."""
    return ".".join(part for part in name.split(".") if part not in ("wiring", "norms", "qk_norms"))
