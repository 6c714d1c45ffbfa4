"""Atomic replacement of files, and appending, both safe against kills, full disks and power cuts."""

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TypeGuard

from normlab.base.errors import DiskError, StoreError

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")

_REMEDIES = {
    errno.ENOSPC: "free some space and run the same command again",
    errno.EDQUOT: "free some of your quota and run the same command again",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) and run the same command again",
    errno.EMFILE: "raise the limit on open files (ulimit -n) and run the same command again",
    errno.ENOLCK: "this disk has no file locks; choose a results_dir on another disk",
}
_ATTEMPTS = 100
"""How often a file is opened that other processes replace."""
_LONGEST_NAME = 200
"""Most bytes of a name in a record; a disk's limit is 255, and normlab adds to some names."""
_BAD_PATH = (errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ENAMETOOLONG)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_MISSING_RIGHT = {"read": "readable", "opened": "readable and writable"}
"""The permission that each action needs; other actions need a writable file."""


def io_error(path: Path, action: str, error: OSError, safe: str = "", *, setting: str = "results_dir") -> DiskError:
    """Return the error for a failed operation on a file, with its reason and a remedy.

    Args:
        path: The file.
        action: The operation, as a participle: `written`, `read`.
        error: The operating system's error.
        safe: A note on data that is not lost.
        setting: The setting that names the folder; the remedy may be another value of it.
    """
    remedy = _REMEDIES.get(error.errno or 0, "check the disk and run the same command again")
    if error.errno in _FORBIDDEN:
        right = _MISSING_RIGHT.get(action, "writable")
        if error.errno == errno.EROFS:  # a disk that is read-only refuses writing, whatever the action
            right = "writable"
        # A file that does not exist yet, such as a temporary file, needs the rights of its folder.
        denied = path
        if isinstance(error.filename, str | bytes):
            denied = Path(os.fsdecode(error.filename))
        while not os.path.lexists(denied) and denied != denied.parent:
            denied = denied.parent
        subject = "it" if denied == path else denied
        remedy = f"make {subject} {right}, or choose another {setting}"
    elif action == "read" and error.errno == errno.ENOENT:
        remedy = "restore a copy"
    elif error.errno in _BAD_PATH:
        remedy = f"choose another {setting}"
    parts = [f"{path}: cannot be {action} ({error.strerror or error})", safe, remedy]
    return DiskError("; ".join(part for part in parts if part))


def is_file_name(value: object) -> TypeGuard[str]:
    """Whether a value of a record may name a file or a folder: one visible part of a path, of printable characters."""
    if not isinstance(value, str) or not value.isprintable() or "/" in value or value.startswith("."):
        return False
    return 0 < len(value.encode()) <= _LONGEST_NAME


def check_links(folder: Path) -> None:
    """Check that what is written into the folder of a run or a sweep, or deleted there, is in that folder.

    The folder may come from someone else: it must not be a symbolic link, nor have one that leads out of it. Links that
    stay in it are W&B's. A link above it is the user's, whose results may be on another disk.

    Raises:
        StoreError: There is such a link.
    """
    folder = Path(os.path.abspath(folder))
    real = Path(os.path.realpath(folder.parent), folder.name)
    for path in filter(os.path.islink, chain([folder], _entries(folder))):
        target = Path(os.path.realpath(path))
        if path == folder or not target.is_relative_to(real):
            raise StoreError(
                f"{path}: is a symbolic link to {target}, and normlab changes no file outside of {folder}; replace the "
                "link with what it points to, or delete it"
            )


def _entries(folder: Path) -> Iterator[Path]:
    """Yield every file and folder in a folder, but for the content of W&B's folders of runs.

    W&B's runs have links to its log. Nothing is written there again, and `shutil.rmtree` does not follow links.
    """
    for top, folders, files in os.walk(folder):
        yield from (Path(top, name) for name in (*folders, *files))
        if os.path.basename(top) == "wandb":
            folders[:] = [name for name in folders if not name.startswith(("run-", "offline-run-"))]


def open_to_change(path: Path, flags: int) -> int:
    """Open a file that is changed in place, and return its descriptor.

    A file with hard links outside of the record is replaced by a copy first. Such links are made by `cp -al`, for a
    backup, or by a stranger whose record shares a file with the user.

    Args:
        path: The file, in a folder that may come from someone else.
        flags: Flags of `os.open`, with `O_RDWR`.

    Raises:
        StoreError: It is no regular file, or it has other names and another process locks it.
        OSError: It is a symbolic link, or the system refused.
    """
    for _ in range(_ATTEMPTS):
        # Without O_NONBLOCK, opening a pipe waits until another process reads from it.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        status = os.fstat(descriptor)
        is_file = stat.S_ISREG(status.st_mode)
        if is_file and status.st_nlink == 1 and is_at(descriptor, path):
            return descriptor
        try:
            if not is_file:
                raise StoreError(f"{path}: is a pipe or a device, not a file; delete it")
            if status.st_nlink > 1:
                _replace_by_copy(path, descriptor)
        finally:
            os.close(descriptor)
        # Next, open what is at the path now: the copy, or another process's file.
    raise StoreError(f"{path}: changes while it is opened; end the processes that use it, and try again")


def _replace_by_copy(path: Path, descriptor: int) -> None:
    """Replace an open file by a copy of it, unless another process has replaced it."""
    try:
        # A lock keeps its owner, and of several processes only one makes the copy.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreError(f"{path}: another process has locked it; wait for it or stop it") from None
    if is_at(descriptor, path):
        with _replacement(path) as copy, open(os.dup(descriptor), "rb") as file:
            os.fchmod(copy, stat.S_IMODE(os.fstat(descriptor).st_mode))
            # A piece at a time: metrics may have more bytes than the machine has memory.
            while content := file.read(2**20):
                write_all(copy, content)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether a path is that of an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def make_folder(path: Path, *, parents: bool = True) -> None:
    """Make a folder unless it exists; `parents=False` where a missing parent means that the run's folder was moved."""
    try:
        path.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise io_error(path, "made", error) from error


def write_all(descriptor: int, content: bytes) -> None:
    """Write all bytes; a single `os.write` may write only some."""
    remainder = memoryview(content)
    while remainder:
        remainder = remainder[os.write(descriptor, remainder) :]


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes, *, setting: str = "results_dir", sync_name: bool = True) -> None:
    """Create or replace a file atomically.

    The content is written and synced to a temporary file in the same folder, which is then renamed.

    Args:
        path: The file.
        content: The complete new content.
        setting: The setting that names the folder, for the error message.
        sync_name: Whether to sync the folder too; else a power cut may bring back the old file.

    Raises:
        StoreError: The write failed (full disk, no permission); the file is unchanged.
    """
    try:
        with _replacement(path) as descriptor:
            write_all(descriptor, content)
    except OSError as error:
        raise io_error(path, "written", error, setting=setting) from error
    # A power cut can undo a rename that is not synced. Some network disks cannot sync a folder, which loses no content.
    if sync_name:
        with contextlib.suppress(OSError):
            sync(path.parent)


@contextlib.contextmanager
def _replacement(path: Path) -> Iterator[int]:
    """Yield the descriptor of a temporary file that replaces a file at the end of a `with` block.

    If the block fails, the temporary file is deleted.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # Synced before it is renamed: after a power cut, the name must not be that of an empty file.
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def delete_temporaries(folder: Path) -> list[str]:
    """Delete the temporary files of killed `write_atomic` calls, and return their names.

    Only the folder's single writer may call this, because temporary files of live processes look the same.
    """
    if not folder.exists():
        return []
    names = sorted(entry.name for entry in os.scandir(folder) if _TEMPORARY.fullmatch(entry.name))
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return names


class AppendFile:
    """A file of rows that is only appended to; the first `append` opens it. A kill tears at most the last row.

    Args:
        path: The file, in an existing folder.
        lines: Whether rows are lines; the first append then ends a torn last line with a newline.
    """

    def __init__(self, path: Path, *, lines: bool) -> None:
        self.path = path
        self._lines = lines
        self._descriptor: int | None = None
        self._is_synced = True

    def append(self, content: bytes) -> None:
        """Append rows in one system call.

        Raises:
            StoreError: The write failed; the file holds none of the content.
        """
        try:
            descriptor = self._open()
            self._is_synced = False
            start = os.fstat(descriptor).st_size
            try:
                write_all(descriptor, content)
            except BaseException:
                os.ftruncate(descriptor, start)  # the next row must not follow part of this one
                raise
        except OSError as error:
            raise io_error(self.path, "written", error) from error

    def sync(self) -> None:
        """Sync the content to the disk, so that a power cut does not lose it."""
        if self._descriptor is not None and not self._is_synced:
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise io_error(self.path, "written", error) from error
            self._is_synced = True

    def truncate(self, size: int) -> None:
        """Truncate the file to `size` bytes, sync and close it."""
        self.close()
        try:
            with os.fdopen(open_to_change(self.path, os.O_RDWR), "r+b") as file:
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
            self._descriptor = open_to_change(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            # A killed writer may have left half a line, which the next row must not continue.
            size = os.fstat(self._descriptor).st_size
            if self._lines and size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                write_all(self._descriptor, b"\n")
        return self._descriptor


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder; links are not followed."""
    size = 0
    for top, _, names in os.walk(folder):
        for name in names:
            # A process that writes there may have replaced a temporary file since.
            with contextlib.suppress(FileNotFoundError):
                size += os.lstat(os.path.join(top, name)).st_size
    return size
