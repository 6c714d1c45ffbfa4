"""Make and delete files and folders as a whole, under a hidden name.

What is made has a hidden name until it is complete, and what is deleted has one from the start. So a kill leaves no
half of anything with its own name. The hidden name follows from that name: the same command finds it, and finishes.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from normlab.base.errors import StoreError
from normlab.store.files import io_error, is_at, open_to_change

_NEW, _DELETED = ".normlab-new", ".normlab-deleted"
"""The ends of hidden names."""


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield the hidden path of an empty file, which gets the name `path` at the end of a `with` block.

    If the block fails, the file is deleted.

    Raises:
        StoreError: Another process makes the same file.
        OSError: The system refused.
    """
    with _owned(path, os.O_RDWR | os.O_CREAT) as hidden:
        os.truncate(hidden, 0)
        try:
            yield hidden
            hidden.rename(path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield the hidden path of an empty folder, which gets the name `path` at the end of a `with` block.

    `path` is missing or an empty folder. If the block fails, the folder is deleted; errors as for `new_file`.
    """
    with _owned(path, os.O_RDONLY | os.O_DIRECTORY) as hidden:
        for leftover in hidden.iterdir():  # by a killed process
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        try:
            yield hidden
            hidden.rename(path)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise


@contextlib.contextmanager
def _owned(path: Path, flags: int) -> Iterator[Path]:
    """Make and lock the hidden file or folder of a path, and yield its path."""
    hidden = _hidden(path, _NEW)
    while True:
        if flags & os.O_DIRECTORY:
            hidden.mkdir(exist_ok=True)
            descriptor = os.open(hidden, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        else:
            descriptor = open_to_change(hidden, flags)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StoreError(f"{path}: another process makes it; wait for it, or give another name") from None
        except OSError:
            os.close(descriptor)
            raise
        if is_at(descriptor, hidden):
            break
        # Another process has renamed or deleted it between the opening and the lock.
        os.close(descriptor)
    try:
        yield hidden
    finally:
        os.close(descriptor)


def delete_folder(path: Path) -> None:
    """Delete a folder.

    Raises:
        StoreError: The system refused.
    """
    hidden = _hidden(path, _DELETED)
    try:
        if hidden.exists():  # left by a killed process
            shutil.rmtree(hidden)
        # Renamed first: a kill in the middle leaves no folder of this name that lacks some of its files.
        path.rename(hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        raise io_error(path, "deleted", error) from error


def finish_deletions(folder: Path) -> list[str]:
    """Delete what killed processes have left of deleted folders in a folder, and return the names that they had."""
    if folder.is_symlink():  # a stranger's may lead to any place
        return []
    hidden_folders = sorted(folder.glob(f".*{_DELETED}"))
    for hidden in hidden_folders:
        shutil.rmtree(hidden, ignore_errors=True)
    return [hidden.name[1:].removesuffix(_DELETED) for hidden in hidden_folders if not hidden.is_symlink()]


def _hidden(path: Path, end: str) -> Path:
    return path.with_name(f".{path.name}{end}")
