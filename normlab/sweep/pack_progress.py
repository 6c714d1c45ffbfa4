"""The progress of a pack, from the records of its runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from normlab.errors import StoreError
from normlab.store.outcome import OUTCOMES, final_losses
from normlab.store.plans import Job, run_of
from normlab.store.reading import read_last_row
from normlab.store.schema import number


@dataclass(frozen=True, slots=True)
class PackProgress:
    """The progress of the runs of a pack, taken together."""

    steps: int
    """Steps of each run."""
    step: float
    """Mean number of steps done; a completed run counts as having done all."""
    outcomes: Mapping[str, int]
    """Number of completed runs, by outcome."""
    loss: float | None
    """Latest validation loss of a pack of one run that has not diverged, in nats/token."""
    cost: float
    """Relative cost of the whole pack: tokens times weights, summed over its runs."""

    @property
    def fraction(self) -> float:
        """Fraction of the work that is done, 0 to 1."""
        return self.step / self.steps


def pack_progress(folder: Path, jobs: Sequence[Job]) -> PackProgress:
    """Return the progress of a pack; a run that cannot be read counts as not started.

    Args:
        folder: The sweep's.
        jobs: The pack's runs, which have the same number of steps.
    """
    steps = jobs[0].config["train"]["steps"]
    states = [_state(folder, job) for job in jobs]
    steps_done = [steps if state in OUTCOMES else step for state, step, _ in states]
    return PackProgress(
        steps=steps,
        step=sum(steps_done) / len(steps_done),
        outcomes=Counter(state for state, _, _ in states if state in OUTCOMES),
        loss=states[0][2] if len(jobs) == 1 else None,
        cost=sum(map(_cost, jobs)),
    )


def _state(folder: Path, job: Job) -> tuple[str, float, float | None]:
    """Return a run's outcome or state, its number of updates, and its latest validation loss."""
    run = run_of(folder, job)
    try:
        status = run.status() if run.exists() else {"state": ""}
        row = read_last_row(run.metrics_path) or {}
    except StoreError:
        return "", 0, None
    # The step of a training row counts from 0; that of other rows is the number of updates before them.
    step = (number(row.get("step")) or 0) + (row.get("kind") == "train")
    state = status.get("outcome", status["state"])
    return state, step, final_losses(state, number(status.get("val_loss")))[0]


def _cost(job: Job) -> float:
    train, model = job.config["train"], job.config["model"]
    tokens = train["steps"] * train["batch_size"] * model["context"]
    return tokens * model["width"] * (model["depth"] * 12 * model["width"] + 512)
