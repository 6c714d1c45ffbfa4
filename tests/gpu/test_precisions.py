"""Steps in each precision on a pretended GPU: no waits, and two steps in fp16 that a CUDA graph could replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

TakeSteps = Callable[..., dict[str, dict[str, Any]]]
ONE_LAYER = "model.depth=1"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_step_in_each_precision(precision: str, take_steps: TakeSteps) -> None:
    # The logits of the second batch are large, so they are computed in chunks.
    for size in ("4", "8192"):
        parts = take_steps(f"precision={precision}", ONE_LAYER, f"train.batch_size={size}", steps=(0, 10, 11))
        del parts["step 0"]  # builds constants
        assert [(done["waits"], done["copies"]) for done in parts.values()] == [([], 1)] * 2


@pytest.mark.parametrize("overrides", [[], ["norm=batchnorm", "train.accumulation=2"]], ids=" ".join)
def test_a_replay_of_a_step_in_fp16_would_compute_the_next(overrides: list[str], take_steps: TakeSteps) -> None:
    assert take_steps(*overrides, "precision=fp16", ONE_LAYER, replay=(2, 3))["differ"] == []
