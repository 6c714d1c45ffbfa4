"""Prepare overrides (`option=value`) for Hydra's grammar, and convert errors of Hydra to messages of one line.

Plain text needs no quotes: this module quotes `run.name=it's`, `data.path=é.txt` and `run.name=2024_01_05` before Hydra
parses them. Quotes, lists, sweeps and interpolations keep Hydra's meaning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError

from normlab.config.config_files import as_source
from normlab.config.corpora import DATA, HubData
from normlab.config.optim import OPTIMIZERS
from normlab.config.option_names import hint, meanings
from normlab.config.schema import RunConfig, RunOptions
from normlab.config.sweep_options import SweepOptions
from normlab.errors import ConfigError, did_you_mean, unknown
from normlab.norms.base import NORMS
from normlab.options import option_fields
from normlab.paths import WANDB_SWEEPS
from normlab.placements.base import PLACEMENTS

GROUPS: dict[str, Mapping[str, Any]] = {
    "norm": NORMS, "placement": PLACEMENTS, "model": {}, "data": DATA, "optim": OPTIMIZERS,
    "stats": {},
}  # fmt: skip
"""The classes or instances that are registered in each config group. Presets are files that Hydra finds."""

SECTIONS = frozenset(field.name for field in dataclasses.fields(RunConfig))
"""The top-level fields of a run's config. Any other key belongs to Hydra, or to a config group of the user."""

_FOLDERS_OF_HYDRA = ("hydra.run.dir", "hydra.sweep.subdir", "hydra.output_subdir")
_FIX = "fix the overrides or the config file"
MOST_RUNS = 10_000
"""Maximum number of runs in a grid: every run is composed before the first one starts."""


def rewrite_overrides(overrides: Iterable[str]) -> list[str]:
    """Return the overrides in the form that Hydra's grammar reads.

    Raises:
        ConfigError: An override is not of the form option=value, or its option cannot be set.
    """
    texts = {option for option, kind in _option_types() if re.search(r"\bstr\b|^Any$", kind)} | set(GROUPS)
    booleans = boolean_options()
    return [_rewrite(override, texts, booleans) for override in overrides]


def boolean_options() -> set[str]:
    """Return the dotted names of the options that are true or false."""
    return {option for option, kind in _option_types() if re.search(r"\bbool\b", kind)}


def _rewrite(text: str, texts: set[str], booleans: set[str]) -> str:
    key, equals, value = text.partition("=")
    option = key.lstrip("+").strip()
    if not equals or not option or option.startswith("~"):  # no option of a run can be removed
        choices = [f"{group}={text}" for group, names in GROUPS.items() if text in names]
        shown = text if text.strip() else repr(text)
        example = (*choices, "norm=rmsnorm")[0]
        raise ConfigError(f"{shown}: not of the form option=value; write, for example, {example}")
    if option in _FOLDERS_OF_HYDRA:
        raise ConfigError(f"{text}: has no effect, since normlab disables Hydra's output; set results_dir={value}")
    if (
        option == "hydra.searchpath"
        and (parsed := _try_parse([text]))
        and isinstance(folders := parsed[0].value(), list)
    ):
        return f"{key}=[{','.join(quote(as_source(str(path))) for path in folders)}]"
    if option.startswith("hydra"):
        return text
    if "@" in option:
        raise ConfigError(f"{text}: packages (@) are not supported; write {option.partition('@')[0]}={value}")
    group, _, name = option.partition(".")
    if group in GROUPS and name in ("name", "preset") and option != "data.name":  # data=hub has an option data.name
        raise ConfigError(f"{text}: {option} cannot be set; {group}=... chooses another {group}")
    if value.strip() == "???":
        raise ConfigError(f"{text}: ??? is not a value; set a value, or leave out this override")
    if option in booleans and re.fullmatch(r"['\"]?[+-]?[\d_.]+['\"]?", value) and value not in ("0", "1"):
        raise ConfigError(f"{text}: not a boolean; set true or false")  # OmegaConf reads 2 as true
    unquoted = re.sub(r"""\"[^"]*"|'[^']*'|\\.""", "text", value)
    if re.search(r"(^|[\[(,])\s*,|,\s*($|[\])])", unquoted):
        remedy = "remove the comma, or quote a text with commas" if option in texts else "remove the comma"
        raise ConfigError(f"{text}: has an empty value beside a comma; {remedy}")
    if option in GROUPS and value.startswith(("[", "{")):
        return f"{key}={quote(value)}"
    return f"{key}={_quote_where_needed(value, option in texts, option in GROUPS)}"


def _quote_where_needed(value: str, is_text: bool, is_group: bool) -> str:
    """Quote each value or element that Hydra cannot parse or would read as a number."""
    parsed = _try_parse([f"x={value}"])
    is_sweep = bool(parsed) and parsed[0].is_sweep_override()
    if is_sweep and not parsed[0].is_choice_sweep():
        return value
    is_list = value.startswith("[") and value.endswith("]")
    if is_list or is_sweep or not parsed:
        elements = re.findall(r'(?:"[^"]*"|\'[^\']*\'|\\.|[^,])+', value[1:-1] if is_list else value)
        if is_list or len(elements) > 1:
            if parsed and not is_text:
                return value
            joined = ",".join(_quote_where_needed(element.strip(), is_text, is_group) for element in elements)
            return f"[{joined}]" if is_list else joined
    if parsed and not value.endswith("\\"):  # a backslash would escape the character behind it in a list
        content = parsed[0].value()
        if not is_text or isinstance(content, str | QuotedString | list | dict) or (content is None and not is_group):
            return value
    return quote(value)


def quote(text: str) -> str:
    """Return a text in quotes, escaped for Hydra's grammar."""
    return QuotedString(text, Quote.single).with_quotes()


def _try_parse(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar; return an empty list if one is invalid."""
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except (HydraException, ValueError):  # Python raises ValueError for an integer of thousands of digits
        return []


def ways_to_write_one_value(text: str) -> list[str]:
    """Return the remedies for an override with commas that was meant as one value."""
    key, _, value = text.partition("=")
    kind = dict(_option_types()).get(key.lstrip("+"), "")
    if re.search(r"\blist\b", kind):
        return [f"write a list: {key}=[{value}]"]
    if re.search(r"\bstr\b|^Any$", kind):
        return [f"quote a text with commas: {key}='\"{value}\"'"]
    if re.search(r"\bfloat\b", kind) and re.fullmatch(r"[+-]?\d+,\d+", value):
        return [f"write a decimal point: {key}={value.replace(',', '.')}"]
    return []


def check_grid(overrides: Iterable[Override], typed: Sequence[str]) -> None:
    """Raise ConfigError for a grid with an interval, a missing file, or more than `MOST_RUNS` runs."""
    count = 1
    for override in overrides:
        if override.key_or_group == "data.path" and override.is_choice_sweep():
            for path in map(str, override.sweep_iterator()):
                if not path.startswith("[") and not os.path.exists(os.path.expanduser(path)):
                    text = find_override("data.path", typed)
                    (remedy,) = ways_to_write_one_value(text)
                    raise ConfigError(f"{text}: no such file or folder {path!r}; check the path, or {remedy}")
        if override.is_interval_sweep():
            raise ConfigError(f"{override.input_line}: an interval has no list of values; use range(...) or 1,2,3")
        if override.is_range_sweep():
            span: Any = override.value()
            count *= max(1, int((span.stop - span.start) / span.step)) if span.step else 1
        elif override.is_sweep_override():
            count *= sum(1 for _ in override.sweep_iterator())
        if count > MOST_RUNS:
            raise ConfigError(
                f"{override.input_line}: makes a grid of {count} runs (at most {MOST_RUNS}); sweep fewer values"
            )


def _option_types() -> Iterator[tuple[str, str]]:
    """Yield (dotted option, source text of its type) for each option of a run or sweep."""
    kinds = [(group, kind) for group, kinds in GROUPS.items() for kind in kinds.values()]
    for section, kind in [("", RunConfig), ("sweep", SweepOptions), *kinds]:
        for option, field in option_fields(kind, section and f"{section}."):
            # The source text, because names in a plugin's annotations may not resolve in this module.
            yield (
                option,
                field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type)),
            )


def all_options() -> set[str]:
    """Return the names of all config groups, and of all options of runs and sweeps."""
    fixed = {f"{group}.{name}" for group in GROUPS for name in ("name", "preset")}
    return {option for option, _ in _option_types()} - fixed | {*GROUPS, "+experiment"}


def find_override(key: str, overrides: Sequence[str]) -> str:
    """Return the last override that sets an option or a part of it, or else the option."""
    return next(
        (text for text in reversed(overrides) if f"{text.lstrip('+~').split('=')[0]}.".startswith(f"{key}.")), key
    )


@contextlib.contextmanager
def explaining_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Convert errors of Hydra, OmegaConf and YAML to a ConfigError; hide Hydra's warnings."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="hydra")
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise explain_error(error, overrides) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name} line {mark.line + 1}" if mark else "a config file"
        raise ConfigError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or error}); fix it") from error
    except (OSError, ValueError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        # Hydra raises these for some malformed sweeps and config files.
        if isinstance(error, OSError) and error.errno is not None:
            if error.errno in (errno.ENOSPC, errno.EPIPE):  # `cli.main` handles these errors of standard output
                raise
            raise ConfigError(
                f"{error.filename}: {error.strerror}; choose a folder that can be created and read"
            ) from error
        first = (str(error).strip() or "Hydra cannot parse these overrides").splitlines()[0].rstrip(".")
        raise ConfigError(f"{' '.join(overrides)}: {first}; {_FIX}") from error


def explain_error(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """Convert an error of Hydra or OmegaConf to one line with override, choices and remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if not group:
            return ConfigError(f"--config-name={name}: no such config; put {name}.yaml into --config-dir")
        file = re.match(r"In '(.*?)': Could not load", str(error))
        where = f"{file[1]}.yaml" if file else f"{group}={name}"
        kind = {"data": "corpus", "optim": "optimizer"}.get(group, group)
        return ConfigError(f"{where}: " + unknown(kind, name, error.options or GROUPS.get(group, ())))
    if isinstance(error, OverrideParseException):
        return ConfigError(f"{error.override}: not option=value; quote special characters: 'data.path=\"a, b.txt\"'")
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    first, *more = (line.strip().rstrip(".:") for line in str(cause or error).strip().splitlines() or [repr(error)])
    if match := re.match(r"In '(.*)': \w+ raised while composing config", first):
        reason = more[0] if more else "not a config of a run"
        return ConfigError(f"{match[1]}.yaml: {reason}; fix this file (normlab train --cfg job prints a valid config)")
    if cause is not None and cause.full_key:
        return _explain_value_error(cause, first, overrides)
    if match := re.search(r"Could not override '?([^'\s=]+)", first):
        override = find_override(match[1], overrides)
        if "To append to your default list" in str(error) and match[1] != WANDB_SWEEPS:
            return ConfigError(f"{override}: the defaults list has no {match[1]}; write +{override} to add it")
        return no_such_option(override, match[1])
    return ConfigError(f"{' '.join(overrides)}: {first}; {_FIX}")


def no_such_option(override: str, key: str, options: Sequence[str] = ()) -> ConfigError:
    """Return the error for an override whose option does not exist.

    Args:
        override: The override as the user typed it.
        key: The dotted name of the option.
        options: The options of its section.
    """
    section, _, name = key.rpartition(".")
    if not section:
        known = all_options()
        sections = sorted({option.partition(".")[0] for option in known if "." in option} & SECTIONS)
        advice = hint(key, known) or f" (sections with options: {', '.join(sections)})"
        return ConfigError(f"{override}: no such option{advice}; normlab train --cfg job lists all options")
    known = {option for option in all_options() if not option.startswith(f"{section}.")}
    known |= {f"{section}.{option}" for option in options}
    suggestion = hint(key, known) if meanings(key, known) else did_you_mean(name, options)
    choices = f"choose one of {', '.join(options)}" if options else "it has no options"
    if key in all_options():  # for example norm.eps with norm=dyt
        section, suggestion = f"the chosen {section}", did_you_mean(name, options)
    return ConfigError(f"{override}: {section} has no option {name!r}{suggestion}: {choices}")


def _explain_value_error(error: OmegaConfBaseException, message: str, overrides: Sequence[str]) -> ConfigError:
    key = str(error.full_key).partition("[")[0]  # without the index of a list
    override = find_override(key, overrides)
    if error.object_type is not None and "not in" in message:
        return no_such_option(override, key, _options_of(error.object_type))
    if isinstance(error, MissingMandatoryValue):
        group = key.removesuffix(".name")
        override = find_override(group, overrides)
        return ConfigError(f"{override}: the config sets no {group}; add one to its defaults list")
    kind = dict(_option_types()).get(key)
    if kind is None:
        return ConfigError(f"{override}: {message}; set its options one by one: {key}.option=value")
    if kind.startswith("list") and "[" not in override:
        return ConfigError(f"{override}: not a list; set {key}=[{override.partition('=')[2]}]")
    kind = kind.replace(" | ", " or ").replace("None", "null")
    if isinstance(error, ValidationError):
        return ConfigError(f"{override}: must be of type {kind}")
    return ConfigError(f"{override}: {message}; set a value of type {kind}")


def _options_of(kind: Any) -> list[str]:
    if not dataclasses.is_dataclass(kind):
        return []
    fixed = ("preset",) if kind in (HubData, RunOptions, SweepOptions) else ("name", "preset")
    return sorted(field.name for field in dataclasses.fields(kind) if field.name not in fixed)
