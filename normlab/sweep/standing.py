"""How far a pack is, read from the records of its runs as anyone may read them."""

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
class Standing:
    """The runs of a pack, taken together."""

    steps: int
    """Steps that each of them takes, when it is done."""
    step: float
    """Steps that they have taken, on the mean; a run that has ended, however it did, has none to take."""
    outcomes: Mapping[str, int]
    """How many have ended, by outcome."""
    loss: float | None
    """The validation loss that was measured last, where the pack is of one run that has not diverged."""
    work: float
    """What all of it costs: the tokens of all runs times the weights that each of them goes through."""

    @property
    def share(self) -> float:
        """How much of the work is done, from 0 to 1."""
        return self.step / self.steps


def standing(folder: Path, jobs: Sequence[Job]) -> Standing:
    """How far the runs of a pack are; what cannot be read counts as not begun.

    Args:
        folder: The sweep's.
        jobs: The pack's runs, which have the same number of steps.
    """
    steps = jobs[0].config["train"]["steps"]
    states = [_state(folder, job) for job in jobs]
    taken = [steps if state in OUTCOMES else step for state, step, _ in states]
    return Standing(
        steps=steps,
        step=sum(taken) / len(taken),
        outcomes=Counter(state for state, _, _ in states if state in OUTCOMES),
        loss=states[0][2] if len(jobs) == 1 else None,
        work=sum(map(_work, jobs)),
    )


def _state(folder: Path, job: Job) -> tuple[str, float, float | None]:
    """The state or outcome of a run, the updates that it has made, and its last validation loss."""
    run = run_of(folder, job)
    try:
        status = run.status() if run.exists() else {"state": ""}
        row = read_last_row(run.metrics_path) or {}
    except StoreError:
        return "", 0, None
    # A training row's number counts from 0; the others have the number of updates before them.
    step = (number(row.get("step")) or 0) + (row.get("kind") == "train")
    state = status.get("outcome", status["state"])
    return state, step, final_losses(state, status)[0]


def _work(job: Job) -> float:
    train, model = job.config["train"], job.config["model"]
    tokens = train["steps"] * train["batch_size"] * model["context"]
    return tokens * model["width"] * (model["depth"] * 12 * model["width"] + 512)
