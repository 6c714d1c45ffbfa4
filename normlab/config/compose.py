"""Compose the RunConfigs of a command line with Hydra. Only this module and `override_errors.py` import Hydra.

`train`, `sweep`, `verify` and `probe` parse their arguments and compose in the same way. Every run is composed and
validated before the first one starts, so that an error leaves no files behind. Whatever is wrong with a command line
is raised as a ConfigError with the override, the value and what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import errno
import itertools
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser  # Hydra has no public list of its flags
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from normlab import __version__
from normlab.config.corpora import DATA
from normlab.config.override_errors import (
    GROUPS,
    SECTIONS,
    check_grid,
    explain_error,
    find_override,
    no_such_option,
    normalize_overrides,
)
from normlab.config.schema import OPTIMIZERS, RunConfig
from normlab.config.sweep import SweepOptions
from normlab.errors import ConfigError, NormlabError, one_line
from normlab.norms.base import NormConfig
from normlab.norms.base import load_all as load_norms
from normlab.paths import config_dir
from normlab.placements.base import load_all as load_placements
from normlab.plugins import load_plugins

_registered: dict[tuple[str | None, str], Any] = {}
"""The nodes of Hydra's config store, by (group, name)."""


def register(plugins: Sequence[str] = ()) -> None:
    """Register every norm, placement, corpus and optimizer, and those of plugin files, in Hydra's config store."""
    norms, placements = load_norms(), load_placements()
    load_plugins(plugins)
    nodes: dict[tuple[str | None, str], Any] = {(None, "run_schema"): RunConfig}
    for group, known in (("norm", norms), ("placement", placements), ("data", DATA), ("optim", OPTIMIZERS)):
        nodes |= {(group, name): node for name, node in known.items()}
    for (group, name), node in nodes.items():
        # Storing a node again would take a third of the time of a composition.
        if _registered.get((group, name)) is not node:
            ConfigStore.instance().store(group=group, name=name, node=node)
            _registered[group, name] = node


def register_plugins(overrides: Sequence[str]) -> None:
    """Register what the files in `plugins=[...]` define."""
    register(_plugin_files(overrides))


def _plugin_files(overrides: Sequence[str]) -> list[str]:
    """Return the files of the last `plugins=[...]`, which must be loaded before Hydra composes."""
    named = [text for text in overrides if re.match(r"\+{0,2}plugins=", text)]
    files: list[str] = []
    for text, override in zip(named, _parse_overrides(normalize_overrides(named)), strict=True):
        value = override.value()
        if not isinstance(value, list):
            example = text.partition("=")[2] if isinstance(value, str | QuotedString) and str(value) else "my_norm.py"
            raise ConfigError(f"{text}: not a list of files; write plugins=[{example}]")
        files = [str(file) for file in value]
    return files


def to_config(cfg: DictConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the validated RunConfig of a config that was composed from these overrides."""
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
    """Raise ConfigError for an option that `+option=value` added and no dataclass has."""
    kind = OmegaConf.get_type(node)
    for key in node:
        option = f"{prefix}{key}"
        if dataclasses.is_dataclass(kind) and key not in (known := {field.name for field in dataclasses.fields(kind)}):
            raise no_such_option(option, option, sorted(known))
        if not OmegaConf.is_missing(node, key) and isinstance(child := node[key], DictConfig):
            _reject_unknown_options(child, f"{option}.")


@dataclass(frozen=True)
class _CommandLine:
    """A parsed command line.

    Attributes:
        typed: The overrides as the user typed them, for messages.
        overrides: The same overrides in the form that Hydra reads.
        flags: Hydra's flags and their values, unparsed.
        args: The parsed flags.
    """

    typed: list[str]
    overrides: list[str]
    flags: list[str]
    args: argparse.Namespace

    @property
    def config_name(self) -> str:
        """The primary config."""
        return self.args.config_name or "train"


def _parse_command_line(arguments: Sequence[str]) -> _CommandLine:
    """Parse arguments, register the plugins among them, and reject flags that a run cannot have."""
    parser = argparse.ArgumentParser(parents=[get_args_parser()], add_help=False, conflict_handler="resolve")
    parser.add_argument("--version", action="version", version=f"normlab {__version__}")
    parser.error = _reject_flag
    args = parser.parse_intermixed_args(list(arguments))
    _check_flags(args)
    register(_plugin_files(args.overrides))
    overrides = [] if args.hydra_help else normalize_overrides(args.overrides)
    return _CommandLine(args.overrides, overrides, [text for text in arguments if text not in args.overrides], args)


def _reject_flag(message: str) -> NoReturn:
    raise ConfigError(f"{message}; normlab train --hydra-help lists Hydra's flags")


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags of Hydra that normlab does not support, or that exclude each other."""
    if args.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun={args.experimental_rerun}: not supported; repeat the command in the run's run.json"
        )
    if args.config_path is not None:
        raise ConfigError(
            f"--config-path={args.config_path}: not supported; add a folder of your own configs with --config-dir"
        )
    if args.config_dir is not None and not os.path.isdir(args.config_dir):
        raise ConfigError(f"--config-dir={args.config_dir}: no such folder; choose the folder with your configs")
    exclusive = ("run", "multirun", "cfg", "info", "shell_completion")
    if len(given := [f"--{flag.replace('_', '-')}" for flag in exclusive if getattr(args, flag)]) > 1:
        raise ConfigError(f"{' '.join(given)}: exclude each other; choose one")
    if args.shell_completion and not any(re.match(r"(un)?install=|query=", text) for text in args.overrides):
        raise ConfigError("--shell-completion: no action; add install=bash, or another shell")
    if (args.resolve or args.package is not None) and not (args.cfg or args.help or args.info):
        flag = "--resolve" if args.resolve else f"--package={args.package}"
        raise ConfigError(f"{flag}: has an effect only when a config is printed; use it with --cfg job")


def _parse_command_line_without_job(arguments: Sequence[str]) -> _CommandLine:
    """Parse the arguments of `sweep`, `verify` or `probe`, and reject what concerns only a job that Hydra starts."""
    line = _parse_command_line(arguments)
    if flag := next((flag for flag in ("run", "hydra_help", "shell_completion") if getattr(line.args, flag)), None):
        raise ConfigError(f"--{flag.replace('_', '-')}: has no effect here; leave it out, or use normlab train")
    if override := next((text for text in line.typed if re.match(r"\+*hydra(?!\.searchpath)\b", text)), None):
        raise ConfigError(f"{override}: has no effect here; leave it out, or use normlab train")
    return line


def compose_run(arguments: Sequence[str]) -> RunConfig:
    """Return the validated config of a single run."""
    line = _parse_command_line_without_job(arguments)
    if line.args.multirun:
        raise ConfigError("--multirun: has no effect on a single run; leave it out")
    ((_, config),) = _compose_jobs(line, _single_job(line))
    return config


def compose_grid(arguments: Sequence[str]) -> list[RunConfig]:
    """Return the configs of every combination in a grid such as `norm=rmsnorm,dyt model.depth=6,12`."""
    line = _parse_command_line_without_job(arguments)
    return [config for _, config in _compose_jobs(line, _expand_grid(line))]


def compose_sweep(
    arguments: Sequence[str], report_progress: Callable[[str], None] = lambda _: None
) -> tuple[SweepOptions, list[tuple[list[str], RunConfig]]]:
    """Return the options of a sweep, and for each run its overrides that vary in the grid, and its config.

    Args:
        arguments: A grid, and the options of the sweep (`sweep.option=value`).
        report_progress: Receives the progress as text.
    """
    options = _sweep_options(_sweep_overrides(arguments))
    line = _parse_command_line_without_job([text for text in arguments if text not in _sweep_overrides(arguments)])
    jobs, varied = _expand_grid(line), _varied_keys(line)
    runs: list[tuple[list[str], RunConfig]] = []
    for job, config in _compose_jobs(line, jobs):
        report_progress(f"composing: {len(runs) + 1} of {len(jobs)} runs")
        runs.append(([text for text in job if text.partition("=")[0] in varied], config))
    report_progress("")
    return options, runs


def overrides_in(arguments: Sequence[str]) -> list[str]:
    """Return the overrides of a command line, and its --config-name if it has one, without Hydra's other flags."""
    line = _parse_command_line_without_job(arguments)
    return [*line.typed, *([f"--config-name={line.config_name}"] if line.args.config_name else [])]


def show_config(arguments: Sequence[str]) -> bool:
    """Print what --cfg or --info selects, for each run of a grid; return whether either flag is set."""
    line = _parse_command_line_without_job([text for text in arguments if text not in _sweep_overrides(arguments)])
    if not (line.args.cfg or line.args.info):
        return False
    varied = _varied_keys(line)
    for number, job in enumerate(_expand_grid(line)):
        if varied:
            print("---\n" * (number > 0) + f"# {' '.join(text for text in job if text.partition('=')[0] in varied)}")
        _run_hydra(line, job, lambda _: None)
    return True


def norm_presets(names: Sequence[str] | None = None) -> list[NormConfig]:
    """Return the norm presets of conf/norm by their names, or all of them, and register the catalogue.

    A preset is a norm's defaults with some options replaced, so that it needs no composition of a whole run by Hydra.
    """
    register()
    presets = []
    for path in sorted((config_dir() / "norm").glob("*.yaml")):
        if names is None or path.stem in names:
            options = yaml.safe_load(path.read_text(encoding="utf-8"))
            norm, _ = options.pop("defaults")
            presets.append(OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(load_norms()[norm]), options)))
    return presets


def _sweep_overrides(arguments: Sequence[str]) -> list[str]:
    return [text for text in arguments if re.match(r"[+~]*sweep\.", text)]


def _sweep_options(overrides: Sequence[str]) -> SweepOptions:
    parsed = _parse_overrides(normalize_overrides(overrides))
    if override := next((override for override in parsed if override.is_sweep_override()), None):
        text = find_override(override.key_or_group, overrides)
        raise ConfigError(f"{text}: a sweep has one value of each sweep option; choose one")
    cfg = OmegaConf.create({"sweep": OmegaConf.structured(SweepOptions)})
    OmegaConf.set_struct(cfg, True)
    with _explaining_errors(overrides):
        _set_values(cfg, parsed)
        options = OmegaConf.to_object(cfg.sweep)
    assert isinstance(options, SweepOptions)
    options.validate()
    if options.on != "slurm" and (unused := [text for text in overrides if "sweep.slurm." in text.partition("=")[0]]):
        raise ConfigError(f"{unused[0]}: has no effect with sweep.on={options.on}; leave it out, or set sweep.on=slurm")
    return options


def _parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides by Hydra's grammar; raise ConfigError for the first that it cannot read."""
    with _explaining_errors(overrides):
        return OverridesParser.create().parse_overrides(list(overrides))


def _single_job(line: _CommandLine) -> list[list[str]]:
    """Return the overrides of the only run of a command line; raise ConfigError for several values of an option."""
    for override in _parse_overrides(line.overrides):
        if override.is_sweep_override():
            text = find_override(override.key_or_group, line.typed)
            key, _, value = text.partition("=")
            raise ConfigError(
                f"{text}: several values; train each of them with --multirun, or quote a text with commas: "
                f"{key}='\"{value}\"'"
            )
    return [line.overrides]


def _expand_grid(line: _CommandLine) -> list[list[str]]:
    """Return the overrides of each run of a grid: every combination, the last option varying fastest."""
    overrides = _parse_overrides(line.overrides)
    values: dict[str, list[str]] = {}
    with _explaining_errors(line.typed):
        check_grid(overrides)
        for override in overrides:
            is_sweep = override.is_sweep_override()
            choices = override.sweep_string_iterator() if is_sweep else [override.get_value_element_as_str()]
            key = override.get_key_element()
            values[key] = [f"{key}={choice}" for choice in choices]
    return [list(job) for job in itertools.product(*values.values())]


def _varied_keys(line: _CommandLine) -> set[str]:
    """Return the keys that have several values in a grid."""
    return {override.get_key_element() for override in _parse_overrides(line.overrides) if override.is_sweep_override()}


def _compose_jobs(line: _CommandLine, jobs: Sequence[Sequence[str]]) -> Iterator[tuple[Sequence[str], RunConfig]]:
    """Yield the overrides and the config of each run.

    Loading and merging the config groups takes nearly all the time of a composition. So each combination of choices is
    composed once, and the values of a run are set in a copy of it.
    """
    composed: dict[tuple[str, ...], DictConfig] = {}
    with _hydra_initialized(line.args.config_dir):
        for job in jobs:
            overrides = _parse_overrides(job)
            choices = tuple(str(override.input_line) for override in overrides if not _sets_value(override))
            shown = line.typed if len(jobs) == 1 else job  # in a message a single run has its overrides as typed
            with _explaining_errors(shown):
                if choices not in composed:
                    composed[choices] = compose(line.config_name, overrides=list(choices))
                cfg = copy.deepcopy(composed[choices])
                _set_values(cfg, [override for override in overrides if _sets_value(override)])
                config = to_config(cfg, shown)
            yield job, config


def _sets_value(override: Override) -> bool:
    """Return whether an override sets a value of a run; the others choose from a group, add one, or are Hydra's."""
    key = override.key_or_group
    return key not in GROUPS and key.partition(".")[0] in SECTIONS and not (override.is_add() or override.is_delete())


def _set_values(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """Set values in a composed config, as Hydra does after it has merged the config groups."""
    for override in overrides:
        force = override.is_add() or override.is_force_add()
        OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True, force_add=force)


def run_job(
    arguments: Sequence[str], job: Callable[[RunConfig], Any], check: Callable[[RunConfig], None] = lambda _: None
) -> None:
    """Run `job` on the config of a command line; with --multirun, on each config of the grid.

    `check` sees every config before the first job starts, and raises an error for one that cannot run here.

    Without flags and options of Hydra the config is composed once. With one of them Hydra starts the job, so that
    launchers and flags work as in any Hydra application.
    """
    line = _parse_command_line(arguments)
    args = line.args
    prints_only = args.help or args.hydra_help or args.cfg or args.info or args.shell_completion
    configs: list[RunConfig] = []
    if not prints_only:
        jobs = _expand_grid(line) if args.multirun else _single_job(line)
        for _, config in _compose_jobs(line, jobs):
            check(config)
            configs.append(config)
    if not (line.flags or any(re.match(r"[+~]*hydra\b", text) for text in line.typed)):
        job(configs[0])
        return
    failures: list[BaseException] = []
    owner = os.getpid()

    def task(cfg: DictConfig) -> Any:
        try:
            register(list(cfg.plugins))  # a launcher may have started a process that has not loaded the plugins
            return job(to_config(cfg, line.overrides))
        except Exception as error:
            failures.append(error)
            if os.getpid() != owner:  # from the process of a launcher, only an exception reaches this one
                raise
            return None  # Hydra would stop the other runs of the grid, and print a line of its own

    try:
        _run_hydra(line, line.overrides, task)
    except Exception:
        if not failures:
            raise
    if failures:
        # An error without a message of normlab is raised for its traceback; the others are printed in a line each.
        raised = next((error for error in failures if not isinstance(error, NormlabError)), failures[-1])
        for error in failures:
            if error is not raised:
                print(f"error: {one_line(error)}", file=sys.stderr)
        raise raised


_WRITE_NOTHING = (
    *("hydra.run.dir=.", "hydra.sweep.subdir=.", "hydra.output_subdir=null", "hydra.job.chdir=false"),
    *("hydra.job_logging.root=null", "hydra.hydra_logging.root.handlers=[]"),
)
"""Overrides that keep Hydra from making folders and logs: a run makes its own folder once its config is valid."""


def _run_hydra(line: _CommandLine, overrides: Sequence[str], task: Callable[[DictConfig], Any]) -> None:
    """Let Hydra run the task, or print what a flag selects."""
    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    # Hydra reads its flags and launcher from sys.argv only. The flags come last: one with an optional value must not
    # take an override for it.
    sys.argv = ["normlab train", *([] if line.args.hydra_help else _WRITE_NOTHING), *overrides, *line.flags]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise errors instead of printing them and exiting
    try:
        with _explaining_errors(line.typed):
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(task)()
    finally:
        sys.argv = arguments
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


class _ConfigDir(SearchPathPlugin):
    """Appends the folder of --config-dir to the search path, where Hydra's own command line has it."""

    folder: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder."""
        if self.folder is not None:
            search_path.append("command-line", f"file://{os.path.abspath(self.folder)}")


@contextlib.contextmanager
def _hydra_initialized(config_folder: str | None) -> Iterator[None]:
    """Prepare Hydra to compose from normlab's configs and those in the folder of --config-dir."""
    GlobalHydra.instance().clear()
    Plugins.instance().register(_ConfigDir)
    _ConfigDir.folder = config_folder
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"), _strict_booleans():
            yield
    finally:
        _ConfigDir.folder = None


@contextlib.contextmanager
def _strict_booleans() -> Iterator[None]:
    """Make OmegaConf reject numbers other than 0 and 1 as booleans.

    OmegaConf converts the number while it merges a config file, so a check of the composed config comes too late.
    """
    convert = BooleanNode._validate_and_convert_impl

    def convert_strictly(self: BooleanNode, value: Any) -> bool:
        if isinstance(value, int) and value not in (0, 1):
            raise ValidationError(f"Value '{value}' is not a valid bool")
        return convert(self, value)

    BooleanNode._validate_and_convert_impl = convert_strictly
    try:
        yield
    finally:
        BooleanNode._validate_and_convert_impl = convert


@contextlib.contextmanager
def _explaining_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Raise what Hydra, OmegaConf or YAML raise as a ConfigError of one line, and hide Hydra's warnings."""
    remedy = "fix the overrides or the config file"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="hydra")
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise explain_error(error, overrides) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name} line {mark.line + 1}" if mark else "a config file"
        raise ConfigError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or error}); fix it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"a config file is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EPIPE):  # raised for standard output, which the command line handles
            raise
        if error.errno is None:  # OmegaConf's error for a file that holds no config
            raise ConfigError(f"{' '.join(overrides)}: {_first_line(error)}; {remedy}") from error
        raise ConfigError(
            f"{error.filename}: {error.strerror}; choose a folder that can be created and read"
        ) from error
    except (ValueError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        # Hydra raises these for some malformed sweeps and config files.
        raise ConfigError(f"{' '.join(overrides)}: {_first_line(error)}; {remedy}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "Hydra cannot read this").splitlines()[0].rstrip(".")
