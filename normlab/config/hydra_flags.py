"""Implement Hydra's flags: print a config (--cfg, --info, --help) and start the jobs of a grid (--multirun)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from normlab.config.compose import (
    CommandLine,
    compose_jobs,
    expand_grid,
    parse_command_line,
    parse_command_line_without_job,
    register,
    single_job,
    split_sweep_overrides,
    to_config,
    varied_overrides,
)
from normlab.config.config_files import initialized_hydra
from normlab.config.flags import flag_parser
from normlab.config.override_errors import explaining_errors
from normlab.config.schema import RunConfig
from normlab.errors import ConfigError, NormlabError, one_line
from normlab.paths import WANDB_SWEEPS
from normlab.placements.init_rules import INIT_RULES

_HELP = """\
normlab train [option=value ...]: train one run.
The same command resumes the run, or reports that it is finished.

== Choices (option=value) ==
{choices}

== All options and their defaults (option=value) ==
{options}
normlab list norms|placements|models|data|optim|init describes each choice.
Hydra's flags work too: --cfg job, --info, --config-dir DIR, --multirun, hydra/launcher=..., --hydra-help"""

_WRITE_NOTHING = (
    *("hydra.sweep.subdir=.", "hydra.output_subdir=null", "hydra.job.chdir=false", "hydra.job_logging.root=null"),
    "hydra.hydra_logging.root.handlers=[]",
)
"""Overrides with which a launcher makes no folders and logs; a run makes its folder after its config is validated."""


def run_job(
    arguments: Sequence[str], job: Callable[[RunConfig], Any], check: Callable[[RunConfig], None] = lambda _: None
) -> None:
    """Run `job` on the config of a command line; with --multirun, on each config of the grid.

    `check` is called with every config before the first job starts, and raises an error if the run cannot run here. A
    job that fails does not stop the others. One error is raised at the end; each other error is printed in a line.
    """
    line = parse_command_line(arguments)
    if line.flags.help:
        return _print_help(line)
    if line.flags.hydra_help:
        return print(flag_parser().format_help(), end="", flush=True)
    if line.flags.cfg or line.flags.info:
        return _print_config(line, line.overrides)
    jobs = expand_grid(line) if line.flags.multirun else single_job(line)
    configs = list(compose_jobs(line, jobs))
    for config in configs:
        check(config)
    if line.hydra_overrides or _chosen_launcher(line, jobs[0]) != "basic":
        failures = _launch(line, jobs, job)
    else:
        failures = []
        for config in configs:
            try:
                job(config)
            except Exception as error:
                failures.append(error)
    if failures:
        # Prefer to raise a bug, because its traceback is needed.
        raised = next((error for error in failures if not isinstance(error, NormlabError)), failures[-1])
        for error in failures:
            if error is not raised:
                print(f"error: {one_line(error)}", file=sys.stderr)
        raise raised


def _chosen_launcher(line: CommandLine, job: Sequence[str]) -> str:
    """Return the launcher that the user's config files choose."""
    if line.flags.config_dir is None and line.flags.config_name is None:
        return "basic"
    with explaining_errors(line.typed), initialized_hydra(line.flags.config_dir):
        cfg = compose(line.config_name, overrides=list(job), return_hydra_config=True)
    return cfg.hydra.runtime.choices["hydra/launcher"]


def _launch(line: CommandLine, jobs: Sequence[Sequence[str]], job: Callable[[RunConfig], Any]) -> list[Exception]:
    """Start the jobs with a launcher of Hydra (`hydra/launcher=joblib`); return their errors.

    The steps are those of Hydra's sweeper. A launcher receives the overrides of each job, and the process of the job
    composes the config again.
    """

    def task(cfg: DictConfig) -> Any:
        register(list(cfg.plugins))  # a process that the launcher has started has not loaded the plugins
        return job(to_config(cfg, line.overrides))

    with explaining_errors(line.typed), initialized_hydra(line.flags.config_dir) as loader:
        overrides = [*_WRITE_NOTHING, *line.overrides, "hydra.mode=MULTIRUN"]
        cfg = loader.load_configuration(line.config_name, overrides, RunMode.MULTIRUN)
        context = HydraContext(config_loader=loader, callbacks=Callback())  # pyright: ignore[reportArgumentType]
        launcher = Plugins.instance().instantiate_launcher(context, task, cfg)
        # The launcher adds the overrides of Hydra to each job.
        runs = [[text for text in overrides if not re.match(r"[+~]*hydra\b", text)] for overrides in jobs]
        results = launcher.launch(runs, initial_job_idx=0)
    failures: list[Exception] = []
    for result in results:
        try:
            _ = result.return_value
        except Exception as error:
            failures.append(error)
    return failures


def show_config(arguments: Sequence[str]) -> bool:
    """Print the output of --cfg or --info for each run; return whether either flag is set."""
    _, others = split_sweep_overrides(arguments)
    line = parse_command_line_without_job(others)
    if not (line.flags.cfg or line.flags.info):
        return False
    for number, job in enumerate(expand_grid(line)):
        if varied := varied_overrides(line, job):
            if number:
                print("---")
            print(f"# {' '.join(varied)}")
        _print_config(line, job)
    return True


def _print_config(line: CommandLine, job: Sequence[str]) -> None:
    """Print the output of --cfg (with --package) or --info for one run."""
    flags = line.flags
    with explaining_errors(line.typed):
        with initialized_hydra(line.flags.config_dir) as loader:
            cfg = compose(line.config_name, overrides=list(job), return_hydra_config=True)
            if flags.info:
                return _print_info(
                    flags.info, cfg, loader.compute_defaults_list(line.config_name, list(job), RunMode.RUN)
                )
        HydraConfig.instance().set_config(cfg)  # for interpolations such as ${hydra:job.name}
        if flags.cfg == "hydra":
            cfg = OmegaConf.masked_copy(cfg, "hydra")
        elif flags.cfg == "job":
            with open_dict(cfg):
                del cfg["hydra"]
        part = cfg if flags.package in (None, "_global_") else OmegaConf.select(cfg, flags.package)
        if part is None:
            raise ConfigError(f"--package={flags.package}: the config has no such part; choose one of {', '.join(cfg)}")
        if flags.resolve and OmegaConf.is_config(part):
            OmegaConf.resolve(part)
    if part is not cfg and OmegaConf.is_config(part):
        print(f"# @package {flags.package}")
    print(OmegaConf.to_yaml(part).rstrip() if OmegaConf.is_config(part) else part, flush=True)


def _print_info(kind: str, cfg: DictConfig, defaults: Any) -> None:
    """Print a part of Hydra's composition (`kind`), or all parts."""
    if kind in ("all", "searchpath"):
        for source in cfg.hydra.runtime.config_sources:
            print(f"{source.provider}: {source['schema']}://{source.path}")
    if kind in ("all", "defaults", "defaults-tree"):
        for default in defaults.defaults:
            print(f"{default.config_path}: package {default.package or '_global_'}, from {default.parent}")
    if kind in ("all", "plugins"):
        for plugin in Plugins.instance().discover():
            print(f"{plugin.__module__}.{plugin.__name__}")
    if kind in ("all", "config"):
        print(OmegaConf.to_yaml(cfg))


def _print_help(line: CommandLine) -> None:
    with explaining_errors(line.typed), initialized_hydra(line.flags.config_dir) as loader:
        cfg = compose(line.config_name, overrides=line.overrides)
        groups = [group for group in loader.list_groups("") if group not in ("hydra", WANDB_SWEEPS)]
        choices = {group: sorted(loader.get_group_options(group)) for group in groups}
    choices["init"] = ["auto", *sorted(INIT_RULES)]
    lines = [f"{option}: {', '.join(names)}" for option, names in sorted(choices.items())]
    print(_HELP.format(choices="\n".join(lines), options=OmegaConf.to_yaml(cfg)), flush=True)
