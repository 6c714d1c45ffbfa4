"""File locks: one writer at a time. The kernel frees a lock when its owner ends, however it ends.

`filelock` is not used: it has no shared `flock`, by which a reader tests for a writer without making a file and without
disturbing other readers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from normlab.errors import StoreError
from normlab.parsing import from_json, read_at_most
from normlab.store.files import io_error, write_all
from normlab.store.schema import to_json

_ATTEMPTS = 20
_PAUSE_S = 0.01

_locked: set[int] = set()
"""Descriptors of the locks that this process holds."""


def _close_in_child() -> None:
    # A forked child shares the lock and would keep it after its parent's death. Closing the child's descriptor
    # leaves the parent's lock alone; unlocking would not.
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def file_lock(path: Path, subject: str, alternative: str = "run.fresh=true") -> Iterator[int]:
    """Hold a lock for the length of a `with` block, and give its file descriptor.

    Args:
        path: The lock file; its folder exists. Its content only names the owner, for the message.
        subject: What is locked, for the message.
        alternative: The override that starts another beside it, for the message.

    Raises:
        StoreError: Another process holds the lock, or this process already does.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise io_error(path, "opened", error) from error
    try:
        _acquire(descriptor, path, subject, alternative)
    except BaseException:
        os.close(descriptor)
        raise
    _locked.add(descriptor)
    owner = os.getpid()
    try:
        # A full disk may refuse these few bytes; the lock holds without them.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            write_all(descriptor, to_json({"pid": owner, "started": time.time(), "host": os.uname().nodename}))
        yield descriptor
    finally:
        if os.getpid() == owner:  # a forked child leaves the block too
            _locked.discard(descriptor)
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _acquire(descriptor: int, path: Path, subject: str, alternative: str) -> None:
    for _ in range(_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_PAUSE_S)  # `is_locked` of a reader also holds it, for microseconds
        except OSError as error:
            raise io_error(path, "locked", error) from error
    raise StoreError(
        f"{subject} is active in {_owner(path)}; wait for it or stop it, or {alternative} starts another beside it"
    )


def _owner(path: Path) -> str:
    try:
        owner = from_json(read_at_most(path, 2**10))
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock; writes nothing and keeps no lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
