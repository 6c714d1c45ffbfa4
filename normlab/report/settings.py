"""The settings of a run by option (`norm`, `model.depth`, `corpus`), conditions on them, and the settings that differ.

A setting is the value of a config option, or a value that the machine, the corpus or the code decides (the device, the
version of torch). The latter have option names too, and `is_config_option` tells the two apart.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normlab.config.option_names import ALIASES, hint, meanings
from normlab.errors import ConfigError, unknown
from normlab.store.record import RunRecord, Setting, as_setting

LR = "optim.lr"
SEEDS = ("seed", "data.seed")
"""The options in which replicates differ: the seeds of the initial weights and of the data order."""

_READERS: dict[str, Callable[[RunRecord], Setting]] = {
    "norm": lambda run: run.config.norm.preset or run.config.norm.name,
    "placement": lambda run: run.config.placement.name,
    "model": lambda run: run.config.model.preset,
    "optim": lambda run: run.config.optim.name,
    "corpus": lambda run: _join(run.corpus.name, (run.corpus.sha256 or "")[:8]),  # two texts can have one name
    "device": lambda run: run.machine.device,
    "precision": lambda run: run.machine.precision,
    "compile": lambda run: run.machine.compile,
    "deterministic": lambda run: run.machine.deterministic,
    "init": lambda run: run.machine.init,
}
"""Options that are no field of the config, or whose `auto` is resolved by the run."""

NUMERICS = "numerics ("
"""The beginning of settings that change the last bits."""
_PACK_SIZE = "numerics (pack size)"
_ENVIRONMENT: dict[str, Callable[[RunRecord], Setting]] = {
    "corpus": _READERS["corpus"],
    "tokenizer": lambda run: _join(*map(str, filter(None, [run.corpus.tokenizer, run.corpus.vocab_size]))) or "unknown",
    "device": lambda run: _join(run.machine.device, run.machine.device_name),
    "precision": _READERS["precision"],
    "numerics (compile)": _READERS["compile"],
    "numerics (deterministic)": _READERS["deterministic"],
    "numerics (threads)": lambda run: run.machine.threads,
    "numerics (instructions)": lambda run: run.machine.instructions,
    "numerics (torch)": lambda run: as_setting(run.versions.get("torch")),
    _PACK_SIZE: lambda run: len(run.pack.runs) or 1,
    "sweep": lambda run: run.pack.sweep,
}
"""What the loss depends on besides the config, and the sweep, whose plan fixes the sizes of its packs."""

_CODE = {"norm": "the norm's code", "placement": "the placement's code"}
"""Parts whose version is part of a run's identity, and the name of that version as a setting."""
_INIT_RULE = "init rule"
"""The rule that `init=auto` resolves to."""


def setting(run: RunRecord, option: str) -> Setting:
    """Return a run's value of an option by its dotted name; None where its record has no such option."""
    read = _READERS.get(option)
    return read(run) if read else run.options.get(option)


def format_setting(value: Setting) -> str:
    """Return a setting as it is typed on the command line; `-` for None."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def resolve_options(names: Iterable[str], runs: Sequence[RunRecord], flag: str) -> list[str]:
    """Return the full name of each option; a short name such as `depth` is accepted where it means one option.

    Raises:
        ConfigError: No run has an option, or a short name means several; the message suggests the nearest ones.
    """
    known = options_of(runs)
    return [_resolve_option(name, known, flag) for name in names]


def _resolve_option(name: str, known: set[str], flag: str) -> str:
    if name in known:
        return name
    found = meanings(name, known) if "." not in name else []
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{flag} {name}: is ambiguous; write {' or '.join(found)}")
    raise ConfigError(
        f"{flag} {name}: no run has such an option{hint(name, known)}; "
        f"choose one of {', '.join(_READERS)} or a config option such as model.depth"
    )


def options_of(runs: Iterable[RunRecord]) -> set[str]:
    """Return the options by which runs can be selected."""
    return set(_READERS).union(*(run.options for run in runs))


def short_names(options: Iterable[str]) -> dict[str, list[str]]:
    """Return the options that each short or foreign name means: `depth` and `n_layer` mean `model.depth`."""
    options = set(options)
    names = {option.rpartition(".")[2] for option in options} | ALIASES.keys()
    return {name: found for name in sorted(names - options) if (found := meanings(name, options))}


# Conditions: `--where 'model.depth>=8,norm!=none'`. Nothing is evaluated as code.

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

    def holds(self, run: RunRecord) -> bool:
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


def select_where(runs: Sequence[RunRecord], where: Sequence[str], flag: str = "--where") -> list[RunRecord]:
    """Return the runs that meet all conditions.

    Raises:
        ConfigError: A condition is invalid, an option is unknown, or no run meets a condition; the message lists the
            values there are.
    """
    known = options_of(runs)
    conditions = [
        replace(condition, option=_resolve_option(condition.option, known, flag))
        for condition in parse_conditions(where, flag)
    ]
    selected = list(runs)
    for condition in conditions:
        matches = {run for run in runs if condition.holds(run)}
        if not matches:
            values = {format_setting(actual) for run in runs if (actual := setting(run, condition.option)) is not None}
            choices = f"{condition.option} is {', '.join(sorted(values))}"
            if condition.sign in ("=", "=="):
                choices = unknown(condition.option, condition.value, values)
            raise ConfigError(f"{flag} {condition}: no run matches; {choices}")
        selected = [run for run in selected if run in matches]
    if not selected and conditions:
        raise ConfigError(f"{flag} {','.join(map(str, conditions))}: no run matches all conditions; remove one")
    return selected


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# Settings that differ


def settings_of(run: RunRecord) -> dict[str, Setting]:
    """Return everything that a run's loss depends on, except learning rate and seeds, for `differing_settings`.

    The config options are those of the run's identity, which leaves out what cannot change a number. The corpus
    replaces the `data` options that selected it.
    """
    options = {
        option: value
        for option, value in (run.identity or run.options).items()
        if option not in (LR, *SEEDS) and not (run.corpus.sha256 and option.startswith("data."))
    }
    environment = {name: read(run) for name, read in _ENVIRONMENT.items()}
    code = {name: str(run.code_versions.get(part))[:8] for part, name in _CODE.items()}
    return environment | options | code | {"init": run.options.get("init"), _INIT_RULE: run.machine.init}


def is_config_option(name: str) -> bool:
    """Whether a setting of `settings_of` is chosen on the command line, not by the machine, the corpus or the code."""
    return name not in (*_ENVIRONMENT, _INIT_RULE, *_CODE.values())


def differing_settings(runs: Sequence[Mapping[str, Setting]]) -> dict[str, list[str]]:
    """Return the settings in which runs differ, each with its sorted values.

    Two norms, placements or optimisers are reported by name, without their options. An init rule is reported where
    the overrides of runs differ in it, not where it follows from the placement. Code that differs is reported where no
    option explains it. Pack sizes are reported across sweeps only, because the plan of one sweep lists them.

    Args:
        runs: The `settings_of` each run.
    """
    runs = list({tuple(run.items()): run for run in runs}.values())  # most runs are alike, and hashing is fast
    different: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run.get(name) for run in runs]
        if any(value != values[0] for value in values[1:]):
            different[name] = _sorted_values(values)
    if different.pop(_INIT_RULE, None) is None:
        different.pop("init", None)
    if different.pop("sweep", None) is None:
        different.pop(_PACK_SIZE, None)
    for group in ("norm", "placement", "optim"):
        if names := different.pop(f"{group}.name", None):
            different = {name: values for name, values in different.items() if not name.startswith(f"{group}.")}
            different[group] = names
    for part, name in _CODE.items():
        if {part, "init", "model"} & {other.partition(".")[0] for other in different}:
            different.pop(name, None)
    return different


def _sorted_values(values: Iterable[Setting]) -> list[str]:
    by_text: dict[str, Any] = {}
    for value in values:
        by_text.setdefault(format_setting(value), value)
    is_numeric = all(isinstance(value, int | float) for value in by_text.values())
    return sorted(by_text, key=by_text.__getitem__) if is_numeric else sorted(by_text)


def _join(*parts: str | None) -> str | None:
    return " ".join(dict.fromkeys(filter(None, parts))) or None
