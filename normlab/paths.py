"""Where things are on disk: the configs that ship with the package, and the cache of token files."""

from __future__ import annotations

import os
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def config_dir() -> Path:
    """Folder of the Hydra configs: inside the wheel, or `conf/` beside the package in a checkout."""
    packaged = _HERE / "conf"
    return packaged if packaged.is_dir() else _HERE.parent / "conf"


def cache_dir() -> Path:
    """Folder of the token files: `$NORMLAB_CACHE`, else `$XDG_CACHE_HOME/normlab`, else `~/.cache/normlab`."""
    if explicit := os.environ.get("NORMLAB_CACHE"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "normlab"
