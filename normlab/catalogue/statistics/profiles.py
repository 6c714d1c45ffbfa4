"""Arrays of statistics over (step, layer), one for each (statistic, site), and the layout of their columns.

Needs numpy only, so that a report can read a run's statistics without the code that trained the run.

Shapes: S measured steps, L blocks, N columns. Layer 0 is the embeddings, 1 to L the blocks, L + 1 the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


class StatisticColumn(NamedTuple):
    """The statistic, site and layer of one value of a measured step."""

    statistic: str
    site: str
    """The norm or parameter; empty for a statistic with one value per layer."""
    layer: int


class ColumnGroup(NamedTuple):
    """Adjacent columns: one statistic at one site, one value per layer."""

    statistic: str
    site: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    depth: int
    groups: tuple[ColumnGroup, ...]
    families: Mapping[str, str]
    """The family of each parameter site: embed, attn, mlp, norm, wiring or head."""

    @property
    def width(self) -> int:
        """N."""
        return sum(len(group.layers) for group in self.groups)

    @classmethod
    def of(
        cls, columns: Sequence[StatisticColumn], depth: int, families: Mapping[str, str]
    ) -> tuple[Layout, NDArray[np.intp]]:
        """Return the layout of columns in any order, and the permutation that sorts them into it."""
        by_site: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for index, column in enumerate(columns):
            by_site.setdefault((column.statistic, column.site), []).append((column.layer, index))
        groups: list[ColumnGroup] = []
        order: list[int] = []
        for (statistic, site), pairs in by_site.items():
            pairs.sort()
            groups.append(ColumnGroup(statistic, site, tuple(layer for layer, _ in pairs)))
            order += [index for _, index in pairs]
        return cls(depth, tuple(groups), dict(families)), np.array(order, dtype=np.intp)

    def as_tree(self) -> dict[str, Any]:
        groups = [{"statistic": name, "site": site, "places": list(layers)} for name, site, layers in self.groups]
        return {"depth": self.depth, "groups": groups, "families": dict(self.families)}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Layout:
        """Return the layout that `as_tree` described.

        Raises:
            KeyError, TypeError, ValueError: The tree does not describe a layout.
        """
        depth = int(tree["depth"])
        groups: list[ColumnGroup] = []
        for group in tree["groups"]:
            layers = tuple(int(layer) for layer in group["places"])
            # A damaged record must not write outside of the arrays that `Profiles.get` makes.
            if any(not 0 <= layer <= depth + 1 for layer in layers):
                raise ValueError("a layer that the model does not have")
            groups.append(ColumnGroup(str(group["statistic"]), str(group["site"]), layers))
        families = {str(site): str(family) for site, family in tree["families"].items()}
        return cls(depth, tuple(groups), families)


@dataclass(frozen=True, slots=True)
class Profiles:
    layout: Layout
    steps: NDArray[np.int64]
    """(S,): updates made before the step."""
    values: Array
    """(S, N)."""

    def __contains__(self, name: str) -> bool:
        return any(group.statistic == name for group in self.layout.groups)

    def names(self) -> list[str]:
        return list(dict.fromkeys(group.statistic for group in self.layout.groups))

    def get(self, name: str) -> dict[str, Array]:
        """Return a statistic by site, (S, L + 2) each, NaN at layers without the site; empty if not measured."""
        by_site: dict[str, Array] = {}
        start = 0
        for group in self.layout.groups:
            stop = start + len(group.layers)
            if group.statistic == name:
                values = np.full((len(self.steps), self.layout.depth + 2), np.nan, dtype=self.values.dtype)
                values[:, list(group.layers)] = self.values[:, start:stop]
                by_site[group.site] = values
            start = stop
        return by_site

    def select(self, names: Sequence[str]) -> Profiles:
        keep = [group.statistic in names for group in self.layout.groups]
        groups = tuple(group for group in self.layout.groups if group.statistic in names)
        # Each group has a column for each of its layers.
        columns = np.repeat(np.array(keep, dtype=bool), [len(group.layers) for group in self.layout.groups])
        return Profiles(Layout(self.layout.depth, groups, self.layout.families), self.steps, self.values[:, columns])

    def single_site(self, name: str) -> Array:
        """Return a statistic that has one site, (S, L + 2).

        Raises:
            KeyError: The statistic was not measured.
        """
        by_site = self.get(name)
        if not by_site:
            raise KeyError(name)
        (values,) = by_site.values()
        return values


def join(parts: Iterable[Profiles]) -> list[Profiles]:
    """Concatenate the parts that have the same layout, each sorted by step."""
    groups: list[list[Profiles]] = []
    for part in parts:
        for group in groups:
            if group[0].layout == part.layout:
                group.append(part)
                break
        else:
            groups.append([part])
    joined: list[Profiles] = []
    for group in groups:
        steps = np.concatenate([part.steps for part in group])
        values = np.concatenate([part.values for part in group])
        # Stable, so that of two parts with the same step the later part stays behind.
        order = np.argsort(steps, kind="stable")
        joined.append(Profiles(group[0].layout, steps[order], values[order]))
    return joined
