"""A study that is killed five times, with everything it has started, ends with the report of an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

STUDY = """
from normlab.studies.base import AtMost, Claim, Grid, Picture, Study, Within, register_study
from normlab.studies.estimators import Share, difference

register_study(
    Study(
        "tiny",
        "Do two norms differ?",
        {"small": [Grid("norms", "model=gpt2_nano model.depth=1 model.width=8 model.context=8 data=files "
            "data.path=text.txt data.tokenizer=chars norm=rmsnorm,layernorm optim.lr=1e-3,3e-3,1e-2 train.steps=60 "
            "eval.sequences=2 seed=range(4) train.checkpoint_every=10 sweep.pack=4")]},
        [Claim("close", "The losses are equal.", difference("norm=rmsnorm", "norm=layernorm"), Within(-1.0, 1.0))],
        [Claim("runs", "No run diverges.", Share("norm=rmsnorm", states=("diverged",)), AtMost(0.9))],
        [Picture("lr", {"color": "norm"})],
    )
)
"""
COMMAND = [sys.executable, "-m", "normlab", "study", "run", "tiny", "plugins=[mine.py]", "tracking.wandb=off"]


def completed(folder: Path) -> int:
    """Return the number of runs that have finished."""
    return sum('"finished"' in path.read_text() for path in folder.glob("results/runs/*/status.json"))


MOMENTS: dict[str, Callable[[Path], bool]] = {
    "the plan is written": lambda folder: any(folder.glob("results/sweeps/*/plan.json")),
    "a run has rows": lambda folder: any(path.stat().st_size for path in folder.glob("results/runs/*/metrics.jsonl")),
    "a pack is complete": lambda folder: completed(folder) >= 4,
    "half of the runs are complete": lambda folder: completed(folder) >= 12,
    "all runs are complete": lambda folder: completed(folder) >= 24,
}


def kill_all(folder: Path) -> None:
    """Kill every process that works in the folder."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd") == str(folder):
                os.kill(int(process.name), signal.SIGKILL)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "results/studies/tiny").iterdir()}


@pytest.mark.process
def test_a_study_that_is_killed_five_times_ends_with_the_same_report(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    (whole / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    (whole / "mine.py").write_text(STUDY)
    shutil.copytree(whole, killed)
    subprocess.run(COMMAND, cwd=whole, check=True, capture_output=True, timeout=600)
    for moment, is_reached in MOMENTS.items():
        process = subprocess.Popen(
            COMMAND, cwd=killed, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not is_reached(killed):
            assert process.poll() is None, f"the study ended before the moment: {moment}"
            time.sleep(0.01)
        kill_all(killed)
        assert process.wait(60) == -signal.SIGKILL, moment
    subprocess.run(COMMAND, cwd=killed, check=True, capture_output=True, timeout=600)
    assert files_of(killed) == files_of(whole)
