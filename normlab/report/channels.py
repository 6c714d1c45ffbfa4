"""Assign the factors of a sweep to the channels of a figure: x, colour, line style and panels.

One level has one colour in every figure of a sweep, because the colours follow from the colour factor's levels only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from normlab.analysis.factors import Factor, label
from normlab.analysis.settings import resolve_options
from normlab.base.errors import ConfigError
from normlab.store.record import RunEntry, Setting

COLORS = ("#0072b2", "#d55e00", "#009e73", "#a0458a", "#b07d00", "#2f8fc4", "#5b4ba8", "#5f6670")
"""Colours of named levels, distinct with any colour vision (after Okabe & Ito 2008)."""
_SCALE = ("#440154", "#46317e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#9fda3a")
"""Colours of numeric levels, from low to high: viridis without its lightest end."""
STYLES = ("solid", "dash", "dot", "dashdot")
MANY_PANELS, MAX_PANELS = 4, 24


@dataclass(frozen=True, slots=True)
class Channels:
    x: Factor | None
    """None for a figure whose x axis is no factor: a learning rate, a step or a layer."""
    color: Factor | None
    style: Factor | None
    panel: tuple[Factor, ...]
    """One panel for each combination of these factors' levels."""

    def without_x(self) -> Channels:
        """Return the channels of a figure with its own x axis: the factor on x has the colours, or else panels."""
        if self.x is None or self.color in (None, self.x):
            return replace(self, x=None, color=self.color or self.x)
        return replace(self, x=None, panel=(self.x, *self.panel))

    def colors(self) -> dict[Setting, str]:
        return level_colors(self.color) if self.color else {None: COLORS[0]}

    def styles(self) -> dict[Setting, str]:
        if self.style is None:
            return {None: STYLES[0]}
        every = self.style.all_levels or self.style.levels
        return {level: STYLES[every.index(level) % len(STYLES)] for level in self.style.levels}

    def panel_label(self, values: Mapping[str, Setting]) -> str:
        options = [factor.option for factor in self.panel]
        return label(options, [values[option] for option in options]) if options else ""


def level_colors(factor: Factor) -> dict[Setting, str]:
    """Return the colour of each level: from a scale for numbers, else from a list."""
    every = factor.all_levels or factor.levels
    is_scale = factor.is_numeric and len(every) > 1
    colors = [mix(_SCALE, i / (len(every) - 1)) if is_scale else _nth_color(i) for i in range(len(every))]
    by_level = dict(zip(every, colors, strict=True))
    return {level: by_level[level] for level in factor.levels}


def _nth_color(index: int) -> str:
    """Return a colour of the list; behind its end, the colours again, lighter and then darker."""
    base = COLORS[index % len(COLORS)]
    tint = {0: base, 1: mix((base, "#ffffff"), 0.5), 2: mix((base, "#000000"), 0.5)}
    return tint[index // len(COLORS) % 3]


def mix(scale: Sequence[str], share: float) -> str:
    """Return the colour at a share of a scale, by linear interpolation."""
    position = share * (len(scale) - 1)
    index = min(int(position), len(scale) - 2)
    parts = [(int(scale[index][i : i + 2], 16), int(scale[index + 1][i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * (position - index)):02x}" for a, b in parts)


def choose_channels(
    factors: Sequence[Factor],
    runs: Sequence[RunEntry],
    *,
    x: str | None = None,
    color: str | None = None,
    style: str | None = None,
    panel: Sequence[str] | None = None,
) -> Channels:
    """Return the channels of a figure with a factor on x.

    By default the numeric factor with the most levels is on x, the other factor with the most levels has the colours,
    and the rest have panels; of more than `MANY_PANELS`, the factor with the fewest levels has the line styles.

    Raises:
        ConfigError: An option is unknown, is not a factor or is given twice; or a factor is left without a channel.
    """
    by_option = {factor.option: factor for factor in factors}
    given: dict[str, list[Factor]] = {"x": [], "color": [], "style": [], "panel": []}
    for flag, names in {"x": x, "color": color, "style": style, "panel": panel}.items():
        names = [names] if isinstance(names, str) else names or []
        for option in resolve_options(names, runs, f"--{flag}"):
            if option not in by_option:
                known = ", ".join(by_option) or "none"
                raise ConfigError(f"--{flag} {option}: is not one of the factors of these runs ({known})")
            if any(by_option[option] in others for others in given.values()):
                raise ConfigError(f"--{flag} {option}: is on another channel already; name each factor once")
            given[flag].append(by_option[option])
    rest = [factor for factor in factors if all(factor not in others for others in given.values())]

    def take(flag: str, key) -> Factor | None:
        """Return the given factor of a channel, or remove and return the first of the rest with the largest key."""
        if not given[flag] and rest:
            given[flag].append(rest.pop(rest.index(max(rest, key=key))))
        return given[flag][0] if given[flag] else None

    on_x = take("x", lambda factor: (factor.is_numeric, len(factor.levels)))
    on_color = take("color", lambda factor: len(factor.levels))
    if on_color is None and on_x is not None and not on_x.is_numeric:
        on_color = on_x  # a single factor
    if given["style"] or (panel is None and math.prod(len(factor.levels) for factor in rest) > MANY_PANELS):
        take("style", lambda factor: -len(factor.levels))
    if panel is not None and rest:
        names = ", ".join(factor.option for factor in rest)
        raise ConfigError(f"--panel: not on a channel: {names}; add to --panel, or select one value each with --where")
    return Channels(on_x, on_color, next(iter(given["style"]), None), (*given["panel"], *rest))
