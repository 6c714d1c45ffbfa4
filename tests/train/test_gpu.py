"""Tests on a GPU, skipped without one; `scripts/gpu` runs them with the benchmarks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.config import memory
from normlab.config.compose import compose_run
from normlab.data.corpus import open_corpus
from normlab.store.runs import RunFolder
from normlab.training.build import build_parts
from normlab.training.loop import Loop
from normlab.training.machine import apply, resolve
from normlab.training.start import train, train_pack
from normlab.training.training_run import TrainingRun
from support.small_steps import norm_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@pytest.fixture
def gpu_overrides(overrides: list[str]) -> list[str]:
    return [*[override for override in overrides if override != "device=cpu"], "device=cuda"]


def test_auto_settings_are_gpu_bf16_compiled(overrides: list[str]) -> None:
    resolved = resolve(compose_run([*overrides, "device=auto", "train.steps=1000000"]))
    assert (resolved.device, resolved.precision, resolved.compile, resolved.graph) == ("cuda", "bf16", "on", "on")
    assert not resolved.deterministic


def test_gpu_and_cpu_have_the_same_losses(overrides: list[str], gpu_overrides: list[str]) -> None:
    same = ["precision=fp32", "compile=off"]
    cpu, gpu = (train(compose_run([*some, *same]), trackers=[]) for some in (overrides, gpu_overrides))
    pairs = zip(cpu.folder.rows().rows, gpu.folder.rows().rows, strict=True)
    assert all(a["loss"] == pytest.approx(b["loss"], abs=1e-3) for a, b in pairs if "loss" in a)


@pytest.mark.parametrize("extra", [[], ["norm=batchnorm"], ["placement=post"]], ids=["default", "batchnorm", "post"])
def test_the_default_run_trains(extra: list[str], gpu_overrides: list[str]) -> None:
    outcome = train(compose_run([*gpu_overrides, *extra, "train.steps=60", "optim.lr=3e-3"]), trackers=[])
    losses = [row["loss"] for row in outcome.folder.rows("eval").rows]
    assert losses[-1] < losses[0] - 0.5


def test_resume_is_bit_identical(gpu_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from normlab.training import loop as loop_module

    every = [*gpu_overrides, "deterministic=true", "train.checkpoint_every=5", "norm=batchnorm"]
    whole = train(compose_run([*every, "run.fresh=true"]), trackers=[])
    real, seen = loop_module.Loop.take_step, []

    def stopping(self: Loop, step: int):
        seen.append(step)
        if len(seen) == 8:
            raise KeyboardInterrupt
        return real(self, step)

    split = [*every, f"results_dir={tmp_path / 'split'}"]
    monkeypatch.setattr(loop_module.Loop, "take_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(compose_run(split), trackers=[])
    monkeypatch.setattr(loop_module.Loop, "take_step", real)
    rest = train(compose_run(split), trackers=[])
    rows = [[row for row in out.folder.rows().rows if row["kind"] != "pace"] for out in (whole, rest)]
    assert rows[0] == rows[1]


def assert_replays_are_steps(overrides: list[str], runs: int, tmp_path: Path) -> None:
    """Train a pack with and without CUDA graphs, and compare all rows but those of the times."""
    outcomes = []
    for graph in ("on", "off"):
        every = [*overrides, "deterministic=true", "eval.every=5", "stats.every=3"]
        config = compose_run([*every, f"results_dir={tmp_path / graph}", f"train.graph={graph}"])
        outcomes.append(train_pack([replace(config, seed=seed) for seed in range(runs)], [[]] * runs))
    for replayed, stepped in zip(*outcomes, strict=True):
        rows = [[row for row in each.folder.rows().rows if row["kind"] != "pace"] for each in (replayed, stepped)]
        assert rows[0] == rows[1]


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("runs", [1, 2])
def test_a_replayed_run_is_the_run(
    runs: int, compiled: str, gpu_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_replays_are_steps([*gpu_overrides, "norm=batchnorm", f"compile={compiled}"], runs, tmp_path)
    assert "train.graph" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "choice",
    [
        *(f"norm={name}" for name in load_norms()),
        *(f"placement={name} {norm_in(name, 'rmsnorm')}" for name in load_placements()),
    ],
)
def test_every_norm_and_placement_replays(
    choice: str, gpu_overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_replays_are_steps([*gpu_overrides, *choice.split(), "compile=off"], 2, tmp_path)
    assert "train.graph" not in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("runs", [1, 4])
def test_memory_estimate_holds(runs: int, precision: str, gpu_overrides: list[str]) -> None:
    every = ["model=gpt2_mini", "train.batch_size=64", f"precision={precision}", "compile=off", "train.graph=off"]
    config = compose_run([*gpu_overrides, *every])
    estimated = memory.estimate(config, device="cuda", precision=precision, runs=runs).peak
    outcomes = train_pack([replace(config, seed=seed) for seed in range(runs)], [[]] * runs)
    assert estimated <= outcomes[0].folder.status()["peak_memory_bytes"] <= memory.PEAK_FACTOR * estimated


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("runs", [1, 2])
def test_steps_do_not_synchronise_with_the_gpu(runs: int, gpu_overrides: list[str], tmp_path) -> None:
    configs = [compose_run([*gpu_overrides, "compile=off", f"seed={seed}"]) for seed in range(runs)]
    resolved = resolve(configs[0])
    apply(resolved)
    training_runs = [TrainingRun(config, RunFolder(tmp_path / f"{config.seed}")) for config in configs]
    loop = Loop(training_runs, resolved, build_parts(training_runs, resolved, open_corpus(configs[0].data)))
    for step in range(3):
        loop.take_step(step)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        outputs = [loop.take_step(step) for step in range(3, 12)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {output.measured is None for output in outputs} == {False, True}
