"""Folders that appear whole or not at all: the cache of what is costly to make.

One process at a time makes a thing, under another name, brings it to the disk, and renames it; the others that
want it wait. The lock is the kernel's, so it is free once its owner has ended, however it ended; and whoever
holds it knows that what is half-made of that thing is left over from a process that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# Names of our own inside the cache, which may be a folder that others use too.
LOCKS = "normlab.locks"
MAKING = ".normlab-making"

SILENCE_S = 1.0
"""Seconds of waiting for another process before that is said."""


@contextlib.contextmanager
def locked(cache: Path, key: str) -> Iterator[Path]:
    """Wait for, then hold, the right to make one thing in a cache, which is made where there is none.

    Yields the name of a folder for what is half-made, the holder's alone. Those of processes that were killed
    are deleted, whatever they made.

    Raises:
        OSError: No file can be made there, or the disk has no locks.
    """
    (cache / LOCKS).mkdir(parents=True, exist_ok=True)
    with _lock_file(cache, key) as file:
        if not _take(file):
            _wait(file)
        making = cache / MAKING
        try:
            for other in _entries(making):
                with _lock_file(cache, other.name) as its:
                    if other.name != key and _take(its):
                        _remove(other)
            yield making / key
        finally:
            with contextlib.suppress(OSError):  # another process makes something else there
                making.rmdir()


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _lock_file(cache: Path, key: str) -> TextIO:
    # The file stays: who deletes it may take it from under one who has it open and waits.
    return (cache / LOCKS / key).open("a", encoding="ascii")


def _take(file: TextIO) -> bool:
    """Take a lock if it is free, and leave word whose it is."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    _sign(file)
    return True


def _wait(file: TextIO) -> None:
    """Take a lock that another process holds, when it is free; a long wait is said once."""
    deadline = time.monotonic() + SILENCE_S
    while time.monotonic() < deadline:
        time.sleep(0.02)
        if _take(file):
            return
    pid = Path(file.name).read_text(encoding="ascii")  # empty, if it has only just begun
    owner = f"process {pid}" if pid else "another process"
    print(f"normlab: waiting for {owner}, which makes this corpus", file=sys.stderr, flush=True)
    fcntl.flock(file, fcntl.LOCK_EX)
    _sign(file)


def _sign(file: TextIO) -> None:
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()


@contextlib.contextmanager
def fresh_folder(folder: Path, making: Path) -> Iterator[Path]:
    """A new folder to fill, inside `making`, which becomes `folder` if the block ends well.

    Whatever stood there is deleted; who has files of it open can go on reading them. `making` belongs to the
    lock's holder alone and is deleted before and after, with all that the block puts there.
    """
    new, old = making / "new", making / "old"
    _remove(making)
    try:
        _make(new)
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


def _make(folder: Path) -> None:
    while not folder.is_dir():
        with contextlib.suppress(FileNotFoundError):  # another process, at its end, removes what is empty above it
            folder.mkdir(parents=True)


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
