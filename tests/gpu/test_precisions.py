"""Steps in each precision on a pretended GPU: no waits, and steps in fp16 that a CUDA graph can replay."""

from collections.abc import Callable
from typing import Any

import pytest

TakeSteps = Callable[..., dict[str, dict[str, Any]]]
ONE_LAYER = "model.depth=1"


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_a_step_in_each_precision(precision: str, take_steps: TakeSteps) -> None:
    # The logits of the second batch are large, so they are computed in chunks.
    for size in ("4", "8192"):
        parts = take_steps(f"precision={precision}", ONE_LAYER, f"train.batch_size={size}", steps=(0, 10, 11))
        for step in ("step 10", "step 11"):
            assert (parts[step]["waits"], len(parts[step]["copies"])) == ([], 1)


@pytest.mark.exhaustive
def test_a_replay_of_a_step_in_fp16_would_compute_the_next(take_steps: TakeSteps) -> None:
    overrides = ["precision=fp16", "train.graph=on", "stats.every=2", "norm=batchnorm", "train.accumulation=2"]
    parts = take_steps(*overrides, ONE_LAYER, steps=range(8))
    assert [parts[f"step {step}"]["differ"] for step in (6, 7)] == [[], []]
    assert parts["step 7"]["launches"] < 10
