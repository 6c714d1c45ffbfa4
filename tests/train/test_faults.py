"""Damaged, missing, foreign and malicious checkpoints are reported and never used; a run never restarts silently."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import normlab
from normlab.errors import StoreError
from normlab.store.format import RECORD_VERSION, with_checksum
from normlab.store.query import find_runs
from normlab.store.runs import RunFolder
from normlab.training import checkpoint
from normlab.training.training_run import TrainingRun
from support.run_folders import OVERRIDES, Command, Train, contents, damage, differences, steps_of

NEWEST = "checkpoints/step_00000011"
"""The checkpoint of a run that `interrupt(9)` stopped; the one before is of step 8."""
HASH = "damaged (its size or SHA-256 differs from the manifest)"
FRESH = "or start another run beside it with run.fresh=true"
PREVIOUS = "resuming from the previous checkpoint"


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            delete_checkpoints,
            "{checkpoints}: the checkpoint of step 11 is missing and there is no other; put it back, " + FRESH,
        ),
        (
            delete_status_and_checkpoints,
            "{run}: the run took steps, and has neither status.json nor a checkpoint; put them back, " + FRESH,
        ),
        (
            delete_run_json,
            "{run}/run.json: is missing, but the folder has checkpoints and metrics.jsonl and status.json of a run; "
            "restore a copy, " + FRESH,
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


def delete_the_newest(folder: RunFolder) -> None:
    shutil.rmtree(folder.path / NEWEST)


def rename_a_checkpoint(folder: RunFolder) -> None:
    checkpoints = folder.path / "checkpoints"
    shutil.copytree(checkpoints / "step_00000008", checkpoints / "step_00000012")


def write_a_file_in_place_of_a_checkpoint(folder: RunFolder) -> None:
    (folder.path / "checkpoints" / "step_00000012").touch()


@pytest.mark.parametrize(
    ("change", "warning", "step"),
    [
        (
            damage_the_newest,
            f"{{checkpoints}}/step_00000011/state.safetensors: {HASH}; {PREVIOUS}",
            8,
        ),
        (
            change_the_version,
            "{checkpoints}/step_00000011/manifest.json: damaged (its checksum does not match); " + PREVIOUS,
            8,
        ),
        (delete_the_newest, "{checkpoints}: the checkpoint of step 11 is missing; resuming from that of step 8", 8),
        (rename_a_checkpoint, "{checkpoints}/step_00000012: holds the checkpoint of step 8; " + PREVIOUS, 11),
        (
            write_a_file_in_place_of_a_checkpoint,
            "{checkpoints}/step_00000012: damaged or incomplete "
            "({checkpoints}/step_00000012/manifest.json: Not a directory); " + PREVIOUS,
            11,
        ),
    ],
)
def test_resume_uses_the_newest_intact_checkpoint(
    change: Callable[[RunFolder], None],
    warning: str,
    step: int,
    train: Train,
    command: Command,
    reference: Path,
    interrupt: Callable[..., None],
) -> None:
    interrupt(9)
    folder = train()
    change(folder)
    code, _, err = command()
    assert code == 0
    assert err.splitlines()[0] == f"warning: {warning.format(checkpoints=folder.path / 'checkpoints')}"
    assert f"resumes from step {step}" in err.splitlines()
    assert differences(reference, folder.path) == []


@pytest.mark.parametrize("left", ["status.json", "metrics.jsonl"])
def test_partial_record_without_run_json_fails(left: str, train: Train, command: Command) -> None:
    folder = train()
    shutil.rmtree(folder.path / "checkpoints")
    for name in {"run.json", "status.json", "metrics.jsonl"} - {left}:
        (folder.path / name).unlink()
    before = contents(folder.path)
    code, out, err = command()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"run.json: is missing, but the folder has {left} of a run" in err
    assert contents(folder.path) == before
    code, out, err = command("run.fresh=true")  # as the message says
    assert code == 0
    assert contents(folder.path) == before


@pytest.mark.process
@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"x":' * 2000 + b"1" + b"}" * 2000], ids=["lists", "objects"])
@pytest.mark.parametrize("place", ["manifest.json", "meta.json"])
def test_deeply_nested_json_is_damage(
    place: str, content: bytes, train: Train, command: Command, run_command: Command, interrupt: Callable[..., None]
) -> None:
    """Nested deeper than Python's stack, or than the limit of the parser."""
    interrupt(9)
    folder = train()
    path = folder.path / "checkpoints" / "step_00000011"
    (path / place).write_bytes(content)
    if place == "meta.json":
        _write_manifest(path)
    message = "step_00000011: damaged (its files hold no checkpoint)"
    code, _, err = run_command("sample", str(folder.path), "--tokens=3")
    assert (code, err.count("\n")) == (0, 1)
    assert message in err
    code, _, err = command()
    assert code == 0
    assert f"{message}; resuming from the previous checkpoint" in err
    (folder.path / "tokenizer.json").write_bytes(content)
    code, out, err = run_command("sample", str(folder.path), "--tokens=3")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "tokenizer.json: is damaged (it holds no tokenizer: " in err


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


def test_advice_for_a_damaged_status_works_without_checkpoints(
    train: Train, command: Command, interrupt: Callable[..., None]
) -> None:
    interrupt(9)
    folder = train()
    shutil.rmtree(folder.path / "checkpoints")
    status = folder.path / "status.json"
    status.write_text("x")
    code, _, err = command()
    assert code == 2
    assert "delete this one file and the same `normlab train` resumes from the last checkpoint; where there is" in err
    status.unlink()
    before = contents(folder.path)
    assert "another run beside it with run.fresh=true" in command()[2]
    assert command("run.fresh=true")[0] == 0  # as both messages say
    assert contents(folder.path) == before


@pytest.mark.parametrize("override", ["model.depth=3", "seed=1"])
def test_checkpoint_of_another_run_fails(
    override: str, train: Train, command: Command, interrupt: Callable[..., None]
) -> None:
    interrupt(9)
    folder = train()
    interrupt(9)
    other = train(override)
    shutil.rmtree(folder.path / "checkpoints")
    shutil.copytree(other.path / "checkpoints", folder.path / "checkpoints")
    before = contents(folder.path)
    code, out, err = command()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"the checkpoint of step 11 is of run {other.run_id}; restore this run's own, or" in err
    assert contents(folder.path) == before


def _torch_file(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


class FileCreator:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


@pytest.mark.process
@pytest.mark.parametrize("dump", [pickle.dumps, _torch_file])
@pytest.mark.parametrize(
    "place",
    ["checkpoints/step_00000011/state.safetensors", "checkpoints/step_00000011/meta.json",
     "checkpoints/step_00000011/manifest.json", "run.json", "status.json", "metrics.jsonl", "tokenizer.json"],
)  # fmt: skip
def test_pickle_instead_of_a_file_does_not_execute(
    place: str,
    dump: Callable[[object], bytes],
    train: Train,
    command: Command,
    run_command: Command,
    reference: Path,
    interrupt: Callable[..., None],
    tmp_path: Path,
) -> None:
    interrupt(9)
    folder = train()
    planted = tmp_path / "executed"
    (folder.path / place).write_bytes(dump(FileCreator(planted)))
    if place.endswith(("state.safetensors", "meta.json")):
        _write_manifest(folder.path / "checkpoints" / "step_00000011")
    for arguments in (("summarize", str(folder.path)), ("sample", str(folder.path), "--tokens=1")):
        run_command(*arguments)
    before = contents(folder.path)
    code, _, err = command()
    assert not planted.exists()
    if place.startswith("checkpoints"):
        assert "step_00000011: damaged (its files hold no checkpoint); resuming from" in err
    if place.startswith(("checkpoints", "tokenizer")):  # an older checkpoint is used; the tokenizer is written again
        assert code == 0
        assert differences(reference, folder.path) == []
    else:
        assert (code, err.count("\n")) == (2, 1)
        assert f"{place}: is damaged" in err or f"{place}: has {len(before[place])} bytes where the checkpoint" in err
        assert contents(folder.path) == before


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


@pytest.mark.parametrize("version", [-1, 0, 1.5, True, None, "1", [1]])
def test_manifest_without_a_valid_version_is_damage(version: object, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 4, {"x": torch.zeros(4)}, {})
    path = tmp_path / "step_00000004" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
    with pytest.raises(StoreError, match=r"every checkpoint of this run is damaged: .*manifest\.json: damaged"):
        checkpoint.read_newest(tmp_path)


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


def test_missing_meta_fields_fail(train: Train, command: Command, interrupt: Callable[..., None]) -> None:
    interrupt(9)
    folder = train()
    path = folder.path / "checkpoints" / "step_00000011"
    meta = json.loads((path / "meta.json").read_text())
    for content in ({**meta, "progress": 3}, {**meta, "progress": {"mood": "fine"}}, {"progress": meta["progress"]}):
        (path / "meta.json").write_text(json.dumps(content))
        _write_manifest(path)
        code, _, err = command()
        assert code == 2
        assert "the checkpoint of step 11 has no complete meta.json" in err.splitlines()[0]


def test_save_deletes_the_temporary_folder_of_a_killed_save(tmp_path: Path) -> None:
    (tmp_path / ".step_00000003.tmp").mkdir()
    (tmp_path / ".step_00000003.tmp" / "state.safetensors").write_bytes(b"half")
    checkpoint.save(tmp_path, 4, {"x": torch.zeros(4)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000004"]


def test_all_files_of_a_checkpoint_have_the_same_mode(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 4, {"x": torch.zeros(4)}, {})
    modes = {path.stat().st_mode for path in (tmp_path / "step_00000004").iterdir()}
    assert len(modes) == 1


def test_sample_reports_a_damaged_checkpoint(
    train: Train, run_command: Command, interrupt: Callable[..., None]
) -> None:
    interrupt(9)
    folder = train()
    damage(folder, steps_of(folder)[-1])
    code, out, err = run_command("sample", str(folder.path), "--tokens=3")
    assert (code, err.count("\n")) == (0, 1)
    assert "damaged" in err
    assert "using the previous checkpoint" in err
    assert out


@pytest.mark.process
def test_out_of_memory_in_a_step_is_reported(tmp_path: Path) -> None:
    """The process may allocate 1 GiB after its start, and a step needs more."""
    script = """
import resource, sys, torch
from pathlib import Path
import normlab.config.compose, normlab.training.start
from normlab.cli import main
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30,) * 2)
main(sys.argv[1:])
"""
    overrides = [*OVERRIDES, "norm=rmsnorm", "train.batch_size=20000", f"results_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", script, "train", *overrides], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "error: the memory ran out; lower train.batch_size" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    (entry,) = find_runs(tmp_path)
    assert entry.state == "failed"
    assert (entry.status.error or "").startswith("the memory ran out")


@pytest.mark.process
@pytest.mark.parametrize("command", ["train", "sample"])
def test_out_of_memory_while_reading_a_checkpoint_is_not_damage(
    command: str, train: Train, interrupt: Callable[..., None]
) -> None:
    """The process may allocate 900 MB, and the checkpoint, whose hashes are right, has 1 GB."""
    interrupt(9)
    folder = train()
    path = folder.path / "checkpoints" / "step_00000011"
    save_file({"x": torch.zeros(2**28)}, path / "state.safetensors")
    _write_manifest(path)
    script = """
import resource, sys, torch
from pathlib import Path
import normlab.config.compose, normlab.training.start, normlab.loaded_run
from normlab.cli import main
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 7 * 2**27,) * 2)
main(sys.argv[1:])
"""
    overrides = [*OVERRIDES, f"results_dir={folder.path.parents[1]}"] if command == "train" else [str(folder.path)]
    before = steps_of(folder)
    done = subprocess.run(
        [sys.executable, "-c", script, command, *overrides], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "error: the memory ran out" in done.stderr.splitlines()[-1]
    assert "damaged" not in done.stderr
    assert "Traceback" not in done.stderr
    assert steps_of(folder) == before


@pytest.mark.parametrize("write", ["write_rows", "write_statistics", "write_status", "save"])
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
