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


def _contains(path: Path, mark: bytes) -> bool:
    """Return whether a readable file contains `mark`."""
    try:
        return path.is_file() and mark in path.read_bytes()
    except OSError:
        return False
