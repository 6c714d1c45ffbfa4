"""The loop with a fake step: in which order it records, evaluates, saves and stops, without a model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normlab.config.compose import compose_run
from normlab.store.runs import RunFolder
from normlab.system.process_memory import PeakMemory
from normlab.training.loop import Loop, Parts
from normlab.training.machine import resolve
from normlab.training.step import StepOutput
from normlab.training.training_run import TrainingRun
from normlab.training.writer import Writer
from support.small_run import small_run

ALIVE, DIVERGED = (3.0, 1.0, 1.0, 1.0), (float("nan"), 1.0, 1.0, 0.0)


class Events(list[str]):
    """Receives what the loop does, as its tracker, its state and its stop request; the stop comes after a step."""

    def __init__(self, stops_after: int | None = None) -> None:
        super().__init__()
        self.step_count, self._stops_after = 0, stops_after

    def log(self, rows: list[dict[str, Any]]) -> None:
        self += [f"record {row['kind']}" for row in rows]

    def save(self) -> None:
        self.append("checkpoint")

    @property
    def received(self) -> int | None:
        self.append("stop?")
        return 15 if self._stops_after is not None and self.step_count >= self._stops_after else None


def loop_of(events: Any, results: Path, *outputs: tuple[float, ...]) -> Loop:
    """Return a loop whose steps return these outputs, with an evaluation and a checkpoint every two steps."""
    options = [f"train.steps={len(outputs)}", "eval.every=2", "train.checkpoint_every=2", "stats=off"]
    config = compose_run(small_run(results, *options))
    writer = Writer(enabled=False)
    run = TrainingRun(config, RunFolder(results / "run"), trackers=[events], writer=writer)
    remaining = list(outputs)

    def compute_step(measured: bool) -> StepOutput:
        assert not measured
        events.append("step")
        return StepOutput(torch.tensor(remaining.pop(0)))

    inputs: Any = SimpleNamespace(load=lambda step: events.append(f"load {step}"))
    schedule: Any = SimpleNamespace(
        is_due=lambda step: False, is_measured=lambda step: False, probe_if_due=lambda step: ()
    )
    parts = Parts(
        inputs=inputs, compute_step=compute_step,
        evaluate=lambda: {"loss": [2.5]}, measure_initialisation=lambda: None, schedule=schedule, state=events,
        groups={}, writer=writer, peak_memory=PeakMemory("cpu"),
    )  # fmt: skip
    return Loop([run], resolve(config), parts)


def test_the_order_between_two_steps(tmp_path: Path) -> None:
    """Record, evaluation, checkpoint, then the request to stop: a checkpoint knows the length of the record."""
    events: Any = Events()
    loop = loop_of(events, tmp_path, ALIVE, ALIVE, ALIVE, ALIVE)
    assert loop.run(events) == "finished"
    due = ["record train", "record train", "record pace", "record eval", "checkpoint", "stop?"]
    assert events == [
        "record eval", "stop?",
        "load 0", "step", "stop?", "load 1", "step", "stop?", *due,
        "load 2", "step", "stop?", "load 3", "step", "stop?", *due,
        "checkpoint",
    ]  # fmt: skip
    progress = loop.runs[0].progress
    assert (progress.step, progress.train_loss, progress.val_loss) == (4, 3.0, 2.5)


def test_a_stopped_run_records_its_steps_and_saves(tmp_path: Path) -> None:
    events: Any = Events(stops_after=1)
    assert loop_of(events, tmp_path, ALIVE, ALIVE, ALIVE).run(events) == "interrupted"
    assert events[2:] == ["load 0", "step", "stop?", "record train", "record pace", "stop?", "checkpoint"]


@pytest.mark.parametrize("step", [0, 1])
def test_a_diverged_run_takes_no_step_more_than_its_interval(step: int, tmp_path: Path) -> None:
    events: Any = Events()
    outputs = [DIVERGED if number >= step else ALIVE for number in range(6)]
    loop = loop_of(events, tmp_path, *outputs)
    assert loop.run(events) == "diverged"
    assert events[-2:] == ["record pace", "checkpoint"]
    assert (events.count("step"), loop.runs[0].progress.step) == (2, step)
