"""What is sent to W&B: payloads of the rows, the config and the summary."""

from __future__ import annotations

import math
from typing import Any

import pytest

from normlab.store.status import Status
from normlab.store.throughput import Compute
from normlab.tracking.wandb_payloads import final_summary, flat_config, payloads
from support.wandb_runs import RUN

UNKNOWN = Compute.parse({})


def test_the_summary_has_the_outcome_and_no_final_loss_of_a_diverged_run() -> None:
    losses: dict[str, Any] = {"val_loss": 7.5, "best_val_loss": 5.5}
    diverged: dict[str, Any] = {"state": "diverged", "outcome": "diverged"}
    assert final_summary(Status(**losses, **diverged)) == diverged | {"best_val_loss": 5.5, "last_val_loss": 7.5}
    stuck: dict[str, Any] = {"state": "finished", "outcome": "stuck"}
    assert final_summary(Status(**losses, **stuck)) == losses | stuck


def train(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": loss, "grad_norm": 1.0, "clip": 0.5, "lr": 1e-3}


def test_rows_of_one_step_are_one_payload() -> None:
    rows = [
        {"kind": "eval", "step": 0, "loss": 5.5},
        train(1, 5.0),
        {"kind": "eval", "step": 1, "loss": 4.5, "loss_batch_statistics": 4.4},
        train(2, 7.0),
        train(3, 4.0),
        {"kind": "pace", "step": 3, "seconds": 0.1, "tokens_per_s": 10.0},
    ]
    assert payloads(rows, 8, UNKNOWN) == [
        {"train/step": 0, "train/tokens": 0, "eval/loss": 5.5},
        {"train/step": 1, "train/tokens": 8, "eval/loss": 4.5, "eval/loss_batch_statistics": 4.4},
        {
            "train/step": 3,
            "train/tokens": 24,
            "train/loss": 4.0,
            "train/loss_max": 7.0,
            "train/grad_norm": 1.0,
            "train/clip_coef": 0.5,
            "train/lr": 1e-3,
            "perf/seconds": 0.1,
            "perf/tokens_per_s": 10.0,
        },
    ]


def test_the_pace_has_flops_and_the_mfu_of_a_pack() -> None:
    pace = {"kind": "pace", "step": 3, "seconds": 0.1, "tokens_per_s": 1e5}
    known = Compute(flops_per_token=1e9, peak=5e14, runs=2)
    (payload,) = payloads([pace], 8, known)
    assert (payload["perf/tflops_per_s"], payload["perf/mfu"]) == (100.0, pytest.approx(0.4))
    assert "perf/mfu" not in payloads([pace], 8, Compute(1e9, None, 2))[0]
    assert flat_config(RUN | {"flops_per_token": 1e9})["flops_per_token"] == 1e9


@pytest.mark.parametrize("losses", [[math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [math.inf, 1.0, math.nan]])
def test_nan_loss_is_the_largest_of_its_interval(losses: list[float]) -> None:
    (payload,) = payloads([train(step, loss) for step, loss in enumerate(losses)], 8, UNKNOWN)[-1:]
    assert math.isnan(payload["train/loss_max"])


def test_preset_labels_the_norm() -> None:
    tree = RUN["config"] | {"norm": {"name": "rmsnorm", "preset": "rmsnorm_bare"}}
    assert flat_config(RUN | {"config": tree})["norm"] == "rmsnorm_bare"
