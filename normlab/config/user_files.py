"""Configs of the user, which may be a stranger's: a folder of `--config-dir` or of `hydra.searchpath`.

A config file sets options, and nothing else. It names no other folder, package or file outside of its folder, and it
reads nothing of the machine. Its options and their values are checked here, before Hydra composes.
"""

import dataclasses
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import yaml
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from normlab.base.errors import ConfigError
from normlab.base.parsing import LARGEST_YAML, check_expanded_size, check_link, leaves, read_at_most
from normlab.catalogue.sites import split_key
from normlab.config.config_folders import ConfigFolders
from normlab.config.known_options import (
    OF_SITES,
    SECTIONS,
    TOO_MANY_DIGITS,
    all_options,
    as_list,
    is_in,
    is_too_large,
    option_types,
    requirement,
    takes,
)
from normlab.config.option_names import hint
from normlab.config.override_errors import no_such_choice

_OF_HYDRA = re.compile(r"(^|[\s/@])hydra($|[/@.:])")
"""A key of a defaults list that chooses a part of Hydra's own config, such as `override /hydra/launcher`."""
WRITE_THE_VALUE = "write the value itself, since records and archives store it"
DEBUG = "--debug prints the reason"


class EnvironmentRefused(ConfigError):
    """A reference to a variable of the environment."""


class _NamedText(io.StringIO):
    """A text with the name of its file, which errors of YAML have."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


class UserFiles(ConfigSource):
    """A folder of configs, of which Hydra sees only files that `load_config` has checked."""

    folders: ClassVar[ConfigFolders] = ConfigFolders()
    """All folders of the composition, whose configs a defaults list may name."""

    @staticmethod
    def scheme() -> str:
        return "normlab"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a config file.

        Raises:
            ConfigError: It is outside of the folder, too large, no YAML, or does more than to set options.
        """
        path = self._path(self._normalize_file_name(config_path))
        text = self._read(path)
        config = _load(path, text)
        header = ConfigSource._get_header_dict(text[:512])
        package = str(header.get("package") or "")
        content = OmegaConf.to_container(config, resolve=False)
        assert isinstance(content, dict)
        # What a file may not do at all comes before what it may misspell, so that no error prints a foreign text.
        _check_content(path, content, package)
        group = config_path.rpartition("/")[0]
        self._check_defaults(path, group, content.pop("defaults", []))
        self._check_options(path, group, package, content)
        return ConfigResult(config=config, path=self.full_path(), provider=self.provider, header=header)

    def _read(self, path: Path) -> str:
        try:
            check_link(path, Path(self.path))
            content = read_at_most(path, LARGEST_YAML)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); choose another config") from error
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: is not valid YAML in UTF-8; fix the file ({DEBUG})") from error
        try:
            check_expanded_size(text)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; write the values out") from error
        return text

    def _check_defaults(self, path: Path, group: str, defaults: Any) -> None:
        """Check that the defaults list names configs that exist."""
        if not isinstance(defaults, list):
            raise ConfigError(f"{path}: its defaults are no list; write a list such as defaults: [rmsnorm]")
        for key, value in _entries(defaults):
            for name in as_list(value):
                self._check_entry(path, group, key, str(name))

    def _check_entry(self, path: Path, group: str, key: str, name: str) -> None:
        chosen = _group_of_entry(group, key, name)
        # Hydra would follow the list of the file without an end.
        if chosen == (group, path.stem):
            raise ConfigError(f"{path}: its defaults list names the file itself; leave it out")
        if chosen is None or not self.folders.are_listable or self.folders.has(*chosen):
            return
        choices = self.folders.choices(chosen[0]) if chosen[0] else []
        if choices:
            raise no_such_choice(*chosen, choices)
        config = "/".join(filter(None, chosen))
        raise ConfigError(
            f"{path}: its defaults list names {config}, and there is no such config; that of a run is train"
        )

    def _check_options(self, path: Path, group: str, package: str, content: Mapping[Any, Any]) -> None:
        """Check that a config file sets options that exist, and that these take its values."""
        # Without a header, the options of norm/mine.yaml are those of the section norm.
        section = package or group.replace("/", ".")
        if section == "_global_":
            section = ""
        elif section.startswith("_"):
            return  # a part of the file's own name, which only Hydra knows
        if section and section.partition(".")[0] not in SECTIONS:
            raise ConfigError(
                f"{path}: sets options of {section}, which is no section of a run; begin the file with the line "
                "# @package _global_"
            )
        # A file for all sections may set options of any class: only the composition has the chosen one.
        kind = self.folders.class_of(group, path.stem) if section == group else None
        if kind is not None:
            known = {field.name for field in dataclasses.fields(kind)}
            for name in content:
                if name not in known:
                    raise _no_option(path, section, str(name))
        of_runs = {option: kind for option, kind in option_types().items() if not is_in(option, "sweep")}
        _check_values(path, section, content, of_runs)

    def is_group(self, config_path: str) -> bool:
        return self._path(config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self._path(self._normalize_file_name(config_path)).is_file()

    def available(self) -> bool:
        return self.is_group("")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names: list[str] = []
        for name in os.listdir(self._path(config_path)):
            self._list_add_result(names, os.path.join(config_path, name), name, results_filter)
        return sorted(set(names))

    def _path(self, config_path: str) -> Path:
        return Path(self.path, config_path)


def _load(path: Path, text: str) -> DictConfig:
    """Return the content of a config file, as OmegaConf reads YAML.

    Raises:
        ConfigError: It is not YAML, or no dictionary, or OmegaConf reads no number or reference in it.
    """
    try:
        config = OmegaConf.load(_NamedText(text, str(path)))
    except yaml.MarkedYAMLError as error:
        place = str(path)
        if error.problem_mark is not None:
            place += f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"{place}: is not valid YAML; fix the file ({DEBUG})") from error
    except yaml.YAMLError as error:  # a character that YAML lacks
        raise ConfigError(f"{path}: is not valid YAML in UTF-8; fix the file ({DEBUG})") from error
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{path}: {error.full_key} is no reference; write ${{model.width}} for an option, or the value itself"
        ) from error
    except OSError:
        config = None  # a text or a number
    except ValueError as error:  # Python's int() refuses more than 4,300 digits
        raise ConfigError(f"{path}: {TOO_MANY_DIGITS}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: holds no options; fix the file")
    return config


def _entries(defaults: Any) -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of each entry of a defaults list; a name has no key."""
    if not isinstance(defaults, list):
        return
    for entry in defaults:
        if isinstance(entry, dict):
            yield from ((str(key), value) for key, value in entry.items())
        else:
            yield "", entry


def _group_of_entry(group: str, key: str, name: str) -> tuple[str, str] | None:
    """Return the group and the name of an entry of a defaults list in a group; None if it may be absent.

    `rmsnorm`, `/norm: rmsnorm`, `override /norm: rmsnorm` and `optional norm: mine`.
    """
    *words, chosen = key.split() or [""]
    if name in ("_self_", "None") or "optional" in words or "@" in f"{chosen}{name}" or name.startswith("optional "):
        return None
    if not key and "/" in name:
        chosen, _, name = name.rpartition("/")
    if chosen.startswith("/"):
        return chosen.strip("/"), name
    return "/".join(filter(None, (group, chosen))), name


def _check_values(path: Path, section: str, content: Mapping[Any, Any], types: Mapping[str, str]) -> None:
    for name, value in content.items():
        option = f"{section}.{name}".lstrip(".")
        if option == OF_SITES:
            _check_sites(path, value)
            continue
        is_reference = isinstance(value, str) and ("${" in value or value == "???")
        if option in types:
            if not is_reference and not takes(types[option], value):
                raise ConfigError(f"{path}: {option} must be {requirement(types[option])}; fix the file")
            if is_too_large(types[option], value):
                raise ConfigError(f"{path}: {option} has a whole number that is too large for a float; fix the file")
        elif any(is_in(known, option) for known in types):
            if isinstance(value, dict):
                _check_values(path, option, value, types)
            elif not is_reference:
                raise ConfigError(f"{path}: {option} is a section; set its options one by one")
        else:
            raise _no_option(path, section, str(name))


def _check_sites(path: Path, settings: Any) -> None:
    """Check that a config file sets norms by site with keys such as `final.eps`, of sites that exist.

    The model, which the file need not set, has the sites; `config.norms` checks the settings with it.
    """
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: {OF_SITES} is a section; set its options one by one")
    for key, value in settings.items():
        try:
            split_key(str(key))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        if isinstance(value, dict):
            raise ConfigError(f"{path}: {OF_SITES}.{key} is no section; write one key for each option, as {key}.eps: 1")


def _no_option(path: Path, section: str, name: str) -> ConfigError:
    option = f"{section}.{name}".lstrip(".")
    return ConfigError(
        f"{path}: sets {name!r}, which is no option here{hint(option, all_options())}; set another in the file"
    )


def _check_content(path: Path, content: Mapping[Any, Any], package: str) -> None:
    """Check that a config file sets options only.

    Raises:
        ConfigError: It sets options of Hydra, names a file outside of its folder, or reads the environment.
    """
    keys = [str(key) for key in content]
    for key, value in _entries(content.get("defaults")):
        keys.append(key or str(value))
        entry = f"{key} {value}"
        if ".." in entry or "${" in entry:
            name = str(value or key)
            raise ConfigError(
                f"{path}: its defaults list names {name!r:.80}; name a config by its path in the folder, "
                "without .. and references"
            )
    for key in [*keys, package]:
        if _OF_HYDRA.search(key):
            raise ConfigError(
                f"{path}: sets {key!r:.80}, and a config file sets no options of Hydra; leave it out, and give other "
                "folders of configs in the command: hydra.searchpath=[file://FOLDER]"
            )
    for text in leaves(content):
        if isinstance(text, str) and re.search(r"\$\{\s*oc\.env", text):
            raise ConfigError(f"{path}: reads the environment in {text!r:.80}; {WRITE_THE_VALUE}")


@contextmanager
def without_environment() -> Iterator[None]:
    """Refuse references to variables of the environment, however they are written, during a `with` block."""
    OmegaConf.register_new_resolver("oc.env", _refuse_variable, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)  # of other programs of the process


def _refuse_variable(key: object, default: object = None) -> None:
    raise EnvironmentRefused(f"${{oc.env:{key}}}: reads the environment; {WRITE_THE_VALUE}")
