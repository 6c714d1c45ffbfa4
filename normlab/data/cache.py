"""Folders that appear whole or not at all: the cache of what is costly to make.

One process at a time makes something, under another name, brings it to the disk, and renames it; the others
wait. The lock is the kernel's, so it is free once its owner has ended, however it ended; and whoever holds it
knows that all half-made things are left over from processes that were killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(cache: Path) -> Iterator[None]:
    """Wait for, then hold, the right to make things in a cache, which is made where there is none.

    Raises:
        OSError: No file can be made there, or the disk has no locks.
    """
    cache.mkdir(parents=True, exist_ok=True)
    # The file stays: who deletes it may take it from under one who has it open and waits.
    with (cache / "normlab.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def fresh_folder(folder: Path, making: Path) -> Iterator[Path]:
    """A new folder to fill, inside `making`, which becomes `folder` if the block ends well.

    Whatever stood there is deleted; who has files of it open can go on reading them. `making` belongs to the
    lock's holder alone and is deleted before and after, with all that the block puts there.
    """
    new, old = making / "new", making / "old"
    _remove(making)
    try:
        new.mkdir(parents=True)
        folder.parent.mkdir(exist_ok=True)
        yield new
        for path in [*new.iterdir(), new]:
            _sync(path)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)  # a folder cannot be renamed over one that is not empty
        new.rename(folder)
        _sync(folder.parent)
    finally:
        _remove(making)


def _remove(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Bring a file or folder to the disk, so that a power cut cannot leave a name without its content."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
