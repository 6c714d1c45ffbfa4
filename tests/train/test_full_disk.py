"""A disk that fills up during a run: the old state is intact, the reason is printed, and the run can resume."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from resuming import OVERRIDES, Command, differences, steps_of

from normlab.store.query import find_runs
from normlab.store.runs import RunFolder
from normlab.tracking.base import Row
from normlab.tracking.console import Console
from normlab.train import checkpoint, start


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill the disk up to `leave` free bytes."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        while (free := shutil.disk_usage(disk).free) > leave:
            try:
                os.write(file.fileno(), bytes(min(free - leave, 1 << 16)))
            except OSError:
                break
    return filler


def the_run(disk: Path) -> RunFolder:
    (entry,) = find_runs(disk / "results")
    return entry.folder


def test_disk_full_in_a_checkpoint_keeps_older_ones(disk: Path, reference: Path, run_command: Command) -> None:
    arguments = ["train", *OVERRIDES, f"results_dir={disk / 'results'}"]
    size = sum(path.stat().st_size for path in (reference / "checkpoints" / "step_00000016").iterdir())
    filler = fill(disk, leave=int(2.5 * size))
    code, _, err = run_command(*arguments)
    assert code == 2
    assert "step_00000012: cannot be written" in err.splitlines()[-1]
    assert "older checkpoints are intact; free some space and run the same command again" in err.splitlines()[-1]
    folder = the_run(disk)
    assert [checkpoint.read(folder.path / "checkpoints", step).step for step in steps_of(folder)] == [4, 8]
    assert folder.state() == "failed"
    assert "cannot be written" in folder.status()["error"]
    filler.unlink()
    assert run_command(*arguments)[0] == 0
    assert differences(reference, folder.path) == []


def test_disk_full_in_the_first_checkpoint_is_reported(disk: Path, reference: Path, run_command: Command) -> None:
    size = sum(path.stat().st_size for path in (reference / "checkpoints" / "step_00000016").iterdir())
    fill(disk, leave=int(0.7 * size))
    code, _, err = run_command("train", *OVERRIDES, f"results_dir={disk / 'results'}")
    assert code == 2
    assert "step_00000004: cannot be written (No space left on device); free some space and" in err.splitlines()[-1]


@pytest.fixture
def fill_at(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the disk full after `step` updates are in the next run's record."""

    def arm(step: int) -> None:
        class Filling(Console):
            def log(self, rows: Sequence[Row]) -> None:
                super().log(rows)
                if rows[-1]["step"] >= step and start.Console is Filling:
                    monkeypatch.setattr(start, "Console", Console)
                    fill(disk)

        monkeypatch.setattr(start, "Console", Filling)

    return arm


@pytest.mark.parametrize("step", [3, 11])
def test_disk_full_in_the_record_is_resumable(
    step: int, disk: Path, reference: Path, run_command: Command, fill_at: Callable[[int], None]
) -> None:
    """The disk fills up before and after the first checkpoint."""
    arguments = ["train", *OVERRIDES, f"results_dir={disk / 'results'}"]
    fill_at(step)
    code, _, err = run_command(*arguments)
    assert code == 2
    assert "cannot be written (No space left on device); free some space and run the same command again" in err
    folder = the_run(disk)
    assert folder.state() in ("failed", "killed")
    assert folder.rows().damaged == 0
    (disk / "filler").unlink()
    assert run_command(*arguments)[0] == 0
    assert differences(reference, folder.path) == []


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 3])
def test_disk_full_in_the_wandb_folder_does_not_change_the_run(
    step: int, disk: Path, reference: Path, run_command: Command, fill_at: Callable[[int], None], tmp_path: Path
) -> None:
    """The disk fills up before the start or in the middle: the run equals one with W&B off."""
    folder = tmp_path / "results" / "runs" / reference.name
    folder.mkdir(parents=True)
    (folder / "wandb").symlink_to(disk)
    if step:
        fill_at(step)
    else:
        fill(disk)
    code, _, err = run_command("train", *OVERRIDES, "tracking.wandb=offline", f"results_dir={tmp_path / 'results'}")
    assert code == 0
    if not step:
        assert "No space left on device. The local record has everything; what W&B has can be sent later" in err
    (folder / "wandb").unlink()
    assert differences(reference, folder) == []


def test_disk_full_while_copying_a_plugin_is_resumable(disk: Path, run_command: Command, tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text('"""Nothing."""\n' + "# much of it\n" * 40_000)
    arguments = ["train", *OVERRIDES, f"results_dir={disk / 'results'}", f"plugins=[{plugin}]"]
    filler = fill(disk, leave=200_000)
    code, _, err = run_command(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert "00_mine.py: cannot be written (No space left on device); free some space and run" in err
    filler.unlink()
    assert run_command(*arguments)[0] == 0
    assert the_run(disk).state() == "finished"


def test_read_only_disk_can_be_read_and_is_reported(
    disk: Path, run_command: Command, interrupt: Callable[..., None]
) -> None:
    arguments = ["train", *OVERRIDES, f"results_dir={disk / 'results'}"]
    interrupt(9)
    run_command(*arguments)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    code, out, _ = run_command("summarize", str(disk / "results"))
    assert code == 0
    assert "interrupted" in out
    assert run_command("sample", "batchnorm", "--tokens=3", "--results-dir", str(disk / "results"))[0] == 0
    for more in ([], ["seed=1"]):
        code, out, err = run_command(*arguments, *more)
        assert (code, err.count("\n")) == (2, 1)
        assert "(Read-only file system); make it writable, or choose another results_dir" in err
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert run_command(*arguments)[0] == 0
