"""How Hydra finds and reads config files: normlab's own, those of --config-dir and those of hydra.searchpath."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf

from normlab.errors import ConfigError
from normlab.paths import config_dir

SCHEME = "normlab"
"""Scheme of a folder whose files `_ConfigFiles` reads."""


def as_source(path: str) -> str:
    """Return an element of Hydra's search path, with the scheme of `_ConfigFiles` if it is a folder."""
    return path if "://" in path and not path.startswith("file://") else f"{SCHEME}://{path.removeprefix('file://')}"


class _SearchPath(SearchPathPlugin):
    """Appends the folder of --config-dir to the search path, and lets `_ConfigFiles` read all folders."""

    folder: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Change the search path of normlab; another program of the process may have its own."""
        path = search_path.get_path()
        if str(config_dir()) in (element.path for element in path):
            if self.folder is not None:
                search_path.append("command-line", os.path.abspath(self.folder))
            for element in path:
                element.path = as_source(element.path)


class _TextLoader(yaml.SafeLoader):
    """Reads each value as text, except null."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _ConfigFiles(ConfigSource):
    """Reads values as the command line does: as text, which the type of an option converts.

    YAML itself reads `name: 1e3` as 1000.0, `seed: 010` as 8 and `compile: off` as false.
    """

    @staticmethod
    def scheme() -> str:
        """Return the scheme of a folder that this class reads."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a config file; the options of Hydra keep their types, because some have no class."""
        path = self._file(config_path)
        try:
            with path.open(encoding="utf-8-sig") as file:
                config = OmegaConf.load(file)
                file.seek(0)
                text = file.read()
        except UnicodeDecodeError as error:
            reason = f"{error.reason} at byte {error.start}"
            raise ConfigError(f"{path}: is not UTF-8 ({reason}); convert the file to UTF-8") from error
        header = self._get_header_dict(text)
        if isinstance(config, DictConfig) and not (header["package"] or config_path).startswith("hydra"):
            values = _TextLoader(text).get_single_data() or {}
            if "hydra" in values:
                values["hydra"] = OmegaConf.masked_copy(config, "hydra")["hydra"]
            config = OmegaConf.create(values)
            if isinstance(folders := OmegaConf.select(config, "hydra.searchpath"), ListConfig):
                folders[:] = [as_source(path) if isinstance(path, str) else path for path in folders]
        return ConfigResult(self.provider, self.full_path(), config, header)

    def is_group(self, config_path: str) -> bool:
        """Return whether a group is a folder here."""
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Return whether a config is a file here."""
        return self._file(config_path).is_file()

    def available(self) -> bool:
        """Return whether the folder exists."""
        return self.is_group("")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of the groups and configs in a group."""
        names: list[str] = []
        for name in os.listdir(Path(self.path, config_path)):
            self._list_add_result(names, os.path.join(config_path, name), name, results_filter)
        return sorted(set(names))

    def _file(self, config_path: str) -> Path:
        return Path(self.path, self._normalize_file_name(config_path))


@contextlib.contextmanager
def initialized_hydra(folder: str | None) -> Iterator[ConfigLoader]:
    """Initialize Hydra with normlab's configs and `folder` (--config-dir); yield its loader."""
    GlobalHydra.instance().clear()
    Plugins.instance().register(_SearchPath)
    Plugins.instance().register(_ConfigFiles)
    _SearchPath.folder = folder
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()
