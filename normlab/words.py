"""How words are read: a little more kindly than Hydra's grammar does it, and what is wrong with them in one line.

A text is taken as it stands, whatever it holds: `run.name=it's`, `data.path=é.txt`, `run.name=2024_01_05` need
no quotes. Quotes, lists, sweeps and interpolations keep the meaning that Hydra gives them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from normlab.config import OPTIMIZERS, RunConfig, RunOptions
from normlab.corpora import DATA, HubData
from normlab.errors import ConfigError, did_you_mean, unknown
from normlab.norms.base import NORMS
from normlab.option_names import hint, meanings
from normlab.paths import config_dir
from normlab.placements.base import PLACEMENTS
from normlab.sweep.options import SlurmOptions, SweepOptions

GROUPS: dict[str, Mapping[str, Any]] = {
    "norm": NORMS, "placement": PLACEMENTS, "model": {}, "data": DATA, "optim": OPTIMIZERS,
    "stats": {},
}  # fmt: skip
"""What is chosen by name, and the classes or instances that are known; presets are Hydra's to find."""

FIELDS = frozenset(field.name for field in dataclasses.fields(RunConfig))
"""What a run's config consists of; an override of anything else is Hydra's, or chooses from a group of the user's."""
_NO_FOLDER = ("hydra.run.dir", "hydra.sweep.subdir", "hydra.output_subdir")
"""Folders that Hydra would make and that no run writes to."""

_LONGEST_NAME = 200
"""Most characters of what is chosen by name: it is looked for as a file, whose name cannot be much longer."""
MOST_JOBS = 10_000
"""Runs that one --multirun may ask for: each is composed before the first one starts."""


def read(words: Iterable[str]) -> list[str]:
    """The words as Hydra is given them.

    Raises:
        ConfigError: A word can be no option of a run, whatever its value.
    """
    texts, flags = _options_of_type(r"\bstr\b|^Any$") | set(GROUPS), _options_of_type(r"\bbool\b")
    return [_read(word, texts, flags) for word in words]


def _read(word: str, texts: set[str], flags: set[str]) -> str:
    key, equals, value = word.partition("=")
    option = key.lstrip("+").strip()
    if key.startswith("~") and option != "~":
        raise ConfigError(f"{word}: nothing can be left out of a run; {option.lstrip('~')}=... sets it")
    if not equals or not option.lstrip("~"):
        choices = [f"{group}={word}" for group, known in GROUPS.items() if word in known]
        shown = word if word.strip() else repr(word)
        raise ConfigError(f"{shown}: is no option=value; write {choices[0] if choices else 'norm=rmsnorm, for one'}")
    if option in _NO_FOLDER:
        raise ConfigError(f"{word}: has no effect, Hydra writes nothing; set results_dir={value} to keep runs there")
    if option.startswith("hydra"):
        return word
    if "@" in option:
        raise ConfigError(f"{word}: a choice has one place; write {option.partition('@')[0]}={value}")
    group, _, label = option.partition(".")
    if group in GROUPS and label in ("name", "preset") and option != "data.name":  # which data=hub asks for
        raise ConfigError(f"{word}: {option} is not to be set; {group}=... chooses another")
    if value.strip() == "???":
        raise ConfigError(f"{word}: ??? is no value; give one, or leave the word out")
    if option in flags and re.fullmatch(r"['\"]?[+-]?[\d_.]+['\"]?", value) and value not in ("0", "1"):
        raise ConfigError(f"{word}: is no switch; give true or false")  # OmegaConf takes any number for true
    if option in GROUPS and len(value) > _LONGEST_NAME:
        raise ConfigError(f"{word}: nothing has so long a name; normlab train --help lists what there is")
    if option in GROUPS and value.startswith(("[", "{")):
        return f"{key}={quoted(value)}"
    return f"{key}={_readable(value, option in texts, option in GROUPS)}"


def _readable(value: str, is_text: bool, is_group: bool) -> str:
    """A value, or each of several, quoted where Hydra could not read it or would make a number of a text."""
    parsed = parse([f"x={value}"])
    is_sweep = bool(parsed) and parsed[0].is_sweep_override()
    if is_sweep and not parsed[0].is_choice_sweep():
        return value
    is_list = value.startswith("[") and value.endswith("]")
    if is_list or is_sweep or not parsed:
        elements = re.findall(r'(?:"[^"]*"|\'[^\']*\'|\\.|[^,])+', value[1:-1] if is_list else value)
        if is_list or len(elements) > 1:
            if parsed and not is_text:
                return value
            joined = ",".join(_readable(element.strip(), is_text, is_group) for element in elements)
            return f"[{joined}]" if is_list else joined
    if parsed and not value.endswith("\\"):  # which would escape what follows it in a list
        seen = parsed[0].value()
        if not is_text or isinstance(seen, str | QuotedString | list | dict) or (seen is None and not is_group):
            return value
    return quoted(value)


def quoted(text: str) -> str:
    """A text in quotes, as Hydra reads it back."""
    return QuotedString(text, Quote.single).with_quotes()


def parse(words: Sequence[str]) -> list[Override]:
    """The words by Hydra's grammar; none where it cannot read one of them."""
    try:
        return OverridesParser.create().parse_overrides(list(words))
    except (HydraException, ValueError):  # the second is Python's, for a number of thousands of digits
        return []


def refuse_too_many(overrides: Iterable[Override]) -> None:
    """Refuse a sweep over more runs than can be looked at.

    Raises:
        ConfigError: They are more than `MOST_JOBS`.
    """
    count = 1
    for override in overrides:
        if override.is_range_sweep():
            span: Any = override.value()
            count *= max(1, int((span.stop - span.start) / span.step)) if span.step else 1
        elif override.is_sweep_override():
            count *= sum(1 for _ in override.sweep_iterator())
        if count > MOST_JOBS:
            raise ConfigError(
                f"{override.input_line}: these are {count} runs, and --multirun takes at most {MOST_JOBS}; "
                "sweep over fewer values"
            )


def _options_of_type(pattern: str) -> set[str]:
    """The options of a run, whatever it chooses, whose type's source matches."""
    found: set[str] = set()

    def look(kind: Any, prefix: str) -> None:
        for field in dataclasses.fields(kind):
            # From the source, since a plugin's annotations need not be importable from here.
            text = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
            if re.search(pattern, text):
                found.add(prefix + field.name)

    look(RunConfig, "")
    for name, kind in _parts():
        look(kind, f"{name}.")
    return found


def all_options() -> set[str]:
    """Return the name of every option that some run or sweep has, of every group, and `+experiment`."""
    sections = {name for name, _ in _parts()} - GROUPS.keys()
    labels = {f"{group}.{label}" for group in GROUPS for label in ("name", "preset")}
    return _options_of_type("") - sections - labels | {"+experiment"}


def _parts() -> Iterable[tuple[str, Any]]:
    """Every dataclass that can stand in a run's config, by where; and how a sweep is run."""
    yield "sweep", SweepOptions
    yield "sweep.slurm", SlurmOptions
    for field in dataclasses.fields(RunConfig):
        if dataclasses.is_dataclass(field.default_factory):
            yield field.name, field.default_factory
        for kind in GROUPS.get(field.name, {}).values():
            yield field.name, kind


# Hydra's and OmegaConf's errors, in one line that names the word, the choices and the nearest.


def explain(error: Exception, words: Sequence[str]) -> ConfigError:
    """Return one line about an error in the user's overrides, which are `words`, for what Hydra or OmegaConf raised."""
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return ConfigError(f"{group}={name}: " + unknown(group.split("/")[-1] or "config", name, error.options))
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    text = str(cause or error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    if match := re.match(r"In '(.*)': \w+ raised while composing config", first):
        reason = text[1].strip().rstrip(".:") if len(text) > 1 else "it is no config of a run"
        return ConfigError(f"{match[1]}.yaml: {reason}; mend that file, normlab train --cfg job shows a sound one")
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _explain_value(cause, first, words)
    if isinstance(error, OverrideParseException):
        reason = text[1].strip() if len(text) > 1 else "it is no word=value"
        hint = "quote what is special, as in 'data.path=\"a, b.txt\"'"
        return ConfigError(f"{error.override}: cannot be read ({reason}); {hint}")
    if match := re.search(r"Ambiguous value for argument '(.*)'$", first):
        word = _word_of(match[1].partition("=")[0].lstrip("+"), words)
        key, _, value = word.partition("=")
        return ConfigError(
            f"{word}: is more than one value; --multirun trains each of them, quotes make them one: {key}='\"{value}\"'"
        )
    if match := re.search(r"^(\S+) appears more than once in the final defaults list", first):
        return ConfigError(f"{_word_of(match[1], words)}: {match[1]} is chosen already; write {match[1]}=... once")
    if match := re.search(r"^In '(.*)': Could not load '(\w+)/(.*)'", first):
        presets = (path.stem for path in (config_dir() / match[2]).glob("*.yaml"))
        return ConfigError(f"{match[1]}.yaml: " + unknown(match[2], match[3], {*GROUPS.get(match[2], ()), *presets}))
    if match := re.search(r"^Cannot find primary config '(.*?)'", first):
        return ConfigError(f"--config-name={match[1]}: there is no such config; put {match[1]}.yaml into --config-dir")
    if match := re.search(r"Could not override '?([^'\s=]+)", first):
        word = _word_of(match[1], words)
        if "To append to your default list" in str(error):
            return ConfigError(f"{word}: the config chooses no {match[1]} yet; write +{word} to add one")
        return no_such_option(word, match[1])
    return ConfigError(f"{first.rstrip('.:')}; normlab train --cfg job lists what can be set")


def no_such_option(word: str, key: str, options: Sequence[str] = ()) -> ConfigError:
    """Return the error for an option that does not exist.

    Args:
        word: The user's override.
        key: The option's dotted name.
        options: Those that its section has.
    """
    section, _, last = key.rpartition(".")
    if not section:
        return ConfigError(f"{word}: no such option{hint(key, all_options())}; normlab train --cfg job lists them")
    others = {option for option in all_options() if not option.startswith(f"{section}.")}
    known = others | {f"{section}.{option}" for option in options}
    close = hint(key, known) if meanings(key, known) else did_you_mean(last, options)
    choices = f"choose one of {', '.join(options)}" if options else "it has none"
    return ConfigError(f"{word}: {section} has no option {last!r}: {choices}{close}")


def _explain_value(cause: OmegaConfBaseException, first: str, words: Sequence[str]) -> ConfigError:
    key = str(cause.full_key)
    word = _word_of(key, words)
    if cause.object_type is not None and "not in" in first:
        return no_such_option(word, key, _fields(cause.object_type))
    if "missing mandatory value: name" in first:
        group = key.rpartition(".")[0]
        return ConfigError(f"{_word_of(group, words)}: names no {group}; let its defaults list begin with one")
    remedy = next((text for name, text in _REMEDIES.items() if name in first), "give another value, or leave it out")
    value = word.partition("=")[2]
    return ConfigError(f"{word}: {first.rstrip('.')}; " + remedy.format(key=key, value=value or "..."))


_REMEDIES = {
    "converted to Integer": "give a whole number",
    "converted to Float": "give a number",
    "not a valid bool": "give true or false",
    "is not a ListConfig": "give a list: {key}=[{value}]",
    "is not a subclass of": "set its options one by one: {key}.word=value",
    "missing mandatory value": "choose one: {key}=...",
    "not found": "name an option that there is, or leave the word out",
    "Recursive interpolation": "give a value",
    "is not Optional": "give a value, or leave the word out",
}
"""What to do about what OmegaConf says."""


def _word_of(key: str, words: Sequence[str]) -> str:
    """The word that set an option, the last one where there are several; else the option itself."""
    return next((word for word in reversed(words) if f"{word.lstrip('+~').split('=')[0]}.".startswith(f"{key}.")), key)


def _fields(kind: Any) -> list[str]:
    if not dataclasses.is_dataclass(kind):
        return []
    fixed = ("preset",) if kind in (HubData, RunOptions, SweepOptions) else ("name", "preset")
    return sorted(field.name for field in dataclasses.fields(kind) if field.name not in fixed)
