"""normlab: a laboratory for normalisation in transformers."""

from typing import TYPE_CHECKING, Any

from normlab.base.version import __version__

if TYPE_CHECKING:
    from normlab.api import LoadedRun, figure, load, runs, statistics, summarize, sweep, train

__all__ = ["LoadedRun", "__version__", "figure", "load", "runs", "statistics", "summarize", "sweep", "train"]


def __getattr__(name: str) -> Any:
    # The functions need torch and pandas; `import normlab` must not.
    if name in __all__:
        from normlab import api

        return getattr(api, name)
    raise AttributeError(f"module 'normlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
