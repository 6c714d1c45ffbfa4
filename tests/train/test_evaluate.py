"""Validation: the mean over windows, unchanged running statistics, and the loss with batch statistics."""

from contextlib import nullcontext

import pytest
import torch

from normlab.config.compose import compose_run
from normlab.model.init import build_model
from normlab.model.runner import SingleRun
from normlab.training.evaluate import Validation
from normlab.training.start import train

VOCAB = 20


def validation_of(batch_size: int, batch_statistics: bool = False) -> Validation:
    tokens = torch.randint(0, VOCAB, (7, 9), generator=torch.Generator().manual_seed(0))
    return Validation(tokens[:, :-1], tokens[:, 1:], batch_size, nullcontext, batch_statistics)


def runner_of(norm: str) -> SingleRun:
    config = compose_run(["model=gpt2_nano", "model.context=8", f"norm={norm}", "init=xavier"])
    return SingleRun(build_model(config, VOCAB), compiled=False)


@pytest.mark.parametrize("norm", ["layernorm", "batchnorm"])
def test_validation_loss_does_not_depend_on_the_batch_size(norm: str) -> None:
    runner, validation = runner_of(norm), validation_of(7)
    with torch.no_grad():
        logits = runner.model.eval()(validation.tokens_NT)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), validation.targets_NT.flatten()).item()
    for batch_size in (1, 2, 3, 7, 50):
        assert validation_of(batch_size)(runner)["loss"] == [pytest.approx(expected, abs=1e-6)]


def test_evaluation_with_batch_statistics_keeps_the_running_ones() -> None:
    runner = runner_of("batchnorm")
    before = {name: tensor.clone() for name, tensor in runner.buffers.items()}
    losses = validation_of(4, batch_statistics=True)(runner)
    (loss,), (of_batches,) = losses["loss"], losses["loss_batch_statistics"]
    assert loss != pytest.approx(of_batches, abs=1e-3)
    assert before
    for name, tensor in runner.buffers.items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize(("norm", "gap"), [("batchnorm", True), ("rmsnorm", False)])
def test_batch_statistics_loss_is_recorded_for_norms_that_have_it(norm: str, gap: bool, overrides: list[str]) -> None:
    folder = train(compose_run([*overrides, f"norm={norm}", "train.steps=2"]), trackers=[]).folder
    assert all(("loss_batch_statistics" in row) == gap for row in folder.rows("eval").rows)
    assert (folder.status()["val_loss_batch_statistics"] is not None) == gap


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "extra",
    [
        ["model.context=1"],
        ["model.depth=1", "train.batch_size=1"],
        ["train.steps=1", "eval.every=1", "train.checkpoint_every=1"],
        ["model.depth=60", "model.width=8", "model.heads=1", "train.steps=2"],
        ["norm=batchnorm", "model.context=1", "train.batch_size=1", "train.steps=2"],
        ["data.tokenizer=chars"],
        ["model=llama_nano", "model.qk_norm=full", "placement=post"],
    ],
    ids=lambda extra: " ".join(extra),
)
def test_corner_cases_train(extra: list[str], overrides: list[str]) -> None:
    outcome = train(compose_run([*overrides, "train.steps=3", *extra]), trackers=[])
    assert outcome.state == "finished"
