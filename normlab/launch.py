"""From words to a RunConfig, by Hydra. Only this module and `words.py` know it.

Every word is composed and validated before anything starts, so that a mistake leaves nothing behind; then
Hydra runs the job as it would any other application's, and all of its flags work.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import BooleanNode, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from normlab import memory
from normlab import words as reading
from normlab.config import OPTIMIZERS, RunConfig
from normlab.corpora import DATA, FilesData
from normlab.errors import ConfigError, NormlabError, nearest, one_line
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
        raise ConfigError(
            "--config-name: what it names is no run; let its defaults begin with run_schema, as conf/train.yaml does"
        )
    config.validate()
    config.refuse_idle()
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
    register(_plugins_in(words))
    overrides = reading.read(words)
    if config_folder is not None:
        overrides.append(_search(config_folder))
    with _composing(words):
        return to_config(compose("train", overrides=overrides), words)


def compose_grid(words: Sequence[str]) -> list[RunConfig]:
    """The configs of a grid, `norm=rmsnorm,dyt model.depth=6,12`: every combination, as with `train --multirun`.

    Raises:
        ConfigError: Naming the word, what was seen, and what to do.
    """
    register(_plugins_in(words))
    overrides = reading.read(words)
    with _composing(words):
        return [config for _, config in _composed(_jobs(overrides))]


def compose_sweep(
    words: Sequence[str], tell: Callable[[str], None] = lambda _: None
) -> tuple[SweepOptions, list[tuple[list[str], RunConfig]]]:
    """How a sweep is run, and of each of its jobs the words that tell it from the others, and its validated config.

    Args:
        words: Of the command line: those of a grid, and those after `sweep.`.
        tell: Is told how far it is.

    Raises:
        ConfigError: Naming the word, what was seen, and what to do.
    """
    own = [word for word in words if re.match(r"[+~]*sweep\.", word)]
    words = [word for word in words if word not in own]
    options = _sweep_options(own)
    register(_plugins_in(words))
    overrides = reading.read(words)
    with _composing(words):
        jobs = _jobs(overrides)
        varied = {word.get_key_element() for word in reading.parse(overrides) if word.is_sweep_override()}
        found: list[tuple[list[str], RunConfig]] = []
        for job, config in _composed(jobs):
            tell(f"composing: {len(found) + 1} of {len(jobs)} runs")
            _check_machine(config, options)
            found.append(([word for word in job if word.partition("=")[0] in varied], config))
    tell("")
    return options, found


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


def _composed(jobs: Sequence[Sequence[str]]) -> Iterator[tuple[Sequence[str], RunConfig]]:
    """Each job of a grid, and its config: what is chosen by name is composed once, the values are set in copies of it.

    Composing is nearly all in the choices. The values are set by Hydra's own function, which does it after them.
    """
    chosen: dict[tuple[str, ...], DictConfig] = {}
    for job in jobs:
        choices = tuple(word for word in job if _is_choice(word))
        with _explained(job):
            if choices not in chosen:
                chosen[choices] = compose("train", overrides=list(choices))
            cfg = copy.deepcopy(chosen[choices])
            ConfigLoaderImpl._apply_overrides_to_config([_parsed(word) for word in job if not _is_choice(word)], cfg)
            config = to_config(cfg, job)
        yield job, config


def _is_choice(word: str) -> bool:
    """Whether a word chooses by name, or speaks to Hydra; the others set a value."""
    key = word.partition("=")[0].lstrip("+")
    return key in reading.GROUPS or key.startswith("hydra")


def _jobs(overrides: Sequence[str]) -> list[list[str]]:
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    reading.refuse_too_many(parsed)
    return [list(job) for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]


def norm_presets(names: Sequence[str] | None = None) -> list[NormConfig]:
    """The presets of norms by these names, or every one; whatever is known is registered then."""
    known = sorted(path.stem for path in (config_dir() / "norm").glob("*.yaml"))
    return [compose_run([f"norm={name}"]).norm for name in known if names is None or name in names]


def main(words: Sequence[str], job: Callable[[RunConfig], Any]) -> None:
    """Run `job` on the config (with --multirun: the configs) of a command line, Hydra's flags and all.

    Raises:
        ConfigError: A word is wrong; nothing was written. What `job` raises is raised too.
    """
    parser = get_args_parser()
    parser.error = _refuse_flag
    args = parser.parse_intermixed_args(list(words))
    _check_flags(args)
    register(_plugins_in(args.overrides))
    flags = [word for word in words if word not in args.overrides]
    overrides = [] if args.hydra_help else reading.read(args.overrides)
    shows_only = args.help or args.hydra_help or args.cfg or args.info or args.shell_completion
    if not shows_only:
        _check_all(args, overrides)
    failures: list[BaseException] = []
    owner = os.getpid()

    def task(cfg: DictConfig) -> Any:
        try:
            register(list(cfg.plugins))  # a launcher may have brought the job to a process that knows none yet
            return job(to_config(cfg, overrides))
        except Exception as error:
            failures.append(error)
            if os.getpid() != owner:  # a launcher's process: only what is raised comes back from there
                raise
            return None  # Hydra would print a line of its own around it; and a sweep's other runs are trained

    arguments, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    # The flags last: one that takes a value or none must not take a word for it.
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["normlab train", *overrides, *flags], "1"
    try:
        with _refusing(args.overrides), _explained(args.overrides):
            hydra.main(version_base="1.3", config_path=str(config_dir()), config_name="train")(task)()
    except Exception:
        if not failures:
            raise
    finally:
        sys.argv = arguments
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    if failures:
        # A mistake of ours, if there is one, for its traceback; the others in a line each.
        raised = next((error for error in failures if not isinstance(error, NormlabError)), failures[-1])
        for error in failures:
            if error is not raised:
                print(f"error: {one_line(error)}", file=sys.stderr)
        raise raised


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


def _check_all(args: Any, overrides: Sequence[str]) -> None:
    """Compose and validate every job of a command line, before the first one starts."""
    jobs = [list(overrides)]
    with _composing(args.overrides):
        if args.multirun:
            jobs = _jobs(overrides)
        extra = [] if args.config_dir is None else [_search(args.config_dir)]
        for words in jobs:
            told = words if args.multirun else args.overrides
            with _explained(told):
                config = to_config(compose(args.config_name or "train", overrides=[*words, *extra]), told)
            _check_machine(config)


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


@contextlib.contextmanager
def _composing(words: Sequence[str]) -> Iterator[None]:
    """Be able to compose configs, and say in one line what is wrong with them."""
    GlobalHydra.instance().clear()
    composing = initialize_config_dir(str(config_dir()), version_base="1.3")
    with composing, _refusing(words), _explained(words), _numbers_are_no_switches():
        yield


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
        raise reading.explain(error, words, lambda: compose_run([])) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name} line {mark.line + 1}" if mark else "a config file"
        raise ConfigError(f"{where}: is no YAML ({getattr(error, 'problem', None) or error}); mend it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"a config file is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or "Hydra cannot use this").splitlines()[0].rstrip(".")


def _search(folder: str) -> str:
    """The word that adds a folder to those that configs are looked for in."""
    url = reading.quoted(f"file://{os.path.abspath(folder)}")
    return f"hydra.searchpath=[{url}]"


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
