"""TensorBoard's own reader finds each step of a run once."""

from __future__ import annotations

from pathlib import Path

import pytest

from normlab.store.runs import RunFolder
from support.wandb_runs import call, overrides_of

pytestmark = pytest.mark.network


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_written_while_the_run_trains_and_again_later(tmp_path: Path) -> None:
    overrides = overrides_of(tmp_path, "tracking.wandb=off", "tracking.also=[tensorboard]")
    done = call(tmp_path, None, "train", *overrides)
    assert done.returncode == 0, done.stderr
    (folder,) = map(RunFolder, (tmp_path / "results" / "runs").iterdir())
    assert "`tensorboard --logdir " in done.stderr.splitlines()[-1]
    expected = [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in folder.rows("train").rows]
    assert scalars(folder.path, "train/loss") == expected
    assert [step for step, _ in scalars(folder.path, "resid/resid_rms/L01")] == [0, 15, 30, 45]
    assert call(tmp_path, None, "sync", "--to", "tensorboard", "results").returncode == 0
    assert scalars(folder.path, "train/loss") == expected
