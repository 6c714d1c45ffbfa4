"""Compose the validated config of each run of a command, by Hydra's compose API.

Overrides have Hydra's grammar and its quoting, with one rule more (`keep_text`). Every run is composed and validated
before the first one starts, so that an error leaves no files behind. Only this module, `user_files.py` and
`override_errors.py` import Hydra.
"""

import copy
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from normlab.base.errors import ConfigError, no_effect
from normlab.base.paths import config_dir
from normlab.base.plugins import load_plugins
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.config import arms
from normlab.config.option_names import empty_list_hint
from normlab.config.override_errors import (
    GROUPS,
    SECTIONS,
    check_key,
    explaining_errors,
    list_options,
    naming_run,
    no_such_option,
    text_options,
)
from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SweepOptions
from normlab.config.user_files import UserFiles, without_environment

MOST_RUNS = 10_000
"""Maximum number of runs in a grid: every run is composed before the first one starts."""

_registered: dict[tuple[str | None, str], Any] = {}
"""The nodes of Hydra's config store, by (group, name)."""

Job = tuple[Override, ...]
More = Callable[[list[str]], Iterable[Sequence[str]]]
"""Returns lists of overrides to add to a run, from its varied ones: a run for each list."""
"""The overrides of one run, each with one value."""


class UserConfigs(NamedTuple):
    """The configs of the user that a command names: the folder of --config-dir, and --config-name."""

    folder: str | None = None
    name: str = "train"


PACKAGED = UserConfigs()


def register(plugins: Sequence[str] = ()) -> None:
    """Register norms, placements, corpora, optimizers and plugins in Hydra's config store."""
    load_norms()
    load_placements()
    load_plugins(plugins)
    nodes = {(group, name): node for group, known in GROUPS.items() for name, node in known.items()}
    for (group, name), node in {**nodes, (None, "run_schema"): RunConfig}.items():
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
            value = _parse(text).value()
            if not isinstance(value, list):
                nearest = empty_list_hint(text.partition("=")[2])
                raise ConfigError(f"{text}{nearest}: not a list of files; write plugins=[my_norm.py]")
            files = [str(file) for file in value]
    register(files)


def compose_run(overrides: Sequence[str], configs: UserConfigs = PACKAGED) -> RunConfig:
    for text in overrides:
        if text.startswith(arms.PREFIX):
            raise ConfigError(f"{text}: is for normlab sweep only; give the overrides of one arm")
        parsed = _parse(text)
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
    return [to_config(cfg, job) for job, _, cfg in _compose_jobs(overrides, configs)]


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
            composed.append((varied, to_config(cfg, job)))
    return options, composed


def config_texts(overrides: Sequence[str], configs: UserConfigs = PACKAGED) -> Iterator[str]:
    """Yield the composed config of each run in a grid as YAML; a comment names its varied overrides."""
    for _, varied, cfg in _compose_jobs(_without_sweep(overrides), configs):
        yield (f"# {' '.join(varied)}\n" if varied else "") + OmegaConf.to_yaml(cfg).rstrip()


def norm_presets() -> list[NormConfig]:
    """Return the norm presets of conf/norm, and register the catalogue."""
    return [compose_run([f"norm={path.stem}"]).norm for path in sorted((config_dir() / "norm").glob("*.yaml"))]


def to_config(cfg: DictConfig, job: Job = ()) -> RunConfig:
    """Convert a composed config to a validated RunConfig; errors quote the overrides of the job."""
    if unknown := [str(key) for key in cfg if key not in SECTIONS]:
        raise no_such_option(unknown[0], job)
    with explaining_errors(job), without_environment():
        config = OmegaConf.to_object(cfg)
    if not isinstance(config, RunConfig):
        raise ConfigError("--config-name: not a config of a run; start its defaults list with train")
    config.validate()
    config.reject_unused_options()
    return config


# Overrides


@lru_cache(1024)  # a grid parses the same texts again and again
def _parse(text: str) -> Override:
    with explaining_errors(typed=text):
        return _parser().parse_overrides([text])[0]


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _read(text: str) -> Override:
    """Parse an override of a run by Hydra's grammar; reject those that would be ignored."""
    override = _parse(text)
    key = override.key_or_group
    if override.is_delete():
        raise ConfigError(f"{text}: an option cannot be removed; leave {text} out, or set another value")
    if key.startswith("hydra") and key != "hydra.searchpath":
        raise ConfigError(f"{text}: has no effect, since normlab only composes configs with Hydra; leave it out")
    if key.startswith("sweep."):
        raise ConfigError(f"{text}: is an option of normlab sweep only; leave it out, or use normlab sweep")
    check_key(override)
    group, _, name = key.partition(".")
    if group in GROUPS and name in ("name", "preset") and key != "data.name":  # data=hub has an option data.name
        raise ConfigError(f"{text}: {key} cannot be set; {group}=... chooses another {group}")
    return keep_text(override)


def keep_text(override: Override) -> Override:
    """Return an override, with what was typed where Hydra has read a number or a boolean for an option of type text.

    Hydra reads `run.name=2024_01_05` as 20240105, `1e3` as 1000.0 and `true` as True, and OmegaConf would turn these
    values into texts again. A typed number has neither quotes nor commas, so that commas separate the values.
    """
    value, typed = override.value(), override.get_value_string().strip()
    values, texts = [value], [typed]
    if isinstance(value, ChoiceSweep) and value.simple_form:  # typed as 1,2 and not as choice(1,2)
        values, texts = value.list, typed.split(",")
    elif isinstance(value, list):
        values, texts = value, typed[1:-1].split(",")
    if not any(isinstance(each, int | float) for each in values) or override.key_or_group not in text_options():
        return override
    if len(texts) != len(values):
        raise ConfigError(f"{override.input_line}: has a number among texts with commas; quote each text")
    kept = ",".join(
        quote(text.strip()) if isinstance(each, int | float) else text for text, each in zip(texts, values, strict=True)
    )
    return _parse(f"{override.get_key_element()}={f'[{kept}]' if isinstance(value, list) else kept}")


def quote(text: str) -> str:
    """Return a text in quotes, escaped for Hydra's grammar and for OmegaConf's, in which ${x} is a reference."""
    without_references = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return QuotedString(without_references, Quote.single).with_quotes()


def _without_sweep(overrides: Sequence[str]) -> list[str]:
    return [text for text in overrides if not text.lstrip("+-").startswith("sweep.")]


def _sweep_options(overrides: Sequence[str]) -> SweepOptions:
    cfg = OmegaConf.create({"sweep": OmegaConf.structured(SweepOptions)})
    OmegaConf.set_struct(cfg, True)
    parsed = list(map(_parse, overrides))
    for override in parsed:
        if override.key_or_group in text_options() and override.is_choice_sweep():
            # A sweep has one value of each option: 0,2,5 is one text.
            override = _parse(f"{override.key_or_group}={quote(override.get_value_string())}")
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line}: several values of a sweep option; choose one")
        _set_value(cfg, keep_text(override), [override])
    with explaining_errors(parsed), without_environment():
        options = OmegaConf.to_object(cfg.sweep)
    assert isinstance(options, SweepOptions)
    options.validate()
    slurm = [text for text in overrides if text.startswith("sweep.slurm.")]
    if slurm and options.on != "slurm":
        raise no_effect(slurm[0], f"sweep.on={options.on}")
    return options


# Composition


def _jobs(overrides: Sequence[str]) -> Iterator[tuple[Job, list[str]]]:
    """Yield the overrides of each run of a grid, and as texts its arm and the varied overrides.

    The last option varies fastest, and the arm slowest.
    """
    by_arm, shared = arms.read_arms(overrides)
    own_keys = [{_read(text).get_key_element() for text in own} for own in by_arm.values()]
    for override in map(_read, shared):
        if override.is_sweep_override() and all(override.get_key_element() in keys for keys in own_keys):
            raise ConfigError(f"{override.input_line}: every arm sets this option too; leave one of them out")
    count = 0
    for name, own in by_arm.items():
        for job, varied in _jobs_of_arm([*shared, *own]):
            count += 1
            if count > MOST_RUNS:
                raise ConfigError(f"arm={name}: the arms make a grid of more than {MOST_RUNS} runs; sweep fewer")
            yield job, [f"{arms.PREFIX}{name}", *varied] if name else varied


def _jobs_of_arm(overrides: Sequence[str]) -> Iterator[tuple[Job, list[str]]]:
    choices: dict[str, list[Override]] = {}
    for override in map(_read, overrides):
        key = override.get_key_element()
        choices[key] = [override]
        if override.is_sweep_override():
            with explaining_errors((override,)):
                values = _swept_values(override)
            if len(values) * math.prod(map(len, choices.values())) > MOST_RUNS:
                raise ConfigError(f"{override.input_line}: makes a grid of more than {MOST_RUNS} runs; sweep fewer")
            if len(set(values)) < len(values):  # the warning about equal runs names the values as they were typed
                values = _typed_values(override) or values
            choices[key] = [_parse(f"{key}={value}") for value in values]
    varied = {key for key, values in choices.items() if len(values) > 1}
    for job in itertools.product(*choices.values()):
        yield job, [str(each.input_line) for each in job if each.get_key_element() in varied]


def _swept_values(override: Override) -> list[str]:
    """Return the values of a sweep as texts, at most one more than a grid may have."""
    value = override.value()
    if isinstance(value, RangeSweep) and value.shuffle:
        # Hydra makes a list of all numbers before it shuffles them.
        values = list(itertools.islice(value.range(), MOST_RUNS + 1))
        if len(values) > MOST_RUNS:
            return [str(number) for number in values]
    return list(itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1))


def _typed_values(override: Override) -> list[str]:
    """Return the values of `1e-3,0.001` or `choice(1e-3,0.001)` as they were typed, so that a warning can name both.

    Return [] for another function, which may change their order, and for values that hold commas.
    """
    values, typed = override.value(), override.get_value_string()
    if choice := re.fullmatch(r"choice\((.*)\)", typed):
        typed = choice[1]
    texts = typed.split(",")
    if isinstance(values, ChoiceSweep) and "(" not in typed and len(texts) == len(values.list):
        return [text.strip() for text in texts]
    return []


def _compose_jobs(
    overrides: Sequence[str],
    configs: UserConfigs,
    more: More = no_more,
) -> Iterator[tuple[Job, list[str], DictConfig]]:
    """Yield the overrides, the varied overrides and the composed config of each run of a grid.

    Loading and merging the config groups takes nearly all the time of a composition. So Hydra composes each combination
    of group choices once, and the values of each run are set in a copy of the result.
    """
    register_plugins(overrides)
    if configs.folder is not None and not os.path.isdir(configs.folder):
        raise ConfigError(f"--config-dir={configs.folder}: no such folder; choose the folder with your configs")
    if configs.folder is not None or any("hydra.searchpath" in text for text in overrides):
        _compose_choices.cache_clear()  # the user's files may have changed since the last command of this process
    added = ((grid_job, each, texts) for grid_job, each in _jobs(overrides) for texts in more(each))
    for grid_job, each, texts in added:
        job, varied = (*grid_job, *map(_read, texts)), [*each, *texts]
        values = [override for override in job if _sets_value(override)]
        with explaining_errors(job):
            chosen = tuple(str(each.input_line) for each in job if each not in values)
            cfg = copy.deepcopy(_compose_choices(configs, chosen))
        with naming_run(varied):
            for override in values:
                _set_value(cfg, override, job)
        yield job, varied, cfg


@cache
def _compose_choices(configs: UserConfigs, choices: tuple[str, ...]) -> DictConfig:
    GlobalHydra.instance().clear()
    for plugin in (_ConfigDir, UserFiles):
        Plugins.instance().register(plugin)
    _ConfigDir.folder = configs.folder
    try:
        with without_environment(), initialize_config_dir(str(config_dir()), version_base="1.3"):
            return compose(configs.name, overrides=list(map(_checked_folders, choices)))
    finally:
        _ConfigDir.folder = None


def _checked_folders(choice: str) -> str:
    """Return an override of `hydra.searchpath` with its folders read by `UserFiles`, and any other as it is."""
    if not choice.startswith("hydra.searchpath="):
        return choice
    value = _parse(choice).value()
    assert isinstance(value, list)  # as `check_key` requires
    folders = [each if "://" in each else f"file://{each}" for each in map(str, value)]
    checked = [quote(re.sub("^file://", f"{UserFiles.scheme()}://", each)) for each in folders]
    return f"hydra.searchpath=[{','.join(checked)}]"


class _ConfigDir(SearchPathPlugin):
    """Appends the folder of --config-dir to Hydra's search path, as Hydra's own flag does."""

    folder: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.folder is not None:
            search_path.append("command-line", f"{UserFiles.scheme()}://{os.path.abspath(self.folder)}")


def _sets_value(override: Override) -> bool:
    """Return whether an override sets an option of a run, and does not choose from a config group."""
    return override.key_or_group not in GROUPS and override.key_or_group.partition(".")[0] in SECTIONS


def _set_value(cfg: DictConfig, override: Override, job: Sequence[Override]) -> None:
    """Set a value in a composed config as Hydra does, after the config groups are merged."""
    with explaining_errors(job):
        OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
