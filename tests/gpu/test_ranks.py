"""Two ranks on pretended GPUs: the steps wait for nothing, and sum the gradients while the backward pass goes on.

The process group records collectives and moves nothing; `tests/train/test_devices.py` checks numbers on CPUs.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.small_run import small_run

HERE = Path(__file__).parent
DEPTH = 2
SEGMENTS = DEPTH + 2
"""Embeddings, blocks and head."""
NORMS = 2 * DEPTH + 1
PLAIN = SEGMENTS + 1
"""All-reduces of a plain step: one for the gradients of each segment, and one for the loss."""
MEASURED = PLAIN + 2
"""The statistics are means and maxima over ranks."""
STEPS = (0, 1, 10, 11)
"""Measured and plain ones, alternately."""

Parts = dict[str, dict[str, Any]]
TakeSteps = Callable[..., list[Parts]]


@pytest.fixture(scope="module")
def take_steps(guard: Path) -> Iterator[TakeSteps]:
    """Yield a function that takes the steps of two ranks with some overrides and returns what each step does."""
    command = [sys.executable, HERE / "pretended_ranks.py", guard]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def call(*overrides: str, small_vocab: int = 1024) -> list[Parts]:
            overrides = (*small_run(Path("results")), f"model.depth={DEPTH}", *overrides)
            ranks = []
            for rank in range(2):
                case = {
                    "overrides": overrides, "devices": 2, "rank": rank, "steps": STEPS, "small_vocab": small_vocab,
                }  # fmt: skip
                print(json.dumps(case), file=stdin, flush=True)
                ranks.append(json.loads(stdout.readline()))
                if "error" in ranks[-1]:
                    pytest.fail(ranks[-1]["error"])
            return ranks

        yield call
        stdin.close()
    assert process.returncode == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("overrides", "of_a_norm"),
    [
        (["norm=rmsnorm"], 0),
        (["norm=batchnorm"], 4),  # mean and variance, forward and backward
        (["norm=rmsnorm", "train.accumulation=4"], 0),
        pytest.param(["norm=none"], 0, marks=pytest.mark.exhaustive),
        pytest.param(["norm=rmsnorm", "model.tie_embeddings=false", "precision=fp32"], 0, marks=pytest.mark.exhaustive),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_steps_of_two_ranks(overrides: list[str], of_a_norm: int, take_steps: TakeSteps) -> None:
    ranks = take_steps(*overrides)
    segments = PLAIN - ("norm=none" in overrides)  # then the head has no parameters of its own
    for steps in ranks:
        for step, budget in zip(STEPS, (segments + 2, segments) * 2, strict=True):
            done = steps[f"step {step}"]
            assert {name for name, _ in done["collectives"]} == {"c10d::allreduce_"}
            assert len(done["collectives"]) == budget + of_a_norm * NORMS
            if step:  # the first one also builds constants
                assert (done["waits"], done["copies"]) == ([], 1)
    # Ranks that called collectives in another order or with other sizes would wait for each other for ever.
    assert [step["collectives"] for step in ranks[0].values()] == [step["collectives"] for step in ranks[1].values()]


@pytest.mark.exhaustive
def test_gradients_are_summed_while_the_backward_pass_goes_on(take_steps: TakeSteps) -> None:
    steps, _ = take_steps("norm=layernorm", "train.accumulation=4")  # two micro-batches for each rank
    for step in steps.values():
        first, operations = step["backward"]
        assert "c10d::allreduce_" not in first
        sums = [index for index, name in enumerate(operations) if name == "c10d::allreduce_"]
        products = [index for index, name in enumerate(operations) if name in ("aten::mm", "aten::bmm")]
        assert len(sums) == SEGMENTS
        *earlier, first_block, embeddings = sums
        assert max(earlier) < products[-1] < first_block < embeddings


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", [[], ["train.batch_size=8192"]], ids=["at once", "chunks"])
def test_a_padded_vocabulary_adds_few_launches(overrides: list[str], take_steps: TakeSteps) -> None:
    """The rows of zeros, the matrix with them, and the gradient of the part of the logits that the loss takes."""
    (plain, _), (padded, _) = (take_steps(*overrides, small_vocab=small_vocab) for small_vocab in (1024, 0))
    for step, done in padded.items():
        assert 1 <= done["launches"] - plain[step]["launches"] <= 0.02 * plain[step]["launches"]
        assert done["waits"] == plain[step]["waits"]
