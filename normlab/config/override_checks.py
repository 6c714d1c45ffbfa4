"""Checks of parsed overrides against the known options, before Hydra or OmegaConf sees them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString, RangeSweep
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationValidationError, OmegaConfBaseException

from normlab.base.errors import ConfigError
from normlab.config.config_folders import ConfigFolders
from normlab.config.known_options import GROUPS, SECTIONS, as_list, is_fixed, is_too_large, takes
from normlab.config.option_names import empty_list_hint
from normlab.config.override_errors import (
    is_section,
    no_such_choice,
    no_such_option,
    typed_override,
    without_brackets,
    wrong_value,
)
from normlab.config.user_files import WRITE_THE_VALUE, EnvironmentRefused


def no_config_of_a_run() -> ConfigError:
    return ConfigError("--config-name: not a config of a run; start its defaults list with train")


def check_override(override: Override) -> None:
    """Check that an override of a run has a meaning here, whatever the chosen classes are.

    Raises:
        ConfigError: It has none, although Hydra's grammar allows it.
    """
    text, key = str(override.input_line), override.key_or_group
    if override.is_delete():
        raise ConfigError(f"{text}: an option cannot be removed; leave {text} out, or set another value")
    if key.startswith("hydra") and key != "hydra.searchpath":
        raise ConfigError(f"{text}: has no effect, since normlab only composes configs with Hydra; leave it out")
    if key.startswith("sweep."):
        raise ConfigError(f"{text}: is an option of normlab sweep only; leave it out, or use normlab sweep")
    if not key:
        raise no_such_option(text, ())
    if key not in GROUPS and key.partition(".")[0] not in (*SECTIONS, "sweep", "hydra"):
        return  # of a config group of the user
    # A package would put the options of a group into another section.
    if override.package is not None:
        raise ConfigError(f"{text}: @{override.package} has no meaning here; leave @{override.package} out")
    _check_sweep(override)
    if key == "hydra.searchpath" and not _are_folders(override.value()):
        raise ConfigError(
            f"{text}{empty_list_hint(str(override.value()))}: not a list of folders; write "
            "hydra.searchpath=[file://FOLDER]"
        )
    if key in GROUPS:
        _check_choices(override)
    if is_fixed(key):
        raise _fixed(text, key)


def _fixed(typed: str, option: str) -> ConfigError:
    group = option.partition(".")[0]
    return ConfigError(f"{typed}: {option} cannot be set; {group}=... chooses another {group}")


def _check_sweep(override: Override) -> None:
    """Check that several values are listed, and that those of a range can be counted."""
    text, value = override.input_line, override.value()
    if override.is_sweep_override() and not isinstance(value, ChoiceSweep | RangeSweep):
        raise ConfigError(f"{text}: names no values; write them with commas, as in norm=rmsnorm,layernorm")
    if not isinstance(value, RangeSweep):
        return
    # Such a range has no end, or Python's decimals compare with no number.
    if value.step == 0:
        raise ConfigError(f"{text}: the step of a range must not be 0; set another step")
    for number in (value.start, value.stop, value.step):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{text}: the numbers of a range must be finite; set other numbers")


def _are_folders(value: Any) -> bool:
    """Return whether a value is a list of folders, each with the prefix file:// or pkg:// or no prefix."""
    if not isinstance(value, list):
        return False
    schemes = {str(folder).rpartition("://")[0] for folder in value}
    return schemes <= {"", "file", "pkg"}


def _check_choices(override: Override) -> None:
    """Check that an override of a config group names presets, as texts, or gives a dictionary of options."""
    text, group, value = str(override.input_line), override.key_or_group, override.value()
    if isinstance(value, RangeSweep):
        raise ConfigError(f"{text}: takes names and no range of numbers; write them as in {group}=a,b")
    names = value.list if isinstance(value, ChoiceSweep) else [value]
    for name in names:
        _check_choice(text, group, name)
    if override.is_add() or override.is_force_add():
        raise ConfigError(f"{text}: {group} is chosen already; leave {text.partition(group)[0]} out")


def _check_choice(text: str, group: str, value: Any) -> None:
    """Reject a value that is neither the name of a preset, nor a dictionary of options of a group that has some."""
    if isinstance(value, list):
        typed = text.partition("=")[2]
        action = f"write names only, as in {group}=a,b"
        if typed.startswith("["):
            action = without_brackets(group, typed)
        raise ConfigError(f"{text}: a run has one {group}; {action}")
    is_name = isinstance(value, str | QuotedString) and str(value) != "???"
    # Hydra looks for a choice before any option has a value.
    if is_name and "${" in str(value):
        raise ConfigError(f"{text}: a preset is not taken from another option; write its name")
    # Of recipes, which set options of several sections, there are only files.
    is_options = isinstance(value, dict) and group in SECTIONS
    if not is_name and not is_options:
        name = str(value)
        # As it was typed: Hydra has read null, true or false.
        if value is None:
            name = "null"
        elif isinstance(value, bool):
            name = name.lower()
        raise no_such_choice(group, name)


def sets_values(override: Override) -> bool:
    """Return whether an override sets options of a run, and does not choose from a config group."""
    key = override.key_or_group
    if key in GROUPS:
        return isinstance(override.value(), dict)
    return key.partition(".")[0] in SECTIONS


def check_length(overrides: Sequence[Override]) -> None:
    """Check that the overrides of a run set its number of steps once.

    Raises:
        ConfigError: They set train.steps and train.tokens_per_parameter, which sets it too.
    """
    typed = {override.key_or_group: override for override in overrides}
    steps, ratio = typed.get("train.steps"), typed.get("train.tokens_per_parameter")
    if steps is not None and ratio is not None and ratio.value() is not None:
        raise ConfigError(f"{steps.input_line}: {ratio.input_line} sets it too; leave one of them out")


def check_config_exists(override: Override, folders: ConfigFolders) -> None:
    """Check that an override that sets no values names a config of a group, of the package or of the user.

    Raises:
        ConfigError: There is no such group, or no such config in it.
    """
    text, key, value = str(override.input_line), override.key_or_group, override.value()
    if key.startswith("hydra") or not folders.are_listable:
        return
    choices = folders.choices(key)
    for name in as_list(value):
        if name is None or folders.has(key, str(name)):
            continue
        if key in GROUPS or choices:
            raise no_such_choice(key, str(name), choices)
        if key == "experiment" and text.startswith("+"):
            file = text.replace("+", "").replace("=", "/")
            raise ConfigError(f"{text}: no such config; put {file}.yaml into --config-dir")
        # A group without files is no group, so its key is a misspelt option.
        raise no_such_option(key, (override,))


def check_recipe(job: Sequence[Override], folders: ConfigFolders) -> None:
    """Check that the chosen recipe sets no option that a choice of the same command lacks."""
    chosen = {override.key_or_group: override for override in job if not sets_values(override)}
    if "recipe" not in chosen:
        return
    recipe = chosen["recipe"]
    # A choice of the command replaces that of the recipe, whose options may then belong to another class.
    for group, options in folders.content("recipe", str(recipe.value())).items():
        if group not in chosen or not isinstance(options, dict):
            continue
        kind = folders.class_of(group, str(chosen[group].value()))
        for name in options:
            if kind is not None and name not in _field_types(kind):
                raise ConfigError(
                    f"{recipe.input_line}: sets {name!r}, which {chosen[group].input_line} does not have; leave out one"
                )


def check_values(config: DictConfig, override: Override, job: Sequence[Override]) -> None:
    """Check that the chosen classes have the options that an override sets, and that these take its values."""
    _check_value(config, override.key_or_group, override.value(), job)


def _check_value(config: DictConfig, option: str, value: Any, job: Sequence[Override]) -> None:
    part, path = config, ""
    *sections, last = option.split(".")
    for name in sections:
        path = f"{path}.{name}".lstrip(".")
        part_class = _class_of_part(part, path, job)
        if not dataclasses.is_dataclass(part_class):  # a part of an option, such as norm.eps.x
            raise wrong_value(path, _field_types(OmegaConf.get_type(part))[name], job)
        part = part[name]
    part_class = _class_of_part(part, option, job)
    if is_fixed(option):
        raise _fixed(typed_override(option, job), option)
    if not dataclasses.is_dataclass(part_class):
        check_type(option, _field_types(OmegaConf.get_type(part))[last], value, job)
        return
    if not isinstance(value, dict):
        raise is_section(typed_override(option, job), option)
    for key, inner in value.items():
        _check_value(config, f"{option}.{key}", inner, job)


def _class_of_part(section: DictConfig, option: str, job: Sequence[Override]) -> Any:
    """Return the class of an option or a section, by its dotted name, within the section that may have it."""
    name = option.rpartition(".")[2]
    section_class = OmegaConf.get_type(section)
    if name not in (_field_types(section_class) or section):
        raise no_such_option(option, job, section_class)
    return OmegaConf.get_type(section, name)


def check_type(option: str, kind: str, value: Any, job: Sequence[Override]) -> None:
    """Check that an option of a type takes a value; a reference has one only after all options are set."""
    texts = as_list(value)
    # `check_references` checks these, when the options that they name are set.
    if any(isinstance(text, str) and "${" in text for text in texts):
        return
    if "???" in texts or not takes(kind, value):
        raise wrong_value(option, kind, job)
    if is_too_large(kind, value):
        raise ConfigError(f"{typed_override(option, job)}: is too large; set another value")


def _field_types(kind: Any) -> dict[str, str]:
    """Return the type of each field of a class of options, as text; {} for another class."""
    if not dataclasses.is_dataclass(kind):
        return {}
    return {field.name: str(field.type) for field in dataclasses.fields(kind)}


def check_references(config: DictConfig, job: Sequence[Override], section: str = "") -> None:
    """Check that each option has a value, and that its reference `${...}` gives one that it takes.

    Raises:
        ConfigError: One lacks a value, reads the environment, or refers to nothing or to a value of another type.
    """
    types = _field_types(OmegaConf.get_type(config))
    # Without a schema the config is one of a sweep, `{"sweep": ...}`, or of a user.
    for name in types or config:
        option = f"{section}{name}"
        if OmegaConf.is_missing(config, name):
            raise _missing(option, types.get(str(name), ""), job)
        try:
            value = config[name]
            # Reading a list resolves none of its elements.
            if OmegaConf.is_list(value):
                list(value)
        except InterpolationValidationError as error:
            raise wrong_value(option, types.get(str(name), ""), job) from error
        except OmegaConfBaseException as error:
            raise _unresolved(typed_override(option, job), error) from error
        if isinstance(value, DictConfig):
            check_references(value, job, f"{option}.")


def _missing(option: str, kind: str, job: Sequence[Override]) -> ConfigError:
    group, _, name = option.rpartition(".")
    if option in GROUPS:
        return no_config_of_a_run()
    if group in GROUPS and name == "name":
        return ConfigError(
            f"{typed_override(option, job)}: names no {group}; begin the config file with a list such as "
            "defaults: [rmsnorm]"
        )
    return wrong_value(option, kind, job)


def _unresolved(typed: str, error: BaseException) -> ConfigError:
    """Return the error for a reference without a value: one to the environment, or to no option."""
    # OmegaConf wraps the error of a resolver, once for each nested reference.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, EnvironmentRefused):
            return ConfigError(f"{typed}: reads the environment; {WRITE_THE_VALUE}")
        cause = cause.__cause__ or cause.__context__
    return ConfigError(
        f"{typed}: this reference cannot be resolved; write ${{model.width}} for an option, or the value itself"
    )
