"""Maps each measured value to its (statistic, site, layer) column, and checks that none is missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import NamedTuple

from torch import Tensor

from normlab.errors import StatisticsError
from normlab.model.gpt import GPT
from normlab.stats.instrument import InstrumentedNorm, Selection
from normlab.stats.profiles import Column
from normlab.stats.statistic import OF


class Measurement(NamedTuple):
    """Values of statistics and their columns."""

    columns: tuple[Column, ...]
    values: Tensor
    """(K, ...R) for K columns and R stacked runs, on the device."""


SegmentNames = tuple[tuple[tuple[str, str], ...], ...]
"""For each segment the (statistic, site) of its values, in order."""


def segment_columns(names: SegmentNames) -> list[Column]:
    """Return the columns of the segments' values, concatenated in order."""
    return [Column(*name, layer) for layer, segment in enumerate(names) for name in segment]


def parameter_column(name: str, depth: int, statistic: str = "") -> Column:
    """Return the column of a parameter's statistic; the site is the parameter's name in its block or in the model."""
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
    """Check that every selected statistic was collected in every block, in the head and at every norm.

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
