"""The options that overrides can set, and the errors of Hydra as one line: what was typed, and the nearest option."""

import contextlib
import dataclasses
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from decimal import InvalidOperation
from typing import Any

import yaml
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    InterpolationValidationError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
)

from normlab.base.errors import ConfigError, unknown
from normlab.base.options import LARGEST_INTEGER, option_fields
from normlab.base.paths import config_dir
from normlab.catalogue import entries as catalogue
from normlab.catalogue.corpora import DATA, HubData, corpus_hint
from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.optimizers.options import OPTIMIZERS
from normlab.catalogue.other_names import OTHER_NAMES
from normlab.catalogue.placements.base import PLACEMENTS
from normlab.config.option_names import NOTHING, empty_list_hint, hint
from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SweepOptions
from normlab.config.user_files import WRITE_THE_VALUE

GROUPS: dict[str, Mapping[str, Any]] = {
    "norm": NORMS, "placement": PLACEMENTS, "model": {}, "data": DATA, "optim": OPTIMIZERS, "stats": {}, "recipe": {},
}  # fmt: skip
"""The classes or instances that are registered in each config group. Presets are files that Hydra finds."""

SECTIONS = frozenset(field.name for field in dataclasses.fields(RunConfig))
"""The top-level fields of a run's config. Any other key belongs to Hydra, or to a config group of the user."""

_REQUIREMENTS = (
    ("list[", "a list of texts"),
    ("Any", "one text, or a list"),
    ("bool", "true or false"),
    ("int", "a whole number"),
    ("float", "a number"),
    ("str", "one text"),
)
"""What an option takes, by a part of its type; the first that is in the type."""
_OPTION = re.compile(r"[~+]*[A-Za-z_][\w-]*([./][A-Za-z_][\w-]*)*(@[\w.]*)?")
"""The part of an override before its `=`."""
_BRACKETS = ("[]", "{}", "()")
_DEBUG = "--debug prints the reason"

_OF_MALFORMED_INPUTS = (OSError, ValueError, ArithmeticError, TypeError, AttributeError, AssertionError, RecursionError)
"""Further errors that Hydra raises for malformed sweeps and config files."""


def _option_types() -> dict[str, str]:
    """Return the type of each option of a run or a sweep as text, by its dotted name.

    A text, because names in a plugin's annotations may not resolve in this module.
    """
    kinds = [(f"{group}.", kind) for group, kinds in GROUPS.items() for kind in kinds.values()]
    fields = [pair for prefix, kind in [("", RunConfig), ("sweep.", SweepOptions), *kinds]
              for pair in option_fields(kind, prefix)]  # fmt: skip
    return {option: str(field.type) for option, field in fields}


def text_options() -> set[str]:
    """Return the dotted names of the options that are texts, or lists of texts."""
    return {option for option, kind in _option_types().items() if "str" in kind or "Any" in kind}


def list_options() -> set[str]:
    """Return the dotted names of the options that may be a list."""
    return {option for option, kind in _option_types().items() if "list[" in kind or "Any" in kind}


def all_options() -> set[str]:
    """Return the names of all config groups, and of all options of runs and sweeps."""
    fixed = {f"{group}.{name}" for group in GROUPS for name in ("name", "preset")} - {"data.name"}  # of data=hub
    return _option_types().keys() - fixed | {*GROUPS, "+experiment"}


def check_key(override: Override) -> None:
    """Reject overrides that Hydra's grammar allows but that have no meaning for an option of a run."""
    text, key = override.input_line, override.key_or_group
    if not key:
        raise no_such_option(str(text), ())
    if key not in GROUPS and key.partition(".")[0] not in (*SECTIONS, "sweep", "hydra"):
        return  # of a config group of the user
    if override.package is not None:
        without = str(text).replace(f"@{override.package}", "", 1)
        raise ConfigError(f"{text}: @{override.package} has no meaning here; write {without}")
    value = override.value()
    if override.is_sweep_override() and not isinstance(value, ChoiceSweep | RangeSweep):
        raise ConfigError(f"{text}: names no values; write them with commas, as in norm=rmsnorm,layernorm")
    if isinstance(value, RangeSweep) and value.step == 0:
        raise ConfigError(f"{text}: the step of a range must not be 0; set another step")
    if key == "hydra.searchpath" and not _are_folders(value):
        raise ConfigError(
            f"{text}{empty_list_hint(str(value))}: not a list of folders; write hydra.searchpath=[file://FOLDER]"
        )
    if key in GROUPS:
        if isinstance(value, RangeSweep):
            raise ConfigError(f"{text}: takes names and no range of numbers; write them as in {key}=a,b")
        for each in value.list if isinstance(value, ChoiceSweep) else [value]:
            _check_choice(str(text), key, each)
        if override.is_add() or override.is_force_add():
            raise ConfigError(f"{text}: {key} is chosen already; write {str(text).lstrip('+')}")


def _are_folders(value: Any) -> bool:
    """Return whether a value is a list of folders, each with the prefix file:// or pkg:// or no prefix."""
    schemes = [str(folder).rpartition("://")[0] for folder in value] if isinstance(value, list) else ["no list"]
    return {"", "file", "pkg"}.issuperset(schemes)


def _check_choice(text: str, group: str, value: Any) -> None:
    """Reject a value that is neither the name of a preset, nor a dictionary of options of a group that has some."""
    if isinstance(value, list):
        typed = text.partition("=")[2]
        action = without_brackets(group, typed) if typed.startswith("[") else f"write names only, as in {group}=a,b"
        raise ConfigError(f"{text}: a run has one {group}; {action}")
    is_name = isinstance(value, str | QuotedString) and str(value) != "???"
    is_options = isinstance(value, dict) and group in SECTIONS
    if not is_name and not is_options:
        name = str(value)
        if value is None or isinstance(value, bool):
            name = "null" if value is None else name.lower()
        raise no_such_choice(group, name)


@contextlib.contextmanager
def explaining_errors(job: Sequence[Override] = (), typed: str = "") -> Iterator[None]:
    """Convert errors of Hydra, OmegaConf and YAML about a job, or about a text that is not parsed, to a ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="hydra")
            yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, *_OF_MALFORMED_INPUTS) as error:
        # Without overrides, it is the config file that -cn names.
        typed = typed or " ".join(str(override.input_line) for override in job) or "-cn"
        raise _explain(error, job, typed) from error


@contextlib.contextmanager
def naming_run(varied: Sequence[str]) -> Iterator[None]:
    """Add the varied overrides of a grid's run to an error about it."""
    try:
        yield
    except ConfigError as error:
        if not varied:
            raise
        raise ConfigError(f"{error} (of the run {' '.join(varied)})") from error


def _explain(error: BaseException, job: Sequence[Override], typed: str) -> ConfigError:
    """Convert an error to one line: the override that caused it, the reason, and what to do.

    No word of a message of Hydra or OmegaConf reaches the user: these name their own classes. What the option takes,
    by its type, is the reason.
    """
    if isinstance(error, OverrideParseException):
        return malformed(str(error.override))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_config(error, job)
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return ConfigError(f"{mark.name}, line {mark.line + 1}: is not valid YAML; fix the file ({_DEBUG})")
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if file := re.match(r"In '([\w/.-]+)': ", lines[0]):
        return _wrong_file(file[1], error, job)
    if isinstance(error, InvalidOperation):  # Hydra reads the numbers of a range as decimals
        return ConfigError(f"{typed}: the numbers of a range must be finite; set other numbers")
    if isinstance(error, ValueError) and "integer string conversion" in str(error):  # Python's limit of 4,300 digits
        return ConfigError(
            f"{typed}: has a whole number of thousands of digits; choose at most {LARGEST_INTEGER}, the largest int64"
        )
    if isinstance(error, OverflowError) and (key_line := re.search(r"full_key: (\S+)", str(error))):
        return ConfigError(f"{_typed(key_line[1], job)}: is too large; set another value")
    if isinstance(error, OverflowError):
        return ConfigError(f"{typed}: has a whole number that is too large for a float; set another value")
    cause = _cause(error)
    if cause is not None and cause.full_key:
        key = str(cause.full_key).partition("[")[0]  # without the index of a list
        if isinstance(cause, ConfigKeyError | ConfigAttributeError):
            return no_such_option(key, job, cause.object_type)
        return _wrong_value(key, cause, job)
    if lines[0].startswith("Error resolving interpolation"):
        chosen = next((each.input_line for each in job if "${" in str(each.input_line)), typed)
        return ConfigError(f"{chosen}: a preset is not taken from another option; write its name")
    for override in job if lines[0].startswith("Could not override") else ():
        if override.key_or_group.partition(".")[0] not in SECTIONS:
            return no_such_option(override.key_or_group, job)
    if isinstance(error, yaml.YAMLError | UnicodeDecodeError):
        return ConfigError(f"{typed}: its config file is not valid YAML in UTF-8; fix the file ({_DEBUG})")
    if lines[0].startswith("Invalid loaded object type"):
        return ConfigError(f"{typed}: a config file holds no options; fix the file ({_DEBUG})")
    return ConfigError(
        f"{typed}: no config can be composed from these; fix the overrides or the config file ({_DEBUG})"
    )


def _cause(error: BaseException) -> OmegaConfBaseException | None:
    """Return the error of OmegaConf that an error is, or that caused it; it may name an option."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    return cause


def malformed(typed: str) -> ConfigError:
    """Return the error for an argument that is no override in Hydra's grammar, with one that is, if one is near."""
    option, equals, value = typed.partition("=")
    if not equals:
        return ConfigError(f"{typed}: not option=value; write, for example, norm=rmsnorm")
    if not _OPTION.fullmatch(option.strip()):
        return ConfigError(f"{typed}: no such option{hint(option, all_options())}; normlab list options prints all")
    if (option, value) != (option.strip(), value.strip()):
        return ConfigError(f"{typed}: has spaces around =; write '{option.strip()}={value.strip()}'")
    if value.startswith("="):
        return ConfigError(f"{typed}: has two =; write {option}{value}")
    if re.search(r"^\s*,|,\s*,|,\s*$", value):
        return ConfigError(f"{typed}: has no value beside a comma; leave out the comma")
    if value.count("'") % 2 or value.count('"') % 2 or any(value.count(a) != value.count(b) for a, b in _BRACKETS):
        return ConfigError(f"{typed}: a quote or a bracket is not closed; close it, or quote the text around it")
    if option in GROUPS:
        return no_such_choice(option, value)
    kind = _option_types().get(option.lstrip("+"), "str")
    if ("list[" in kind or "Any" in kind) and re.fullmatch(r"\(.*\)", value):
        return ConfigError(f"{typed}: a list has square brackets; write {option}=[{value[1:-1]}]")
    if re.fullmatch(r"(range|choice)\(.*\)", value):
        return ConfigError(f"{typed}: has wrong arguments; write {option}=range(3) or {option}=choice(1,2)")
    if "str" not in kind and "Any" not in kind:
        return ConfigError(f"{typed}: must be {_requirement(kind)}")
    quoted = QuotedString(value, Quote.single).with_quotes()
    return ConfigError(f"{typed}: has special characters; quote the text: {shlex.quote(f'{option}={quoted}')}")


def _no_such_config(error: MissingConfigException, job: Sequence[Override]) -> ConfigError:
    """Return the error for a preset, or a primary config, that no folder has."""
    file = str(error.missing_cfg_file)
    group, _, name = file.rpartition("/")
    for override in job:
        if file.startswith(f"{override.key_or_group}/"):
            group, name = override.key_or_group, file.removeprefix(f"{override.key_or_group}/")
    if not group:
        return ConfigError(f"--config-name={name}: no such config; put {name}.yaml into --config-dir")
    return no_such_choice(group, name, error.options)


def no_such_choice(group: str, name: str, presets: Sequence[str] | None = None) -> ConfigError:
    """Return the error for a name that a config group does not have; `presets` has its names, if they are known."""
    if group == "data" and (action := corpus_hint(name)):
        return ConfigError(f"data={name}: names no corpus; {action}, or choose one of {', '.join(sorted(DATA))}")
    if presets is None:
        presets = [*GROUPS.get(group, ()), *(path.stem for path in (config_dir() / group).glob("*.yaml"))]
    elsewhere = OTHER_NAMES if group in ("norm", "placement") else None
    return ConfigError(f"{group}={name}: " + unknown(group, name, set(presets), elsewhere, catalogue.titles(group)))


def _wrong_file(file: str, error: BaseException, job: Sequence[Override]) -> ConfigError:
    """Return the error for a config file of the user, `norm/mine`, or for a recipe that a preset contradicts."""
    group, _, name = file.partition("/")
    text = " ".join(str(error).split())
    if lacking := re.search(r"ConfigKeyError .*: Key '(\w+)' not in '(\w+)'", text):
        key, kind = lacking.groups()
        parts = [part for part, kinds in GROUPS.items() if kind in {getattr(k, "__name__", "") for k in kinds.values()}]
        if group == "recipe":
            chosen = next((o.input_line for o in job if o.key_or_group in parts), kind)
            return ConfigError(f"{file.replace('/', '=')}: sets {key!r}, which {chosen} does not have; leave out one")
        nearest = hint(".".join([*parts[:1], key]), all_options())
        return ConfigError(f"{file}.yaml: sets {key!r}, which is no option here{nearest}; set another in the file")
    cause = _cause(error)
    key = "" if cause is None else str(cause.full_key or "").partition("[")[0]
    if key in (types := _option_types()):
        return ConfigError(f"{file}.yaml: {key} must be {_requirement(types[key])}; fix the file")
    return ConfigError(f"{file}.yaml: no {group} can be composed from {name}; fix the file ({_DEBUG})")


def _wrong_value(key: str, cause: OmegaConfBaseException, job: Sequence[Override]) -> ConfigError:
    """Return the error for a value that an option, or a section of options, cannot have."""
    typed, types = _typed(key, job), _option_types()
    text = typed.partition("=")[2]
    if WRITE_THE_VALUE in str(cause):
        return ConfigError(f"{typed}: reads the environment; {WRITE_THE_VALUE}")
    is_resolved = isinstance(cause, InterpolationValidationError)  # to a value of another type
    if isinstance(cause, InterpolationResolutionError | UnsupportedInterpolationType) and not is_resolved:
        return ConfigError(
            f"{typed}: this reference cannot be resolved; write ${{model.width}} for an option, or the value itself"
        )
    section, _, name = key.rpartition(".")
    if section in GROUPS and name == "name":
        return ConfigError(
            f"{typed}: names no {section}; begin the config file with a list such as defaults: [rmsnorm]"
        )
    if key not in types:
        if any(_is_in(option, key) for option in types):
            return _is_section(typed, key)
        return ConfigError(f"{typed}: no config can be composed from these; fix the config file ({_DEBUG})")
    needed = f"must be {_requirement(types[key])}"
    if not typed.startswith(f"{key}="):
        needed = f"{key} {needed}"
    if text.lower() in NOTHING and "None" in types[key]:
        return ConfigError(f"{typed} (did you mean 'null'?): {needed}")
    if "list[" in types[key] and (nearest := empty_list_hint(text)):
        return ConfigError(f"{typed}{nearest}: {needed}")
    if "list[" in types[key] and re.fullmatch(r"[\w.-]+", text):
        return ConfigError(f"{typed}: {needed}; write {key}=[{text}]")
    if text.startswith("[") and text.endswith("]") and "list[" not in types[key]:
        return ConfigError(f"{typed}: {needed}; {without_brackets(key, text)}")
    return ConfigError(f"{typed}: {needed}")


def _is_section(typed: str, section: str) -> ConfigError:
    """Return the error for a value of a section of options, `train=3`."""
    options = [option for option in _option_types() if _is_in(option, section)]
    parts = sorted({option.removeprefix(f"{section}.").partition(".")[0] for option in options})
    texts = ", ".join(f"{section}.{part}" for part in parts)
    return ConfigError(f"{typed}: {section} is a section; set its options one by one: {texts}")


def without_brackets(option: str, value: str) -> str:
    """Return what to do instead of a list `[a,b]`, which is one value, for an option that has no list."""
    inner = value[1:-1].strip()
    if not inner:
        return f"write one value after {option}="
    if "," not in inner:
        return f"write {option}={inner}"
    return f"write it without brackets for a run of each (normlab sweep): {option}={inner}"


def _is_in(option: str, section: str) -> bool:
    return option.startswith(f"{section}.")


def _requirement(kind: str) -> str:
    """Return what an option takes, from the text of its type."""
    nullable = ", or null" if "None" in kind else ""
    for name, needed in _REQUIREMENTS:
        if name in kind:
            return needed + nullable
    return "another value" + nullable


def _typed(key: str, job: Sequence[Override]) -> str:
    """Return the last override of an option, of its section or of one of its parts, or else the option."""
    for other in (key, key.partition(".")[0]):
        for override in reversed(job):
            if f"{override.key_or_group}.".startswith(f"{other}."):
                return str(override.input_line)
    return key


def no_such_option(key: str, job: Sequence[Override], section_type: Any = None) -> ConfigError:
    """Return the error for an option, by its dotted name, that the class of the chosen section does not have."""
    typed, (section, _, name), known = _typed(key, job), key.rpartition("."), all_options()
    if key == "experiment" and typed.startswith("+"):
        file = typed.replace("+", "").replace("=", "/")
        return ConfigError(f"{typed}: no such config; put {file}.yaml into --config-dir")
    if any(_is_in(option, key) for option in known):
        return _is_section(typed, key)
    if not section or not dataclasses.is_dataclass(section_type):
        return ConfigError(f"{typed or repr(key)}: no such option{hint(key, known)}; normlab list options prints all")
    fixed = () if section not in GROUPS else ("preset",) if section_type is HubData else ("name", "preset")
    options = sorted(field.name for field in dataclasses.fields(section_type) if field.name not in fixed)
    if key in known and (owners := _choices_with(key)):
        action = f"choose an option of the chosen {section}: {', '.join(options)}" if options else "leave it out"
        if len(owners) == 1:
            return ConfigError(f"{typed}: belongs to {section}={owners[0]}; set {section}={owners[0]}, or {action}")
        choices = ", ".join(owners)
        return ConfigError(f"{typed}: is an option of {section}={choices}; set one of these, or {action}")
    choices = f"choose one of {', '.join(options)}" if options else "it has no options"
    # The chosen class lacks the section's other options, so they are no hint.
    elsewhere = [option for option in known if not _is_in(option, section)]
    nearest = hint(key, [f"{section}.{option}" for option in options]) or hint(key, elsewhere)
    return ConfigError(f"{typed}: the chosen {section} has no option {name!r}{nearest}: {choices}")


def _choices_with(option: str) -> list[str]:
    """Return the choices of a config group that have an option, by its dotted name, in alphabetical order."""
    group = option.partition(".")[0]
    kinds = GROUPS.get(group, {}).items()
    return sorted(choice for choice, kind in kinds if option in dict(option_fields(kind, f"{group}.")))
