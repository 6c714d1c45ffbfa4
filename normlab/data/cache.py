"""A cache of folders that are expensive to build: each is built by one process, and appears atomically.

A process builds a folder under a temporary name, calls fsync, and renames the folder. Other processes that need the
same folder wait. The kernel releases the lock of a killed process; the next holder deletes its half-built folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from normlab.errors import notify
from normlab.paths import CACHE_LOCKS

# The name carries a prefix because a user may point the cache at a folder with other files.
BUILDING = ".normlab-making"

QUIET_S = 1.0
"""Seconds that a process waits for the lock before it prints a message."""


@contextlib.contextmanager
def locked(cache: Path, key: str) -> Iterator[Path]:
    """Hold the lock for building one folder of a cache; yield the path of a temporary folder.

    Also delete all temporary folders of killed processes.

    Raises:
        OSError: The cache cannot be written, or its disk does not support locks.
    """
    (cache / CACHE_LOCKS).mkdir(parents=True, exist_ok=True)
    with _lock_file(cache, key) as file:
        notify_at = time.monotonic() + QUIET_S
        while not _try_lock(file):
            time.sleep(0.02)
            if time.monotonic() > notify_at:
                pid = Path(file.name).read_text(encoding="ascii")  # empty until the holder has written its id
                holder = f"process {pid}" if pid else "another process"
                notify(f"waiting for {holder}, which is building this corpus")
                notify_at = math.inf
        building = cache / BUILDING
        try:
            for other in list(building.iterdir()) if building.is_dir() else ():
                with _lock_file(cache, other.name) as other_lock:
                    if other.name != key and _try_lock(other_lock):
                        _remove(other)
            yield building / key
        finally:
            with contextlib.suppress(OSError):  # not empty while another process builds a folder
                building.rmdir()


def _lock_file(cache: Path, key: str) -> TextIO:
    # Lock files are never deleted, because another process may have opened the file to wait for its lock.
    return (cache / CACHE_LOCKS / key).open("a", encoding="ascii")


def _try_lock(file: TextIO) -> bool:
    """Take a lock if it is free, and write the process id into its file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return True


@contextlib.contextmanager
def atomic_folder(folder: Path, temporary: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `folder` if the block raises no error.

    Open files of the previous folder stay readable. `temporary` is deleted before and after the block, with all files
    that the block writes there.
    """
    new, old = temporary / "new", temporary / "old"
    _remove(temporary)
    try:
        while not new.is_dir():
            # Another process removes the parent folder when it finishes and the folder is empty.
            with contextlib.suppress(FileNotFoundError):
                new.mkdir(parents=True)
        folder.parent.mkdir(exist_ok=True)
        yield new
        for path in [*new.iterdir(), new]:
            _fsync(path)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)  # a folder cannot be renamed over one that is not empty
        new.rename(folder)
        _fsync(folder.parent)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    """Flush a file or folder to the disk, so that a power cut cannot lose its content."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
