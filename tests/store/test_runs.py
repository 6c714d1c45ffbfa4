import json
import math
import os
import random
import subprocess
import sys
import time

import pytest

from normlab.base.errors import StoreError
from normlab.store.format import RECORD_VERSION, STATISTICS_FOLDER
from normlab.store.runs import RunFolder

WRITER = """
import os, sys
from normlab.store.runs import RunFolder
folder = RunFolder(sys.argv[1])
step = int(sys.argv[2])
with folder.lock():
    while True:
        rows = [
            {"kind": "train", "step": step + i, "loss": 1.5, "grad_norm": 1, "clip": 1, "lr": 1, "note": "x" * 3000}
            for i in range(5)
        ]
        folder.append(rows)
        step += 5
        os.write(1, b"%d\\n" % step)
"""
FINISHED = {"state": "finished", "step": 7, "outcome": "finished", "val_loss": 2.25, "best_val_loss": 2.25}
SMALL_DISK = """
import resource, sys
from normlab.base.errors import StoreError
from normlab.store.runs import RunFolder
folder = RunFolder(sys.argv[1])
with folder.lock():
    row = {"kind": "train", "loss": 1, "grad_norm": 1, "clip": 1, "lr": 1}
    folder.append([{**row, "step": 0}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        folder.append([{**row, "step": i} for i in range(1, 1000)])
    except StoreError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    folder.append([{**row, "step": 1}])
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "runs" / "abc", {"run_id": "abc", "name": None})


def steps(folder: RunFolder) -> list[int]:
    return [row["step"] for row in folder.rows().rows]


def train(*numbers: int) -> list[dict]:
    numbers_of_step = {"grad_norm": 1.0, "clip": 1.0, "lr": 1e-3}
    return [{"kind": "train", "step": step, "loss": step / 3, **numbers_of_step} for step in numbers]


def python(script: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE)


def test_create_writes_run_json_once(folder):
    assert folder.exists()
    assert folder.run() == {"version": RECORD_VERSION, "run_id": "abc", "name": None}
    with pytest.raises(StoreError, match="holds a run already"):
        RunFolder.create(folder.path, {})
    assert folder.run()["run_id"] == "abc"


def test_write_status_replaces_all_fields(folder):
    folder.write_status({"state": "diverged", "diverged": {"step": 3, "loss": math.inf, "grad_norm": math.nan}})
    before = time.time()
    folder.write_status({"state": "interrupted", "step": 7, "val_loss": -math.inf})
    status = folder.status()
    assert before <= status["updated"] <= time.time()
    assert (status["state"], status["step"], status["val_loss"]) == ("interrupted", 7, -math.inf)
    assert status["diverged"] is None
    json.loads((folder.path / "status.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("name", ["run.json", "status.json"])
def test_every_changed_byte_is_noticed(folder, name):
    folder.write_status(FINISHED)
    path = folder.path / name
    whole = path.read_bytes()
    before = folder.run(), folder.status()
    for index in range(len(whole)):
        changed = bytearray(whole)
        changed[index] ^= 1
        path.write_bytes(changed)
        try:
            after = folder.run(), folder.status()
        except StoreError:
            continue
        # A changed blank that JSON ignores is no damage.
        assert after == before


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"\x00\xff\x00", b"{}", b"[" * 200_000, b'{"x":' * 2000 + b"1" + b"}" * 2000]
)
def test_damaged_file_is_named(folder, content):
    for name, read in (("run.json", folder.run), ("status.json", folder.status)):
        (folder.path / name).write_bytes(content)
        with pytest.raises(StoreError, match=rf"{name}: is damaged"):
            read()


def test_rows_read_back(folder):
    rows = [
        {"kind": "train", "step": 1, "loss": math.nan, "grad_norm": math.inf, "clip": 1.0, "lr": 1e-3},
        {"kind": "eval", "step": 1, "loss": 0.1 + 0.2, "of a newer version": {"deep": [1, None]}},
    ]
    folder.append(rows)
    read = folder.rows()
    assert math.isnan(read.rows[0].pop("loss"))
    rows[0].pop("loss")
    del rows[1]["of a newer version"]
    assert read.rows == rows
    assert (read.damaged, read.torn) == (0, False)
    assert folder.rows("eval").rows == rows[1:]
    assert folder.rows("pace").rows == []


def test_torn_last_line_is_skipped_and_counted(folder):
    folder.append(train(1, 2, 3))
    with folder.metrics_path.open("r+b") as file:
        file.truncate(folder.size() - 9)
    read = folder.rows()
    assert [row["step"] for row in read.rows] == [1, 2]
    assert (read.damaged, read.torn) == (1, True)

    again = RunFolder(folder.path)
    again.append(train(4))
    read = again.rows()
    assert [row["step"] for row in read.rows] == [1, 2, 4]
    assert (read.damaged, read.torn) == (1, False)


def test_short_writes_are_completed(folder, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: real(descriptor, bytes(content[:7])))
    folder.append(train(*range(50)))
    assert steps(folder) == list(range(50))


def test_kill_loses_the_last_record_at_most(folder):
    draw = random.Random(0)
    known = 0
    for _ in range(6):
        with python(WRITER, folder.path, known) as process:
            assert process.stdout is not None
            output = process.stdout.readline()
            time.sleep(draw.uniform(0, 0.02))
            process.kill()
            output += process.stdout.read()
        acknowledged = int(output.rsplit(b"\n", 2)[-2])
        assert acknowledged > known
        read = folder.rows()
        found = [row["step"] for row in read.rows]
        assert found == list(range(len(found)))
        assert len(found) >= acknowledged
        assert read.damaged <= read.torn
        # A resume cuts the record back to a length at which it was complete.
        folder.truncate(folder.metrics_path.read_bytes().rfind(b"\n") + 1)
        known = len(steps(folder))


def test_full_disk_takes_all_rows_or_none(folder):
    with python(SMALL_DISK, folder.path) as process:
        output = process.communicate()[0].decode()
    assert process.returncode == 0
    assert "metrics.jsonl: cannot be written (File too large)" in output
    read = folder.rows()
    assert [row["step"] for row in read.rows] == [0, 1]
    assert read.damaged == 0


def test_truncate_to_a_checkpoint_and_append(folder):
    folder.append(train(1, 2))
    folder.sync()
    size = folder.size()
    whole = folder.metrics_path.read_bytes()
    folder.append(train(3, 4))
    folder.truncate(size)
    assert folder.metrics_path.read_bytes() == whole
    folder.append(train(3))
    assert steps(folder) == [1, 2, 3]
    folder.truncate(0)
    assert folder.size() == 0


def test_truncate_beyond_the_end_is_an_error(folder):
    folder.append(train(1))
    size = folder.size()
    with pytest.raises(
        StoreError,
        match=rf"has {size} bytes where the checkpoint says that a row ends at byte {size + 1}; .*run.fresh=true",
    ):
        folder.truncate(size + 1)
    assert steps(folder) == [1]
    with pytest.raises(StoreError, match="has 0 bytes"):
        RunFolder(folder.path.parent / "other").truncate(1)


def test_deleted_lock_stops_its_holder(folder):
    with folder.lock():
        folder.append(train(1))
        (folder.path / "lock").unlink()
        other = RunFolder(folder.path)
        with other.lock():
            other.append(train(2))
        with pytest.raises(StoreError, match="was moved, or its lock file deleted, so another process may be writing"):
            folder.append(train(3))
    assert steps(folder) == [1, 2]


@pytest.mark.parametrize("moved", ["abc", "../runs"])
def test_moved_folder_stops_its_writer(folder, moved):
    path = folder.path.parent / moved
    old, new = path.resolve(), path.resolve().with_name("elsewhere")
    with folder.lock():
        folder.append(train(1))
        old.rename(new)
        for write in (lambda: folder.append(train(2)), lambda: folder.write_status(FINISHED)):
            with pytest.raises(StoreError, match=r"abc: was moved, .*; put the folder back"):
                write()
        assert not old.exists()
        old.symlink_to(old)  # no file can be found below it
        with pytest.raises(StoreError, match="abc: was moved"):
            folder.append(train(2))
        old.unlink()
    new.rename(old)
    assert steps(folder) == [1]
    assert folder.state() == "killed"


def test_one_writer(folder):
    with folder.lock():
        expected = f"run abc is active in process {os.getpid()} on .*run.fresh=true"
        with pytest.raises(StoreError, match=expected), RunFolder(folder.path).lock():
            pass
        folder.append(train(1))
    with folder.lock():
        folder.append(train(2))
    assert steps(folder) == [1, 2]


def test_lock_deletes_temporary_files_of_a_killed_writer(folder):
    (folder.path / STATISTICS_FOLDER).mkdir()
    for name in (".status.json.0123abcd.tmp", f"{STATISTICS_FOLDER}/.core.json.0123abcd.tmp"):
        (folder.path / name).touch()
    with folder.lock():
        assert not list(folder.path.rglob(".*.tmp"))


def test_running_run_without_a_lock_is_killed(folder):
    assert folder.state() == "killed"
    with folder.lock():
        assert RunFolder(folder.path).state() == "running"
        folder.write_status({"state": "running", "step": 5})
        assert RunFolder(folder.path).state_and_status()[1].step == 5
        assert RunFolder(folder.path).state() == "running"
    assert folder.state() == "killed"
    folder.write_status({"state": "interrupted", "step": 5})
    assert folder.state() == "interrupted"


def test_run_that_finishes_while_it_is_read_is_not_killed(folder, monkeypatch):
    folder.write_status({"state": "running"})

    def finish_and_release(path):
        folder.write_status(FINISHED)
        return False

    monkeypatch.setattr("normlab.store.runs.is_locked", finish_and_release)
    assert folder.state() == "finished"
