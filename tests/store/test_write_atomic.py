import errno
import os
import signal
import subprocess
import sys

import pytest

from normlab.store.files import delete_temporaries, io_error, write_atomic

LENGTH = 1 << 20


def run_python(script: str, *arguments: object, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], **options)


def test_writes_and_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "status.json"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["status.json"]


def test_new_file_has_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "x", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_kill_before_each_call_leaves_the_old_file_and_a_temporary_one(tmp_path, call):
    path = tmp_path / "status.json"
    path.write_bytes(b"old")
    script = f"""
import os, pathlib, signal, sys
from normlab.store.files import write_atomic
os.{call} = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
write_atomic(pathlib.Path(sys.argv[1]), b"new")
"""
    with run_python(script, path) as process:
        assert process.wait() == -signal.SIGKILL
    assert path.read_bytes() == b"old"
    assert len(os.listdir(tmp_path)) == 2
    assert len(delete_temporaries(tmp_path)) == 1
    assert os.listdir(tmp_path) == ["status.json"]


def test_only_temporary_files_are_deleted(tmp_path):
    kept = ["metrics.jsonl", ".hidden", "notes.tmp", ".x.tmp", ".x.0123456g.tmp"]
    for name in [*kept, ".run.json.0123abcd.tmp"]:
        (tmp_path / name).touch()
    assert delete_temporaries(tmp_path) == [".run.json.0123abcd.tmp"]
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_full_disk_keeps_the_old_file(tmp_path):
    path = tmp_path / "status.json"
    path.write_bytes(b"old")
    script = """
import pathlib, resource, sys
from normlab.base.errors import StoreError
from normlab.store.files import write_atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    write_atomic(pathlib.Path(sys.argv[1]), b"new" * 1000)
except StoreError as error:
    print(error)
"""
    with run_python(script, path, stdout=subprocess.PIPE, text=True) as process:
        output = process.communicate()[0]
    assert "cannot be written (File too large)" in output
    assert "run the same command again" in output
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["status.json"]


@pytest.mark.parametrize(
    ("action", "number", "remedy"),
    [
        ("read", errno.EACCES, "make it readable, or choose another results_dir"),
        ("opened", errno.EPERM, "make it readable and writable, or choose another results_dir"),
        ("written", errno.EACCES, "make it writable, or choose another results_dir"),
        ("made", errno.ENOTDIR, "choose another results_dir"),
        ("made", errno.ENOENT, "choose another results_dir"),
        ("read", errno.ENOENT, "restore a copy"),
        ("read", errno.EIO, "check the disk and run the same command again"),
    ],
)
def test_remedy_fits_the_action(tmp_path, action, number, remedy):
    reason = os.strerror(number)
    assert (
        str(io_error(tmp_path, action, OSError(number, reason)))
        == f"{tmp_path}: cannot be {action} ({reason}); {remedy}"
    )
