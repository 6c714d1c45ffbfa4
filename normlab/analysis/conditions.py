"""Conditions on the settings of runs: `--where 'model.depth>=8,norm!=none'`. Nothing is evaluated as code."""

import contextlib
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from normlab.analysis.settings import format_setting, resolve_options, setting, sort_key
from normlab.base.errors import ConfigError, did_you_mean, shorten
from normlab.catalogue import entries as catalogue
from normlab.store.format import DAMAGED
from normlab.store.record import RunEntry, Setting

AnyEntry = TypeVar("AnyEntry", bound=RunEntry)

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq, "!=": operator.ne, "<=": operator.le, ">=": operator.ge, "=": operator.eq, "<": operator.lt,
    ">": operator.gt,
}  # fmt: skip
_CONDITION = re.compile(r"\s*([\w.]+)\s*(==|!=|<=|>=|=|<|>)\s*([^=<>!]+?)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    option: str
    sign: str
    value: str

    def __str__(self) -> str:
        return f"{self.option}{self.sign}{self.value}"

    def accepts(self, actual: Setting) -> bool:
        """Whether a value of the option, None for `null`, meets the condition. Integers are compared exactly.

        Raises:
            ConfigError: The operator compares numbers, and the value is not a number.
        """
        if isinstance(actual, int | float) and not isinstance(actual, bool):
            # As a float, the seed 9007199254740993 would equal 9007199254740992.
            for number in (int, float):
                with contextlib.suppress(ValueError):
                    return OPERATORS[self.sign](actual, number(self.value))
        is_equal = self.value == format_setting(actual)
        if self.sign == "!=":
            return not is_equal
        if self.sign in ("=", "=="):
            return is_equal
        if actual is None:
            return False
        seen = f"{self.option} is {format_setting(actual)}"
        if isinstance(actual, int | float):
            seen = f"{self.value!r} is none"
        raise ConfigError(f"{self}: {self.sign} compares numbers, and {seen}; use = or !=")


def parse_conditions(texts: Iterable[str], flag: str, signs: Sequence[str] = tuple(OPERATORS)) -> list[Condition]:
    """Parse conditions; one text can hold several, separated by commas.

    Raises:
        ConfigError: A part is not a condition.
    """
    form = f"an option, one of {' '.join(OPERATORS)}, and a value"
    if signs == ("=",):
        form = "option=value"
    conditions: list[Condition] = []
    for text in texts:
        for part in text.split(","):
            match = _CONDITION.fullmatch(part)
            if not match or match[2] not in signs:
                raise ConfigError(f"{flag} {part!r}: not a condition; write {form}, for example norm=layernorm")
            conditions.append(Condition(*match.groups()))
    return conditions


def select_where(runs: Sequence[AnyEntry], where: Sequence[str], flag: str = "--where") -> list[AnyEntry]:
    """Return the runs that meet all conditions.

    Raises:
        ConfigError: A condition is invalid, an option is unknown, or no run meets all conditions; the message lists
            the values of the runs that meet the earlier conditions.
    """
    conditions = parse_conditions(where, flag)
    if not conditions:
        return list(runs)
    # All options first: a misspelt option is a mistake even if an earlier condition selects no run.
    options = resolve_options([condition.option for condition in conditions], runs, flag)
    selected = list(runs)
    met: list[Condition] = []
    for short, option in zip(conditions, options, strict=True):
        condition = replace(short, option=option)
        values: set[Setting] = set()
        matches: list[AnyEntry] = []
        problems: list[str] = []
        for run in selected:
            value = setting(run, option)
            if run.state == DAMAGED:  # its values are not known
                problems.append(run.problem)
            else:
                values.add(value)
            if condition.accepts(value):
                matches.append(run)
        if not matches:
            raise ConfigError("; ".join([f"{flag} {_no_match(condition, met, values)}", *problems[:1]]))
        met.append(condition)
        selected = matches
    return selected


def _no_match(condition: Condition, met: Sequence[Condition], values: Iterable[Setting]) -> str:
    """Return why no run matches a condition; `values` are those of the runs that match the `met` ones."""
    earlier = ""
    if met:
        earlier = f" with {','.join(map(str, met))}"
    texts = list(map(format_setting, sorted(values, key=sort_key)))
    guess = ""
    # A condition with `=` names one value, which may be misspelt.
    if condition.sign in ("=", "=="):
        guess = did_you_mean(condition.value, texts, catalogue.titles(condition.option))
    known = f"; {condition.option} is {shorten(texts)}" if texts else ""
    return f"{condition}: no run{earlier} matches{guess}{known}"
