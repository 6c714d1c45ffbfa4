"""File writes that survive a kill, a full disk and a power cut: atomic replacement and appending."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

from normlab.errors import StoreError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")

_REMEDIES = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some of your quota and run the same command again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) and run the same command again",
    errno.EMFILE: "raise the limit on open files (ulimit -n) and run the same command again",
    errno.ENOLCK: "this disk has no file locks, choose a results_dir on another",
}
_BAD_PATH = (errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ENAMETOOLONG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISSING_RIGHT = {"read": "readable", "opened": "readable and writable"}
"""The right that an action needs; every other action needs a writable file."""


def io_error(path: Path, action: str, error: OSError, safe: str = "", *, setting: str = "results_dir") -> StoreError:
    """Return the error for a failed file operation: the file, the reason, what is safe, what to do.

    Args:
        path: The file.
        action: The operation, as a participle: `written`, `read`.
        error: The operating system's error.
        safe: What was not lost.
        setting: The setting that names the folder; the message suggests another value where that helps.
    """
    remedy = _REMEDIES.get(error.errno or 0, "check the disk and run the same command again")
    if error.errno in _FORBIDDEN:
        right = "writable" if error.errno == errno.EROFS else _MISSING_RIGHT.get(action, "writable")
        remedy = f"make it {right}, or choose another {setting}"
    elif action == "read" and error.errno == errno.ENOENT:
        remedy = "restore a copy"
    elif error.errno in _BAD_PATH:
        remedy = f"choose another {setting}"
    parts = [f"{path}: cannot be {action} ({error.strerror or error})", *filter(None, [safe]), remedy]
    return StoreError("; ".join(parts))


def make_folder(path: Path) -> None:
    """Make a folder and its parents unless they exist.

    Raises:
        StoreError: The system refused.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error(path, "made", error) from error


def write_all(descriptor: int, content: bytes) -> None:
    """Write every byte; one call of `os.write` may write fewer."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes, *, setting: str = "results_dir") -> None:
    """Make or replace a file; at any moment it holds the old content or the new.

    The content is written and synced under a temporary name in the same folder, which is then renamed.

    Args:
        path: The file.
        content: All of it.
        setting: The setting that names the folder, for the error message.

    Raises:
        StoreError: The system refused (full disk, no permission); the file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise io_error(path, "written", error, setting=setting) from error
        raise
    # Without this sync a power cut may undo the rename. Some network disks refuse it; the file is complete anyway.
    with contextlib.suppress(OSError):
        sync(path.parent)


def delete_temporaries(folder: Path) -> list[str]:
    """Delete the temporary files of killed `write_atomic` calls in a folder, and return their names.

    Only the folder's one writer may call this: a temporary file of a live process looks the same.
    """
    names = sorted(entry.name for entry in os.scandir(folder) if _TEMPORARY.fullmatch(entry.name))
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return names


class AppendFile:
    """A file that grows at its end; opened by the first `append`. A kill tears at most the last row.

    Args:
        path: The file; its folder exists.
        lines: Whether rows are lines. A torn last line is then ended before the next append.
    """

    def __init__(self, path: Path, *, lines: bool) -> None:
        self.path = path
        self._lines = lines
        self._descriptor: int | None = None

    def append(self, content: bytes) -> None:
        """Append rows in one system call.

        Raises:
            StoreError: The system refused; the file holds none of the content.
        """
        try:
            descriptor = self._open()
            start = os.fstat(descriptor).st_size
            try:
                write_all(descriptor, content)
            except BaseException:
                os.ftruncate(descriptor, start)  # part of a record would run into the next one
                raise
        except OSError as error:
            raise io_error(self.path, "written", error) from error

    def sync(self) -> None:
        """Wait until the content is on the disk, so that a power cut does not lose it."""
        if self._descriptor is not None:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise io_error(self.path, "written", error) from error

    def truncate(self, size: int) -> None:
        """Cut the file to `size` bytes, synced to the disk, and close it."""
        self.close()
        try:
            with self.path.open("r+b") as file:
                file.truncate(size)
                os.fsync(file.fileno())
        except OSError as error:
            raise io_error(self.path, "cut", error) from error

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._descriptor).st_size
            if self._lines and size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                write_all(self._descriptor, b"\n")
        return self._descriptor
