"""The errors of overrides, one line each: what was typed, what is wrong, the nearest option, and what to do."""

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.types import Override, Quote, QuotedString

from normlab.base.errors import ConfigError, shorten, unknown
from normlab.base.options import option_fields, override_text
from normlab.base.paths import config_dir
from normlab.base.plugins import hint_of_empty_plugins
from normlab.catalogue import entries as catalogue
from normlab.catalogue.corpora import DATA, HubData, corpus_hint
from normlab.catalogue.other_names import OTHER_NAMES
from normlab.catalogue.sites import SITES, split_key
from normlab.config.config_folders import ConfigFolders
from normlab.config.known_options import (
    GROUPS,
    OF_SITES,
    all_options,
    choices_with,
    is_in,
    option_types,
    requirement,
)
from normlab.config.option_names import (
    NOTHING,
    did_you_mean_one_of,
    empty_list_hint,
    hint,
    meanings,
    nearest_options,
)
from normlab.config.schema import RunConfig

_OPTION = re.compile(r"[~+]*[A-Za-z_][\w-]*([./][A-Za-z_][\w-]*)*(@[\w.]*)?")
"""The part of an override before its `=`."""
_AT_SITE = re.compile(r"norm\.at\.(\w+)\.(\w+)=")
"""The start of a message about an option of the norm at a site: `norm.at.output_mlp.eps=-1: ...`."""
_SLICE = re.compile(r"-?\d+:-?\d+(:-?\d+)?")
"""A range of whole numbers as Python's indices have it: `0:3`."""
_BRACKETS = ("[]", "{}", "()")


@contextlib.contextmanager
def naming_run(varied: Sequence[str]) -> Iterator[None]:
    """Add the varied overrides of a grid's run to an error about it."""
    try:
        yield
    except ConfigError as error:
        if not varied:
            raise
        raise ConfigError(f"{error} (of the run {' '.join(varied)})") from error


@contextlib.contextmanager
def naming_recipe(job: Sequence[Override], folders: ConfigFolders) -> Iterator[None]:
    """Add the recipe of a job to an error about an option that the recipe sets and no other override sets."""
    try:
        yield
    except ConfigError as error:
        recipe = next((override for override in job if override.key_or_group == "recipe"), None)
        if recipe is None:
            raise
        of_recipe = set(_options_in(folders.content("recipe", str(recipe.value()))))
        name = _option_of_recipe(str(error), of_recipe, job)
        if name is None:
            raise
        raise ConfigError(f"{error} ({recipe.input_line} sets {name}{_remedy(name)})") from error


def _option_of_recipe(message: str, of_recipe: Collection[str], job: Sequence[Override]) -> str | None:
    """Return the option of a recipe, set by no override of the job, that a message is about; None if there is none."""
    for name in _options_of_error(message):
        # What the command sets for a site wins over what the recipe sets for a wider one.
        if any(_sets(override, name) for override in job):
            break
        if name in of_recipe:
            return name
    # The message may begin with an option of the command that does not fit one of the recipe.
    for name in re.findall(r"(\w+\.[\w.]+)=", message):
        if name in of_recipe and not any(_sets(override, name) for override in job):
            return name
    return None


def _remedy(option: str) -> str:
    """Return how the command takes back an option of a recipe, after a semicolon; nothing if the default is unknown."""
    if is_in(option, OF_SITES):
        site, _ = split_key(option.removeprefix(f"{OF_SITES}."))
        return f"; {OF_SITES}.{site}=null takes back what it sets there"
    for name, field in option_fields(RunConfig):
        if name == option and field.default is not dataclasses.MISSING:
            return f"; the default is {name}={override_text(field.default)}"
    return ""


def _options_of_error(message: str) -> list[str]:
    """Return the option with which a message of `RunConfig` begins; at a site also those that give it its value."""
    at_site = _AT_SITE.match(message)
    if at_site is not None:
        site, option = at_site.groups()
        sites = [name for name in (site, SITES[site].within) if name]
        return [*(f"{OF_SITES}.{name}.{option}" for name in sites), f"norm.{option}"]
    begin = re.match(r"[\w.]+", message)
    return [] if begin is None else [begin[0]]


def _options_in(content: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield the names of the options that a config file sets."""
    for name, value in content.items():
        if isinstance(value, dict):
            yield from _options_in(value, f"{section}{name}.")
        elif name != "defaults":
            yield f"{section}{name}"


def _sets(override: Override, name: str) -> bool:
    """Return whether an override sets an option."""
    key = override.key_or_group
    return key == name or (is_in(name, key) and isinstance(override.value(), dict))


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
    has_open_quote = value.count("'") % 2 or value.count('"') % 2
    if has_open_quote or any(value.count(left) != value.count(right) for left, right in _BRACKETS):
        return ConfigError(f"{typed}: a quote or a bracket is not closed; close it, or quote the text around it")
    if option in GROUPS:
        return no_such_choice(option, value)
    kind = option_types().get(option.lstrip("+"), "str")
    if ("list[" in kind or "Any" in kind) and re.fullmatch(r"\(.*\)", value):
        return ConfigError(f"{typed}: a list has square brackets; write {option}=[{value[1:-1]}]")
    if re.fullmatch(r"(range|choice)\(.*\)", value):
        return ConfigError(f"{typed}: has wrong arguments; write '{option}=range(3)' or '{option}=choice(1,2)'")
    if "str" not in kind and "Any" not in kind:
        return ConfigError(f"{typed}: must be {requirement(kind)}")
    quoted = QuotedString(value, Quote.single).with_quotes()
    return ConfigError(f"{typed}: has special characters; quote the text: {shlex.quote(f'{option}={quoted}')}")


def no_such_choice(group: str, name: str, choices: Collection[str] | None = None) -> ConfigError:
    """Return the error for a name that a config group does not have; `choices` has its names, if they are known."""
    if group == "data":
        action = corpus_hint(name)
        if action:
            return ConfigError(f"data={name}: names no corpus; {action}, or choose one of {', '.join(sorted(DATA))}")
    if group == "recipe" and name in ("null", "none"):
        return ConfigError(
            f"recipe={name}: a run without a recipe leaves it out; beside others it is an arm, as in "
            "'arm=[plain: placement=pre, olmo3: recipe=olmo3]'"
        )
    if choices is None:
        choices = {*GROUPS.get(group, ()), *(path.stem for path in (config_dir() / group).glob("*.yaml"))}
    elsewhere = OTHER_NAMES if group in ("norm", "placement") else None
    of_plugins = hint_of_empty_plugins() if group in ("norm", "placement") else ""
    message = unknown(group, name, set(choices), elsewhere, catalogue.titles(group))
    return ConfigError(f"{group}={name}: {of_plugins}{message}")


def no_such_option(key: str, job: Sequence[Override], section_class: Any = None) -> ConfigError:
    """Return the error for an option, by its dotted name, that the class of the chosen section does not have."""
    typed, known = typed_override(key, job), all_options()
    section, _, name = key.rpartition(".")
    if any(is_in(option, key) for option in known):
        return is_section(typed, key)
    if not section or not dataclasses.is_dataclass(section_class):
        return ConfigError(f"{typed or repr(key)}: no such option{hint(key, known)}; normlab list options prints all")
    fixed = ("name", "preset", "at") if section in GROUPS and section_class is not HubData else ()
    options = sorted(field.name for field in dataclasses.fields(section_class) if field.name not in fixed)
    owners = choices_with(key) if key in known else []
    if owners:
        action = "leave it out"
        if options:
            action = f"choose an option of the chosen {section}: {', '.join(options)}"
        if len(owners) == 1:
            return ConfigError(f"{typed}: belongs to {section}={owners[0]}; set {section}={owners[0]}, or {action}")
        choices = ", ".join(owners)
        return ConfigError(f"{typed}: is an option of {section}={choices}; set one of these, or {action}")
    choices = f"choose one of {', '.join(options)}" if options else "it has no options"
    nearest = hint(key, [f"{section}.{option}" for option in options]) or _hint_outside(key, section, known)
    return ConfigError(f"{typed}: the chosen {section} has no option {name!r}{nearest}: {choices}")


def _hint_outside(key: str, section: str, known: Collection[str]) -> str:
    """Return a hint for an option that the chosen class of a section lacks.

    Options of the section's other choices come first. One of another section must have the same name, because a typing
    error is more likely in the name than in the section.
    """
    for option in nearest_options(key, [option for option in known if is_in(option, section)]):
        owners = choices_with(option)
        if owners:
            return f" (did you mean {option!r} of {section}={shorten(owners)}?)"
    return did_you_mean_one_of(meanings(key, [option for option in known if not is_in(option, section)]))


def wrong_value(option: str, kind: str, job: Sequence[Override]) -> ConfigError:
    """Return the error for a value that an option of a type does not take."""
    typed = typed_override(option, job)
    text = typed.partition("=")[2]
    needed = f"must be {requirement(kind)}"
    # Of a section's dictionary, or of another option's part, the text does not begin with the option.
    if typed != option and not typed.startswith(f"{option}="):
        needed = f"{option} {needed}"
    if text.lower() in NOTHING and "None" in kind:
        return ConfigError(f"{typed} (did you mean 'null'?): {needed}")
    if "list[" in kind:
        nearest = empty_list_hint(text)
        if nearest:
            return ConfigError(f"{typed}{nearest}: {needed}")
        if re.fullmatch(r"[\w.-]+", text):
            return ConfigError(f"{typed}: {needed}; write {option}=[{text}]")
    elif text.startswith("[") and text.endswith("]"):
        return ConfigError(f"{typed}: {needed}; {without_brackets(option, text)}")
    elif _SLICE.fullmatch(text) and not is_in(option, "sweep"):
        swept = shlex.quote(f"{option}=range({text.replace(':', ',')})")
        return ConfigError(f"{typed}: {needed}; write a range for a run of each (normlab sweep): {swept}")
    return ConfigError(f"{typed}: {needed}")


def is_section(typed: str, section: str) -> ConfigError:
    """Return the error for a value of a section of options, `train=3`."""
    options = [option for option in option_types() if is_in(option, section)]
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
    if is_in(option, "sweep"):
        return f"choose one value, as in {option}={inner.partition(',')[0].strip()}"
    return f"write it without brackets for a run of each (normlab sweep): {option}={inner}"


def typed_override(option: str, job: Sequence[Override]) -> str:
    """Return the last override of an option, of its section or of one of its parts, or else the option."""
    for name in (option, option.partition(".")[0]):
        for override in reversed(job):
            if is_in(f"{override.key_or_group}.", name):
                return str(override.input_line)
    return option
