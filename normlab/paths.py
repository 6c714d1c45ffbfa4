"""Folders on disk: the configs that ship with the package, and the cache of tokenized corpora."""

from __future__ import annotations

import os
from contextlib import nullcontext
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
"""By suffix: what a page or a figure of normlab contains near its start (.md: at its start; .pdf: anywhere)."""
_START = 2**12
"""Bytes of a file, other than a PDF, that may have the mark."""


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
    if parent.name not in _OUTPUT_FILES:
        return folder.name == CACHE_LOCKS
    name, mark = _OUTPUT_FILES[parent.name]
    # A run or sweep that was killed at its start has only the lock, which is empty or names its owner.
    lock = _content(folder / "lock") if parent.name != "studies" else None
    return mark in (_content(folder / name) or b"") or lock == b"" or (lock or b"").startswith(b'{"pid":')


def is_output_file(path: Path) -> bool:
    """Return whether normlab wrote a file: a page, a figure, or the table of all studies."""
    suffix = path.suffix.lower()
    content = _content(path, None if suffix == ".pdf" else _START) if suffix in _FILE_MARKS else None
    if content is None:
        return False
    return content.startswith(_FILE_MARKS[suffix]) if suffix == ".md" else _FILE_MARKS[suffix] in content


def _content(path: Path, most: int | None = None) -> bytes | None:
    """Return the first bytes of a file; None if there is none that can be read, or a pipe, which could block."""
    try:
        with path.open("rb") if path.is_file() else nullcontext() as file:
            return file and file.read(most)
    except OSError:
        return None
