"""Every placement outside the residual algebra trains, compiles and resumes."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normlab.catalogue.placements.algebra import AlgebraPlacement
from normlab.catalogue.placements.base import load_all
from normlab.catalogue.placements.wiring import Branch
from normlab.config.compose import compose_run
from normlab.model.init import build_model
from normlab.model.runner import SingleRun
from normlab.training import start as training
from normlab.training.optim import hyperparameters_at
from support.run_folders import differences
from support.small_steps import VOCAB, assert_same_measurements, config_of, cyclic_batch, norm_in, step_of

OWN_WIRING = [
    name
    for name, placement in load_all().items()
    if not isinstance(placement, AlgebraPlacement) and type(placement).__module__.startswith("normlab.")
]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", OWN_WIRING)
def test_wiring_trains_at_depth_4(name: str, overrides: list[str]) -> None:
    overrides = [override for override in overrides if not override.startswith("train.steps")]
    extra = (
        "model.depth=4",
        "train.steps=20",
        "train.log_every=5",
        f"placement={name}",
        "optim.lr=3e-3",
        norm_in(name, "rmsnorm"),
    )
    outcome = training.train(compose_run([*overrides, *extra]), trackers=[])
    assert outcome.state == "finished"
    rows = outcome.folder.rows("train").rows
    assert rows[-1]["step"] == 19
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row


@pytest.mark.exhaustive  # half a minute each
@pytest.mark.parametrize("name", OWN_WIRING)
def test_compiled_equals_eager(name: str) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    config = config_of(norm_in(name, "rmsnorm"), f"placement={name}", "model.depth=3")
    model = build_model(config, VOCAB).double()
    eager, compiled = (step_of(config, SingleRun(copy.deepcopy(model), compiled=how)) for how in (False, True))
    for number in range(2):
        tokens, targets = (t[0] for t in cyclic_batch(torch.Generator().manual_seed(number), 1))
        outputs = [
            step(tokens, targets, [hyperparameters_at(config.optim, 50, number)], measured=True)
            for step in (eager, compiled)
        ]
        # The loss and the gradient norm.
        torch.testing.assert_close(*(out.scalars[:2] for out in outputs), atol=1e-12, rtol=1e-9)
        assert_same_measurements(*([out] for out in outputs))
    # One graph for every layer, each way; the first block of attn_res makes room for the states.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3 + (name == "attn_res")
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OWN_WIRING)
def test_resumed_run_is_bit_identical(
    name: str, overrides: list[str], tmp_path: Path, interrupt: Callable[..., None]
) -> None:
    resume(overrides, tmp_path, interrupt, norm_in(name, "batchnorm"), f"placement={name}")


def resume(overrides: list[str], tmp_path: Path, interrupt: Callable[..., None], *own: str) -> None:
    """Train a run at once, and in two parts, and compare."""
    overrides = [override for override in overrides if not override.startswith("results_dir")]
    overrides += [*own, "train.log_every=1", "train.checkpoint_every=3"]
    whole = training.train(compose_run([*overrides, f"results_dir={tmp_path / 'whole'}"]))
    interrupt(5)
    again = [*overrides, f"results_dir={tmp_path / 'parts'}"]
    first = training.train(compose_run(again))
    assert first.state == "interrupted"
    second = training.train(compose_run(again))
    assert (whole.state, second.state) == ("finished", "finished")
    assert first.folder.path == second.folder.path
    assert differences(whole.folder.path, second.folder.path) == []


@pytest.mark.few(1)
def test_a_resumed_run_continues_to_grow_its_branches(
    overrides: list[str], tmp_path: Path, interrupt: Callable[..., None]
) -> None:
    resume(overrides, tmp_path, interrupt, "norm=rmsnorm", "placement=peri", "placement.branch_warmup=9")


@pytest.mark.few(1)
@pytest.mark.parametrize("warmup", [1, 8])
def test_a_resumed_run_continues_to_taper(
    overrides: list[str], tmp_path: Path, interrupt: Callable[..., None], warmup: int
) -> None:
    taper = (f"norm.taper_warmup={warmup}", "norm.taper_steps=6")
    resume(overrides, tmp_path, interrupt, "norm=rmsnorm", *taper, "placement=pre")


@pytest.mark.parametrize("placement", ["pre", "post", "deepnorm", "peri", "lns"])
def test_branches_grow_as_in_prores(placement: str) -> None:
    depth, warmup = 4, 8
    growth = f"placement.branch_warmup={warmup}"
    config = config_of("norm=rmsnorm", f"placement={placement}", growth, "model.depth=4", "optim.lr=1e-12")
    step = step_of(config, SingleRun(build_model(config, VOCAB).double(), compiled=False))
    model, generator = step.runner.model, torch.Generator().manual_seed(0)
    blocks: list[Any] = list(model.blocks)
    for made in range(2 * warmup):
        # As set_prores_alpha of dandingsky/ProRes at 5253e0d has it before update `made`.
        theirs = np.clip(made / np.linspace(warmup // depth, warmup, depth), 0.0, 1.0)
        for block, factor in zip(blocks, theirs, strict=True):
            for part in (block.wiring.attn, block.wiring.mlp):
                branch = Branch(torch.ones_like)  # 1, and still 1 after a norm
                part(torch.randn(1, 1, config.model.width, generator=generator).double(), branch)
                assert branch.last_update is not None
                torch.testing.assert_close(
                    branch.last_update, torch.full_like(branch.last_update, factor), atol=1e-6, rtol=0
                )
        tokens, targets = (t[0] for t in cyclic_batch(generator, 1))
        step(tokens, targets, [hyperparameters_at(config.optim, 50, made)])
