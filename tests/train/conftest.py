from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import WORDS, Command, Train

from normlab.launch import compose_run
from normlab.store.runs import RunFolder
from normlab.tracking.console import Console
from normlab.train import start


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The number of threads may change bits; some of these runs change the process half-way."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train the run of WORDS and more, however it ends, and return its folder."""

    def call(*words: str, results: str = "results") -> RunFolder:
        return start.train(compose_run([*WORDS, f"results_dir={tmp_path / results}", *words])).folder

    return call


@pytest.fixture
def command(tmp_path: Path, run_command: Command) -> Command:
    """`normlab train` with WORDS and more, in the folder that `train` uses: exit code, output, errors."""
    return lambda *words: run_command("train", *WORDS, f"results_dir={tmp_path / 'results'}", *words)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of WORDS that nothing happened to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = tmp_path_factory.mktemp("reference")
    outcome = start.train(compose_run([*WORDS, f"results_dir={results}"]))
    torch.set_num_threads(threads)
    assert outcome.state == "finished"
    return outcome.folder.path


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the next run send itself a signal once `step` updates are in its record; 0: before the first."""

    def arm(step: int, number: int = signal.SIGTERM, times: int = 1) -> None:
        class Interrupting(Console):
            def start(self, run: Any, first_step: int) -> None:
                super().start(run, first_step)
                self.send(0)

            def log(self, rows: Any) -> None:
                super().log(rows)
                self.send(rows[-1]["step"])

            def send(self, now: int) -> None:
                if now >= step and start.Console is Interrupting:
                    monkeypatch.setattr(start, "Console", Console)
                    for _ in range(times):
                        os.kill(os.getpid(), number)

        monkeypatch.setattr(start, "Console", Interrupting)

    return arm
