"""A sweep whose runs train in packs: their records equal those of single runs, also after kills."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from compare_runs import differences

from normlab.config.compose import compose_run
from normlab.store.plans import read_plan, sweep_folder
from normlab.store.runs import RunFolder
from normlab.sweeps.files import read_outcomes
from normlab.training.start import train
from support.processes import workers_of

Command = Callable[..., tuple[int, str, str]]
GRID = ["norm=layernorm,rmsnorm", "optim.lr=1e-3,1e30", "seed=0,1"]
"""At the higher rate every run diverges."""
SWEEP = ["sweep", "sweep.name=packed", "sweep.pack=3", *GRID]


def runs_of(results: Path) -> dict[str, RunFolder]:
    return {folder.name: RunFolder(folder) for folder in sorted((results / "runs").glob("*"))}


@pytest.mark.process
def test_each_run_of_a_packed_sweep_has_the_numbers_that_it_has_alone(
    overrides: list[str], run_command: Command, tmp_path: Path
) -> None:
    assert run_command(*SWEEP, *overrides)[0] == 0
    folder = sweep_folder(tmp_path / "results", "packed")
    plan, runs = read_plan(folder), runs_of(tmp_path / "results")
    assert [len(pack.runs) for pack in plan.packs] == [2, 2, 2, 2]
    assert [end.cause for end in read_outcomes(folder)] == ["finished"] * 4
    assert len(runs) == 8
    for pack in plan.packs:
        ids = [job.run_id for job in plan.runs_of(pack)]
        for job in plan.runs_of(pack):
            assert runs[job.run_id].run()["pack"] == {"sweep": "packed", "number": pack.number, "runs": ids}
            alone = train(compose_run([*overrides, *job.overrides, f"results_dir={tmp_path / 'alone'}"]), trackers=[])
            assert runs[job.run_id].state() == alone.state
            rows, expected = runs[job.run_id].rows("train").rows, alone.folder.rows("train").rows
            losses, wanted = ([row["loss"] for row in of] for of in (rows, expected))
            assert losses == pytest.approx(wanted, abs=1e-5, nan_ok=True)
    code, out, _ = run_command("summarize", str(folder), "--by", "norm", "--against", "norm=layernorm", "--format=json")
    assert code == 0
    rows = json.loads(out)
    # At 1e30 every run diverges, and of twelve steps at 1e-3 none has learned: every rate is bad.
    assert [(row["norm"], row["lr"], row["bad_lrs"]) for row in rows] == [
        ("layernorm", 1e-3, [1e-3, 1e30]), ("rmsnorm", 1e-3, [1e-3, 1e30]),
    ]  # fmt: skip
    assert [row["pairs"] for row in rows] == [0, 2]


KILLS = 10


SEARCH = ["norm=layernorm,rmsnorm", "optim.lr=search(1e-4,1e-1)", "sweep.trials=8"]


@pytest.mark.process
@pytest.mark.parametrize(("grid", "steps"), [(GRID, 4000), (SEARCH, 2000)], ids=["grid", "search"])
def test_killed_at_any_time_with_all_its_processes_it_ends_as_if_undisturbed(
    grid: list[str], steps: int, overrides: list[str], tmp_path: Path
) -> None:
    """SIGKILL to the supervisor and its workers, ten times at random; then to the end: every record bit for bit.

    Two packs at once, those of the grid each of two runs that train and two that diverge; killed while they start and
    while they train. A search makes the same trials.
    """
    command = [sys.executable, "-m", "normlab", "sweep", "sweep.name=packed", "sweep.pack=4", *grid, *overrides]
    command += [f"train.steps={steps}", "train.checkpoint_every=50", "deterministic=true", "sweep.jobs=2"]
    subprocess.run([*command, f"results_dir={tmp_path / 'calm'}"], check=True, capture_output=True, timeout=600)
    draws, reached = random.Random(0), [0]
    command.append(f"results_dir={tmp_path / 'wild'}")

    def recorded() -> int:
        return sum(run.size() for run in runs_of(tmp_path / "wild").values())

    for kill in range(KILLS):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(draws.uniform(4, 12))
        # A busy machine may only just start in that time: every second kill waits for progress.
        deadline = time.monotonic() + 300
        while kill % 2 and recorded() <= reached[-1] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None, f"over after {len(reached)} kills"
        for pid in [process.pid, *workers_of(tmp_path / "wild")]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        reached.append(recorded())
    assert len(set(reached)) > KILLS // 2, "it made hardly any progress between two kills"
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    calm, wild = runs_of(tmp_path / "calm"), runs_of(tmp_path / "wild")
    assert calm.keys() == wild.keys()
    assert {name: differences(calm[name].path, wild[name].path) for name in calm} == {name: [] for name in calm}
