"""A disk that fills up while a run writes to it: the old state intact, the reason named, the run resumable."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from normlab.store.query import find_runs
from normlab.store.runs import RunFolder
from normlab.tracking.console import Console, MetricsRow
from normlab.training import checkpoint
from normlab.training import start as training
from support.disk import fill
from support.run_folders import OVERRIDES, Command, differences, steps_of


def the_run(disk: Path) -> RunFolder:
    (entry,) = find_runs(disk / "results")
    return entry.folder


def test_disk_full_in_a_checkpoint(disk: Path, reference: Path, run_command: Command) -> None:
    overrides = ["train", *OVERRIDES, f"results_dir={disk / 'results'}"]
    size = sum(path.stat().st_size for path in (reference / "checkpoints" / "step_00000016").iterdir())
    filler = fill(disk, leave=int(2.5 * size))
    code, _, err = run_command(*overrides)
    assert code == 2
    assert "step_00000012: cannot be written" in err.splitlines()[-1]
    assert "older checkpoints are intact; free some space and run the same command again" in err.splitlines()[-1]
    folder = the_run(disk)
    assert [checkpoint.read(folder.path / "checkpoints", step).step for step in steps_of(folder)] == [4, 8]
    assert folder.state() == "failed"
    assert "cannot be written" in folder.status()["error"]
    filler.unlink()
    assert run_command(*overrides)[0] == 0
    assert differences(reference, folder.path) == []


@pytest.fixture
def fill_at(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have the next run find its disk full once `step` updates are in its record."""

    def arm(step: int) -> None:
        class Filling(Console):
            def log(self, rows: Sequence[MetricsRow]) -> None:
                super().log(rows)
                if rows[-1]["step"] >= step and training.Console is Filling:
                    monkeypatch.setattr(training, "Console", Console)
                    fill(disk)

        monkeypatch.setattr(training, "Console", Filling)

    return arm


def test_disk_full_in_the_record(
    disk: Path, reference: Path, run_command: Command, fill_at: Callable[[int], None]
) -> None:
    overrides = ["train", *OVERRIDES, f"results_dir={disk / 'results'}"]
    fill_at(11)
    code, _, err = run_command(*overrides)
    assert code == 2
    assert "cannot be written (No space left on device); free some space and run the same command again" in err
    folder = the_run(disk)
    assert folder.state() in ("failed", "killed")
    assert folder.rows().damaged == 0
    (disk / "filler").unlink()
    assert run_command(*overrides)[0] == 0
    assert differences(reference, folder.path) == []


def test_read_only_disk(disk: Path, run_command: Command, interrupt: Callable[..., None]) -> None:
    overrides = ["train", *OVERRIDES, f"results_dir={disk / 'results'}"]
    interrupt(9)
    run_command(*overrides)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    code, out, _ = run_command("summarize", str(disk / "results"))
    assert code == 0
    assert "interrupted" in out
    assert run_command("sample", "batchnorm", "--tokens=3", "--results-dir", str(disk / "results"))[0] == 0
    for more in ([], ["seed=1"]):
        code, out, err = run_command(*overrides, *more)
        assert (code, err.count("\n")) == (2, 1)
        assert "(Read-only file system); make " in err
        assert " writable, or choose another results_dir" in err
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert run_command(*overrides)[0] == 0
