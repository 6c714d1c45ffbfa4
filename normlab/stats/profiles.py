"""Statistics as they are kept and read: for each, and each site of it, the number at every measured step and place.

Needs numpy alone, so that a year from now a report reads what a run wrote without the run's code.

Shapes: S measured steps, L blocks, N numbers a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


class Column(NamedTuple):
    """What one number of a measured step is."""

    statistic: str
    site: str
    """Which norm or parameter; empty where there is one a block."""
    place: int
    """0 the embeddings, 1 to L the blocks, L + 1 the head."""


class Group(NamedTuple):
    """The numbers of one statistic at one site, a number a place."""

    statistic: str
    site: str
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What the N numbers of a measured step are, in order."""

    depth: int
    groups: tuple[Group, ...]
    families: Mapping[str, str]
    """What each parameter is part of: embed, attn, mlp, norm, wiring or head, by its site."""

    @property
    def width(self) -> int:
        """N."""
        return sum(len(group.places) for group in self.groups)

    @classmethod
    def of(cls, columns: Sequence[Column], depth: int, families: Mapping[str, str]) -> tuple[Layout, NDArray[np.intp]]:
        """The layout of columns that come in any order, and the order that brings them into it."""
        places: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for index, column in enumerate(columns):
            places.setdefault((column.statistic, column.site), []).append((column.place, index))
        groups = tuple(Group(*key, tuple(place for place, _ in sorted(own))) for key, own in places.items())
        order = [index for own in places.values() for _, index in sorted(own)]
        return cls(depth, groups, dict(families)), np.array(order, dtype=np.intp)

    def as_tree(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        groups = [{"statistic": name, "site": site, "places": list(places)} for name, site, places in self.groups]
        return {"depth": self.depth, "groups": groups, "families": dict(self.families)}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Layout:
        """The inverse of `as_tree`.

        Raises:
            KeyError, TypeError, ValueError: It is none.
        """
        groups = tuple(Group(str(g["statistic"]), str(g["site"]), tuple(map(int, g["places"]))) for g in tree["groups"])
        families = {str(site): str(family) for site, family in tree["families"].items()}
        depth = int(tree["depth"])
        if any(not 0 <= place <= depth + 1 for group in groups for place in group.places):
            raise ValueError("a place that the model does not have")
        return cls(depth, groups, families)


@dataclass(frozen=True, slots=True)
class Profiles:
    """What was measured at some steps of a run."""

    layout: Layout
    steps: NDArray[np.int64]
    """(S,): updates made before the step."""
    values: Array
    """(S, N)."""

    def __contains__(self, name: str) -> bool:
        return any(group.statistic == name for group in self.layout.groups)

    def names(self) -> list[str]:
        """The statistics that were measured."""
        return list(dict.fromkeys(group.statistic for group in self.layout.groups))

    def get(self, name: str) -> dict[str, Array]:
        """A statistic by site: (S, L + 2) each, NaN where the site is at no such place; empty where it is not here."""
        found: dict[str, Array] = {}
        start = 0
        for group in self.layout.groups:
            stop = start + len(group.places)
            if group.statistic == name:
                whole = np.full((len(self.steps), self.layout.depth + 2), np.nan, dtype=self.values.dtype)
                whole[:, list(group.places)] = self.values[:, start:stop]
                found[group.site] = whole
            start = stop
        return found

    def select(self, names: Sequence[str]) -> Profiles:
        """Return these statistics alone, at the same steps."""
        kept = [group.statistic in names for group in self.layout.groups]
        groups = tuple(group for group, keep in zip(self.layout.groups, kept, strict=True) if keep)
        columns = np.repeat(np.array(kept, dtype=bool), [len(group.places) for group in self.layout.groups])
        return Profiles(Layout(self.layout.depth, groups, self.layout.families), self.steps, self.values[:, columns])

    def one(self, name: str) -> Array:
        """A statistic that has one site, (S, L + 2).

        Raises:
            KeyError: It was not measured.
        """
        found = self.get(name)
        if not found:
            raise KeyError(name)
        (values,) = found.values()
        return values


def join(parts: Iterable[Profiles]) -> list[Profiles]:
    """Join the parts that have the same layout, each in the order of its steps."""
    groups: list[list[Profiles]] = []
    for part in parts:
        group = next((group for group in groups if group[0].layout == part.layout), None)
        if group is None:
            groups.append([part])
        else:
            group.append(part)
    joined: list[Profiles] = []
    for group in groups:
        steps = np.concatenate([part.steps for part in group])
        order = np.argsort(steps, kind="stable")
        joined.append(Profiles(group[0].layout, steps[order], np.concatenate([part.values for part in group])[order]))
    return joined


def later_half(count: int) -> list[int]:
    """Return how many measured steps the later half holds after the 1st, 2nd, ... of `count`: 1, 1, 2, 2, 3, ..."""
    return [(index + 2) // 2 for index in range(count)]


def mean_of_later_half(values: Array) -> Array:
    """Return at each step the mean over the later half of the measured steps up to it, float64.

    The window grows, so that the mean of a stationary statistic converges, and it forgets the start of training.

    Args:
        values: (S, ...), in the order of the steps.
    """
    wide = values.astype(np.float64)
    sizes = later_half(len(wide))
    means = [wide[stop - size : stop].mean(axis=0) for stop, size in enumerate(sizes, start=1)]
    return np.stack(means) if means else wide


def per_place(
    combine: Callable[[Array, Array], Array], profiles: Profiles, first: str, second: str
) -> dict[str, Array]:
    """Combine two measured statistics, site by site and place by place."""
    pair = [profiles.get(name) for name in (first, second)]
    with np.errstate(divide="ignore", invalid="ignore"):
        return {site: combine(values, pair[1][site]) for site, values in pair[0].items()}


def slope_over_places(values: Array, places: NDArray[np.intp]) -> Array:
    """The least-squares slope over some places, (S,); of a single place 0."""
    known = values[:, places].astype(np.float64)
    centred = places - places.mean()
    with np.errstate(invalid="ignore"):  # of what is infinite there is none
        return (known * centred).sum(axis=1) / max((centred**2).sum(), 1)
