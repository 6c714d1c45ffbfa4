"""Mutants of placements, each with another field of a row or another init rule."""

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from mutants.mutant import Mutant
from normlab.catalogue.placements import algebra, table
from normlab.catalogue.placements.algebra import SITES, EarlyBlocks, Row, Schedule, SubLayer, Variant, unit_factor
from normlab.catalogue.placements.base import PLACEMENTS


def one_and_a_half(layer: int, depth: int) -> float:
    """Return a factor that no placement uses."""
    return 1.5


FACTORS: dict[str, Schedule] = {
    "1": unit_factor,
    "3/2": one_and_a_half,
    "L ** (1/4)": lambda layer, depth: depth**0.25,
    "(2 * L) ** (-1/4)": lambda layer, depth: (2 * depth) ** -0.25,
    "(2 * L) ** (1/2)": lambda layer, depth: (2 * depth) ** 0.5,
    "(8 * L) ** (1/4)": lambda layer, depth: (8 * depth) ** 0.25,
    "(2 * l) ** (1/4)": lambda layer, depth: (2 * layer) ** 0.25,
    "sqrt(L)": lambda layer, depth: math.sqrt(depth),
    "sqrt(2 * l)": lambda layer, depth: math.sqrt(2 * layer),
    "sqrt(l + 1)": lambda layer, depth: math.sqrt(layer + 1),
    "sqrt(l - 1)": lambda layer, depth: math.sqrt(layer - 1),
    "1 / sqrt(l)": lambda layer, depth: 1 / math.sqrt(layer),
    "l": lambda layer, depth: layer,
}
"""Replacements of a factor of depth."""
STARTS: dict[str, Schedule | None] = {"none": None, "0": table.zero, "1": unit_factor, "0.1": lambda layer, depth: 0.1}
"""Replacements of a learned factor's initial value."""


def row_mutants(row: Row) -> Iterator[Mutant]:
    """Yield every mutant of a row of the algebra, with one field changed in each."""

    def mutant(text: str, **fields: Any) -> Mutant:
        return Mutant(row.name, text, partial(_set_row, dataclasses.replace(row, **fields)))

    for name in ("head_scale", "shared_scale", "embedding_norm", "final_norm"):
        yield mutant(f"row: {name}={not getattr(row, name)}", **{name: not getattr(row, name)})
    yield mutant(f"row: init={_wrong_init(row.init)}", init=_wrong_init(row.init))
    if row.attn != row.mlp:
        yield mutant("row: attn and mlp are exchanged", attn=row.mlp, mlp=row.attn)
    for part in ("attn", "mlp"):
        for text, sub in _sub_layers(getattr(row, part), part):
            yield mutant(f"row: {part} {text}", **{part: sub})
    for choice, form in (("", row), *row.variants.items()):
        for text, early in _earlies(form.early) if form.early is not None else ():
            variants = dict(row.variants)
            if choice:
                variants[choice] = Variant(formula=form.formula, early=early)
            label = f"row: {choice}: {text}" if choice else f"row: {text}"
            yield mutant(label, variants=variants, **({} if choice else {"early": early}))
    if (early := row.early) is not None:
        late = {"attn": early.attn, "mlp": early.mlp, "early": dataclasses.replace(early, attn=row.attn, mlp=row.mlp)}
        yield mutant("row: early and late are exchanged", **late)


def _earlies(early: EarlyBlocks) -> Iterator[tuple[str, EarlyBlocks]]:
    """Yield pairs (mistake, early blocks with this mistake)."""
    for text, blocks in (
        ("one less", lambda depth: early.blocks(depth) - 1),
        ("all", lambda depth: depth),
        ("one more", lambda depth: early.blocks(depth) + 1),
    ):
        yield f"{text} {'is' if text == 'one more' else 'are'} early", dataclasses.replace(early, blocks=blocks)
    for part in ("attn", "mlp"):
        for text, sub in _sub_layers(getattr(early, part), part):
            yield f"early {part} {text}", dataclasses.replace(early, **{part: sub})


def _set_row(row: Row) -> None:
    algebra.ROWS_BY_NAME[row.name] = row


def init_mutant(entry: str, name: str) -> Mutant:
    """Return a mutant of a placement outside the algebra, with another init rule."""
    kind = type(PLACEMENTS[name])
    wrong = _wrong_init(kind.init)
    return Mutant(entry, f"{name}: init={wrong}", lambda: setattr(kind, "init", wrong))


def _wrong_init(init: str) -> str:
    """Return another init rule: GPT-2's, or its scaled form."""
    return "gpt2_scaled" if init == "gpt2" else "gpt2"


def _sub_layers(sub: SubLayer, part: str) -> Iterator[tuple[str, SubLayer]]:
    """Yield pairs (mistake, sub-layer with this mistake)."""
    for site in SITES[part]:
        rest = tuple(other for other in sub.norms if other != site)
        if site not in sub.norms:
            yield f"has a norm at {site}", dataclasses.replace(sub, norms=(*sub.norms, site))
            continue
        yield f"lacks {site}", dataclasses.replace(sub, norms=rest)
        for other in SITES[part]:
            if other not in sub.norms:
                yield f"has {other} for {site}", dataclasses.replace(sub, norms=(*rest, other))
    for name in ("skip", "branch", "shrink"):
        now = _numbers(getattr(sub, name))
        for text, factor in FACTORS.items():
            if _numbers(factor) != now and (now != _numbers(unit_factor) or text in ("3/2", "sqrt(2 * l)")):
                yield f"{name}={text}", dataclasses.replace(sub, **{name: factor})
    for text, start in STARTS.items():
        if (start is None) != (sub.scale is None) or (start and sub.scale and _numbers(start) != _numbers(sub.scale)):
            yield f"scale={text}", dataclasses.replace(sub, scale=start)
    if sub.scale is not None:
        yield "has the other kind of scale", dataclasses.replace(sub, scale_per_channel=not sub.scale_per_channel)


def _numbers(schedule: Schedule) -> list[float]:
    """Return the numbers of a schedule at several depths, or an empty list if it is undefined."""
    try:
        return [schedule(layer, depth) for depth in (1, 2, 5, 24) for layer in range(1, depth + 1)]
    except ValueError:
        return []


def _uses(row: Row) -> set[str]:
    schedules: set[Any] = {row.early.blocks} if row.early is not None else set()
    for sub in row.all_sub_layers:
        schedules |= {*sub.factors, sub.scale, sub.out_gain} - {None}
    return {schedule.__name__ for schedule in schedules}


SCHEDULES: dict[str, list[str]] = {}
"""Rows by the name of the schedule that they use."""
for _row in table.ROWS:
    for _name in sorted(_uses(_row)):
        SCHEDULES.setdefault(_name, []).append(_row.name)
