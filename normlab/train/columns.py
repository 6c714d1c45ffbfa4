"""Which number is which: the place and the site of what a model shows and of its parameters, and what must be there."""

from __future__ import annotations

from collections.abc import Iterable

from normlab.errors import StatisticsError
from normlab.model.gpt import GPT
from normlab.stats.profiles import Column
from normlab.stats.show import Wanted, Watched
from normlab.stats.statistic import STATISTICS

Names = tuple[tuple[tuple[str, str], ...], ...]
"""What was seen of each segment: statistics and their sites, in order."""


def columns_of(names: Names) -> list[Column]:
    """What the segments' numbers are, one segment's after the other's."""
    return [Column(*name, place) for place, segment in enumerate(names) for name in segment]


def column_of(name: str, depth: int) -> Column:
    """The place of a parameter, and its name there: in its block, or in the model."""
    part, _, rest = name.partition(".")
    if part == "blocks":
        layer, _, site = rest.partition(".")
        return Column("", site, int(layer) + 1)
    return Column("", name, 0 if part == "embed" else depth + 1)


def families(model: GPT) -> dict[str, str]:
    """What each parameter is part of, by its site: embed, attn, mlp, norm, wiring or head."""
    found: dict[str, str] = {}
    of_norms = {id(p) for module in model.modules() if isinstance(module, Watched) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        site = column_of(name, len(model.blocks)).site
        part = site.partition(".")[0]
        family = part if part in ("embed", "head", "attn", "mlp") else "wiring"
        found[site] = "norm" if id(parameter) in of_norms else family
    return found


def refuse_missing(model: GPT, wanted: Wanted, seen: Iterable[Column]) -> None:
    """Nothing, where every statistic of every block, of the head and of every norm was seen.

    Raises:
        StatisticsError: One was not; it is named.
    """
    depth, found = len(model.blocks), set(seen)
    for place, (_, segment) in enumerate(model.segments()):
        sites = dict.fromkeys(("attn", "mlp", "block", "attention", "hidden"), [""] * (0 < place <= depth))
        sites |= {"resid": [""] * (place > 0), "head": [""] * (place > depth)}
        sites["norm"] = [module.site for module in segment.modules() if isinstance(module, Watched)]
        for of, made in wanted.items():
            for column in (Column(name, site, place) for name, _ in made for site in sites.get(of, ())):
                if column not in found:
                    raise _missing(column)


def refuse_unmeasured(names: Iterable[str], seen: Iterable[Column]) -> None:
    """Nothing, where something of every statistic was seen.

    Raises:
        StatisticsError: One was not; it is named.
    """
    for name in sorted(set(names) - {column.statistic for column in seen}):
        raise StatisticsError(f"statistic {name}: was not measured; train with stats.without=[{name}]")


def _missing(column: Column) -> StatisticsError:
    never = "the placement's wiring never called"
    why = {
        "attn": f"{never} attention",
        "mlp": f"{never} the MLP",
        "attention": f"{never} attention",
        "hidden": f"{never} the MLP",
        "norm": "the norm was built and never called",
    }.get(STATISTICS[column.statistic].of, "it was not shown")
    site = f" of {column.site}" if column.site else ""
    return StatisticsError(
        f"statistic {column.statistic}{site}, place {column.place}: was not measured ({why}); mend the placement, or "
        f"train with stats.without=[{column.statistic}]"
    )
