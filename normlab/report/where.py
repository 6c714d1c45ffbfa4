"""Select runs by conditions on their settings: `--where 'model.depth>=8,norm!=none'`. Nothing is evaluated as code."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from normlab.errors import ConfigError, unknown
from normlab.report.settings import Run, check_options, format_setting, setting

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"\s*([\w.]+)\s*(==|!=|<=|>=|=|<|>)\s*([^=<>!]+?)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """An option, an operator and the value to compare with."""

    option: str
    sign: str
    value: str

    def __str__(self) -> str:
        return f"{self.option}{self.sign}{self.value}"

    def holds(self, run: Run) -> bool:
        """Whether a run meets the condition; a setting that the record lacks equals no value.

        Raises:
            ConfigError: The operator compares numbers and the setting is no number.
        """
        actual, bound = setting(run, self.option), _number(self.value)
        if isinstance(actual, int | float) and not isinstance(actual, bool) and bound is not None:
            return OPERATORS[self.sign](actual, bound)
        if self.sign in ("=", "==", "!="):
            return (actual is not None and self.value == format_setting(actual)) == (self.sign != "!=")
        if actual is None:
            return False
        raise ConfigError(
            f"{self}: {self.sign} compares numbers, and {self.option} is {format_setting(actual)}; use = or !="
        )


def parse_conditions(texts: Iterable[str], flag: str, signs: Sequence[str] = tuple(OPERATORS)) -> list[Condition]:
    """Parse conditions; one text can hold several, separated by commas.

    Raises:
        ConfigError: A part is not a condition.
    """
    conditions = []
    for part in (part for text in texts for part in text.split(",")):
        match = _CONDITION.fullmatch(part)
        if not match or match[2] not in signs:
            form = "option=value" if signs == ("=",) else f"an option, one of {' '.join(OPERATORS)}, and a value"
            raise ConfigError(f"{flag} {part!r}: not a condition; write {form}, for example norm=layernorm")
        conditions.append(Condition(*match.groups()))
    return conditions


def match_runs(runs: Sequence[Run], conditions: Sequence[Condition], flag: str = "--where") -> list[bool]:
    """Return for each run whether it meets all conditions.

    Raises:
        ConfigError: An option is unknown, or no run meets a condition; the message lists the values there are.
    """
    check_options([condition.option for condition in conditions], runs, flag)
    matches = [[condition.holds(run) for run in runs] for condition in conditions]
    for condition, by_run in zip(conditions, matches, strict=True):
        if not any(by_run):
            values = {format_setting(actual) for run in runs if (actual := setting(run, condition.option)) is not None}
            choices = f"{condition.option} is {', '.join(sorted(values))}"
            if condition.sign in ("=", "=="):
                choices = unknown(condition.option, condition.value, values)
            raise ConfigError(f"{flag} {condition}: no run matches; {choices}")
    meets_all = [all(by_condition) for by_condition in zip(*matches, strict=True)] if matches else [True] * len(runs)
    if not any(meets_all):
        raise ConfigError(f"{flag} {','.join(map(str, conditions))}: no run matches all conditions; remove one")
    return meets_all


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
