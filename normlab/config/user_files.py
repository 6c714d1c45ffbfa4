"""Configs of the user, which may be a stranger's: a folder of `--config-dir` or of `hydra.searchpath`.

A config file sets options, and nothing else. It names no other folder, package or file outside of its folder, and it
reads nothing of the machine.
"""

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from normlab.base.errors import ConfigError
from normlab.base.parsing import LARGEST_YAML, check_expanded_size, check_link, leaves, read_at_most

_OF_HYDRA = re.compile(r"(^|[\s/@])hydra($|[/@.:])")
"""A key of a defaults list that chooses a part of Hydra's own config, such as `override /hydra/launcher`."""
WRITE_THE_VALUE = "write the value itself, since records and archives store it"


class _NamedText(io.StringIO):
    """A text with the name of its file, which errors of YAML have."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


class UserFiles(ConfigSource):
    """A folder of configs, of which Hydra sees only files that `load_config` has checked."""

    @staticmethod
    def scheme() -> str:
        return "normlab"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a config file.

        Raises:
            ConfigError: It is outside of the folder, too large, or does more than to set options.
        """
        path = self._path(self._normalize_file_name(config_path))
        try:
            check_link(path, Path(self.path))
            content = read_at_most(path, LARGEST_YAML)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}); choose another config") from error
        text = content.decode()  # its error is explained with the override that names the file
        try:
            check_expanded_size(text)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}; write the values out") from error
        config = OmegaConf.load(_NamedText(text, str(path)))
        header = ConfigSource._get_header_dict(text[:512])
        _check_content(path, OmegaConf.to_container(config, resolve=False), str(header.get("package", "")))
        return ConfigResult(config=config, path=self.full_path(), provider=self.provider, header=header)

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


def _check_content(path: Path, content: Any, package: str) -> None:
    """Check that a config file sets options only.

    Raises:
        ConfigError: It sets options of Hydra, names a file outside of its folder, or reads the environment.
    """
    if not isinstance(content, dict):
        return
    defaults = content.get("defaults")
    keys = [str(key) for key in content]
    for entry in defaults if isinstance(defaults, list) else ():
        pairs = entry.items() if isinstance(entry, dict) else [(entry, "")]
        for key, value in pairs:
            keys.append(str(key))
            if ".." in f"{key} {value}" or "${" in f"{key} {value}":
                name = str(value or key)
                raise ConfigError(
                    f"{path}: its defaults list names {name!r:.80}; name a config by its path in the folder, "
                    "without .. and references"
                )
    if hydra := next((key for key in [*keys, package] if _OF_HYDRA.search(key)), None):
        raise ConfigError(
            f"{path}: sets {hydra!r:.80}, and a config file sets no options of Hydra; leave it out, and give other "
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
    raise ConfigError(f"${{oc.env:{key}}}: reads the environment; {WRITE_THE_VALUE}")
