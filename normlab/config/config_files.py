"""How Hydra finds and reads config files: normlab's own, those of --config-dir and those of hydra.searchpath."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import yaml
from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from normlab.paths import config_dir


class _ConfigDir(SearchPathPlugin):
    """Appends the folder of --config-dir to the search path, as Hydra's command line does."""

    folder: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder."""
        if self.folder is not None:
            search_path.append("command-line", f"file://{os.path.abspath(self.folder)}")


class _TextLoader(yaml.SafeLoader):
    """Reads each value as text, except null."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _ConfigFiles(FileConfigSource):
    """Reads values as the command line does: as text, which the type of an option converts.

    YAML itself reads `name: 1e3` as 1000.0, `seed: 010` as 8 and `compile: off` as false.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a config file; the options of Hydra keep their types, because some have no class."""
        result = super().load_config(config_path)
        text = Path(self.path, self._normalize_file_name(config_path)).read_text(encoding="utf-8-sig")
        result.header = self._get_header_dict(text)  # behind a byte-order mark, Hydra finds no header
        if isinstance(result.config, DictConfig) and not (result.header["package"] or config_path).startswith("hydra"):
            values = _TextLoader(text).get_single_data() or {}
            if "hydra" in values:
                values["hydra"] = OmegaConf.masked_copy(result.config, "hydra")["hydra"]
            result.config = OmegaConf.create(values)
        return result


@contextlib.contextmanager
def initialized_hydra(folder: str | None) -> Iterator[ConfigLoader]:
    """Initialize Hydra with normlab's configs and `folder` (--config-dir); yield its loader."""
    GlobalHydra.instance().clear()
    Plugins.instance().register(_ConfigDir)
    SourcesRegistry.instance().types["file"] = _ConfigFiles
    _ConfigDir.folder = folder
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()
