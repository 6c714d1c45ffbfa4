"""Writes that a kill, a full disk or a power cut leave whole: the old content or the new, never a mixture."""

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
_ELSEWHERE = (errno.ENOTDIR, errno.ENOENT, errno.EEXIST, errno.ENAMETOOLONG)
"""Where nothing helps but another place."""
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_LACKING = {"read": "readable", "opened": "readable and writable"}
"""What a file must be made that there is no right to; writable unless it is here."""


def refusal(path: Path, doing: str, error: OSError, comfort: str = "", *, instead: str = "results_dir") -> StoreError:
    """The error for what the system refused to do with a file: the file, the reason, what is safe, what to do.

    Args:
        path: The file.
        doing: What was being done: `written`, `read`.
        error: What the system said.
        comfort: What is safe.
        instead: What to choose another of, where that helps.
    """
    remedy = _REMEDIES.get(error.errno or 0, "check the disk and run the same command again")
    if error.errno in _FORBIDDEN:
        # What may only be read lacks one thing, whatever was being done.
        lacking = "writable" if error.errno == errno.EROFS else _LACKING.get(doing, "writable")
        remedy = f"make it {lacking}, or choose another {instead}"
    elif doing == "read" and error.errno == errno.ENOENT:
        remedy = "put back a copy"
    elif error.errno in _ELSEWHERE:
        remedy = f"choose another {instead}"
    told = [f"{path}: cannot be {doing} ({error.strerror or error})", *filter(None, [comfort]), remedy]
    return StoreError("; ".join(told))


def write_all(descriptor: int, content: bytes) -> None:
    """Write every byte; the system may take fewer than it is given."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_atomic(path: Path, content: bytes, *, instead: str = "results_dir") -> None:
    """Replace a file, or make it, so that at any moment it holds the old content or the new.

    The content reaches the disk under a temporary name in the same folder and is then renamed.

    Args:
        path: The file.
        content: All of it.
        instead: What to choose another of where the system refuses.

    Raises:
        StoreError: The system refused (a full disk, no permission); the file is as it was.
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
            raise refusal(path, "written", error, instead=instead) from error
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # Without it a power cut may undo the rename. Some network disks cannot do it; the file is whole anyway.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sweep_temporaries(folder: Path) -> list[str]:
    """Delete what killed `write_atomic` calls left in a folder, and return its names.

    Only for the folder's one writer: a temporary file of a live process looks the same.
    """
    names = sorted(entry.name for entry in os.scandir(folder) if _TEMPORARY.fullmatch(entry.name))
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return names
