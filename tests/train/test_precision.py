"""precision=fp16 against torch's GradScaler, and precision=tf32 as torch's compiler and the next run see it."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from normlab.base.errors import ConfigError
from normlab.catalogue.optimizers.options import AdamW
from normlab.config.compose import compose_run, compose_sweep
from normlab.model import chunked_loss
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.model.runner import SingleRun
from normlab.sweeps.plan import make_plan
from normlab.training import checkpoint
from normlab.training import step as stepping
from normlab.training.machine import apply, resolve
from normlab.training.measure.core import CoreStatistics
from normlab.training.measure.extended import ExtendedPass
from normlab.training.optim import hyperparameters_at
from normlab.training.start import train
from normlab.training.step import LossScale, Step
from support.pretended_gpus import pretend_gpus
from support.small_run import small_run
from support.small_steps import VOCAB, config_of, cyclic_batch, step_of

STEPS = 40
HUGE = 2.0**26
"""A loss scale with which the first gradients overflow in float16."""


def fp16_step(*overrides: str, scale: float) -> tuple[Step, GPT]:
    config = config_of("norm=rmsnorm", "optim.lr=3e-3", f"train.steps={STEPS}", *overrides)
    model = build_model(config, VOCAB)
    step = step_of(config, SingleRun(model, compiled=False))
    step.autocast = resolve(dataclasses.replace(config, precision="fp16")).autocast()
    step.loss_scale = LossScale(torch.device("cpu"))
    step.loss_scale.scale.fill_(scale)
    return step, model


def test_fp16_equals_a_plain_loop_with_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale grows and shrinks as GradScaler's does, and every parameter has the same bits after every step."""
    monkeypatch.setattr(stepping, "GROWTH_INTERVAL", 3)
    step, model = fp16_step(scale=HUGE)
    options, clip = step.optimizer.families[0].options[0], step.clip
    assert isinstance(options, AdamW)
    assert isinstance(clip, float)
    plain = build_model(config_of("norm=rmsnorm"), VOCAB)
    decayed, others = ([p for p in plain.parameters() if (p.dim() >= 2) is matrices] for matrices in (True, False))
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}],
        betas=(options.beta1, options.beta2), eps=options.eps, fused=True,
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", init_scale=HUGE, growth_interval=3)
    generator, scales, skipped = torch.Generator().manual_seed(0), [], 0
    for number in range(STEPS):
        tokens, targets = (x[0] for x in cyclic_batch(generator, 1))
        hyperparameters = [hyperparameters_at(options, STEPS, number)]
        output = step(tokens, targets, hyperparameters, measured=number % 5 == 0)

        for settings in adamw.param_groups:
            settings["lr"] = hyperparameters[0].lr
        with torch.autocast("cpu", torch.float16):
            logits = plain(tokens)
        loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
        adamw.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(adamw)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        scaler.step(adamw)
        scaler.update()

        found_loss, grad_norm, clip_factor, alive = output.scalars
        assert alive
        assert torch.equal(found_loss, loss)
        if norm.isfinite():
            torch.testing.assert_close(grad_norm, norm)
        else:
            skipped += 1
            assert not grad_norm.isfinite()
        assert (clip_factor == 0) == (not norm.isfinite())
        assert step.loss_scale is not None
        scales.append(step.loss_scale.scale.item())
        assert scales[-1] == scaler.get_scale()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert skipped > 3
    assert len({*scales}) > 4
    assert any(after > before for before, after in itertools.pairwise(scales))


@pytest.mark.parametrize("overrides", [[], ["placement=ngpt", "norm=none"]], ids=["adamw", "projected"])
def test_an_overflow_makes_no_update(overrides: list[str]) -> None:
    step, model = fp16_step(*overrides, scale=2.0**40)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens, targets = (x[0] for x in cyclic_batch(torch.Generator().manual_seed(0), 1))
    output = step(tokens, targets, [hyperparameters_at(step.optimizer.families[0].options[0], STEPS, 9)])
    assert (output.scalars[2:].tolist(), step.optimizer.count.item()) == ([0, 1], 0)  # the clip factor, and alive
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(moment.any() for kind in step.optimizer.moments.values() for moment in kind.values())


@pytest.mark.parametrize("fault", ["loss", "scale"])
def test_what_ends_a_run_in_fp16(fault: str) -> None:
    """A loss that is not finite, and a gradient that overflows even without a scale."""
    step, model = fp16_step(scale=2.0 if fault == "scale" else 1024.0)
    tokens, targets = (x[0] for x in cyclic_batch(torch.Generator().manual_seed(0), 1))
    if fault == "loss":
        torch.nn.init.constant_(model.embed.tokens.weight, math.nan)
    else:
        model.embed.tokens.weight.register_hook(lambda gradient: gradient * math.inf)
    alive = [
        bool(
            step(tokens, targets, [hyperparameters_at(step.optimizer.families[0].options[0], STEPS, number)]).scalars[3]
        )
        for number in range(3)
    ]
    assert alive == ([False] * 3 if fault == "loss" else [True, False, False])


def test_gradients_of_the_stream_that_float16_holds_only_with_a_scale() -> None:
    """They are divided by the scale as norms, in float32: as float16 numbers they would vanish."""
    step, model = fp16_step(scale=1024.0)
    measure = CoreStatistics(step.runner, frozenset({"dresid_rms"}))
    gradients = [torch.full((2, 8, 16), 2.0**-13, dtype=torch.float16) for _ in model.blocks]
    scales = (torch.tensor(1.0), torch.tensor(2.0**12))
    plain, scaled = (measure.of_micro_batch({}, gradients, 16, scale).values for scale in scales)
    assert len(plain) == len(gradients)
    assert (plain > 0).all()
    torch.testing.assert_close(scaled, plain * 2.0**-24, rtol=1e-6, atol=0)


def test_adam_statistics_count_the_updates_and_not_the_steps() -> None:
    """An overflow makes no update, so the averages are those of fewer steps."""
    found = []
    for overflows in (0, 2):
        step, model = fp16_step("optim.clip=null", scale=1024.0)
        tokens, targets = (x[0] for x in cyclic_batch(torch.Generator().manual_seed(0), 1))
        for number in range(overflows + 3):
            assert step.loss_scale is not None
            step.loss_scale.scale.fill_(2.0**40 if number < overflows else 1024.0)
            step(tokens, targets, [hyperparameters_at(step.optimizer.families[0].options[0], STEPS, 9)])
        names = frozenset({"adam_rms", "adam_eps_frac"})
        measure = ExtendedPass(
            step.runner, names, tokens, targets, step.optimizer, [step.optimizer.families[0].options[0]]
        )
        found.append(measure(overflows + 3).values)
        assert step.optimizer.count == 3
        assert all(p.isfinite().all() for p in model.parameters())
    assert torch.equal(*found)


@pytest.mark.exhaustive
def test_chunked_loss_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are computed in the forward pass, so the scale must be there; without it the small ones vanish."""
    config = config_of("norm=layernorm", "model.tie_embeddings=false")
    text = torch.randint(1000, (64, 17), generator=torch.Generator().manual_seed(0))
    runner = SingleRun(build_model(config, 8000), compiled=False)

    def loss_and_gradient(scale: float | None, *, is_fp16: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.float16, enabled=is_fp16):
            factor = None if scale is None else torch.tensor(scale)
            loss = runner.loss(text[:, :-1], text[:, 1:], scale=factor).loss
        (gradient,) = torch.autograd.grad(loss * (scale or 1), runner.params["head.weight"])
        return loss, gradient[1000:] / (scale or 1)  # tokens that are never a target: sums of small probabilities

    loss, exact = loss_and_gradient(None, is_fp16=False)
    monkeypatch.setattr(chunked_loss, "LARGE_LOGITS", 2**16)
    errors = []
    for scale in (2.0**12, None):
        rounded_loss, rounded = loss_and_gradient(scale, is_fp16=True)
        torch.testing.assert_close(rounded_loss, loss, rtol=1e-3, atol=0)
        errors.append(((rounded - exact).norm() / exact.norm()).item())
    assert errors[0] < 2e-3 < 2e-2 < errors[1]


def test_a_resumed_run_keeps_its_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "INITIAL_SCALE", 2.0**22)
    monkeypatch.setattr(stepping, "GROWTH_INTERVAL", 2)
    rows = []
    for name, stops in (("whole", False), ("resumed", True)):
        overrides = [*small_run(tmp_path / name), "precision=fp16", "train.checkpoint_every=9", "stats.every=4"]
        folder = train(compose_run(overrides), trackers=[]).folder
        if stops:
            (newest,) = (path for path in (folder.path / checkpoint.FOLDER).glob("step_*12"))
            newest.rename(tmp_path / "newest")
            folder.write_status(folder.status() | {"state": "running"})
            saved = checkpoint.read(folder.path / checkpoint.FOLDER, 9)
            assert 1 < saved.tensors["loss_scale"] < 2.0**22
            folder = train(compose_run(overrides), trackers=[]).folder
        rows.append(list(folder.rows("train").rows))
        final = checkpoint.read(folder.path / checkpoint.FOLDER, 12)
        rows[-1].append({key: tensor.double().sum().item() for key, tensor in final.tensors.items()})
    assert rows[0] == rows[1]
    skipped = [row["step"] for row in rows[0][:-1] if row["clip"] == 0]
    assert skipped[:3] == [0, 1, 2]
    assert len(skipped) < 12


def test_a_sweep_notes_that_runs_in_fp16_train_alone(tmp_path: Path) -> None:
    grid = [*small_run(tmp_path), "precision=fp16", "seed=0,1", "sweep.pack=2"]
    notes = make_plan(*compose_sweep(grid)).plan.notes
    assert notes == ["sweep.pack=2 does not apply to all runs: with precision=fp16, each run skips other updates"]
    assert make_plan(*compose_sweep([*grid, "precision=bf16"])).plan.notes == []


def test_tf32_is_on_for_one_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch)
    for precision in ("tf32", "fp32", "tf32", "bf16"):
        apply(resolve(config_of("device=cuda", "compile=off", f"precision={precision}")))
        is_on = precision == "tf32"
        # What torch's compiler reads; a product on a CPU stays as it is.
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if is_on else "ieee")
        assert torch.get_float32_matmul_precision() == ("high" if is_on else "highest")
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # pyright: ignore[reportAttributeAccessIssue]


def test_tf32_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^precision=tf32: a CPU has no TF32; use precision=fp32$"):
        resolve(config_of("device=cpu", "precision=tf32"))
    pretend_gpus(monkeypatch, major=(7,) * 4)
    with pytest.raises(ConfigError, match=r"^precision=tf32: 0 \(.*\) has no TF32; use precision=fp32$"):
        resolve(config_of("device=cuda", "precision=tf32"))
    assert resolve(config_of("device=cuda")).precision == "fp32"
    assert resolve(config_of("device=cuda", "precision=fp16")).precision == "fp16"
