"""Hydra's flags and ways to choose configs work in `train`, `sweep` and `verify`, and write no files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from normlab import __version__
from normlab.config.schema import RunConfig

Command = Callable[..., tuple[int, str, str]]

SMALL = ["model=gpt2_nano", "tracking.wandb=off", "device=cpu"]
BARE = ["run_schema", {"norm": "rmsnorm"}, {"placement": "pre"}, {"data": "stdlib"}, {"optim": "adamw"}, "_self_"]
OVERRIDDEN = ["train", {"override norm": "layernorm"}, {"override model": "gpt2_nano"}, "_self_"]
CONFIGS: dict[str, Any] = {
    "experiment/deep.yaml": {"defaults": [{"override /placement": "peri"}], "model": {"depth": 3}},
    "myrun.yaml": {"defaults": OVERRIDDEN, "optim": {"lr": 0.002}},
    "bare.yaml": {"defaults": BARE, "optim": {"lr": 0.002}, "hydra": {"run": {"dir": "outputs"}}},
    "norm/mine.yaml": {"defaults": ["rmsnorm", "_self_"], "preset": "mine", "eps": 0.5},
    "chosen.yaml": {"defaults": ["train", {"override norm": "mine"}, "_self_"]},
}

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("normlab.training.start", "train"),
    "sweep": ("normlab.sweeps.plan", "make_plan"),
    "verify": ("normlab.verify.selection", "checks_of_run"),
}
"""For each command the function that receives the config or configs."""

HABITS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "a preset in --config-dir": (["norm=mine", "--config-dir", "own"], {"norm.eps": 0.5}),
    "-cd and -cn": (["-cd", "own", "-cn", "myrun", "init=xavier"], {"norm.name": "layernorm", "init": "xavier"}),
    "a config without train.yaml": (["-cd=own", "-cn=bare"], {"norm.name": "rmsnorm", "optim.lr": 0.002}),
    "a defaults list with a preset": (["--config-dir=own", "--config-name=chosen"], {"norm.eps": 0.5}),
    "-cn and +experiment": (["-cd=own", "-cn=myrun", "+experiment=deep"], {"norm.name": "layernorm", "model.depth": 3}),
    "hydra.searchpath and --config-dir": (
        ["hydra.searchpath=[file://{own}]", "--config-dir=other", "norm=mine", "+experiment=wide"],
        {"norm.eps": 0.5, "model.width": 64},
    ),
}


@pytest.fixture(autouse=True)
def _config_folders(tmp_path: Path) -> None:
    """Write folders of configs into the working folder."""
    configs = {f"own/{name}": content for name, content in CONFIGS.items()}
    configs["other/experiment/wide.yaml"] = {"model": {"width": 64}}
    for name, content in configs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        head = "# @package _global_\n" if "experiment/" in name else ""
        path.write_text(head + OmegaConf.to_yaml(OmegaConf.create(content)))


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def collect_configs(command: str, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Return a list that receives the configs that a command would work on; the command exits then."""
    module, name = COMMANDS[command]
    configs: list[RunConfig] = []

    def collect(value: Any) -> None:
        if isinstance(value, RunConfig):
            configs.append(value)
        elif isinstance(value, list | tuple):
            for element in value:
                collect(element)

    def replacement(*arguments: Any, **_: Any) -> Any:
        collect(arguments)
        raise SystemExit(0)

    monkeypatch.setattr(f"{module}.{name}", replacement)
    return configs


def value_of(config: RunConfig, option: str) -> Any:
    for part in option.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("habit", HABITS)
def test_every_command_composes_the_same_run(
    habit: str, command: str, run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs, before = collect_configs(command, monkeypatch), files_below(tmp_path)
    arguments, expected = HABITS[habit]
    code, _, err = run_command(command, *(text.replace("{own}", str(tmp_path / "own")) for text in arguments))
    assert (code, err) == (0, "")
    assert [{option: value_of(config, option) for option in expected} for config in configs] == [expected]
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_results_dir_is_a_flag_too(command: str, run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = collect_configs(command, monkeypatch)
    assert run_command(command, "--results-dir", "kept")[0] == 0
    assert [config.results_dir for config in configs] == ["kept"]


def test_a_grid_of_configs_in_config_dir(run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = collect_configs("sweep", monkeypatch)
    assert run_command("sweep", "-m", "-cd=own", "-cn=myrun", "norm=mine,none", "+experiment=deep", "seed=0,1")[0] == 0
    composed = [(config.norm.label, config.placement.name, config.model.depth, config.seed) for config in configs]
    assert composed == [(norm, "peri", 3, seed) for norm in ("mine", "none") for seed in (0, 1)]


@pytest.mark.exhaustive
def test_train_multirun_over_configs_in_config_dir(run_command: Command, overrides: list[str], tmp_path: Path) -> None:
    short = [*overrides, "train.steps=1", f"results_dir={tmp_path / 'kept'}"]
    code, _, err = run_command("train", "-m", "-cd=own", "-cn=myrun", *short, "norm=mine,none", "+experiment=deep")
    assert code == 0, err
    rows = json.loads(run_command("summarize", "kept", "--format=json")[1])
    assert sorted((row["norm"], row["placement"], row["depth"]) for row in rows) == [
        ("mine", "peri", 3),
        ("none", "peri", 3),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"own", "other", "kept"}


def test_a_launcher_of_hydra_starts_the_jobs(run_command: Command, overrides: list[str], tmp_path: Path) -> None:
    """With options of Hydra's job, the launcher composes and starts each run; an error is still one line of normlab."""
    launched = ["--multirun", *overrides, "hydra/launcher=basic", "+hydra.job.env_set.PLANT=tree", "seed=0,1"]
    code, out, err = run_command("train", *launched, "train.steps=1")
    assert code == 0, err
    assert len(out.splitlines()) == 2
    rows = json.loads(run_command("summarize", "results", "--format=json")[1])
    assert sorted(row["seed"] for row in rows) == [0, 1]
    for line in out.splitlines():
        (tmp_path / line / "run.json").write_text("no JSON")
    code, out, err = run_command("train", *launched, "train.steps=1")
    assert (code, out) == (2, "")
    assert sum(line.startswith("error: ") and "is damaged" in line for line in err.splitlines()) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"own", "other", "results"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", COMMANDS)
def test_cfg_job_prints_the_config_without_running(command: str, run_command: Command, tmp_path: Path) -> None:
    before = files_below(tmp_path)
    code, out, err = run_command(command, "--cfg", "job", "-cd=own", "-cn=myrun", "+experiment=deep", "seed=3")
    assert (code, err) == (0, "")
    config = OmegaConf.create(out)
    assert (config.norm.name, config.model.depth, config.seed, config.optim.lr) == ("layernorm", 3, 3, 0.002)
    assert run_command(command, "-c", "job", "-p", "optim", "optim=sgd")[1].startswith("# @package optim\nname: sgd\n")
    assert files_below(tmp_path) == before


def test_cfg_job_of_a_grid_prints_each_run(run_command: Command) -> None:
    code, out, _ = run_command("sweep", "norm=rmsnorm,none", "sweep.jobs=2", "--cfg", "job")
    assert code == 0
    printed = [(text.splitlines()[0], OmegaConf.create(text).norm.name) for text in out.split("---\n")]
    assert printed == [("# norm=rmsnorm", "rmsnorm"), ("# norm=none", "none")]


@pytest.mark.parametrize("command", COMMANDS)
def test_version_and_help_are_normlabs(command: str, run_command: Command) -> None:
    assert run_command(command, "--version") == (0, f"normlab {__version__}\n", "")
    for flag in ("--help", "-h") if command != "train" else ():
        code, out, _ = run_command(command, flag)
        assert code == 0
        assert f"normlab {command}" in out
        assert "--results-dir DIR" in out
        assert "--multirun" not in out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["hydra.run.dir", "hydra.output_subdir", "hydra.sweep.subdir"])
def test_folders_of_hydra_are_rejected(option: str, command: str, run_command: Command, tmp_path: Path) -> None:
    before = files_below(tmp_path)
    code, out, err = run_command(command, *SMALL, f"{option}=made")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{option}=made: has no effect" in err
    assert "results_dir=made" in err
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("command", ["sweep", "verify"])
@pytest.mark.parametrize(
    "argument", ["hydra/launcher=basic", "hydra.job.chdir=true", "--hydra-help", "--run", "--config-path=x", "--nope"]
)
def test_options_of_hydras_jobs_are_rejected(argument: str, command: str, run_command: Command) -> None:
    code, out, err = run_command(command, argument)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert argument in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_config_is_a_one_line_error(command: str, run_command: Command) -> None:
    code, _, err = run_command(command, "-cd=own", "-cn=mine")
    assert (code, err.count("\n")) == (2, 1)
    assert "--config-name=mine: no such config; put mine.yaml into --config-dir" in err
    code, _, err = run_command(command, "-cd=own", "experiment=deep")
    assert (code, err.count("\n")) == (2, 1)
    assert "experiment=deep: the defaults list has no experiment; write +experiment=deep to add it" in err


def test_an_option_with_two_dashes_is_an_override(run_command: Command) -> None:
    """The agent of a W&B sweep writes options so by default (`${args}`); flags stay flags."""
    plain = run_command("train", "norm=rmsnorm", "optim.lr=0.01", "seed=3", "--cfg=job")
    assert run_command("train", "--norm=rmsnorm", "--optim.lr=0.01", "--seed=3", "--cfg=job") == plain
    assert (plain[0], "lr: 0.01" in plain[1]) == (0, True)
    assert "optim.lrr=1: optim has no option 'lrr'" in run_command("train", "--optim.lrr=1")[2]


def test_the_folder_of_wandb_sweeps_is_no_config_group(run_command: Command) -> None:
    assert "wandb: lr" not in run_command("train", "--help")[1]
    assert "did you mean 'tracking.wandb'" in run_command("train", "wandb=offline")[2]
