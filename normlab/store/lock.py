"""One writer at a time: a file lock that dies with its owner.

The lock is the kernel's (`flock`), not the file's existence: when its owner ends, however it ends, the lock
is free. What stands in the file is only for the message to whoever comes second.
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
from normlab.store.files import refusal, write_all
from normlab.store.schema import to_json

_TRIES = 20
_PAUSE_S = 0.01

_held: set[int] = set()


def _let_go_in_child() -> None:
    # A forked child shares the lock and would hold on to it after its parent's death. Closing the child's
    # copy leaves the parent's lock alone; unlocking would not.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


@contextlib.contextmanager
def hold(path: Path, what: str, beside: str = "run.fresh=true") -> Iterator[int]:
    """Hold the lock for the length of a `with` block; gives the descriptor that holds it.

    Args:
        path: The lock file; its folder exists.
        what: What is locked, for the message.
        beside: The word that starts another beside it, for the message.

    Raises:
        StoreError: Another process holds it, or this one does already.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise refusal(path, "opened", error) from error
    try:
        _take(descriptor, path, what, beside)
    except BaseException:
        os.close(descriptor)
        raise
    _held.add(descriptor)
    owner = os.getpid()
    try:
        # A full disk may refuse these few bytes; the lock holds without them.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            write_all(descriptor, to_json({"pid": owner, "started": time.time(), "host": os.uname().nodename}))
        yield descriptor
    finally:
        if os.getpid() == owner:  # not in a forked child that leaves the block too
            _held.discard(descriptor)
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _take(descriptor: int, path: Path, what: str, beside: str) -> None:
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            # Perhaps only a reader's probe, which is over in microseconds.
            time.sleep(_PAUSE_S)
        except OSError as error:
            raise refusal(path, "locked", error) from error
    raise StoreError(
        f"{what} is active in {_owner(path)}; wait for it or stop it, or {beside} starts another beside it"
    )


def _owner(path: Path) -> str:
    try:
        owner = from_json(read_at_most(path, 2**10))
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def is_held(path: Path) -> bool:
    """Whether some process holds the lock. Takes nothing that outlasts the call and writes nothing."""
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
