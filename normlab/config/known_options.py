"""The options that overrides and config files can set, and the values that each takes, by the classes of options."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from normlab.base.options import LARGEST_INTEGER, option_fields
from normlab.catalogue.corpora import DATA
from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.optimizers.options import OPTIMIZERS
from normlab.catalogue.placements.base import PLACEMENTS
from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SweepOptions

GROUPS: dict[str, Mapping[str, Any]] = {
    "norm": NORMS, "placement": PLACEMENTS, "model": {}, "data": DATA, "optim": OPTIMIZERS, "stats": {}, "recipe": {},
}  # fmt: skip
"""The classes or instances that are registered in each config group. Presets are files of the group's folder."""

SECTIONS = frozenset(field.name for field in dataclasses.fields(RunConfig))
"""The top-level fields of a run's config. Any other key belongs to Hydra, or to a config group of the user."""

OF_SITES = "norm.at"
"""The section of norms at sites. Its keys are checked with the model, which alone knows its sites (`config.norms`)."""

_REQUIREMENTS = (
    ("list[", "a list of texts"),
    ("Any", "one text, or a list"),
    ("bool", "true or false"),
    ("int", "a whole number"),
    ("float", "a number"),
    ("str", "one text"),
)
"""What an option takes, by a part of its type; the first that is in the type."""
TOO_MANY_DIGITS = f"has a whole number of thousands of digits; choose at most {LARGEST_INTEGER}, the largest int64"
"""What is wrong with a number that Python does not read."""
_BOOLEANS = ("yes", "y", "on", "true", "no", "n", "off", "false")
"""The texts that OmegaConf reads as true or false, beside whole numbers."""


def option_types() -> dict[str, str]:
    """Return the type of each option of a run or a sweep as text, by its dotted name.

    A text, because names in a plugin's annotations may not resolve in this module.
    """
    types = {option: str(field.type) for option, field in option_fields(RunConfig) if option not in GROUPS}
    types |= {option: str(field.type) for option, field in option_fields(SweepOptions, "sweep.")}
    for group, kinds in GROUPS.items():
        for kind in kinds.values():
            types |= {option: str(field.type) for option, field in option_fields(kind, f"{group}.")}
    return types


def text_options() -> set[str]:
    """Return the dotted names of the options that are texts, or lists of texts."""
    return {option for option, kind in option_types().items() if "str" in kind or "Any" in kind}


def list_options() -> set[str]:
    """Return the dotted names of the options that may be a list."""
    return {option for option, kind in option_types().items() if "list[" in kind or "Any" in kind}


def all_options() -> set[str]:
    """Return the names of all config groups, and of all options of runs and sweeps that can be set."""
    options = {option for option in option_types() if not is_fixed(option)}
    return options | {*GROUPS, "+experiment"}


def is_fixed(option: str) -> bool:
    """Return whether the choice of a group fixes an option, its name or its preset."""
    group, _, name = option.partition(".")
    # The class of data=hub has an option data.name, the name of a dataset.
    return group in GROUPS and name in ("name", "preset") and option != "data.name"


def is_in(option: str, section: str) -> bool:
    return option.startswith(f"{section}.")


def choices_with(option: str) -> list[str]:
    """Return the choices of a config group that have an option, by its dotted name, in alphabetical order."""
    group = option.partition(".")[0]
    kinds = GROUPS.get(group, {}).items()
    return sorted(choice for choice, kind in kinds if option in dict(option_fields(kind, f"{group}.")))


def requirement(kind: str) -> str:
    """Return what an option takes, from the text of its type."""
    needed = next((needed for name, needed in _REQUIREMENTS if name in kind), "another value")
    if "None" in kind:
        needed += ", or null"
    return needed


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value as a list of one."""
    if isinstance(value, list):
        return value
    return [value]


def takes(kind: str, value: Any) -> bool:
    """Return whether an option of a type takes a value of an override or a config file, as OmegaConf converts it."""
    if value is None:
        return "None" in kind or "Any" in kind
    if "list[" in kind:
        return isinstance(value, list) and None not in value
    if "Any" in kind:
        return not isinstance(value, dict)
    if "bool" in kind:
        is_word = isinstance(value, str) and (value.lower() in _BOOLEANS or _is_number(int, value))
        return isinstance(value, int) or is_word
    if isinstance(value, list | dict):
        return False
    if "int" in kind:
        return not isinstance(value, bool | float) and _is_number(int, value)
    if "float" in kind:
        return not isinstance(value, bool) and _is_number(float, value)
    return True


def is_too_large(kind: str, value: Any) -> bool:
    """Return whether an option is a float, and a whole number is larger than any."""
    if "float" not in kind or not isinstance(value, int):
        return False
    try:
        float(value)
    except OverflowError:
        return True
    return False


def _is_number(convert: type[int | float], value: Any) -> bool:
    try:
        convert(value)
    except ValueError:
        return False
    except OverflowError:  # it is a number, which `is_too_large` reports
        return True
    return True
