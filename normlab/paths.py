"""Folders on disk: the configs that ship with the package, and the cache of tokenized corpora."""

from __future__ import annotations

import os
from pathlib import Path

WANDB_SWEEPS = "wandb"
"""The folder of sweeps of W&B below `config_dir()`, which is no config group."""

CACHE_LOCKS = "normlab.locks"
"""The folder of locks in `cache_dir()`; a lock has the name of a cached corpus in `tokens/`."""

_OUTPUT_FILES = {
    "runs": {"lock": b"", "run.json": b'"sha256": "'},
    "sweeps": {"lock": b"", "plan.json": b'"sha256": "'},
    "studies": {"report.json": b'"criterion": "'},
}
"""By the name of the folder around it: the files that a folder of results has, and what they contain."""

_PAGE_MARK = b'<meta name="generator" content="normlab">'
_FILE_MARKS = {
    "": _PAGE_MARK, ".html": _PAGE_MARK, ".htm": _PAGE_MARK, ".md": b"<!-- Written by normlab. -->",
    ".pdf": b"/Creator (normlab)", ".svg": b"<dc:title>normlab</dc:title>", ".png": b"Software\0normlab",
}  # fmt: skip
"""By suffix: what a page or a figure of normlab contains near its start (a PDF: near its end)."""
_NEAR = 2**16
"""Bytes at the start or end of a file that may have the mark; a PDF ends with 20 bytes for each of its objects."""


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
    marks = _OUTPUT_FILES.get(parent.name, {})
    return folder.name == CACHE_LOCKS or any(_contains(folder / name, mark) for name, mark in marks.items())


def is_output_file(path: Path) -> bool:
    """Return whether normlab wrote a file: a page, a figure, or the table of all studies."""
    mark = _FILE_MARKS.get(path.suffix.lower())
    if mark is None or not path.is_file():  # reading a pipe can block forever
        return False
    try:
        with path.open("rb") as file:
            start = file.read(_NEAR)
            file.seek(max(0, path.stat().st_size - _NEAR))
            return mark in start or (path.suffix.lower() == ".pdf" and mark in file.read(_NEAR))
    except OSError:
        return False


def _contains(path: Path, mark: bytes) -> bool:
    """Return whether a readable file contains `mark`."""
    try:
        return path.is_file() and mark in path.read_bytes()
    except OSError:
        return False
