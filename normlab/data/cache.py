"""Folders of a cache that are expensive to build: each is built by one process, and appears atomically."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from normlab.errors import notify

LOCKS = "normlab.locks"
BUILDING = ".normlab-making"
"""Folders of the cache. Their names carry a prefix because a user may point the cache at a folder with other files."""


@contextlib.contextmanager
def locked(cache: Path, key: str) -> Iterator[Path]:
    """Hold the lock for building one folder of a cache; yield an empty temporary folder, which is deleted at the end.

    The kernel releases the lock of a killed process; the next holder deletes its temporary folder.

    Raises:
        OSError: The cache cannot be written, or its disk does not support locks.
    """
    (cache / LOCKS).mkdir(parents=True, exist_ok=True)
    # Lock files are never deleted, because another process may have opened the file to wait for its lock.
    with (cache / LOCKS / key).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify("waiting for another process, which is building this corpus")
            fcntl.flock(file, fcntl.LOCK_EX)
        temporary = cache / BUILDING / key
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(folder: Path, new: Path) -> None:
    """Rename a complete folder to `folder`; the open files of a previous folder stay readable."""
    folder.parent.mkdir(exist_ok=True)
    # A crash here leaves no folder, or one whose hashes tell that it is damaged: it is built again.
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
