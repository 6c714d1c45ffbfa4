"""The workspace of a sweep at W&B, in the model of wandb-workspaces and at an imitation of W&B's server."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import Record, write_sweep

from normlab.cli import main
from normlab.tracking.uploads import Upload
from support.wandb_runs import call
from support.wandb_server import Server

READ_BACK = """
import json, sys
from wandb_workspaces import workspaces
view = workspaces.Workspace.from_url(sys.argv[1])
panels = [(section.name, type(panel).__name__, vars(panel)) for section in view.sections for panel in section.panels]
print(json.dumps({"name": view.name, "filters": view.runset_settings.filters, "panels": panels,
    "groupby": [key.name for key in view.runset_settings.groupby]}, default=lambda value: getattr(value, "name", None)))
"""
"""Prints the workspace at an address as the library reads it."""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Four runs: two norms at two learning rates."""
    records = [Record(norm=norm, lr=lr, steps=200) for norm in ("layernorm", "rmsnorm") for lr in (1e-3, 3e-3)]
    return write_sweep(tmp_path / "results", "first", records)


def value(config: Any, key: str) -> Any:
    """Return the value of a key of W&B's config, where each top-level entry has its value below `value`."""
    top, *parts = key.split(".")
    config = config[top]["value"]
    for part in parts:
        config = config[part]
    return config


@pytest.mark.network
def test_a_workspace_shows_the_numbers_that_the_runs_have(sweep: Path, tmp_path: Path, server: Server) -> None:
    assert call(tmp_path, server, "sync", "first").returncode == 0
    done = [call(tmp_path, server, "compare", "first", "--wandb") for _ in range(2)]
    assert [each.returncode for each in done] == [0, 0], done
    assert not any("wandb" in each.stderr for each in done)  # no output of W&B's own
    assert (sweep / "compare.html").is_file()

    # The second call has updated the view of the first.
    (address,) = {each.stdout.splitlines()[-1] for each in done}
    (saved,) = server.views
    assert address == f"{server.login['WANDB_BASE_URL']}/me/normlab?nw={saved['name'][3:-2]}"

    printed = call(tmp_path, server, "-c", READ_BACK, address, program=(sys.executable,))
    assert printed.returncode == 0, printed.stderr
    view = json.loads(printed.stdout)
    runs = list(server.runs.values())
    assert (view["name"], view["filters"]) == ("first", f'Metric("ID") in {list(server.runs)}')
    configs = [json.loads(run.known["config"]) for run in runs]
    assert view["groupby"] == ["norm.name", "optim.lr"]
    assert len({tuple(value(config, key) for key in view["groupby"]) for config in configs}) == 4

    keys = {key for run in runs for row in run.rows for key in row}
    lines = [panel for _, kind, panel in view["panels"] if kind == "LinePlot"]
    shown = [key for panel in lines for key in keys if re.fullmatch(panel["metric_regex"] or panel["y"][0], key)]
    assert {"train/loss", "eval/loss", "resid/resid_rms/L01"} <= set(shown)
    assert len(shown) == len(set(shown))
    finals = {kind: panel for section, kind, panel in view["panels"] if section == "Final losses"}
    assert (finals["BarPlot"]["metrics"], finals["BarPlot"]["groupby"]) == (["val_loss"], "norm.name")
    assert (finals["ScatterPlot"]["x"], finals["ScatterPlot"]["y"]) == ("optim.lr", "val_loss")
    assert all("val_loss" in run.summary for run in runs)


def test_errors_leave_the_page(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(sweep.parents[2])
    assert error(capsys, "first") == "--wandb: no run of first was sent to W&B; `normlab sync` sends them"
    assert (sweep / "compare.html").is_file()
    pretend_that_runs_were_sent("one", "two")
    assert "several projects (me/one, me/two)" in error(capsys, "first")
    pretend_that_runs_were_sent("one", "one")
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert "not installed; pip install 'wandb-workspaces" in error(capsys, "first")


@pytest.mark.parametrize("arguments", [[], ["first", "first"], ["first", "--where", "seed=0"], ["results"]])
def test_a_workspace_is_that_of_one_sweep(
    arguments: list[str], sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(sweep.parents[2])
    assert "one sweep" in error(capsys, *arguments) or "name a sweep" in error(capsys, *arguments)


def pretend_that_runs_were_sent(*projects: str) -> None:
    for run, project in zip(sorted(Path("results/runs").iterdir()), projects, strict=False):
        Upload(run.name, project, "me").write(run, "online")


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the line on stderr of a compare that fails."""
    with pytest.raises(SystemExit) as exit:
        main(["compare", *arguments, "--wandb"])
    assert exit.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("error: ")
