import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from normlab.config.compose import compose_run
from normlab.store.runs import RunFolder
from normlab.tracking.console import Console
from normlab.training import start as training
from support.run_folders import OVERRIDES, Train


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use one thread: the number of threads changes bits, and some of these runs resume in another process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Return a function that trains the run of OVERRIDES with more overrides and returns its folder."""

    def call(*overrides: str, results: str = "results") -> RunFolder:
        return training.train(compose_run([*OVERRIDES, f"results_dir={tmp_path / results}", *overrides])).folder

    return call


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the next run send itself a signal after `step` updates are in its record; 0: before the first."""

    def arm(step: int, number: int = signal.SIGTERM, times: int = 1) -> None:
        class Interrupting(Console):
            def start(self, run: Any, first_step: int) -> None:
                super().start(run, first_step)
                self.send(0)

            def log(self, rows: Any) -> None:
                super().log(rows)
                self.send(rows[-1]["step"])

            def send(self, now: int) -> None:
                if now >= step and training.Console is Interrupting:
                    monkeypatch.setattr(training, "Console", Console)
                    for _ in range(times):
                        os.kill(os.getpid(), number)

        monkeypatch.setattr(training, "Console", Interrupting)

    return arm
