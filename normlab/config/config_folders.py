"""The folders in which Hydra finds configs, and what they have, so that choices are checked before Hydra composes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from normlab.base.errors import ConfigError
from normlab.base.parsing import LARGEST_YAML, check_link, read_at_most
from normlab.base.paths import config_dir
from normlab.config.known_options import GROUPS

SCHEMA = "run_schema"
"""The name under which `RunConfig` is registered, with which a primary config begins."""


class ConfigFolders:
    """The folders in which Hydra finds configs: that of the package, and those of the user."""

    def __init__(self, folders: Sequence[str] = ()) -> None:
        """Set the folders of the user, each a path or a URL of file:// or pkg://."""
        self.are_listable = not any(folder.startswith("pkg://") for folder in folders)
        """Whether all are folders of files, and no packages."""
        paths = [Path(folder.removeprefix("file://")) for folder in folders]
        self._paths = [config_dir(), *paths]

    def choices(self, group: str) -> set[str]:
        """Return the names of the configs in a group; in "" those that `--config-name` may have."""
        names = {*GROUPS.get(group, ())}
        for path in self._paths:
            names |= {file.stem for file in (path / group).glob("*.yaml")}
        return names

    def has(self, group: str, name: str) -> bool:
        name = name.removesuffix(".yaml")
        is_registered = name in GROUPS.get(group, ()) or (not group and name == SCHEMA)
        return is_registered or self._file(group, name) is not None

    def content(self, group: str, name: str) -> Mapping[str, Any]:
        """Return what a config file of the group sets; {} if there is none, or if it is no such file."""
        file = self._file(group, name)
        if file is None:
            return {}
        try:
            check_link(file, file.parent)
            content = yaml.load(read_at_most(file, LARGEST_YAML), yaml.BaseLoader)
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return {}  # `UserFiles` names what is wrong
        if not isinstance(content, dict):
            return {}
        return content

    def class_of(self, group: str, name: str) -> Any:
        """Return the class of the options of a choice, or None: that with which the defaults lists of presets begin."""
        visited: set[str] = set()
        # Two presets of a user may name each other in their defaults lists.
        while name not in GROUPS.get(group, ()) and name not in visited:
            visited.add(name)
            defaults = self.content(group, name).get("defaults")
            if not isinstance(defaults, list) or not defaults or not isinstance(defaults[0], str):
                return None
            name = defaults[0]
        choice = GROUPS.get(group, {}).get(name)
        if choice is None or isinstance(choice, type):
            return choice
        return type(choice)  # a placement is registered with its default options

    def _file(self, group: str, name: str) -> Path | None:
        if ".." in Path(name).parts:
            return None
        files = [path / group / f"{name}.yaml" for path in self._paths]
        return next((file for file in files if file.is_file()), None)


def no_such_config(name: str) -> ConfigError:
    return ConfigError(f"--config-name={name}: no such config; put {name}.yaml into --config-dir")
