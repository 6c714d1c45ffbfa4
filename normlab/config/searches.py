"""Values that a sweep finds while it trains: `optim.lr=search(1e-4,1e-1)` and `seed=until(placement=pre,max=24)`."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from normlab.base.errors import ConfigError

_SEARCH = re.compile(r"([\w.]+)=search\(([^(),]*),([^(),]*)\)")
_UNTIL = re.compile(r"seed=until\((.+),\s*max=(\d{1,5})\)")
MOST_SEEDS = 10_000
"""The largest `max` of `seed=until(...)`: a grid has no more runs."""
EXAMPLE = "'optim.lr=search(1e-4,1e-1)'"


@dataclass(frozen=True, slots=True)
class Range:
    """The values of one option that a search may try."""

    option: str
    low: float
    high: float
    is_whole: bool
    """Whether both limits are whole numbers, and so all values."""

    @property
    def is_log(self) -> bool:
        """Whether the values are searched by their logarithm."""
        return self.low > 0

    def at(self, share: float) -> float:
        """Return the value at a share of the range, 0 to 1; each whole number has a share of its own."""
        high = self.high
        if self.is_whole:
            high += 1
        value = self.low + (high - self.low) * share
        if self.is_log:
            value = self.low * (high / self.low) ** share
        return math.floor(value) if self.is_whole else value

    def text(self, value: float) -> str:
        """Return the override that sets a value, of four digits unless it is a limit."""
        number = round(value) if self.is_whole else float(f"{value:.4g}")
        # Four digits may round a value out of the range; its limits are printed as they were typed.
        limited = min(max(number, self.low), self.high)
        return f"{self.option}={limited:.12g}"

    @staticmethod
    def value(text: str) -> float:
        """Return the value that `text` gave an override."""
        return float(text.partition("=")[2])


def read_searches(overrides: Sequence[str]) -> tuple[list[Range], list[str]]:
    """Return the ranges of the searched options, and the other overrides.

    Raises:
        ConfigError: A range is malformed or that of an arm, or its option has a value too.
    """
    ranges = [_range(text) for text in overrides if "=search(" in text]
    others = [text for text in overrides if "=search(" not in text]
    options = {text.lstrip("+").partition("=")[0] for text in others}
    for searched in ranges:
        if searched.option in options:
            raise ConfigError(f"{searched.option}: is given twice; leave the search or the other value out")
        options.add(searched.option)
    return ranges, others


def _range(text: str) -> Range:
    match = _SEARCH.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text}: is not a search, or inside of arm=[...]; write {EXAMPLE} beside it")
    option, *limits = [part.strip() for part in match.groups()]
    try:
        low, high = map(float, limits)
    except ValueError:
        low = high = math.nan  # which the check of finite numbers rejects
    if option in ("seed", "data.seed") or option.startswith("sweep."):
        raise ConfigError(f"{text}: only options of the model, the data and the training are searched")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{text}: the limits must be two numbers, the lower one first, as in {EXAMPLE}")
    is_whole = all(limit.lstrip("-").isdecimal() for limit in limits)
    return Range(option, low, high, is_whole)


@dataclass(frozen=True, slots=True)
class Until:
    """Seeds are added until every difference from a baseline is decided, or there are `most`."""

    against: str
    most: int


def read_until(overrides: Sequence[str]) -> tuple[Until | None, list[str]]:
    """Return the condition of `seed=until(...)`, or None, and the other overrides.

    Raises:
        ConfigError: It is malformed.
    """
    texts = [text for text in overrides if text.startswith("seed=until(")]
    if not texts:
        return None, list(overrides)
    match = _UNTIL.fullmatch(texts[0])
    if match is None or not 4 <= int(match[2]) <= MOST_SEEDS:
        raise ConfigError(
            f"{texts[0]}: must have a baseline and a largest number of seeds, from 4 to {MOST_SEEDS}: "
            "'seed=until(placement=pre,max=24)'"
        )
    return Until(match[1], int(match[2])), [text for text in overrides if text not in texts]


def without_seeds(overrides: Iterable[str]) -> list[str]:
    return [text for text in overrides if not text.startswith(("seed=", "data.seed="))]
