"""The options that overrides can set, and the errors of Hydra as one line: what was typed, and the nearest option."""

import contextlib
import dataclasses
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from decimal import InvalidOperation
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from normlab.config.corpora import DATA, HubData, corpus_overrides
from normlab.config.optim import OPTIMIZERS
from normlab.config.option_names import hint
from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SweepOptions
from normlab.errors import ConfigError, unknown
from normlab.norms.base import NORMS
from normlab.options import option_fields
from normlab.placements.base import OTHER_NAMES, PLACEMENTS

GROUPS: dict[str, Mapping[str, Any]] = {
    "norm": NORMS, "placement": PLACEMENTS, "model": {}, "data": DATA, "optim": OPTIMIZERS, "stats": {}, "recipe": {},
}  # fmt: skip
"""The classes or instances that are registered in each config group. Presets are files that Hydra finds."""

SECTIONS = frozenset(field.name for field in dataclasses.fields(RunConfig))
"""The top-level fields of a run's config. Any other key belongs to Hydra, or to a config group of the user."""

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


def all_options() -> set[str]:
    """Return the names of all config groups, and of all options of runs and sweeps."""
    fixed = {f"{group}.{name}" for group in GROUPS for name in ("name", "preset")} - {"data.name"}  # of data=hub
    return _option_types().keys() - fixed | {*GROUPS, "+experiment"}


@contextlib.contextmanager
def explaining_errors(job: Sequence[Override] = (), typed: str = "") -> Iterator[None]:
    """Convert errors of Hydra, OmegaConf and YAML about a job, or about a text that is not parsed, to a ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="hydra")
            yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, *_OF_MALFORMED_INPUTS) as error:
        typed = typed or " ".join(str(override.input_line) for override in job)
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
    """Convert an error to one line: the override that caused it, the reason, and what to do."""
    if isinstance(error, OverrideParseException):
        return ConfigError(
            f"{error.override}: not option=value in Hydra's grammar; write, for example, norm=rmsnorm, and quote "
            "special characters: 'data.path=\"a, b.txt\"'"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        # The name of a text that is taken for that of a corpus may have slashes.
        if (first := error.missing_cfg_file.partition("/"))[0] in GROUPS:
            group, _, name = first
        if not group:
            return ConfigError(f"--config-name={name}: no such config; put {name}.yaml into --config-dir")
        if group == "data" and (overrides := corpus_overrides(name)):
            return ConfigError(
                f"data={name}: names no corpus; set {overrides}, or choose one of {', '.join(sorted(DATA))}"
            )
        elsewhere = OTHER_NAMES if group in ("norm", "placement") else None
        return ConfigError(
            f"{group}={name}: " + unknown(group, name, error.options or GROUPS.get(group, ()), elsewhere)
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    shown = itertools.takewhile(lambda line: not line.strip().startswith(("full_key", "object_type")), lines)
    reason = " ".join(line.strip() for line in shown).rstrip(".")
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    if isinstance(error, InvalidOperation):  # Hydra reads the numbers of a range as decimals
        reason = "the numbers of a range must be finite"
    if isinstance(error, OverflowError) and (key_line := re.search(r"full_key: (\S+)", str(error))):
        return ConfigError(f"{_typed(key_line[1], job)}: is too large; set another value")
    if cause is not None and cause.full_key and not reason.startswith("In '"):  # not the name of a config file
        key = str(cause.full_key).partition("[")[0]  # without the index of a list
        if isinstance(cause, ConfigKeyError | ConfigAttributeError):
            return no_such_option(key, job, cause.object_type)
        if number := re.fullmatch(r"Value .* could not be converted to (Integer|Float)", reason):
            reason = f"must be {'a whole number' if number[1] == 'Integer' else 'a number'}"
        return ConfigError(f"{_typed(key, job)}: {reason}; set another value")
    if lacking := re.match(r"In '(recipe)/(\w+)': ConfigKeyError .*: Key '(\w+)' not in '(\w+)'", reason):
        group, name, key, kind = lacking.groups()
        of_kind = [
            part for part, kinds in GROUPS.items() if kind in {getattr(k, "__name__", "") for k in kinds.values()}
        ]
        chosen = next((o.input_line for o in job if o.key_or_group in of_kind), kind)
        return ConfigError(f"{group}={name}: sets {key!r}, which {chosen} does not have; leave out one of the two")
    for override in job if reason.startswith("Could not override") else ():
        if override.key_or_group.partition(".")[0] not in SECTIONS:
            return no_such_option(override.key_or_group, job)
    return ConfigError(f"{typed}: {reason}; fix the overrides or the config file")


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
    if not section or not dataclasses.is_dataclass(section_type):
        return ConfigError(f"{typed}: no such option{hint(key, known)}; normlab list options prints all")
    fixed = () if section not in GROUPS else ("preset",) if section_type is HubData else ("name", "preset")
    options = sorted(field.name for field in dataclasses.fields(section_type) if field.name not in fixed)
    choices = f"choose one of {', '.join(options)}" if options else "it has no options"
    nearest = "" if key in known else hint(key, known)  # for example norm.eps with norm=dyt
    return ConfigError(f"{typed}: the chosen {section} has no option {name!r}{nearest}: {choices}")
