"""Folders on disk: the configs that ship with the package, and the cache of tokenized corpora."""

from __future__ import annotations

import os
from pathlib import Path

WANDB_SWEEPS = "wandb"
"""The folder of sweeps of W&B below `config_dir()`, which is no config group."""

CACHE_LOCKS = "normlab.locks"
"""The folder of locks in `cache_dir()`; a lock has the name of a cached corpus in `tokens/`."""

_OUTPUT_FILES = {
    "runs": ("run.json", b'"sha256": "'),
    "sweeps": ("plan.json", b'"sha256": "'),
    "studies": ("report.json", b'"criterion": "'),
}
"""Maps the name of the parent folder to a file, and to a text in it, by which an output folder is recognised."""

_PAGE_MARK = b'<meta name="generator" content="normlab">'
_FILE_MARKS = {
    "": _PAGE_MARK, ".html": _PAGE_MARK, ".htm": _PAGE_MARK, ".md": b"<!-- Written by normlab. -->",
    ".pdf": b"/Creator (normlab)", ".svg": b"<dc:title>normlab</dc:title>", ".png": b"Software\0normlab",
}  # fmt: skip
"""By suffix: what a page or a figure of normlab contains near its start (.md: at its start; .pdf: near its end)."""
_START, _END = 2**12, 2**16
"""Bytes of a file that may have the mark; a PDF ends with 20 bytes for each of its objects."""


def config_dir() -> Path:
    """Return the folder of the Hydra configs: inside the wheel, or `conf/` beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def cache_dir() -> Path:
    """Return `$NORMLAB_CACHE`, else `$XDG_CACHE_HOME/normlab`, else `~/.cache/normlab`."""
    if explicit := os.environ.get("NORMLAB_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "normlab"


def is_output_folder(folder: Path) -> bool:
    """Return whether normlab wrote a folder: that of a run, a sweep or a study, or a cached corpus or its locks.

    The folder around it, such as `runs`, may also hold files of the user.
    """
    parent = folder.parent
    if parent.name == "tokens":  # the lock of a corpus is made before the corpus, and is never deleted
        return (parent.parent / CACHE_LOCKS / folder.name).is_file()
    if folder.name == CACHE_LOCKS:
        return True
    if parent.name not in _OUTPUT_FILES:
        return False
    name, mark = _OUTPUT_FILES[parent.name]
    # A run or sweep that was killed at its start has only the lock, which is empty or names its owner.
    lock = _content(folder / "lock") if parent.name != "studies" else None
    return mark in (_content(folder / name) or b"") or (lock is not None and (not lock or lock.startswith(b'{"pid":')))


def is_output_file(path: Path) -> bool:
    """Return whether normlab wrote a file: a page, a figure, or the table of all studies."""
    mark = _FILE_MARKS.get(path.suffix.lower())
    if mark is None or not path.is_file():  # reading a pipe can block forever
        return False
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ".pdf":
                file.seek(max(0, path.stat().st_size - _END))
                return mark in file.read()
            start = file.read(_START)
            return start.startswith(mark) if path.suffix.lower() == ".md" else mark in start
    except OSError:
        return False


def _content(path: Path) -> bytes | None:
    """Return the content of a file; None if there is none that can be read."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError:
        return None
