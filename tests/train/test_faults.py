"""Damaged, missing, foreign and malicious checkpoints are reported and never used; a run never restarts silently."""

import contextlib
import hashlib
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normlab
from normlab.base.errors import StoreError
from normlab.store.format import RECORD_VERSION, with_checksum
from normlab.store.runs import RunFolder
from normlab.training import checkpoint
from normlab.training.training_run import TrainingRun
from support.run_folders import OVERRIDES, Command, Train, contents, damage, differences, steps_of

NEWEST = "checkpoints/step_00000011"
"""The checkpoint of a run that `interrupt(9)` stopped; the one before is of step 8."""
HASH = "damaged (its size or SHA-256 differs from the manifest)"
FRESH = "or start another run beside it with run.fresh=true"


def delete_checkpoints(folder: RunFolder) -> None:
    shutil.rmtree(folder.path / "checkpoints")


def delete_status_and_checkpoints(folder: RunFolder) -> None:
    delete_checkpoints(folder)
    (folder.path / "status.json").unlink()


def delete_run_json(folder: RunFolder) -> None:
    (folder.path / "run.json").unlink()


def damage_all_checkpoints(folder: RunFolder) -> None:
    for step in steps_of(folder):
        damage(folder, step)


def insert_a_row(folder: RunFolder) -> None:
    folder.metrics_path.write_bytes(b"{}\n" + folder.metrics_path.read_bytes())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            delete_checkpoints,
            "{run}: the run took steps, and its checkpoints are missing (`normlab rm --checkpoints` deletes "
            "them, `normlab share` leaves them out); put them back, " + FRESH,
        ),
        (
            delete_status_and_checkpoints,
            "{run}: the run took steps, and its checkpoints are missing (`normlab rm --checkpoints` deletes "
            "them, `normlab share` leaves them out); put them back, " + FRESH,
        ),
        (
            delete_run_json,
            "{run}/run.json: is missing, but the folder has other files of a run; restore a copy, " + FRESH,
        ),
        (
            damage_all_checkpoints,
            f"every checkpoint of this run is damaged: {{checkpoints}}/step_00000011/state.safetensors: {HASH}; "
            f"{{checkpoints}}/step_00000008/state.safetensors: {HASH}; restore a copy, {FRESH}",
        ),
        (
            insert_a_row,
            "{run}/metrics.jsonl: has {total} bytes where the checkpoint says that a row ends at byte {bytes}; put the "
            "file back, or run.fresh=true starts another run beside this one",
        ),
    ],
)
def test_run_that_cannot_resume_fails_and_stays_unchanged(
    change: Callable[[RunFolder], None],
    message: str,
    train: Train,
    command: Command,
    interrupt: Callable[..., None],
) -> None:
    interrupt(9)
    folder = train()
    size = folder.metrics_path.stat().st_size
    change(folder)
    before = contents(folder.path)
    places = {"run": folder.path, "checkpoints": folder.path / "checkpoints", "bytes": size}
    places |= {"total": folder.size()}
    assert command() == (2, "", f"error: {message.format(**places)}\n")
    assert contents(folder.path) == before


def damage_the_newest(folder: RunFolder) -> None:
    damage(folder, 11)


def change_the_version(folder: RunFolder) -> None:
    path = folder.path / NEWEST / "manifest.json"
    path.write_text(path.read_text().replace(f'"version": {RECORD_VERSION}', '"version": 9'))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (damage_the_newest, f"state.safetensors: {HASH}"),
        (change_the_version, "manifest.json: damaged (its checksum does not match)"),
    ],
)
def test_resume_uses_the_newest_intact_checkpoint(
    change: Callable[[RunFolder], None],
    warning: str,
    train: Train,
    command: Command,
    run_command: Command,
    reference: Path,
    interrupt: Callable[..., None],
) -> None:
    interrupt(9)
    folder = train()
    change(folder)
    sampled, out, err = run_command("sample", str(folder.path), "--tokens=3")
    assert (sampled, bool(out), err.count("\n")) == (0, True, 1)
    assert f"{warning}; using the previous checkpoint" in err
    code, _, err = command()
    assert code == 0
    assert err.splitlines()[0] == f"warning: {folder.path / NEWEST}/{warning}; resuming from the previous checkpoint"
    assert "resumes from step 8" in err.splitlines()
    assert differences(reference, folder.path) == []


@pytest.mark.process
def test_unreadable_checkpoint_is_neither_damaged_nor_deleted(
    train: Train, run_without_root_privileges: Command, interrupt: Callable[..., None]
) -> None:
    interrupt(9)
    folder = train()
    before = contents(folder.path)
    state = folder.path / "checkpoints" / "step_00000011" / "state.safetensors"
    mode = state.stat().st_mode
    state.chmod(0)
    for arguments in (("train", *OVERRIDES, f"results_dir={folder.path.parents[1]}"), ("sample", str(folder.path))):
        code, out, err = run_without_root_privileges(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert "step_00000011/state.safetensors: cannot be read (Permission denied); make it readable, or" in err
    state.chmod(mode)
    assert contents(folder.path) == before


def test_checkpoint_of_another_run_fails(train: Train, command: Command, interrupt: Callable[..., None]) -> None:
    interrupt(9)
    folder = train()
    interrupt(9)
    other = train("seed=1")
    shutil.rmtree(folder.path / "checkpoints")
    shutil.copytree(other.path / "checkpoints", folder.path / "checkpoints")
    before = contents(folder.path)
    code, out, err = command()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"step_00000011/manifest.json: is of run '{other.run_id}', not of run {folder.run_id}; put back" in err
    assert contents(folder.path) == before


class FileCreator:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("place", ["state.safetensors", "meta.json"])
def test_pickle_in_a_checkpoint_does_not_execute(
    place: str, train: Train, command: Command, reference: Path, interrupt: Callable[..., None], tmp_path: Path
) -> None:
    interrupt(9)
    folder = train()
    planted = tmp_path / "executed"
    (folder.path / NEWEST / place).write_bytes(pickle.dumps(FileCreator(planted)))
    _write_manifest(folder.path / NEWEST)
    code, _, err = command()
    assert not planted.exists()
    assert "step_00000011: damaged (its files hold no checkpoint); resuming from" in err
    assert code == 0
    assert differences(reference, folder.path) == []


def _write_manifest(path: Path) -> None:
    """Write a manifest that matches a modified checkpoint."""
    parts = {}
    for name in ("state.safetensors", "meta.json"):
        content = (path / name).read_bytes()
        parts[name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (path / "manifest.json").write_bytes(with_checksum({"step": 11, "files": parts}))


def test_damaged_rows_are_reported(train: Train, command: Command, interrupt: Callable[..., None]) -> None:
    interrupt(9)
    folder = train()
    content = folder.metrics_path.read_bytes()
    at = content.index(b'"step":5')
    folder.metrics_path.write_bytes(content[:at] + b"??" + content[at + 2 :])
    code, _, err = command()
    assert code == 0
    assert "metrics.jsonl: damaged rows: 1; the run resumes from an intact checkpoint" in err.splitlines()[0]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        metrics = normlab.load(folder.path).metrics
    assert sorted(set(range(16)) - set(metrics[metrics["kind"] == "train"]["step"])) == [5]
    assert "metrics.jsonl: damaged rows, left out: 1" in stderr.getvalue()


def test_damaged_checkpoints_do_not_replace_intact_ones(
    train: Train, command: Command, interrupt: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(9)
    folder = train()
    assert steps_of(folder) == [8, 11]
    damage(folder, 11)
    kept, save = [], checkpoint.save

    def saving(*arguments: Any, **options: Any) -> None:
        save(*arguments, **options)
        kept.append(steps_of(folder))

    monkeypatch.setattr(checkpoint, "save", saving)
    assert command()[0] == 0
    assert kept == [[8, 12], [12, 16]]


def test_save_deletes_the_temporary_folder_of_a_killed_save(tmp_path: Path) -> None:
    (tmp_path / ".step_00000003.tmp").mkdir()
    (tmp_path / ".step_00000003.tmp" / "state.safetensors").write_bytes(b"half")
    checkpoint.save(tmp_path, 4, {"x": torch.zeros(4)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_all_files_of_a_checkpoint_have_the_same_mode(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 4, {"x": torch.zeros(4)}, {})
    modes = {path.stat().st_mode for path in (tmp_path / "step_00000004").iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("write", ["write_rows", "save"])
def test_moved_folder_ends_its_run_which_resumes_when_it_is_put_back(
    write: str, train: Train, command: Command, reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, moved, method = tmp_path / "results" / "runs", tmp_path / "moved", getattr(TrainingRun, write)

    def move_before(run: TrainingRun, *arguments: Any) -> None:
        if run.recorded[0].step >= 6 and not moved.exists():
            runs.rename(moved)
            run.folder.path.mkdir(parents=True)  # as another process would
            (run.folder.path / "lock").touch()
        method(run, *arguments)

    monkeypatch.setattr(TrainingRun, write, move_before)
    with pytest.raises(StoreError, match="was moved, or its lock file deleted"):
        train()
    assert [Path(name).name for name in contents(runs)] == ["lock"]
    monkeypatch.undo()
    shutil.rmtree(runs)
    moved.rename(runs)
    assert command()[0] == 0
    (folder,) = runs.iterdir()
    assert differences(reference, folder) == []
