"""Which runs are looked at: `--where 'model.depth>=8,norm!=none'`. Read by rule, never evaluated as code."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from normlab.errors import ConfigError, unknown
from normlab.report.settings import Run, Setting, check_words, setting, shown

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(r"\s*([\w.]+)\s*(==|!=|<=|>=|=|<|>)\s*([^=<>!]+?)\s*")
_EQUAL = ("=", "==", "!=")


@dataclass(frozen=True, slots=True)
class Condition:
    """One word, how it is compared, and with what."""

    word: str
    sign: str
    value: str

    def __str__(self) -> str:
        return f"{self.word}{self.sign}{self.value}"

    def holds(self, run: Run) -> bool:
        """Whether a run is among those that are meant. What its record does not say equals nothing.

        Raises:
            ConfigError: An order is asked of what has none.
        """
        seen, number = setting(run, self.word), _number(self.value)
        if isinstance(seen, int | float) and not isinstance(seen, bool) and number is not None:
            return OPERATORS[self.sign](seen, number)
        if self.sign not in _EQUAL:
            if seen is None:
                return False
            raise ConfigError(
                f"{self}: {self.word} is {shown(seen)}, and {self.sign} compares numbers; use = or != for the others"
            )
        return (seen is not None and self.value == shown(seen)) == (self.sign != "!=")


def parse(texts: Iterable[str], option: str, signs: Sequence[str] = tuple(OPERATORS)) -> list[Condition]:
    """Conditions, several in one text where commas stand between them; all must hold.

    Raises:
        ConfigError: A part is no condition.
    """
    conditions = []
    for part in (part for text in texts for part in text.split(",")):
        match = _FORM.fullmatch(part)
        if not match or match[2] not in signs:
            what = "word=value" if signs == ("=",) else f"word, one of {' '.join(OPERATORS)}, and value"
            raise ConfigError(f"{option} {part!r}: write {what}, as {'norm=layernorm' if '=' in signs else ''}")
        conditions.append(Condition(*match.groups()))
    return conditions


def chosen(runs: Sequence[Run], conditions: Sequence[Condition], option: str = "--where") -> list[bool]:
    """Which runs meet all conditions.

    Raises:
        ConfigError: A word is none, or no run meets a condition; what there is to choose from is said.
    """
    check_words([condition.word for condition in conditions], runs, option)
    meets = [[condition.holds(run) for run in runs] for condition in conditions]
    for condition, each in zip(conditions, meets, strict=True):
        if not any(each):
            raise ConfigError(f"{option} {condition}: no run is so; {_choices(condition, runs)}")
    together = [all(each) for each in zip(*meets, strict=True)] if meets else [True] * len(runs)
    if not any(together):
        raise ConfigError(f"{option} {','.join(map(str, conditions))}: no run is all of it; leave one of them out")
    return together


def _choices(condition: Condition, runs: Sequence[Run]) -> str:
    values = {shown(seen) for run in runs if (seen := setting(run, condition.word)) is not None}
    if condition.sign in ("=", "=="):
        return unknown(condition.word, condition.value, values)
    return f"{condition.word} is {', '.join(sorted(values))}"


def _number(text: Setting) -> float | None:
    try:
        return float(text)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return None
