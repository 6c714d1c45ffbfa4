"""What trains the packs of a sweep: one module for each value of `sweep.on`, imported when a sweep needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from normlab.config.sweep_options import SweepOptions
from normlab.store.plans import Pack, Plan
from normlab.sweeps.files import PackOutcome
from normlab.training.machine import Gpu

MODULES = {"local": "normlab.sweeps.local", "slurm": "normlab.sweeps.slurm"}
"""The module of each executor, whose function `make_executor` returns it."""


class Executor(Protocol):
    """Trains packs, and reports the outcome of each."""

    @property
    def active(self) -> set[int]:
        """The numbers of the submitted packs whose outcome is not known yet."""
        ...

    def take_over(self, plan: Plan) -> Iterable[PackOutcome]:
        """Watch the packs of an earlier supervisor, and return the outcomes of those that have ended.

        The caller holds the lock of the sweep, and records each outcome before it requests the next.

        Raises:
            StoreError: Another executor has packs of the sweep, or the list of packs cannot be read.
        """
        ...

    def submit(self, plan: Plan, waiting: Sequence[Pack]) -> list[Pack]:
        """Start packs, and return those that have to wait."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until a pack may have ended, but not longer than some seconds."""
        ...

    def outcomes(self, plan: Plan) -> Iterable[PackOutcome]:
        """Yield new outcomes; the caller must record each outcome before it requests the next."""
        ...

    def stop(self, *, again: bool) -> str:
        """Stop the packs after a signal, or after another one (`again`); return a message."""
        ...

    def close(self) -> None:
        """Free what the executor holds, also after an error."""
        ...


def make_executor(folder: Path, options: SweepOptions, gpus: Sequence[Gpu], report: Callable[[str], None]) -> Executor:
    """Return the executor of `sweep.on`, for the sweep in `folder`; it sends lines on its progress to `report`.

    Raises:
        ConfigError: It is not available on this machine.
    """
    return import_module(MODULES[options.on]).make_executor(folder, options, gpus, report)
