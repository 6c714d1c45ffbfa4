"""From words to a RunConfig, by Hydra. The only module that knows it.

Every word is composed and validated before anything starts, so that a mistake leaves nothing behind; then
Hydra runs the job as it would any other application's, and all of its flags work.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import hydra
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from normlab.config import DATA, OPTIMIZERS, HubData, RunConfig
from normlab.errors import ConfigError, nearest, unknown
from normlab.norms.base import load_all as load_norms
from normlab.options import leaves
from normlab.paths import config_dir
from normlab.placements.base import load_all as load_placements
from normlab.source import load_plugins


def register(plugins: Sequence[str] = ()) -> None:
    """Tell Hydra's config store of every norm, placement, corpus and optimiser, the plugins' included."""
    norms, placements = load_norms(), load_placements()
    load_plugins(plugins)
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    for group, nodes in (("norm", norms), ("placement", placements), ("data", DATA), ("optim", OPTIMIZERS)):
        for name, node in nodes.items():
            store.store(group=group, name=name, node=node)


def to_config(cfg: DictConfig) -> RunConfig:
    """The typed, validated config of a composed one.

    Raises:
        ConfigError: Naming the word, what was seen, and what to do.
    """
    _refuse_additions(cfg)
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise explain(error, ()) from error
    assert isinstance(config, RunConfig)
    config.validate()
    return config


def _refuse_additions(node: DictConfig, prefix: str = "") -> None:
    """`+word=value` can put anything anywhere; only what a config knows may be there."""
    kind = OmegaConf.get_type(node)
    for key in node:
        word = f"{prefix}{key}"
        if dataclasses.is_dataclass(kind) and key not in (known := {field.name for field in dataclasses.fields(kind)}):
            raise ConfigError(
                f"{word}: no such option; choose one of {', '.join(sorted(known))}{nearest(str(key), known)}"
            )
        if not OmegaConf.is_missing(node, key) and isinstance(child := node[key], DictConfig):
            _refuse_additions(child, f"{word}.")


def compose_run(words: Sequence[str], config_folder: str | None = None) -> RunConfig:
    """The validated config that words on the command line would make.

    Raises:
        ConfigError: Naming the word, what was seen, and what to do.
    """
    overrides = list(words)
    register(_plugins_in(overrides))
    if config_folder is not None:
        overrides.append(f"hydra.searchpath=[file://{os.path.abspath(config_folder)}]")
    try:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            return to_config(compose("train", overrides=overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, words) from error


def main(words: Sequence[str], job: Callable[[RunConfig], Any]) -> None:
    """Run `job` on the config (with --multirun: the configs) of a command line, Hydra's flags and all.

    Raises:
        ConfigError: A word is wrong; nothing was written. What `job` raises is raised too.
    """
    parser = get_args_parser()
    parser.error = _refuse_flag
    args = parser.parse_intermixed_args(list(words))
    if args.config_dir is not None and not os.path.isdir(args.config_dir):
        raise ConfigError(f"--config-dir={args.config_dir}: there is no such folder")
    register(_plugins_in(args.overrides))
    shows_only = args.help or args.hydra_help or args.cfg or args.info or args.shell_completion
    if not shows_only:
        _check_all(args)
    failures: list[BaseException] = []

    def task(cfg: DictConfig) -> Any:
        try:
            register(list(cfg.plugins))  # a launcher may have brought the job to a process that knows none yet
            return job(to_config(cfg))
        except Exception as error:
            # Hydra would print a line of its own around it.
            if args.multirun:
                raise
            failures.append(error)
            return None

    flags = [word for word in words if word not in args.overrides]
    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["normlab train", *flags, *args.overrides], "1"
    try:
        hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(task)()
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, args.overrides) from error
    finally:
        sys.argv = arguments
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    if failures:
        raise failures[0]


def _refuse_flag(message: str) -> NoReturn:
    """What Hydra's parser of flags says, in one line."""
    raise ConfigError(f"{message}; normlab train --hydra-help lists Hydra's flags")


def _check_all(args: Any) -> None:
    """Compose and validate every job of a command line, before the first one starts."""
    jobs = [list(args.overrides)]
    try:
        if args.multirun:
            parsed = OverridesParser.create().parse_overrides(args.overrides)
            jobs = [list(job) for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            extra = [] if args.config_dir is None else [f"hydra.searchpath=[file://{os.path.abspath(args.config_dir)}]"]
            for words in jobs:
                to_config(compose(args.config_name or "train", overrides=[*words, *extra]))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, args.overrides) from error
    except (ValueError, TypeError) as error:  # Hydra's own, for a sweep that makes no sense
        raise ConfigError(f"{' '.join(args.overrides)}: {error}; mend the words") from error


def _plugins_in(words: Sequence[str]) -> list[str]:
    """The files that `plugins=[...]` names: they must be known before anything can be composed."""
    named = [word for word in words if re.match(r"\+{0,2}plugins=", word)]
    try:
        values = [override.value() for override in OverridesParser.create().parse_overrides(named)]
    except HydraException as error:
        raise explain(error, words) from error
    paths: list[str] = []
    for value in values:
        if not isinstance(value, list):
            raise ConfigError(f"plugins={value}: give a list of files: plugins=[{value}]")
        paths = [str(path) for path in value]
    return paths


# Hydra's and OmegaConf's errors, in one line that names the word, the choices and the nearest.


def explain(error: Exception, words: Sequence[str]) -> ConfigError:
    """What a user is told of an error in their words."""
    if isinstance(error, MissingConfigException) and error.options is not None and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        return ConfigError(f"{group}={name}: " + unknown(group.split("/")[-1] or "config", name, error.options))
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    text = str(cause or error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        word = _word_of(cause.full_key, words)
        if cause.object_type is not None and "not in" in first:
            options = _fields(cause.object_type)
            owner = f"{cause.full_key.rpartition('.')[0]}" or "the run"
            choices = f"choose one of {', '.join(options)}" if options else "it has none"
            return ConfigError(
                f"{word}: {owner} has no option {cause.key!r}: {choices}{nearest(str(cause.key), options)}"
            )
        kind = next((text for name, text in _KINDS.items() if name in first), "")
        return ConfigError(f"{word}: {first}{kind}")
    if isinstance(error, OverrideParseException):
        reason = text[1].strip() if len(text) > 1 else "it is no word=value"
        hint = "quote what is special, as in 'data.path=\"a, b.txt\"'"
        return ConfigError(f"{error.override}: cannot be read ({reason}); {hint}")
    match = re.search(r"override '?([^'\s=]+)", first)
    if match and "Could not override" in first:
        known = list(leaves_of_default())
        return ConfigError(f"{match[1]}: no such option{nearest(match[1], known)}; normlab train --cfg job lists them")
    return ConfigError(first)


_KINDS = {
    "converted to Integer": "; give a whole number",
    "converted to Float": "; give a number",
    "not a valid bool": "; give true or false",
}


def _word_of(key: str, words: Sequence[str]) -> str:
    """The word that set an option, the last one where there are several; else the option itself."""
    return next((word for word in reversed(words) if word.lstrip("+~").split("=")[0] == key), key)


def _fields(kind: Any) -> list[str]:
    if not dataclasses.is_dataclass(kind):
        return []
    fixed = ("preset",) if kind is HubData else ("name", "preset")
    return sorted(field.name for field in dataclasses.fields(kind) if field.name not in fixed)


def leaves_of_default() -> dict[str, Any]:
    """Every option word of the default run, with its value."""
    return leaves(compose_run([]))
