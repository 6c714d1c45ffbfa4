"""From a command line to RunConfigs, by Hydra. Only this module and `words.py` know it.

`train`, `sweep`, `verify` and `probe` read the same command line (`_Line`) and compose in the same way (`_composing`).
Every run is composed and validated before anything starts, so that a mistake leaves nothing behind; then, for `train`,
Hydra runs the job as it would any other application's, and its flags work.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import errno
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
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
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

from normlab import __version__, memory
from normlab import words as reading
from normlab.config import OPTIMIZERS, RunConfig
from normlab.corpora import DATA, FilesData
from normlab.errors import ConfigError, NormlabError, one_line
from normlab.norms.base import NormConfig
from normlab.norms.base import load_all as load_norms
from normlab.paths import config_dir
from normlab.placements.base import load_all as load_placements
from normlab.source import load_plugins
from normlab.sweep.options import SweepOptions

_stored: dict[tuple[str | None, str], Any] = {}
"""What the config store holds, by group and name."""


def register(plugins: Sequence[str] = ()) -> None:
    """Tell Hydra's config store of every norm, placement, corpus and optimiser, the plugins' included."""
    norms, placements = load_norms(), load_placements()
    load_plugins(plugins)
    nodes: dict[tuple[str | None, str], Any] = {(None, "run_schema"): RunConfig}
    for group, known in (("norm", norms), ("placement", placements), ("data", DATA), ("optim", OPTIMIZERS)):
        nodes |= {(group, name): node for name, node in known.items()}
    for (group, name), node in nodes.items():
        # Storing makes a config of the node, which takes a third of the time that a composition takes.
        if _stored.get((group, name)) is not node:
            ConfigStore.instance().store(group=group, name=name, node=node)
            _stored[group, name] = node


def register_plugins(words: Sequence[str]) -> None:
    """Load the files that `plugins=[...]` names.

    Raises:
        ConfigError: An override is no list of files, or a file cannot be loaded.
    """
    register(_plugins_in(words))


def to_config(cfg: DictConfig, words: Sequence[str] = ()) -> RunConfig:
    """The typed, validated config of a composed one; `words` made it.

    Raises:
        ConfigError: Naming the word, what was seen, and what to do.
    """
    _refuse_additions(cfg)
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise reading.explain(error, words) from error
    if not isinstance(config, RunConfig):
        raise ConfigError("--config-name: the config is not one of a run; let its defaults list begin with train")
    config.validate()
    config.reject_unused_options()
    return config


def _refuse_additions(node: DictConfig, prefix: str = "") -> None:
    """`+word=value` can put anything anywhere; only what a config knows may be there."""
    kind = OmegaConf.get_type(node)
    for key in node:
        word = f"{prefix}{key}"
        if dataclasses.is_dataclass(kind) and key not in (known := {field.name for field in dataclasses.fields(kind)}):
            raise reading.no_such_option(word, word, sorted(known))
        if not OmegaConf.is_missing(node, key) and isinstance(child := node[key], DictConfig):
            _refuse_additions(child, f"{word}.")


@dataclass(frozen=True)
class _Line:
    """A command line: the overrides as they were typed and as Hydra reads them, and Hydra's flags."""

    words: list[str]
    overrides: list[str]
    flags: list[str]
    args: argparse.Namespace

    @property
    def config_name(self) -> str:
        """The primary config."""
        return self.args.config_name or "train"


def _read_line(words: Sequence[str]) -> _Line:
    """Split a command line, register its plugins, and refuse the flags that no command of normlab has.

    Raises:
        ConfigError: A flag or an override cannot be read, or a plugin cannot be loaded.
    """
    parser = argparse.ArgumentParser(parents=[get_args_parser()], add_help=False, conflict_handler="resolve")
    parser.add_argument("--version", action="version", version=f"normlab {__version__}")
    parser.error = _refuse_flag
    args = parser.parse_intermixed_args(list(words))
    _check_flags(args)
    register(_plugins_in(args.overrides))
    # Hydra's own help may be asked for beside overrides of any kind.
    overrides = [] if args.hydra_help else reading.read(args.overrides)
    return _Line(args.overrides, overrides, [word for word in words if word not in args.overrides], args)


def _read_line_without_job(words: Sequence[str]) -> _Line:
    """The command line of `sweep`, `verify` and `probe`, which compose runs and hand no job to Hydra.

    Raises:
        ConfigError: As `_read_line`; or a flag or an override only changes how Hydra runs a job.
    """
    line = _read_line(words)
    jobs = ("run", "hydra_help", "shell_completion")
    if idle := next((flag for flag in jobs if getattr(line.args, flag)), None):
        raise ConfigError(f"--{idle.replace('_', '-')}: has no effect here; leave it out, or use normlab train")
    if idle := next((word for word in line.words if re.match(r"\+*hydra(?!\.searchpath)\b", word)), None):
        raise ConfigError(f"{idle}: has no effect here, only normlab train hands its job to Hydra; leave it out")
    return line


def compose_run(words: Sequence[str]) -> RunConfig:
    """Return the validated config that a command line makes.

    Raises:
        ConfigError: Naming the override, the value seen, and what to do.
    """
    line = _read_line_without_job(words)
    if line.args.multirun:
        raise ConfigError("--multirun: has no effect here, where there is one run; leave it out")
    with _composing(line):
        return to_config(compose(line.config_name, overrides=line.overrides), line.words)


def compose_grid(words: Sequence[str]) -> list[RunConfig]:
    """Return the configs of a grid, `norm=rmsnorm,dyt model.depth=6,12`: every combination, as `train --multirun`.

    Raises:
        ConfigError: Naming the override, the value seen, and what to do.
    """
    line = _read_line_without_job(words)
    with _composing(line):
        return [config for _, config in _composed(line)]


def compose_sweep(
    words: Sequence[str], tell: Callable[[str], None] = lambda _: None
) -> tuple[SweepOptions, list[tuple[list[str], RunConfig]]]:
    """Return the options of a sweep, and of each job the overrides that differ between jobs, and its validated config.

    Args:
        words: The command line: a grid, and the options of the sweep, which begin with `sweep.`.
        tell: Is called with the progress, as text.

    Raises:
        ConfigError: Naming the override, the value seen, and what to do.
    """
    own = _of_sweep(words)
    options = _sweep_options(own)
    line = _read_line_without_job([word for word in words if word not in own])
    with _composing(line):
        count, varied = len(_jobs(line.overrides)), _varied(line)
        found: list[tuple[list[str], RunConfig]] = []
        for job, config in _composed(line):
            tell(f"composing: {len(found) + 1} of {count} runs")
            _check_machine(config, options)
            found.append(([word for word in job if word.partition("=")[0] in varied], config))
    tell("")
    return options, found


def overrides_in(words: Sequence[str]) -> list[str]:
    """Return the overrides of a command line, without Hydra's flags; empty where no run is named at all."""
    line = _read_line_without_job(words)
    return [*line.words, *([f"--config-name={line.config_name}"] if line.args.config_name else [])]


def show_config(words: Sequence[str]) -> bool:
    """Print what --cfg or --info asks for, of each run of a grid, as `train` prints it of one.

    Returns:
        Whether either was asked for.

    Raises:
        ConfigError: The command line cannot be read or composed.
    """
    line = _read_line_without_job([word for word in words if word not in _of_sweep(words)])
    if not (line.args.cfg or line.args.info):
        return False
    with _composing(line):
        jobs, varied = _jobs(line.overrides), _varied(line)
    for number, job in enumerate(jobs):
        if varied:
            print("---\n" * (number > 0) + f"# {' '.join(word for word in job if word.partition('=')[0] in varied)}")
        _run_hydra(line, job, lambda _: None)
    return True


def _of_sweep(words: Sequence[str]) -> list[str]:
    return [word for word in words if re.match(r"[+~]*sweep\.", word)]


def _varied(line: _Line) -> set[str]:
    """The keys that a grid gives several values."""
    return {override.get_key_element() for override in reading.parse(line.overrides) if override.is_sweep_override()}


def _sweep_options(words: Sequence[str]) -> SweepOptions:
    """What the words after `sweep.` say."""
    parsed = [_parsed(word) for word in reading.read(words)]
    if several := next((one for one in parsed if one.is_sweep_override()), None):
        raise ConfigError(f"{several.input_line}: is more than one value, and there is one sweep; give one of them")
    cfg = OmegaConf.create({"sweep": OmegaConf.structured(SweepOptions)})
    OmegaConf.set_struct(cfg, True)
    with _explained(words):
        ConfigLoaderImpl._apply_overrides_to_config(parsed, cfg)
        options = OmegaConf.to_object(cfg.sweep)
    assert isinstance(options, SweepOptions)
    options.validate()
    if options.on != "slurm" and (idle := next((word for word in words if "sweep.slurm." in word.split("=")[0]), None)):
        raise ConfigError(f"{idle}: has no effect with sweep.on={options.on}; leave it out, or say sweep.on=slurm")
    return options


def _parsed(word: str) -> Override:
    with _explained([word]):
        return OverridesParser.create().parse_override(word)


def _composed(line: _Line) -> Iterator[tuple[Sequence[str], RunConfig]]:
    """Each job of a grid, and its config: what is chosen by name is composed once, the values are set in copies of it.

    Composing is nearly all in the choices. The values are set by Hydra's own function, which does it after them.
    """
    chosen: dict[tuple[str, ...], DictConfig] = {}
    for job in _jobs(line.overrides):
        choices = tuple(word for word in job if _is_choice(word))
        with _explained(job):
            if choices not in chosen:
                chosen[choices] = compose(line.config_name, overrides=list(choices))
            cfg = copy.deepcopy(chosen[choices])
            ConfigLoaderImpl._apply_overrides_to_config([_parsed(word) for word in job if not _is_choice(word)], cfg)
            config = to_config(cfg, job)
        yield job, config


def _is_choice(word: str) -> bool:
    """Whether an override chooses a config by name, one of the user's too, or is Hydra's; the others set a value."""
    key = word.partition("=")[0].lstrip("+")
    return key in reading.GROUPS or key.partition(".")[0] not in reading.FIELDS


def _jobs(overrides: Sequence[str]) -> list[list[str]]:
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    reading.refuse_too_many(parsed)
    return [list(job) for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]


def norm_presets(names: Sequence[str] | None = None) -> list[NormConfig]:
    """The presets of norms by these names, or every one; whatever is known is registered then."""
    known = sorted(path.stem for path in (config_dir() / "norm").glob("*.yaml"))
    return [compose_run([f"norm={name}"]).norm for name in known if names is None or name in names]


def main(words: Sequence[str], job: Callable[[RunConfig], Any]) -> None:
    """Run `job` on the config of a command line; with --multirun, on each of its configs.

    A line without Hydra's flags and options is composed once, here; any other is handed to Hydra, which composes it
    three times.

    Raises:
        ConfigError: An override is wrong; nothing was written. What `job` raises is raised too.
    """
    line = _read_line(words)
    if not (line.flags or any(re.match(r"[+~]*hydra\b", word) for word in line.words)):
        with _composing(line):
            config = to_config(compose(line.config_name, overrides=line.overrides), line.words)
            _check_machine(config)
        job(config)
        return
    if not (line.args.help or line.args.hydra_help or line.args.cfg or line.args.info or line.args.shell_completion):
        _check_all(line)
    failures: list[BaseException] = []
    owner = os.getpid()

    def task(cfg: DictConfig) -> Any:
        try:
            register(list(cfg.plugins))  # a launcher may have brought the job to a process that knows none yet
            return job(to_config(cfg, line.overrides))
        except Exception as error:
            failures.append(error)
            if os.getpid() != owner:  # a launcher's process: only what is raised comes back from there
                raise
            return None  # Hydra would print a line of its own around it; and a sweep's other runs are trained

    try:
        _run_hydra(line, line.overrides, task)
    except Exception:
        if not failures:
            raise
    if failures:
        # A mistake of ours, if there is one, for its traceback; the others in a line each.
        raised = next((error for error in failures if not isinstance(error, NormlabError)), failures[-1])
        for error in failures:
            if error is not raised:
                print(f"error: {one_line(error)}", file=sys.stderr)
        raise raised


_WRITE_NOTHING = (
    *("hydra.run.dir=.", "hydra.sweep.subdir=.", "hydra.output_subdir=null", "hydra.job.chdir=false"),
    *("hydra.job_logging.root=null", "hydra.hydra_logging.root.handlers=[]"),
)
"""Overrides that keep Hydra from making folders and logs, whatever a config of the user's has: a run makes its own
folder once its config is valid."""


def _run_hydra(line: _Line, overrides: Sequence[str], task: Callable[[DictConfig], Any]) -> None:
    """Hand overrides and the flags of a command line to Hydra, which runs the task or prints what a flag asks for."""
    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    # The flags last: one that takes a value or none must not take an override for it.
    sys.argv = ["normlab train", *([] if line.args.hydra_help else _WRITE_NOTHING), *overrides, *line.flags]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with _refusing(line.words), _explained(line.words):
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(task)()
    finally:
        sys.argv = arguments
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error


def _refuse_flag(message: str) -> NoReturn:
    """What Hydra's parser of flags says, in one line."""
    raise ConfigError(f"{message}; normlab train --hydra-help lists Hydra's flags")


def _check_flags(args: Any) -> None:
    """Refuse what Hydra takes for its own programs and a run cannot be made of."""
    if args.experimental_rerun is not None:
        raise ConfigError(
            f"--experimental-rerun={args.experimental_rerun}: a run is no pickle; give the words that made it, "
            "its run.json has them under command"
        )
    if args.config_path is not None:
        raise ConfigError(
            f"--config-path={args.config_path}: normlab's own configs are always read; "
            "--config-dir adds a folder of yours to them"
        )
    if args.config_dir is not None and not os.path.isdir(args.config_dir):
        raise ConfigError(f"--config-dir={args.config_dir}: there is no such folder; name one that has your configs")
    one = ("run", "multirun", "cfg", "info", "shell_completion")
    if len(given := [f"--{flag.replace('_', '-')}" for flag in one if getattr(args, flag)]) > 1:
        raise ConfigError(f"{' '.join(given)}: exclude each other; choose one")
    if args.shell_completion and not any(re.match(r"(un)?install=|query=", word) for word in args.overrides):
        raise ConfigError("--shell-completion: wants to know what to do; add install=bash, or another shell")
    if (args.resolve or args.package is not None) and not (args.cfg or args.help or args.info):
        flag = "--resolve" if args.resolve else f"--package={args.package}"
        raise ConfigError(f"{flag}: only says how a config is shown; use it with --cfg job")


def _check_all(line: _Line) -> None:
    """Compose and validate every job of a command line, before the first one starts."""
    with _composing(line):
        if line.args.multirun:
            for _, config in _composed(line):
                _check_machine(config)
        else:
            _check_machine(to_config(compose(line.config_name, overrides=line.overrides), line.words))


def _check_machine(config: RunConfig, options: SweepOptions | None = None) -> None:
    """Refuse what the machine cannot do: a device or a text that it lacks, more memory than it has.

    Under Slurm it is another machine, of which is known what the sweep asks for.
    """
    import torch

    from normlab.data.sources import find_sources
    from normlab.train.resolve import resolve

    slurm = options.slurm if options is not None and options.on == "slurm" else None
    if slurm is not None and config.device == ("cpu" if slurm.gpus else "cuda"):
        raise ConfigError(
            f"device={config.device}: each task would have {slurm.gpus or 'no'} GPU; say "
            f"sweep.slurm.gpus={1 - slurm.gpus}, or another device"
        )
    resolved = resolve(config, None if slurm is None else slurm.gpus > 0)
    size = 4 if resolved.precision == "fp32" else 2
    if slurm is not None:
        if resolved.device == "cpu":
            memory.check(config, int(slurm.memory_gb * 2**30), "a task (sweep.slurm.memory_gb)", size)
    elif resolved.device == "cuda":
        memory.check(config, torch.cuda.mem_get_info()[1], "the GPU", size)
    else:
        memory.check(config, memory.of_machine(), "this machine", size)
    if isinstance(config.data, FilesData):
        find_sources(config.data)


class _ConfigDir(SearchPathPlugin):
    """Puts the folder of --config-dir where Hydra's own command line puts it: behind normlab's configs."""

    folder: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder."""
        if self.folder is not None:
            search_path.append("command-line", f"file://{os.path.abspath(self.folder)}")


@contextlib.contextmanager
def _composing(line: _Line) -> Iterator[None]:
    """Compose configs from normlab's and the user's folders; what is wrong with them is raised in one line."""
    GlobalHydra.instance().clear()
    Plugins.instance().register(_ConfigDir)
    _ConfigDir.folder = line.args.config_dir
    try:
        composing = initialize_config_dir(str(config_dir()), version_base="1.3")
        with composing, _refusing(line.words), _explained(line.words), _numbers_are_no_switches():
            yield
    finally:
        _ConfigDir.folder = None


@contextlib.contextmanager
def _numbers_are_no_switches() -> Iterator[None]:
    """OmegaConf takes any number in a config file for true; here only 0 and 1 are switches."""
    lenient = BooleanNode._validate_and_convert_impl

    def strict(self: BooleanNode, value: Any) -> bool:
        if isinstance(value, int) and value not in (0, 1):
            raise ValidationError(f"Value '{value}' is not a valid bool")
        return lenient(self, value)

    BooleanNode._validate_and_convert_impl = strict
    try:
        yield
    finally:
        BooleanNode._validate_and_convert_impl = lenient


@contextlib.contextmanager
def _refusing(words: Sequence[str]) -> Iterator[None]:
    """Say in one line what Hydra stumbles over, around `_explained`: some of what that explains is an OSError too."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EPIPE):  # the output's, which is not ours to explain
            raise
        if error.errno is None:  # OmegaConf's, for a file that holds no config
            raise ConfigError(f"{' '.join(words)}: {_first_line(error)}; mend the words or the config file") from error
        raise ConfigError(f"{error.filename}: {error.strerror}; name a folder that can be made and read") from error
    except (ValueError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        # Hydra's own, for sweeps and config files that it does not expect.
        raise ConfigError(f"{' '.join(words)}: {_first_line(error)}; mend the words or the config file") from error


@contextlib.contextmanager
def _explained(words: Sequence[str]) -> Iterator[None]:
    """Say in one line, in the user's words, what Hydra raises; what it warns of is refused or harmless."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="hydra")
            yield
    except (HydraException, OmegaConfBaseException) as error:
        raise reading.explain(error, words) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name} line {mark.line + 1}" if mark else "a config file"
        raise ConfigError(f"{where}: is no YAML ({getattr(error, 'problem', None) or error}); mend it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"a config file is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "Hydra cannot use this").splitlines()[0].rstrip(".")


def _plugins_in(words: Sequence[str]) -> list[str]:
    """The files that `plugins=[...]` names: they must be known before anything can be composed."""
    named = [word for word in words if re.match(r"\+{0,2}plugins=", word)]
    paths: list[str] = []
    for word, override in zip(named, reading.parse(reading.read(named)), strict=True):
        value = override.value()
        if not isinstance(value, list):
            example = word.partition("=")[2] if isinstance(value, str | QuotedString) and str(value) else "my_norm.py"
            raise ConfigError(f"{word}: give a list of files: plugins=[{example}]")
        paths = [str(path) for path in value]
    return paths
