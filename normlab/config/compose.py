"""Compose the validated RunConfigs of a command line with Hydra.

`train`, `sweep` and `verify` parse their arguments and compose in the same way. Every run is composed
and validated before the first one starts, so that an error leaves no files behind. Any error in a command line is
raised as a ConfigError with the override, the value and what to do. Only this module, `config_files.py`,
`hydra_flags.py` and `override_errors.py` import Hydra.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from normlab.config.config_files import SCHEME, initialized_hydra
from normlab.config.corpora import DATA
from normlab.config.flags import flag_parser
from normlab.config.optim import OPTIMIZERS
from normlab.config.override_errors import (
    GROUPS,
    SECTIONS,
    boolean_options,
    check_grid,
    explain_error,
    explaining_errors,
    find_override,
    no_such_option,
    rewrite_overrides,
    ways_to_write_one_value,
)
from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SweepOptions
from normlab.errors import ConfigError, no_effect
from normlab.norms.base import NormConfig
from normlab.norms.base import load_all as load_norms
from normlab.paths import config_dir
from normlab.placements.base import load_all as load_placements
from normlab.plugins import load_plugins

_registered: dict[tuple[str | None, str], Any] = {}
"""The nodes of Hydra's config store, by (group, name)."""


def register(plugins: Sequence[str] = ()) -> None:
    """Register norms, placements, corpora, optimizers and plugins in Hydra's config store."""
    norms, placements = load_norms(), load_placements()
    load_plugins(plugins)
    nodes: dict[tuple[str | None, str], Any] = {(None, "run_schema"): RunConfig}
    for group, known in (("norm", norms), ("placement", placements), ("data", DATA), ("optim", OPTIMIZERS)):
        nodes |= {(group, name): node for name, node in known.items()}
    for (group, name), node in nodes.items():
        # Storing a node takes time: storing all of them again would take a third of a composition.
        if _registered.get((group, name)) is not node:
            ConfigStore.instance().store(group=group, name=name, node=node)
            _registered[group, name] = node
            _compose_choices.cache_clear()


def register_plugins(overrides: Sequence[str]) -> None:
    """Register the plugins of the last `plugins=[...]`, before Hydra composes."""
    named = [text for text in overrides if re.match(r"\+{0,2}plugins=", text)]
    files: list[str] = []
    for text, override in zip(named, _parse_overrides(rewrite_overrides(named)), strict=True):
        value = override.value()
        if not isinstance(value, list):
            example = text.partition("=")[2] if isinstance(value, str | QuotedString) and str(value) else "my_norm.py"
            raise ConfigError(f"{text}: not a list of files; write plugins=[{example}]")
        files = [str(file) for file in value]
    register(files)


_DASHES = re.compile(rf"^--(?=(?:{'|'.join(field.name for field in dataclasses.fields(RunConfig))})(?:\.[\w.]+)?=)")
"""The dashes before an option of a run with a value."""


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line.

    Attributes:
        typed: The overrides as the user typed them, for messages.
        overrides: The same overrides in the form that Hydra reads.
        flags: The parsed flags.
    """

    typed: list[str]
    overrides: list[str]
    flags: argparse.Namespace

    @property
    def config_name(self) -> str:
        """The primary config."""
        return self.flags.config_name or "train"

    @property
    def hydra_overrides(self) -> list[str]:
        """The overrides, as typed, that set options of Hydra except its search path."""
        return [text for text in self.typed if re.match(r"[+~]*hydra(?!\.searchpath)\b", text)]


def parse_command_line(arguments: Sequence[str]) -> CommandLine:
    """Parse the arguments of a command, register its plugins, and reject unused flags.

    `--optim.lr=0.001` is the override `optim.lr=0.001`, because the agent of a W&B sweep writes options so.
    """
    flags = flag_parser().parse_intermixed_args([_DASHES.sub("", text) for text in arguments])
    if flags.config_dir is not None and not os.path.isdir(flags.config_dir):
        raise ConfigError(f"--config-dir={flags.config_dir}: no such folder; choose the folder with your configs")
    if (flags.resolve or flags.package is not None) and not flags.cfg:
        flag = "--resolve" if flags.resolve else f"--package={flags.package}"
        raise ConfigError(f"{flag}: has no effect without --cfg; add --cfg job, or leave it out")
    overrides = [*flags.overrides, *([] if flags.results_dir is None else [f"results_dir={flags.results_dir}"])]
    if of_sweep := split_sweep_overrides(overrides)[0]:
        raise ConfigError(f"{of_sweep[0]}: is an option of normlab sweep only; leave it out, or use normlab sweep")
    register_plugins(overrides)
    return CommandLine(overrides, rewrite_overrides(overrides), flags)


def parse_command_line_without_job(arguments: Sequence[str]) -> CommandLine:
    """Parse the arguments of `sweep` or `verify`; reject those of `train` only."""
    line = parse_command_line(arguments)
    unused = [f"--{flag.replace('_', '-')}" for flag in ("run", "hydra_help") if getattr(line.flags, flag)]
    if unused := [*unused, *line.hydra_overrides]:
        raise ConfigError(f"{unused[0]}: has no effect here; leave it out, or use normlab train")
    return line


def compose_run(arguments: Sequence[str]) -> RunConfig:
    """Return the validated config of a single run."""
    line = parse_command_line_without_job(arguments)
    if line.flags.multirun:
        raise ConfigError("--multirun: has no effect on a single run; leave it out")
    (config,) = compose_jobs(line, single_job(line))
    return config


def compose_sweep(
    arguments: Sequence[str], report_progress: Callable[[str], None] = lambda _: None
) -> tuple[SweepOptions, list[tuple[list[str], RunConfig]]]:
    """Return the options of a sweep and, for each run, its varied overrides and its config.

    Args:
        arguments: A grid, and the options of the sweep (`sweep.option=value`).
        report_progress: Called with a progress message.
    """
    sweep_overrides, others = split_sweep_overrides(arguments)
    options, line = _sweep_options(sweep_overrides), parse_command_line_without_job(others)
    jobs = expand_grid(line)
    runs: list[tuple[list[str], RunConfig]] = []
    for job, config in zip(jobs, compose_jobs(line, jobs), strict=True):
        report_progress(f"composing: {len(runs) + 1} of {len(jobs)} runs")
        runs.append((varied_overrides(line, job), config))
    report_progress("")
    return options, runs


def overrides_in(arguments: Sequence[str]) -> list[str]:
    """Return the overrides of a command line, and --config-name=NAME if it is set."""
    line = parse_command_line_without_job(arguments)
    return [*line.typed, *([f"--config-name={line.config_name}"] if line.flags.config_name else [])]


def norm_presets() -> list[NormConfig]:
    """Return the norm presets of conf/norm, and register the catalogue.

    A preset replaces some options of a norm's defaults, so OmegaConf can build it without Hydra.
    """
    register()
    presets = []
    for path in sorted((config_dir() / "norm").glob("*.yaml")):
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
        norm, _ = options.pop("defaults")
        presets.append(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(load_norms()[norm]), options)))
    return presets


def split_sweep_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments that set options of a sweep, and the others."""
    overrides = [text for text in arguments if re.match(r"[+~]*sweep\.", text)]
    return overrides, [text for text in arguments if text not in overrides]


def _sweep_options(overrides: Sequence[str]) -> SweepOptions:
    parsed = _parse_overrides(rewrite_overrides(_quote_gpus(overrides)))
    if override := next((override for override in parsed if override.is_sweep_override()), None):
        text = find_override(override.key_or_group, overrides)
        raise ConfigError(f"{text}: several values of a sweep option; choose one")
    cfg = OmegaConf.create({"sweep": OmegaConf.structured(SweepOptions)})
    OmegaConf.set_struct(cfg, True)
    with explaining_errors(overrides):
        _set_values(cfg, parsed)
        options = OmegaConf.to_object(cfg.sweep)
    assert isinstance(options, SweepOptions)
    options.validate()
    if options.on != "slurm" and (unused := [text for text in overrides if "sweep.slurm." in text.partition("=")[0]]):
        raise no_effect(unused[0], f"sweep.on={options.on}")
    return options


def _quote_gpus(overrides: Sequence[str]) -> list[str]:
    """Quote the value of sweep.gpus, because Hydra reads 0,2,5 as three values and [0,2,5] as no text."""
    return [re.sub(r"^(\+*sweep\.gpus=)\[?([\w\s,/-]+)\]?$", r"\1'\2'", override) for override in overrides]


def _parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar; raise ConfigError for the first invalid one."""
    with explaining_errors(overrides):
        return OverridesParser.create().parse_overrides(list(overrides))


def single_job(line: CommandLine) -> list[list[str]]:
    """Return the overrides of a single run; raise ConfigError for several values of an option."""
    for override in _parse_overrides(line.overrides):
        if override.is_sweep_override():
            text = find_override(override.key_or_group, line.typed)
            *remedies, last = ["choose one", "train each with normlab sweep", *ways_to_write_one_value(text)]
            raise ConfigError(f"{text}: several values for one run; {', '.join(remedies)}, or {last}")
    return [line.overrides]


def expand_grid(line: CommandLine) -> list[list[str]]:
    """Return the overrides of each run of a grid; the last option varies fastest."""
    overrides = _parse_overrides(line.overrides)
    values: dict[str, list[str]] = {}
    with explaining_errors(line.typed):
        check_grid(overrides, line.typed)
        for override in overrides:
            is_sweep = override.is_sweep_override()
            choices = override.sweep_string_iterator() if is_sweep else [override.get_value_element_as_str()]
            key = override.get_key_element()
            values[key] = [f"{key}={choice}" for choice in choices]
    return [list(job) for job in itertools.product(*values.values())]


def varied_overrides(line: CommandLine, job: Sequence[str]) -> list[str]:
    """Return those overrides of a job whose options have several values in the grid."""
    varied = {
        override.get_key_element() for override in _parse_overrides(line.overrides) if override.is_sweep_override()
    }
    return [text for text in job if text.partition("=")[0] in varied]


def compose_jobs(line: CommandLine, jobs: Sequence[Sequence[str]]) -> Iterator[RunConfig]:
    """Yield the validated config of each job, given as its overrides.

    Loading and merging the config groups takes nearly all the time of a composition. So Hydra composes each combination
    of group choices once, and the values of each run are set in a copy of the result.
    """
    if line.flags.config_dir or any("hydra.searchpath" in text for text in line.overrides):
        _compose_choices.cache_clear()  # the user's files may have changed since the last command of this process
    for job in jobs:
        overrides = _parse_overrides(job)
        choices = tuple(str(override.input_line) for override in overrides if not _sets_value(override))
        shown = line.typed if len(jobs) == 1 else job  # error messages about a single run quote overrides as typed
        with explaining_errors(shown):
            cfg = copy.deepcopy(_compose_choices(line.flags.config_dir, line.config_name, choices))
            _set_values(cfg, [override for override in overrides if _sets_value(override)])
            config = to_config(cfg, shown)
        yield config


@cache
def _compose_choices(folder: str | None, config_name: str, overrides: tuple[str, ...]) -> DictConfig:
    """Compose a config with overrides that choose from groups; `folder` is --config-dir."""
    with initialized_hydra(folder) as loader:
        cfg = compose(config_name, overrides=list(overrides), return_hydra_config=True)
        sources = cfg.hydra.runtime.config_sources
        own = (source for source in sources if source.schema == SCHEME and source.provider != "main")
        if folders := [Path(source.path) for source in own]:
            defaults = loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults
            _reject_numbers_as_booleans(folders, defaults)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def _reject_numbers_as_booleans(folders: Sequence[Path], defaults: Sequence[Any]) -> None:
    """Raise ConfigError for a number that a config file of the user gives to a boolean option."""
    for default in defaults:
        prefix = f"{default.package}." if default.package else ""
        options = [option.removeprefix(prefix) for option in boolean_options() if option.startswith(prefix)]
        for path in [folder / f"{default.config_path}.yaml" for folder in folders]:
            content = OmegaConf.load(path) if path.is_file() else OmegaConf.create()
            for option in options:
                value = OmegaConf.select(content, option, throw_on_resolution_failure=False)
                if re.fullmatch(r"[+-]?[\d_]+", str(value)) and str(value) not in ("0", "1"):
                    raise ConfigError(f"{path}: {option}={value} is not a boolean; set true or false")


def _sets_value(override: Override) -> bool:
    """Return whether an override sets an option of a run, not a group or an option of Hydra."""
    key = override.key_or_group
    return key not in GROUPS and key.partition(".")[0] in SECTIONS and not (override.is_add() or override.is_delete())


def _set_values(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """Set values in a composed config as Hydra does, after the config groups are merged."""
    for override in overrides:
        force = override.is_add() or override.is_force_add()
        OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True, force_add=force)


def to_config(cfg: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Convert a composed config to a validated RunConfig; error messages quote `overrides`."""
    _reject_unknown_options(cfg)
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise explain_error(error, overrides) from error
    if not isinstance(config, RunConfig):
        raise ConfigError("--config-name: not a config of a run; start its defaults list with train")
    config.validate()
    config.reject_unused_options()
    return config


def _reject_unknown_options(node: DictConfig, prefix: str = "") -> None:
    """Raise ConfigError for an option, added by `+option=value`, that no config class has."""
    kind = OmegaConf.get_type(node)
    for key in node:
        option = f"{prefix}{key}"
        if dataclasses.is_dataclass(kind) and key not in (known := {field.name for field in dataclasses.fields(kind)}):
            raise no_such_option(option, option, sorted(known))
        if not OmegaConf.is_missing(node, key) and isinstance(child := node[key], DictConfig):
            _reject_unknown_options(child, f"{option}.")
