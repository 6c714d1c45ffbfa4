"""Assign the factors of a sweep to the channels of a figure: x, colour, line style and panels.

One level has one colour in every figure of a sweep, because the colours follow from the colour factor's levels only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normlab.errors import ConfigError
from normlab.report.factors import Factor, label
from normlab.report.settings import LR, resolve_options
from normlab.store.parts import Setting
from normlab.store.record import RunRecord

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Colours of named levels, distinct with any colour vision (Okabe & Ito 2008)."""
_SCALE = ("#440154", "#46317e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#9fda3a")
"""Colours of numeric levels, from low to high: viridis without its lightest end."""
STYLES = ("solid", "dash", "dot", "dashdot")
MAX_PANELS = 24


@dataclass(frozen=True, slots=True)
class Channels:
    """The factors on each channel of a figure."""

    x: Factor | None
    """None for a figure whose x axis is no factor: a learning rate, a step or a layer."""
    color: Factor | None
    style: Factor | None
    panel: tuple[Factor, ...]
    """One panel for each combination of these factors' levels."""

    def colors(self) -> dict[Setting, str]:
        """Return the colour of each level of the colour factor."""
        return level_colors(self.color) if self.color else {None: COLORS[0]}

    def styles(self) -> dict[Setting, str]:
        """Return the line style of each level of the style factor."""
        levels = self.style.levels if self.style else (None,)
        return {level: STYLES[index % len(STYLES)] for index, level in enumerate(levels)}

    def panel_label(self, values: Mapping[str, Setting]) -> str:
        """Return the title of the panel of a cell, given the cell's value of each option."""
        options = [factor.option for factor in self.panel]
        return label(options, [values[option] for option in options]) if options else ""


def level_colors(factor: Factor) -> dict[Setting, str]:
    """Return the colour of each level: from a scale for numbers, else from a list."""
    levels = factor.levels
    if factor.is_numeric and len(levels) > 1:
        return {level: _mix(index / (len(levels) - 1)) for index, level in enumerate(levels)}
    return {level: COLORS[index % len(COLORS)] for index, level in enumerate(levels)}


def _mix(share: float) -> str:
    """Return the colour at a share of the scale, by linear interpolation."""
    position = share * (len(_SCALE) - 1)
    index = min(int(position), len(_SCALE) - 2)
    parts = [(int(_SCALE[index][i : i + 2], 16), int(_SCALE[index + 1][i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * (position - index)):02x}" for a, b in parts)


def choose_channels(
    factors: Sequence[Factor],
    runs: Sequence[RunRecord],
    *,
    has_x: bool,
    x: str | None = None,
    color: str | None = None,
    style: str | None = None,
    panel: Sequence[str] | None = None,
) -> Channels:
    """Return the channels of a figure.

    By default the numeric factor with the most levels is on x, the other factor with the most levels has the colours,
    and the rest have panels.

    Args:
        factors: The factors of the runs.
        runs: The runs, which have the options.
        has_x: Whether the x axis shows a factor; without, x is `None` and its factor has panels.
        x: The option on x.
        color: The option with the colours.
        style: The option with the line styles.
        panel: The options with panels.

    Raises:
        ConfigError: An option is unknown, is not a factor or is given twice; or a factor is left without a channel.
    """
    by_option = {factor.option: factor for factor in factors}
    given: dict[str, list[Factor]] = {}
    for flag, names in {"x": x, "color": color, "style": style, "panel": panel}.items():
        names = [names] if isinstance(names, str) else names or []
        for option in resolve_options(names, runs, f"--{flag}"):
            if option == LR or option not in by_option:
                known = ", ".join(by_option) or "none"
                raise ConfigError(f"--{flag} {option}: is not one of the factors of these runs ({known})")
            if any(by_option[option] in others for others in given.values()):
                raise ConfigError(f"--{flag} {option}: is on another channel already; name each factor once")
            given.setdefault(flag, []).append(by_option[option])
    if x is not None and not has_x:
        raise ConfigError(f"--x {x}: this figure has its own x axis; use --color, --style or --panel")
    rest = [factor for factor in factors if all(factor not in others for others in given.values())]
    on_x = next(iter(given.get("x", [])), None) or _pop(
        rest, key=lambda factor: (factor.is_numeric, len(factor.levels))
    )
    on_color = next(iter(given.get("color", [])), None) or _pop(rest, key=lambda factor: len(factor.levels))
    if on_color is None and on_x is not None and not (has_x and on_x.is_numeric):
        on_color = on_x  # a single factor
    on_style = next(iter(given.get("style", [])), None)
    panels = given.get("panel", [])
    if panel is None:
        panels = [*rest] if has_x or on_x in (None, on_color) else [on_x, *rest]
    elif left := [*([on_x] if not has_x and on_x and on_x is not on_color else []), *rest]:
        names = ", ".join(factor.option for factor in left)
        raise ConfigError(f"--panel: {names} is on no channel; add it to --panel, or select one value with --where")
    return Channels(on_x if has_x else None, on_color, on_style, tuple(panels))


def _pop(factors: list[Factor], key) -> Factor | None:
    """Remove and return the first factor with the largest key."""
    if not factors:
        return None
    largest = max(factors, key=key)
    factors.remove(largest)
    return largest
