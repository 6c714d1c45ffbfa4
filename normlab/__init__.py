"""normlab: a laboratory for normalisation in transformers."""

from __future__ import annotations

from typing import Any

from normlab.version import __version__ as __version__


def __getattr__(name: str) -> Any:
    # `normlab.load` needs torch; `import normlab` must not.
    if name == "load":
        from normlab.loaded_run import load

        return load
    raise AttributeError(f"module 'normlab' has no attribute {name!r}")
