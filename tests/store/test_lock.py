import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from normlab.base.errors import StoreError
from normlab.store.lock import file_lock, is_locked

HOLD = """
import pathlib, sys, time
from normlab.store.lock import file_lock
with file_lock(pathlib.Path(sys.argv[1]), "run x"):
    print("held", flush=True)
    sys.stdin.read()
"""
HOLD_AND_FORK = """
import os, pathlib, sys, time
from normlab.store.lock import file_lock
with file_lock(pathlib.Path(sys.argv[1]), "run x"):
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
    time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def start(script: str, path) -> subprocess.Popen:
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_second_process_fails_with_the_name_of_the_first(path):
    with start(HOLD, path) as process:
        assert first_line(process) == "held"
        assert is_locked(path)
        expected = rf"run x is active in process {process.pid} on {os.uname().nodename}; wait for it"
        with pytest.raises(StoreError, match=expected), file_lock(path, "run x"):
            pass
        process.communicate("")
    assert process.returncode == 0
    assert not is_locked(path)
    with file_lock(path, "run x"):
        assert is_locked(path)


def test_lock_of_a_killed_owner_is_free(path):
    with start(HOLD, path) as process:
        assert first_line(process) == "held"
        process.kill()
    assert str(process.pid) in path.read_text()
    assert not is_locked(path)
    with file_lock(path, "run x"):
        assert f'"pid":{os.getpid()}' in path.read_text()


@pytest.mark.parametrize(
    "left",
    [
        f'{{"pid": {os.getpid()}, "started": 0.0, "host": "{os.uname().nodename}"}}',
        '{"pid": 1, "started": 4e9, "host": "another.host"}',
        "not what a lock holds",
        "",
    ],
    ids=["a pid that another process has now", "another host", "nonsense", "nothing"],
)
def test_content_of_the_file_does_not_lock(path, left):
    path.write_text(left)
    assert not is_locked(path)
    with file_lock(path, "run x"):
        assert f'"host":"{os.uname().nodename}"' in path.read_text()


def test_fork_does_not_keep_the_lock_of_its_killed_parent(path):
    with start(HOLD_AND_FORK, path) as process:
        child = int(first_line(process))
        try:
            assert is_locked(path)
            process.kill()
            process.wait()
            os.kill(child, 0)
            with file_lock(path, "run x"):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_readers_disturb_no_writer(path):
    path.touch()
    stop = threading.Event()

    def probe():
        while not stop.is_set():
            is_locked(path)

    readers = [threading.Thread(target=probe) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(50):
            with file_lock(path, "run x"):
                assert is_locked(path)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not is_locked(path)


def test_readers_do_not_count_each_other_as_a_writer(path):
    path.touch()
    with path.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert not is_locked(path)


def test_a_pipe_is_not_waited_for(path):
    os.mkfifo(path)
    assert not is_locked(path)


def test_is_locked_makes_no_file(path):
    assert not is_locked(path)
    assert not path.exists()
