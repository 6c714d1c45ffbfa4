"""The time of steps includes what the device still computes when the host has queued them, and nothing else."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from normlab.config.compose import compose_run
from normlab.training.evaluate import Validation
from normlab.training.loop import Loop
from normlab.training.measure.extended import ExtendedPass
from normlab.training.start import train

STEP_S, EXTENDED_S, EVALUATION_S = 1.0, 10.0, 100.0


class Device:
    """A device that computes what is queued when the host reads from it. The host itself takes no time."""

    def __init__(self) -> None:
        self.now = self.queued = 0.0

    def before(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that waits for the device first."""

        def waiting(*args: Any, **options: Any) -> Any:
            self.now, self.queued = self.now + self.queued, 0.0
            return method(*args, **options)

        return waiting

    def queue(self, method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """Return a method that queues work of some seconds."""

        def queueing(*args: Any, **options: Any) -> Any:
            self.queued += seconds
            return method(*args, **options)

        return queueing


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    pretended = Device()
    monkeypatch.setattr(time, "perf_counter", lambda: pretended.now)
    for name in ("cpu", "item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, pretended.before(getattr(torch.Tensor, name)))
    return pretended


def test_the_record_has_the_time_of_the_steps_only(
    device: Device, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "take_step", device.queue(Loop.take_step, STEP_S))
    monkeypatch.setattr(ExtendedPass, "__call__", device.queue(ExtendedPass.__call__, EXTENDED_S))
    monkeypatch.setattr(Validation, "__call__", device.queue(Validation.__call__, EVALUATION_S))
    # No cadence is a multiple of another.
    cadences = ["train.log_every=3", "eval.every=4", "stats.extended_every=5", "stats.tiers=[core,extended]"]
    config = compose_run([*overrides, *cadences])
    paces = train(config, trackers=[]).folder.rows("pace").rows
    assert [(row["step"], row["seconds"]) for row in paces] == [(step, step * STEP_S) for step in (3, 4, 5, 8, 10, 12)]
    tokens = config.train.batch_size * config.model.context
    assert {row["tokens_per_s"] for row in paces} == {tokens / STEP_S}
