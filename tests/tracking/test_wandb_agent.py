"""`wandb sweep` with the example of conf/wandb, and `wandb agent`, against an imitation of W&B's server."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from normlab.config.compose import compose_grid
from normlab.store.query import find_runs
from support.processes import wait_for
from support.small_run import small_run
from support.wandb_runs import ROOT, environment, followers
from support.wandb_server import Server

SWEEP = yaml.safe_load((ROOT / "conf/wandb/lr.yaml").read_text())


def test_the_parameters_of_the_example_are_options() -> None:
    """A typo in the example would show in W&B only, as failed runs."""
    values = {
        option: parameter.get("values") or [parameter.get(key) for key in ("value", "min", "max") if key in parameter]
        for option, parameter in SWEEP["parameters"].items()
    }
    configs = compose_grid([f"--{option}={','.join(map(str, each))}" for option, each in values.items()])
    assert {(config.norm.name, config.optim.lr, config.train.steps) for config in configs} == {
        (norm, lr, 500) for norm in ("layernorm", "rmsnorm") for lr in (0.0001, 0.01)
    }


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with this `normlab` and this `wandb`."""
    script = tmp_path / "bin" / "normlab"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m normlab "$@"\n')
    script.chmod(0o755)
    return f"{script.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"


def wandb(home: Path, path: str, server: Server, *arguments: str) -> str:
    """Run a command of W&B, and return its output."""
    done = subprocess.run(
        ["wandb", *arguments], env=environment(home, server) | {"PATH": path}, cwd=home, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.network
def test_the_runs_of_an_agent_arrive_with_the_metric_of_the_sweep(tmp_path: Path, path: str, server: Server) -> None:
    config = copy.deepcopy(SWEEP)
    small = dict(text.split("=", 1) for text in small_run(tmp_path / "results") if "tracking" not in text)
    config["parameters"] |= {option: {"value": value} for option, value in small.items()}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(config))
    assert "wandb agent me/normlab/abc" in wandb(tmp_path, path, server, "sweep", "sweep.yaml")

    # The server chooses the values. The last two runs are one run of normlab, which has been trained already.
    trials = [("layernorm", 0.001), ("rmsnorm", 0.01), ("rmsnorm", 0.01)]
    for number, (norm, lr) in enumerate(trials):
        values: dict[str, Any] = small | {"norm": norm, "optim.lr": lr}
        arguments = {option: {"value": value} for option, value in values.items()}
        server.commands.append(
            {"type": "run", "run_id": f"trial{number}", "program": config["program"], "args": arguments}
        )
    output = wandb(tmp_path, path, server, "agent", "--count", "3", "me/normlab/abc")
    wait_for(lambda: not followers(tmp_path))

    trained = {(run.config.norm.name, run.config.optim.lr): run for run in find_runs(tmp_path / "results")}
    assert len(trained) == 2, output
    metric = config["metric"]["name"]
    for number, trial in enumerate(trials):
        run = server.runs[f"trial{number}"]
        assert (run.known["sweep"], run.exit_code) == ("abc", 0), output
        assert run.summary[metric] == pytest.approx(trained[trial].status.val_loss)
        uploaded = json.loads(run.known["config"])
        # W&B keeps the value of the sweep for an option of its name.
        assert (uploaded["norm"]["value"], uploaded["optim"]["value"]["lr"]) == trial
    assert "warning" not in output.lower()
