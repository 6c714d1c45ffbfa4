"""Compose the validated config of each run of a command, by Hydra's compose API.

Keys, choices and values are checked against the known options (`override_checks.py`, and `user_files.py` for config
files); then Hydra composes, and what it still refuses is printed as it is. Every run is composed and validated before
the first one starts, so that an error leaves no files behind.
"""

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from normlab.base.errors import ConfigError, no_effect
from normlab.base.paths import config_dir
from normlab.base.plugins import load_plugins
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.catalogue.sites import split_key
from normlab.config import arms
from normlab.config.config_folders import SCHEMA, ConfigFolders, no_such_config
from normlab.config.known_options import GROUPS, OF_SITES, SECTIONS, is_in, list_options, option_types, text_options
from normlab.config.option_names import empty_list_hint
from normlab.config.override_checks import (
    check_config_exists,
    check_length,
    check_recipe,
    check_references,
    check_type,
    check_values,
    no_config_of_a_run,
    sets_values,
)
from normlab.config.override_errors import naming_recipe, naming_run, no_such_option
from normlab.config.overrides import RunOverrides, jobs, keep_text, parse, quote, read
from normlab.config.references import register_functions
from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SweepOptions
from normlab.config.user_files import UserFiles, without_environment

_OF_MALFORMED_INPUTS = (OSError, ValueError, ArithmeticError, TypeError, AttributeError, AssertionError, RecursionError)
"""Further errors that Hydra raises for malformed config files."""

_registered: dict[tuple[str | None, str], Any] = {}
"""The nodes of Hydra's config store, by (group, name)."""

More = Callable[[list[str]], Iterable[Sequence[str]]]
"""Returns lists of overrides to add to a run, from its varied ones: a run for each list."""


class UserConfigs(NamedTuple):
    """The configs of the user that a command names: the folder of --config-dir, and --config-name."""

    folder: str | None = None
    name: str = "train"


PACKAGED = UserConfigs()


def register(plugins: Sequence[str] = ()) -> None:
    """Register norms, placements, corpora, optimizers and plugins in Hydra's config store, and its references."""
    register_functions()
    load_norms()
    load_placements()
    load_plugins(plugins)
    nodes: dict[tuple[str | None, str], Any] = {}
    for group, known in GROUPS.items():
        for name, node in known.items():
            nodes[group, name] = node
    nodes[None, SCHEMA] = RunConfig
    for (group, name), node in nodes.items():
        # Storing a node takes time: storing all of them again would take a third of a composition.
        if _registered.get((group, name)) is not node:
            ConfigStore.instance().store(group=group, name=name, node=node)
            _registered[group, name] = node
            _compose_choices.cache_clear()


def register_plugins(overrides: Sequence[str]) -> None:
    """Register the plugins of the last `plugins=[...]`, before Hydra composes."""
    files: list[str] = []
    for text in overrides:
        if text.lstrip("+-").startswith("plugins="):
            value = parse(text).value()
            if not isinstance(value, list):
                nearest = empty_list_hint(text.partition("=")[2])
                raise ConfigError(f"{text}{nearest}: not a list of files; write plugins=[my_norm.py]")
            files = [str(file) for file in value]
    register(files)


def compose_run(overrides: Sequence[str], configs: UserConfigs = PACKAGED) -> RunConfig:
    for text in overrides:
        if text.startswith(arms.PREFIX):
            raise ConfigError(f"{text}: is for normlab sweep only; give the overrides of one arm")
        parsed = parse(text)
        if parsed.is_sweep_override():
            quoted = "quote a text with commas"
            if parsed.key_or_group in list_options():
                quoted = f"write a list: {parsed.key_or_group}=[{parsed.get_value_string()}]"
            raise ConfigError(
                f"{text}: several values for one run; choose one, train each with normlab sweep, or {quoted}"
            )
    (config,) = compose_grid(overrides, configs)
    return config


def compose_grid(overrides: Sequence[str], configs: UserConfigs = PACKAGED) -> list[RunConfig]:
    """Return the config of each run in a grid such as `norm=rmsnorm,dyt model.depth=6,12`."""
    return [to_config(cfg, job, configs) for job, _, cfg in _compose_jobs(overrides, configs)]


def no_more(varied: list[str]) -> list[tuple[()]]:
    return [()]


def compose_sweep(
    overrides: Sequence[str],
    configs: UserConfigs = PACKAGED,
    more: More = no_more,
) -> tuple[SweepOptions, list[tuple[list[str], RunConfig]]]:
    """Return the options of a sweep (`sweep.option=value`); and of each run the varied overrides and the config.

    An arm comes first, as `arm=NAME`.
    """
    grid = _without_sweep(overrides)
    options = _sweep_options([text for text in overrides if text not in grid])
    composed = []
    for job, varied, cfg in _compose_jobs(grid, configs, more):
        with naming_run(varied):
            composed.append((varied, to_config(cfg, job, configs)))
    return options, composed


def config_texts(overrides: Sequence[str], configs: UserConfigs = PACKAGED) -> Iterator[str]:
    """Yield the composed config of each run in a grid as YAML; a comment names its varied overrides."""
    for _, varied, cfg in _compose_jobs(_without_sweep(overrides), configs):
        text = OmegaConf.to_yaml(cfg).rstrip()
        if varied:
            text = f"# {' '.join(varied)}\n{text}"
        yield text


def norm_presets() -> list[NormConfig]:
    """Return the norm presets of conf/norm, and register the catalogue."""
    return [compose_run([f"norm={path.stem}"]).norm for path in sorted((config_dir() / "norm").glob("*.yaml"))]


def to_config(cfg: DictConfig, job: RunOverrides = (), configs: UserConfigs = PACKAGED) -> RunConfig:
    """Convert a composed config to a validated RunConfig; errors quote the overrides of the job."""
    # A key of a user's config file, which Hydra may have added beside the sections.
    for key in cfg:
        if key not in SECTIONS:
            raise no_such_option(str(key), job)
    config = _to_object(cfg, job)
    if not isinstance(config, RunConfig):
        raise no_config_of_a_run()
    with naming_recipe(job, _folders(job, configs)):
        config.validate()
        config.reject_unused_options()
    return config


def _folders(job: Sequence[Override], configs: UserConfigs) -> ConfigFolders:
    """Return the folders of the configs that a job may choose."""
    search_path: list[str] = []
    if configs.folder:
        search_path.append(configs.folder)
    for override in job:
        if _is_search_path(override):
            search_path += _folders_of(override)
    return ConfigFolders(search_path)


def _to_object(config: DictConfig, job: Sequence[Override]) -> Any:
    """Convert a config to an object of its class, with the values that its references have."""
    with printing_refusals(job), without_environment():
        try:
            return OmegaConf.to_object(config)
        except OmegaConfBaseException:
            check_references(config, job)  # names the option
            raise


def _without_sweep(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if not text.lstrip("+-").startswith("sweep.")]


def _sweep_options(overrides: Sequence[str]) -> SweepOptions:
    config = OmegaConf.create({"sweep": OmegaConf.structured(SweepOptions)})
    OmegaConf.set_struct(config, True)
    parsed = list(map(parse, overrides))
    for override in parsed:
        if override.key_or_group in text_options() and override.is_choice_sweep():
            # A sweep has one value of each option: 0,2,5 is one text.
            override = parse(f"{override.key_or_group}={quote(override.get_value_string())}")
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: several values of a sweep option; choose one")
        _set_value(config, keep_text(override), [override])
    options = _to_object(config, parsed)["sweep"]
    assert isinstance(options, SweepOptions)
    options.validate()
    slurm = [text for text in overrides if text.startswith("sweep.slurm.")]
    if slurm and options.on != "slurm":
        raise no_effect(slurm[0], f"sweep.on={options.on}")
    return options


def _compose_jobs(
    overrides: Sequence[str],
    configs: UserConfigs,
    more: More = no_more,
) -> Iterator[tuple[RunOverrides, list[str], DictConfig]]:
    """Yield the overrides, the varied overrides and the composed config of each run of a grid.

    Loading and merging the config groups takes nearly all the time of a composition. So Hydra composes each combination
    of group choices once, and the values of each run are set in a copy of the result.
    """
    register_plugins(overrides)
    if configs.folder is not None and not os.path.isdir(configs.folder):
        raise ConfigError(f"--config-dir={configs.folder}: no such folder; choose the folder with your configs")
    if configs.folder is not None or any("hydra.searchpath" in text for text in overrides):
        _compose_choices.cache_clear()  # the user's files may have changed since the last command of this process
    for grid_job, grid_varied in jobs(overrides):
        for texts in more(grid_varied):
            job, varied = (*grid_job, *map(read, texts)), [*grid_varied, *texts]
            # Values are set after all choices, as in Hydra, wherever they stand in the command.
            values = [override for override in job if sets_values(override)]
            chosen = tuple(str(override.input_line) for override in job if override not in values)
            # A copy, because the next run with these choices starts from the same config.
            config = copy.deepcopy(_compose_choices(configs, chosen))
            _leave_out_replaced_sites(config, values)
            with naming_run(varied):
                check_length(values)
                for override in values:
                    _set_value(config, override, job)
            yield job, varied, config


@cache
def _compose_choices(configs: UserConfigs, choices: tuple[str, ...]) -> DictConfig:
    """Return the config of some choices from config groups, which are checked before Hydra composes."""
    job = tuple(map(parse, choices))
    folders = _folders(job, configs)
    if folders.are_listable and not folders.has("", configs.name):
        raise no_such_config(configs.name)
    # Without a defaults list it has none of the groups that an override chooses from.
    content = folders.content("", configs.name)
    if folders.are_listable and content and not content.get("defaults"):
        raise no_config_of_a_run()
    for override in job:
        check_config_exists(override, folders)
    check_recipe(job, folders)
    # An earlier error, or another program of the process, may have left Hydra initialised.
    GlobalHydra.instance().clear()
    for plugin in (_ConfigDir, UserFiles):
        Plugins.instance().register(plugin)
    _ConfigDir.folder, UserFiles.folders = configs.folder, folders
    try:
        with (
            printing_refusals(job),
            without_environment(),
            initialize_config_dir(str(config_dir()), version_base="1.3"),
        ):
            return compose(configs.name, overrides=list(map(_with_checked_folders, job)))
    finally:
        # Another program of the process finds its own files, and not those of this user.
        _ConfigDir.folder, UserFiles.folders = None, ConfigFolders()


def _is_search_path(override: Override) -> bool:
    return override.key_or_group == "hydra.searchpath"


def _folders_of(override: Override) -> list[str]:
    value = override.value()
    assert isinstance(value, list)  # as `check_override` requires
    return [str(folder) for folder in value]


def _with_checked_folders(override: Override) -> str:
    """Return an override of `hydra.searchpath` with its folders read by `UserFiles`, and any other as it is."""
    if not _is_search_path(override):
        return str(override.input_line)
    checked: list[str] = []
    for folder in _folders_of(override):
        if "://" not in folder:
            folder = f"file://{folder}"
        checked.append(quote(re.sub("^file://", f"{UserFiles.scheme()}://", folder)))
    return f"hydra.searchpath=[{','.join(checked)}]"


class _ConfigDir(SearchPathPlugin):
    """Appends the folder of --config-dir to Hydra's search path, as Hydra's own flag does."""

    folder: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.folder is not None:
            search_path.append("command-line", f"{UserFiles.scheme()}://{os.path.abspath(self.folder)}")


def _set_value(config: DictConfig, override: Override, job: Sequence[Override]) -> None:
    """Set a value in a composed config as Hydra does, after the config groups are merged."""
    if is_in(override.key_or_group, OF_SITES):
        _set_at_site(config, override)
        return
    if override.key_or_group == OF_SITES:
        raise ConfigError(f"{override.input_line}: {OF_SITES} is a section; set {OF_SITES}.final=NORM, for example")
    check_values(config, override, job)
    with printing_refusals((override,)):
        OmegaConf.update(config, override.key_or_group, override.value(), merge=True)


def _set_at_site(config: DictConfig, override: Override) -> None:
    """Set a value of `norm.at`, one mapping by dotted names: a site's, `final`, or an option's, `final.eps`."""
    key, value = override.key_or_group.removeprefix(f"{OF_SITES}."), override.value()
    _, name = split_key(key)
    with open_dict(config):
        # Null in place of a norm takes back what a file sets: its options there are left out already.
        if not name and value is None:
            config.norm.at.pop(key, None)
            return
        # All norms that have an option of this name have it with one type.
        kind = option_types().get(f"norm.{name}")
        if kind is not None:
            check_type(override.key_or_group, kind, value, (override,))
        config.norm.at[key] = value


def _leave_out_replaced_sites(config: DictConfig, values: Sequence[Override]) -> None:
    """Leave out what config files set for a site of which the command names the norm: options of another norm."""
    for override in values:
        if not is_in(override.key_or_group, OF_SITES):
            continue
        site = override.key_or_group.removeprefix(f"{OF_SITES}.")
        with open_dict(config):
            for key in list(config.norm.at):
                if is_in(str(key), site):
                    del config.norm.at[key]


@contextmanager
def printing_refusals(job: Sequence[Override]) -> Iterator[None]:
    """Print in one line, as it is, what Hydra and OmegaConf still refuse after all checks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="hydra")
            yield
    except (HydraException, OmegaConfBaseException, *_OF_MALFORMED_INPUTS) as error:
        # Without overrides, only the config file that -cn names can be refused.
        typed = " ".join(str(override.input_line) for override in job) or "-cn"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{typed}: {reason}") from error
