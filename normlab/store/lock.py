"""File locks for a single writer. The kernel releases a lock when the owner's process ends, even by SIGKILL.

`filelock` is not used, because it has no shared `flock`. With a shared `flock`, a reader detects a writer without
creating a file and without blocking other readers.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normlab.base.errors import StoreError
from normlab.base.parsing import from_json, read_at_most
from normlab.store.files import io_error, open_to_change, write_all
from normlab.store.format import to_json

_ATTEMPTS = 20
_PAUSE_S = 0.01

_locked: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _close_in_child() -> None:
    # A forked child shares the lock and would keep it after its parent ends. Closing the child's descriptor keeps the
    # parent's lock; unlocking would release it.
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def file_lock(path: Path, subject: str, alternative: str = "run.fresh=true") -> Iterator[int]:
    """Hold a lock during a `with` block, and yield its file descriptor.

    Args:
        path: The lock file, in an existing folder. Its content names the owner for error messages.
        subject: The name of the locked run or sweep, for the message.
        alternative: The override that starts another one beside it, for the message; empty if there is none.

    Raises:
        StoreError: Another process, or this process, already holds the lock.
    """
    try:
        descriptor = try_lock(path)
    except OSError as error:
        raise io_error(path, "locked", error) from error
    if descriptor is None:
        content = _content(path)
        owner = "another process"
        if content:
            owner = f"process {content.get('pid')} on {content.get('host')}"
        remedy = "wait for it or stop it"
        if alternative:
            remedy += f", or {alternative} starts another beside it"
        raise StoreError(f"{subject} is active in {owner}; {remedy}")
    _locked.add(descriptor)
    process = os.getpid()
    try:
        # The lock needs no content, so a full disk does no harm.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            write_all(descriptor, to_json({"pid": process, "started": time.time(), "host": os.uname().nodename}))
        yield descriptor
    finally:
        if os.getpid() == process:  # a forked child also leaves the block
            _locked.discard(descriptor)
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Acquire a lock and return its file descriptor, or None if a process holds it; closing all copies releases it.

    Raises:
        StoreError: The lock file is no file, or it has other names and another process holds it.
        OSError: The lock file cannot be opened, or its file system has no locks.
    """
    descriptor = open_to_change(path, os.O_RDWR | os.O_CREAT)
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if attempt < _ATTEMPTS - 1:
                time.sleep(_PAUSE_S)  # a reader's `is_locked` holds the lock for microseconds
        except BaseException:
            os.close(descriptor)
            raise
    os.close(descriptor)
    return None


def _content(path: Path) -> dict[str, Any]:
    try:
        return from_json(read_at_most(path, 2**10))
    except (OSError, ValueError):
        return {}


def is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may be a pipe
    except FileNotFoundError:
        return False
    # A shared lock, so that readers do not keep each other out, and none waits for a writer.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
