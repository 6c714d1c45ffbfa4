"""Folders on disk: the configs that ship with the package, and the cache of tokenized corpora."""

import os
from pathlib import Path


def config_dir() -> Path:
    """Return the folder of the Hydra configs: inside the wheel, or `conf/` beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "conf"
    if packaged.is_dir():
        return packaged
    return package.parent / "conf"


def cache_dir() -> Path:
    """Return `$NORMLAB_CACHE`, else `$XDG_CACHE_HOME/normlab`, else `~/.cache/normlab`."""
    explicit = os.environ.get("NORMLAB_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    # The XDG specification treats an empty variable as one that is not set.
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "normlab"
    return Path.home() / ".cache" / "normlab"
