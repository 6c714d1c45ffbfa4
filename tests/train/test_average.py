"""The mean of the weights against the written sum; its validation loss; a pack; runs that are not updated."""

import io

import pytest
import torch
from torch import Tensor

from normlab.config.compose import compose_run
from normlab.model.init import build_model
from normlab.model.runner import ModelRunner, SingleRun, StackedRuns
from normlab.report.figure_points import read_curves
from normlab.report.runs_table import summarize
from normlab.store.record import RunRecord
from normlab.tracking.console import Console
from normlab.training.average import WeightAverage
from normlab.training.evaluate import Validation
from normlab.training.start import train
from support.small_steps import VOCAB, config_of

DECAY, STEPS = 0.7, 5


def runner_of(runs: int) -> ModelRunner:
    models = [build_model(config_of(f"seed={seed}"), VOCAB).double() for seed in range(max(runs, 1))]
    return StackedRuns(models, compiled=False) if runs else SingleRun(models[0], compiled=False)


@torch.no_grad()
def averaged(runner: ModelRunner, updated: Tensor) -> tuple[WeightAverage, dict[str, Tensor], dict[str, Tensor]]:
    """Return the average of changing parameters, the initial parameters, and the written sum."""
    average = WeightAverage(runner.params, DECAY)
    initial = {name: p.detach().clone() for name, p in runner.params.items()}
    generator = torch.Generator().manual_seed(0)
    history: list[dict[str, Tensor]] = []
    for count in range(1, STEPS + 1):
        for p in runner.params.values():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        history.append({name: p.detach().clone() for name, p in runner.params.items()})
        average.add(runner.params, torch.tensor(float(count)), updated)
    weights = [DECAY ** (STEPS - 1 - step) for step in range(STEPS)]
    expected: dict[str, Tensor] = {}
    for name, p in initial.items():
        total = torch.zeros_like(p)
        for w, each in zip(weights, history, strict=True):
            total += w * each[name]
        expected[name] = total / sum(weights)
    return average, initial, expected


@pytest.mark.parametrize("runs", [0, 2])
def test_average_is_the_written_sum_and_keeps_runs_that_are_not_updated(runs: int) -> None:
    runner = runner_of(runs)
    updated = torch.tensor([True, False]) if runs else torch.tensor(True)
    average, initial, expected = averaged(runner, updated)
    for name, tensor in average.tensors.items():
        chosen = tensor[0] if runs else tensor
        torch.testing.assert_close(chosen, expected[name][0] if runs else expected[name], atol=1e-12, rtol=1e-12)
        assert not runs or tensor[1].equal(initial[name][1])


@pytest.mark.parametrize("runs", [0, 2])
def test_loss_is_that_of_the_average_and_the_weights_keep_their_bits(runs: int) -> None:
    runner = runner_of(runs)
    average, _, _ = averaged(runner, torch.ones(runner.run_shape, dtype=torch.bool))
    drawn = torch.randint(VOCAB, (6, 9), generator=torch.Generator().manual_seed(0))
    validation = Validation(drawn[:, :-1], drawn[:, 1:], 2, autocast=torch.no_grad, batch_statistics=False)
    weights = {name: p.detach().clone() for name, p in runner.params.items()}
    means = {name: mean.clone() for name, mean in average.tensors.items()}
    losses = validation(runner, average)
    for name, p in runner.params.items():
        assert p.equal(weights[name])
        assert average.tensors[name].equal(means[name])
    other = build_model(config_of("seed=0"), VOCAB).double()
    with torch.no_grad():
        for name, p in other.named_parameters():
            p.copy_(means[name][0] if runs else means[name])
    (expected,) = validation(SingleRun(other, compiled=False))["loss"]
    assert losses["loss_ema"][0] == pytest.approx(expected, abs=1e-12)
    assert losses["loss_ema"][0] != pytest.approx(losses["loss"][0], abs=1e-3)


def test_loss_of_the_average_is_recorded(overrides: list[str]) -> None:
    folder = train(compose_run([*overrides, "eval.ema=1e-30", "train.steps=2", "eval.every=1"]), trackers=[]).folder
    rows = folder.rows("eval").rows
    assert [row["loss_ema"] for row in rows] == [row["loss"] for row in rows]
    assert folder.status()["val_loss_ema"] == folder.status()["val_loss"]


def test_loss_of_the_average_is_shown(overrides: list[str]) -> None:
    stream = io.StringIO()
    config = compose_run([*overrides, "eval.ema=0.9", "train.steps=2", "eval.every=1"])
    record = train(config, trackers=[Console(stream)])
    *_, last = losses = [row["loss_ema"] for row in record.folder.rows("eval").rows]
    assert f"ema {last:.4f}" in stream.getvalue()
    (row,) = summarize(record.folder.path)
    assert row["val_loss_ema"] == last
    assert read_curves(RunRecord.load(record.folder), [])["val_loss_ema"].values.tolist() == losses
