"""How many runs train together: the packs of `sweep.pack=auto`, equal packs, and the packs in the records of runs."""

import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from normlab.config import memory
from normlab.config.compose import compose_run, compose_sweep
from normlab.config.recorded import config_from_record
from normlab.config.sweep_options import SweepOptions
from normlab.data.corpus import open_corpus
from normlab.store.plans import Plan, read_plan, run_of
from normlab.store.runs import RunFolder
from normlab.sweeps import plan as sweep_plan
from normlab.sweeps.cost import cost_of
from normlab.sweeps.files import write_plan
from normlab.sweeps.packs import split
from normlab.sweeps.plan import PlannedSweep, make_plan
from normlab.sweeps.progress import plan_lines
from normlab.sweeps.stored_plan import halve
from normlab.training.start import train
from support.fake_workers import FakeSweeps, FakeWorker

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(overrides: list[str]) -> Callable[..., PlannedSweep]:
    """The plan that the overrides of a small sweep make."""
    return lambda *more: make_plan(*compose_sweep([*overrides, *more]))


def sizes_of(made: Plan) -> list[int]:
    return [len(pack.runs) for pack in made.packs]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("grid", "cores", "sizes", "parallel"),
    [
        ("seed=range(16)", 1, [16], 1),
        ("seed=range(16)", 2, [8, 8], 2),
        ("seed=range(40)", 2, [10] * 4, 2),
        ("seed=range(16) norm=rmsnorm,layernorm", 2, [16, 16], 2),
        ("seed=range(3)", 2, [1] * 3, 2),  # too few for packs on every core
        ("seed=0,1", 64, [1, 1], 2),
        ("seed=0", 2, [1], 1),  # one run has all cores
        ("seed=range(4) model.width=128", 2, [1] * 4, 2),
        ("seed=range(4) model.width=256", 2, [1] * 4, 1),
        ("seed=range(4) sweep.jobs=1", 2, [4], 1),
        ("seed=range(4) sweep.pack=off", 2, [1] * 4, 2),
        ("seed=range(4) sweep.pack=1 sweep.jobs=1", 2, [1] * 4, 1),
        ("seed=0,1 devices=2 train.batch_size=8", 4, [1, 1], 2),
    ],
)
def test_every_core_of_a_cpu_has_a_pack_of_a_small_model(
    plan: Callable[..., PlannedSweep],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    grid: str, cores: int, sizes: list[int], parallel: int,
) -> None:  # fmt: skip
    """By the default options; the plan stores and prints the number of packs at once and of their threads."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: cores)
    made = plan(*grid.split())
    assert (sizes_of(made.plan), made.plan.parallel_packs) == (sizes, parallel)
    made.folder.mkdir(parents=True)
    write_plan(made.folder, made.plan)
    assert read_plan(made.folder) == made.plan == plan(*grid.split(), f"sweep.name={made.plan.name}").plan
    options, _ = compose_sweep(grid.split())
    lines = plan_lines(made, options, cost_of(made, {}), with_packs=False)
    (line,) = [line for line in lines if line.startswith("jobs")] or [""]
    threads = cores // parallel
    expected = f"{parallel} packs at once, {threads} thread{'s' * (threads > 1)} each (sweep.jobs={parallel})"
    assert line == (f"jobs    {expected}" if parallel > 1 else "")
    assert made.plan.threads == (threads if parallel > 1 else torch.get_num_threads())


def test_a_resumed_sweep_keeps_its_threads(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with other cores, by the environment of the processes; a plan for Slurm has none."""
    grid = ("seed=range(4)", "sweep.jobs=2")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: 6)
    sweep = FakeSweeps(overrides, monkeypatch)
    _, _, folder = sweep(*grid, ways={0: "raise"})
    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: 64)
    sweep(*grid, retry=True)
    assert [each.threads for each in FakeWorker.all] == [3]
    (folder / "plan.json").unlink()
    plan = sweep("seed=9", "sweep.jobs=2", ways={9: "raise"})[0].plan
    assert plan.threads == 32
    write_plan(folder, replace(plan, threads=None))
    sweep("seed=9", "sweep.jobs=2", retry=True)
    assert [each.threads for each in FakeWorker.all] == [32]


def test_a_sweep_that_trained_nothing_has_no_threads_to_keep(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its runs were those of another sweep, so that runs that extend it are planned as those of a new sweep."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: 4)
    monkeypatch.setattr(sweep_plan, "_jobs", lambda options, runs: 4)
    sweep = FakeSweeps(overrides, monkeypatch)
    trained = sweep("seed=range(4)", "sweep.pack=off", "sweep.name=x")[0].plan
    found = sweep("seed=range(4)", "sweep.pack=off", "sweep.name=y")[0].plan
    extended = sweep("seed=range(8)", "sweep.pack=off", "sweep.name=y", extend=True)[0].plan
    assert (trained.parallel_packs, trained.threads) == (4, 1)
    assert not found.packs
    assert (extended.parallel_packs, extended.threads) == (4, 1)


def test_packs_are_equal_where_a_size_above_half_of_the_most_divides() -> None:
    assert [len(pack) for pack in split(range(15), 4)] == [3] * 5
    # A pack has no more runs than the group, however large sweep.pack is.
    assert split(range(15), 2**63) == [list(range(15))]
    assert [len(pack) for pack in split(range(16), 5)] == [4] * 4
    assert [len(pack) for pack in split(range(17), 5)] == [5, 4, 4, 4]
    assert [len(pack) for pack in split(range(10), 4)] == [4, 3, 3]
    assert split([3, 1, 4, 5, 9], 2) == [[3, 1], [4, 5], [9]]
    for runs in range(1, 40):
        for most in range(1, 45):
            packs = split(range(runs), most)
            sizes = {len(pack) for pack in packs}
            assert [index for pack in packs for index in pack] == list(range(runs))
            assert max(sizes) <= most
            assert max(sizes) - min(sizes) <= 1


def test_a_plan_of_auto_is_a_pure_function(plan: Callable[..., PlannedSweep], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same overrides give the same plan on a machine of any speed; no process trains to make it."""
    real = subprocess.Popen

    def git_only(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        assert command[0] == "git", command
        return real(command, **options)

    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: 1)
    # A clock that runs a thousand times faster from one call to the next.
    now = iter(1000.0**number for number in range(10**6))
    clocks = [lambda: 0.0, lambda: next(now)]
    grid = ("seed=range(16)", "precision=bf16", "train.steps=1000000")
    made = []
    for clock in clocks:
        with monkeypatch.context() as patched:
            for name in ("perf_counter", "monotonic"):
                patched.setattr(time, name, clock)
            patched.setattr(subprocess, "Popen", git_only)
            made.append(plan(*grid))
    assert made[0].plan == made[1].plan
    assert sizes_of(made[0].plan) == [16]
    assert made[0].plan.memory_bytes
    # What is recorded of the memory is what bounds the packs: half of it holds six runs, and 16 are four packs of 4.
    config = config_from_record(made[0].plan.runs[0].config)
    vocab_size = open_corpus(config.data).tokenizer.vocab_size
    six = memory.PEAK_FACTOR * memory.estimate(config, precision="bf16", vocab_size=vocab_size, runs=6).peak
    monkeypatch.setattr(SweepOptions, "pack_memory", lambda self, device, gpu_bytes, jobs: six)
    bounded = plan(*grid).plan
    assert (sizes_of(bounded), bounded.memory_bytes) == ([4] * 4, six)


def test_auto_asks_the_nodes_of_slurm_and_not_the_login_node(plan: Callable[..., PlannedSweep]) -> None:
    grid = ("device=auto", "precision=bf16", "seed=range(16)", "sweep.on=slurm")
    assert sizes_of(plan(*grid, "model.width=128", "train.batch_size=64").plan) == [8, 8]
    assert sizes_of(plan(*grid, "sweep.slurm.gpus=0").plan) == [16]


def test_one_size_for_the_whole_sweep(plan: Callable[..., PlannedSweep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a width that packs well and one that does not, the smaller size is that of both."""
    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: 1)
    both = plan("seed=range(4)", "precision=bf16", "model.width=64,256").plan
    assert (set(sizes_of(both)), both.notes) == ({1}, [])
    assert sizes_of(plan("seed=range(4)", "precision=bf16", "model.width=64").plan) == [4]


@pytest.mark.process
def test_pack_and_members_are_in_the_record_of_every_run(
    plan: Callable[..., PlannedSweep], overrides: list[str], run_command: Command, tmp_path: Path
) -> None:
    """Here in those of the halves of a pack that ran out of memory in its first step, and of a single run."""
    grid = ("train.steps=2", "seed=range(3)", "sweep.pack=2", "sweep.name=x")
    made = plan(*grid)
    halved = halve(made.plan, made.plan.packs[0])
    pack = made.plan.packs[0]
    ids = [run.run_id for run in made.plan.runs_of(pack)]
    for run in made.plan.runs_of(pack):
        config = compose_run([*overrides, "train.steps=2", *run.overrides, f"results_dir={tmp_path / 'other'}"])
        content = {
            **train(config, trackers=[]).folder.run(),
            "pack": {"sweep": "x", "number": pack.number, "runs": ids},
        }
        RunFolder.create(run_of(made.folder, run).path, content)
    made.folder.mkdir(parents=True)
    write_plan(made.folder, halved)
    code, _, err = run_command("sweep", *overrides, *grid)
    assert code == 0, err
    for pack in halved.packs:
        (job,) = halved.runs_of(pack)
        run = run_of(made.folder, job)
        assert run.status()["pack"] == {"sweep": "x", "number": pack.number, "runs": [job.run_id]}
    # `train` may resume a run that a sweep trained alone.
    assert run_command("train", *overrides, "train.steps=2", "seed=2")[0] == 0
