"""Sweeps whose worker processes are fakes: they end each pack after a few polls, in a way that the test chooses."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from normlab.config.compose import compose_sweep
from normlab.store.format import FAILED, FINISHED, INTERRUPTED
from normlab.store.plans import read_plan, run_of
from normlab.store.runs import RunFolder
from normlab.sweeps import local, supervisor
from normlab.sweeps.files import MEMORY, Answer
from normlab.sweeps.plan import make_plan
from normlab.sweeps.supervisor import Supervision, supervise
from normlab.training.machine import Gpu
from support.processes import RecordingDisplay
from support.small_run import one_run_at_a_time

FINISHED_STATUS = {"state": "finished", "outcome": "finished", "val_loss": 2.0, "best_val_loss": 2.0}
ANSWERS = {
    "finish": Answer(FINISHED, "", can_continue=True),
    "leave": Answer(FINISHED, "", can_continue=False),
    "raise": Answer(FAILED, "ValueError: no", can_continue=False),
    "memory": Answer(MEMORY, "no memory", can_continue=False),
    "stopped from outside": Answer(INTERRUPTED, "", can_continue=False),
}


class FakeWorker:
    """Replaces `WorkerProcess`; `ways` has the way of a pack by the seed of one of its runs."""

    ways: dict[int, str]
    all: list[FakeWorker]
    most_at_once: int

    def __init__(self, folder: Path, options: dict[str, Any], threads: int, gpus: Sequence[Gpu], log: Path) -> None:
        self.folder, self.options, self.threads, self.gpus = folder, options, threads, list(gpus)
        self.connection, self._end = Pipe()
        self.is_new = True
        self.way, self.code, self.is_over = "", None, False
        self.packs: list[int] = []
        self.loads: list[Counter[int]] = []
        """For each pack: the number of packs on each GPU before."""
        self.all.append(self)

    def train(self, number: int) -> None:
        self.loads.append(Counter(gpu.index for each in self.all if each.way for gpu in each.gpus))
        self.packs.append(number)
        plan = read_plan(self.folder)
        self.runs = plan.runs_of(plan.pack_of(number))
        seeds = [run.config["seed"] for run in self.runs]
        self.way = next((self.ways[seed] for seed in seeds if seed in self.ways), "finish")
        if self.way == "memory" and len(self.runs) == 1:
            self.way = "finish"
        self.polls, self.is_over, self.is_stopped = 0, False, False
        FakeWorker.most_at_once = max(self.most_at_once, sum(bool(each.way) for each in self.all))

    def exit_code(self) -> int | None:
        if self.way:
            self.polls += 1
            if self.way == "signal" and self.polls == 3:
                os.kill(os.getpid(), signal.SIGINT)
            self.is_over = self.is_stopped or (
                self.polls > 3 + self.packs[-1] % 3 and self.way not in ("hang", "signal")
            )
            if self.is_over and self.way not in ANSWERS:
                self.code, self.way = -9, ""
        return self.code

    def answer(self) -> Answer | None:
        if not self.is_over or not self.way:
            return None
        answer = ANSWERS[self.way]
        for run in self.runs if answer.cause == FINISHED else ():
            RunFolder.create(run_of(self.folder, run).path, {"run_id": run.run_id}).write_status(FINISHED_STATUS)
        self.way, self.is_over = "", False
        return answer

    def stop(self) -> None:
        self.is_stopped = True

    def kill(self) -> None:
        self.code = -9

    end = kill


class FakeSweeps:
    """Supervises sweeps with fake workers."""

    def __init__(self, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.overrides, self.monkeypatch = overrides, monkeypatch
        monkeypatch.setattr(local, "WorkerProcess", FakeWorker)
        monkeypatch.setattr(supervisor, "POLL_EVERY_S", 0.001)

    def __call__(
        self,
        *more: str,
        ways: dict[int, str] | None = None,
        on: Sequence[Gpu] = (),
        retry: bool = False,
        extend: bool = False,
    ) -> tuple[Supervision, list[Any], Path]:
        """Return the result, the calls of the display and the folder of a sweep on some GPUs."""
        for name, value in {"ways": ways or {}, "all": [], "most_at_once": 0}.items():
            self.monkeypatch.setattr(FakeWorker, name, value, raising=False)
        name = [] if "sweep.name=y" in more else ["sweep.name=x"]
        options, composed = compose_sweep([*self.overrides, *one_run_at_a_time(more), *name, *more])
        planned, display = make_plan(options, composed, extend=extend), RecordingDisplay()
        result = supervise(replace(planned, gpus=list(on)), options, display, retry_failed=retry)
        return result, display.events, planned.folder
