"""normlab: a laboratory for normalisation in transformers."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # `normlab.load` needs torch; `import normlab` must not.
    if name == "load":
        from normlab.train.load import load

        return load
    raise AttributeError(f"module 'normlab' has no attribute {name!r}")
