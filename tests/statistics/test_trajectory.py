"""Statistics do not change training: with every cadence, and without statistics, a run has the same bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normlab.training.machine import resolve
from normlab.training.optim import hyperparameters_at
from normlab.training.step import Step
from support.cadences import CADENCES, bits, trained
from support.measured_steps import case


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


CASES = {
    "pre": ("norm=rmsnorm", "placement=pre"),
    "post": ("norm=layernorm", "placement=post", "train.accumulation=2"),
    "peri": ("norm=batchnorm", "placement=peri", "model.qk_norm=head"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("overrides", "compiled"),
    [(overrides, compiled) for overrides in CASES.values() for compiled in ("off", "on")],
    ids=[f"{name}-{compiled}" for name in CASES for compiled in ("off", "on")],
)
def test_statistics_do_not_change_the_bits_of_a_run(overrides: tuple[str, ...], compiled: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    found = {
        how: bits(trained(tmp_path / how, *overrides, *options, f"compile={compiled}", "deterministic=true"))
        for how, options in CADENCES.items()
    }
    assert found["always"] == found["never"]
    assert found["now and then"] == found["never"]


def test_statistics_do_not_change_eager_bfloat16_steps(tmp_path: Path) -> None:
    found = [
        bits(trained(tmp_path / how, *options, "precision=bf16", "train.steps=3")) for how, options in CADENCES.items()
    ]
    assert found == [found[0]] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
def test_statistics_change_compiled_bfloat16_steps_by_rounding_only(placement: str) -> None:
    """The compiler may keep rounded values for the backward pass or recompute them unrounded, unlike in float32.

    From one state, the loss and the gradient norm of a measured and a plain step differ by far less than a unit in
    the last place of bfloat16, 2^-8.
    """
    torch.compiler.reset()
    runs = case(placement, 1, "precision=bf16", "optim.lr=1e-2", dtype=torch.float32, compiled=True)
    config = runs.configs[0]
    steps = [runs.step_of(runs.models()) for _ in range(2)]
    for step in steps:
        step.autocast = resolve(config).autocast()
    for number in range(12):
        (tokens, targets), hyper = runs.batch(number), [hyperparameters_at(config.optim, 50, number)]
        outputs = [step(tokens[0], targets[0], hyper, measured=step is steps[0]) for step in steps]
        (loss, grad_norm, *_), (plain_loss, plain_grad_norm, *_) = (output.scalars for output in outputs)
        torch.testing.assert_close(loss, plain_loss, rtol=2**-16, atol=0)
        torch.testing.assert_close(grad_norm, plain_grad_norm, rtol=2**-12, atol=0)
        with torch.no_grad():
            for measured, plain in zip(state_of(steps[0]), state_of(steps[1]), strict=True):
                plain.copy_(measured)


def state_of(step: Step) -> list[torch.Tensor]:
    return [*step.runner.params.values(), *(m for kind in step.optimizer.moments.values() for m in kind.values())]


def test_record_holds_the_measured_steps(tmp_path: Path) -> None:
    folder = trained(tmp_path)
    (profiles,), damaged = folder.statistics.read("core")
    assert damaged == 0
    assert profiles.steps.tolist() == [0, 10, 20]
    assert profiles.single_site("resid_rms").shape == (3, 6)
    assert np.isnan(profiles.single_site("resid_rms")[:, 0]).all()
    assert np.isfinite(profiles.single_site("resid_rms")[:, 1:]).all()
    assert [row["step"] for row in folder.rows("train").rows] == list(range(21))
    assert not (trained(tmp_path / "off", "stats=off").path / "stats").exists()
