"""Assign the factors of a sweep to the channels of a figure: x, colour, line style and panels.

One level has one colour in every figure of a sweep, because the colours follow from the colour factor's levels only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        # The colours of a figure of two factors stay, because they are the same in every figure of a sweep.
        if self.x is None or self.color in (None, self.x):
            return replace(self, x=None, color=self.color or self.x)
        return replace(self, x=None, panel=(self.x, *self.panel))

    def colors(self) -> dict[Setting, str]:
        if self.color is None:
            return {None: COLORS[0]}
        return level_colors(self.color)

    def styles(self) -> dict[Setting, str]:
        if self.style is None:
            return {None: STYLES[0]}
        # By their place among all levels, so that conditions change no style.
        all_levels = self.style.all_levels or self.style.levels
        styles: dict[Setting, str] = {}
        for level in self.style.levels:
            styles[level] = STYLES[all_levels.index(level) % len(STYLES)]
        return styles

    def panel_label(self, values: Mapping[str, Setting]) -> str:
        if not self.panel:
            return ""
        levels = {factor.option: values[factor.option] for factor in self.panel}
        return label(levels, levels.values())


def level_colors(factor: Factor) -> dict[Setting, str]:
    """Return the colour of each level: from a scale for numbers, else from a list."""
    all_levels = factor.all_levels or factor.levels
    is_scale = factor.is_numeric and len(all_levels) > 1
    # By the place among all levels, so that conditions change no colour.
    colors: dict[Setting, str] = {}
    for level in factor.levels:
        index = all_levels.index(level)
        if is_scale:
            colors[level] = mix(_SCALE, index / (len(all_levels) - 1))
        else:
            colors[level] = _nth_color(index)
    return colors


def _nth_color(index: int) -> str:
    """Return a colour of the list; behind its end, the colours again, lighter and then darker."""
    base = COLORS[index % len(COLORS)]
    tints = (base, mix((base, "#ffffff"), 0.5), mix((base, "#000000"), 0.5))
    return tints[index // len(COLORS) % len(tints)]


def mix(scale: Sequence[str], share: float) -> str:
    """Return the colour at a share of a scale, by linear interpolation."""
    position = share * (len(scale) - 1)
    index = min(int(position), len(scale) - 2)
    mixed = "#"
    for i in (1, 3, 5):  # red, green and blue in #rrggbb
        low, high = int(scale[index][i : i + 2], 16), int(scale[index + 1][i : i + 2], 16)
        mixed += f"{round(low + (high - low) * (position - index)):02x}"
    return mixed


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
    on_channel: dict[str, list[Factor]] = {"x": [], "color": [], "style": [], "panel": []}
    unassigned = list(factors)
    for flag, names in {"x": x, "color": color, "style": style, "panel": panel}.items():
        if isinstance(names, str):
            names = [names]
        for option in resolve_options(names or [], runs, f"--{flag}"):
            if option not in by_option:
                known = ", ".join(by_option) or "none"
                raise ConfigError(f"--{flag} {option}: is not one of the factors of these runs ({known})")
            if by_option[option] not in unassigned:
                raise ConfigError(f"--{flag} {option}: is on another channel already; name each factor once")
            unassigned.remove(by_option[option])
            on_channel[flag].append(by_option[option])

    def take(flag: str, key: Callable[[Factor], Any]) -> Factor | None:
        """Return the factor of a channel; a free channel takes the first unassigned factor with the largest key."""
        if not on_channel[flag] and unassigned:
            factor = max(unassigned, key=key)
            unassigned.remove(factor)
            on_channel[flag].append(factor)
        return next(iter(on_channel[flag]), None)

    on_x = take("x", lambda factor: (factor.is_numeric, len(factor.levels)))
    on_color = take("color", lambda factor: len(factor.levels))
    if on_color is None and on_x is not None and not on_x.is_numeric:
        on_color = on_x  # a single factor
    # A figure that would have many panels has fewer if one of their factors has the line styles.
    panels = math.prod(len(factor.levels) for factor in unassigned)
    if on_channel["style"] or (panel is None and panels > MANY_PANELS):
        take("style", lambda factor: -len(factor.levels))
    if panel is not None and unassigned:
        names = ", ".join(factor.option for factor in unassigned)
        raise ConfigError(f"--panel: not on a channel: {names}; add to --panel, or select one value each with --where")
    on_style = next(iter(on_channel["style"]), None)
    return Channels(on_x, on_color, on_style, (*on_channel["panel"], *unassigned))
