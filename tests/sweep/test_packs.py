"""How many runs train together: the packs of `sweep.pack=auto`, equal packs, and the notes of a plan on its packs."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from normlab.config import memory
from normlab.config.compose import compose_run, compose_sweep
from normlab.config.schema import RunConfig, config_from_record
from normlab.config.sweep_options import SweepOptions
from normlab.store.plans import Plan, read_plan, run_of, write_plan
from normlab.store.runs import RunFolder
from normlab.sweeps import local, process
from normlab.sweeps import plan as sweep_plan
from normlab.sweeps.packs import split
from normlab.sweeps.plan import PlannedSweep, make_plan
from normlab.sweeps.progress import plan_lines
from normlab.training.start import train, train_pack

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(overrides: list[str]) -> Callable[..., PlannedSweep]:
    """The plan that the overrides of a small sweep make."""
    return lambda *more: make_plan(*compose_sweep([*overrides, *more]))


def sizes_of(made: Plan) -> list[int]:
    return [len(pack.runs) for pack in made.packs]


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
    (line,) = [line for line in plan_lines(made, options, with_packs=False) if line.startswith("jobs")] or [""]
    threads = cores // parallel
    expected = f"{parallel} packs at once, {threads} thread{'s' * (threads > 1)} each (sweep.jobs={parallel})"
    assert line == (f"jobs    {expected}" if parallel > 1 else "")
    assert made.plan.threads == (threads if parallel > 1 else torch.get_num_threads())


def test_a_resumed_sweep_keeps_its_threads(plan: Callable[..., PlannedSweep], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with other cores, by the environment of the processes; only OMP_NUM_THREADS changes them."""
    grid = ("seed=range(4)", "sweep.pack=off", "sweep.jobs=2", "sweep.name=x")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: 6)
    first = plan(*grid)
    first.folder.mkdir(parents=True)
    write_plan(first.folder, first.plan)
    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: 64)
    again = plan(*grid)
    assert again.plan == first.plan
    started: list[str] = []

    def start(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[Any]:
        started.append(env["OMP_NUM_THREADS"])
        return real(["true"], stdin=subprocess.PIPE)

    options, _ = compose_sweep([*grid])

    def threads_of_processes(stored: Plan = again.plan) -> set[str]:
        started.clear()
        with monkeypatch.context() as patched:
            patched.setattr(process.subprocess, "Popen", start)
            executor = local.LocalExecutor(again.folder, options, lambda pack, gpu: None)
            executor.submit(stored, stored.packs)
            executor.close()
        return {*started}

    real = subprocess.Popen
    assert threads_of_processes() == {"3"}
    assert threads_of_processes(replace(again.plan, threads=None)) == {"32"}, "of a sweep in Slurm"
    notes = [line for line in plan_lines(again, options, with_packs=False) if "thread" in line]
    assert notes == [
        "jobs    2 packs at once, 3 threads each (sweep.jobs=2)",
        "note    each process has 3 threads as planned, since bits depend on them; a new sweep would have 32 here",
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setattr(sweep_plan, "num_threads", lambda: 5)
    assert threads_of_processes() == {"5"}
    assert [line for line in plan_lines(again, options, with_packs=False) if "thread" in line] == [
        "jobs    2 packs at once, 5 threads each (sweep.jobs=2)",
        "note    the sweep was planned with 3 threads for each process, and OMP_NUM_THREADS=5 changes the rounding of "
        "the runs that are left",
    ]


def test_packs_are_equal_where_a_size_above_half_of_the_most_divides() -> None:
    assert [len(pack) for pack in split(range(15), 4)] == [3] * 5
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
            divides = any(runs % size == 0 for size in range(math.floor(most / 2) + 1, most + 1))
            assert not divides or len(sizes) == 1


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
    config, vocab_size = config_from_record(made[0].plan.runs[0].config), made[0].resolved.popitem()[1].vocab_size
    six = memory.PEAK_FACTOR * memory.estimate(config, precision="bf16", vocab_size=vocab_size, runs=6).peak
    monkeypatch.setattr(SweepOptions, "pack_memory", lambda self, device, gpu_bytes, jobs: six)
    bounded = plan(*grid).plan
    assert (sizes_of(bounded), bounded.memory_bytes) == ([4] * 4, six)


def test_auto_asks_the_nodes_of_slurm_and_not_the_login_node(plan: Callable[..., PlannedSweep]) -> None:
    grid = ("device=auto", "precision=bf16", "seed=range(16)", "sweep.on=slurm", "sweep.slurm.cluster=local")
    assert sizes_of(plan(*grid, "model.width=128", "train.batch_size=64").plan) == [8, 8]
    assert sizes_of(plan(*grid, "sweep.slurm.gpus=0").plan) == [16]


def test_one_size_for_the_whole_sweep(plan: Callable[..., PlannedSweep], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a width that packs well and one that does not, the smaller size is that of both."""
    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: 1)
    both = plan("seed=range(4)", "precision=bf16", "model.width=64,256").plan
    assert (set(sizes_of(both)), both.notes) == ({1}, [])
    assert sizes_of(plan("seed=range(4)", "precision=bf16", "model.width=64").plan) == [4]


def test_packs_of_several_sizes_are_in_the_plan_once(
    plan: Callable[..., PlannedSweep], overrides: list[str], run_command: Command
) -> None:
    assert plan("seed=range(9)", "sweep.pack=4").plan.notes == []
    made = plan("seed=range(10)", "sweep.pack=4").plan
    note = "packs of several sizes (1 of 4, 2 of 3 runs): the rounding of a run depends on the size of its pack"
    assert made.notes == [note]
    code, out, _ = run_command("sweep", *overrides, "seed=range(10)", "sweep.pack=4", "--dry-run")
    assert (code, out.count(f"note    {note}\n")) == (0, 1)


def test_a_pack_that_is_halved_is_in_the_plan(plan: Callable[..., PlannedSweep]) -> None:
    made = plan("seed=range(8)", "sweep.pack=4").plan
    assert made.notes == []
    assert made.halve(made.packs[0]).notes == [
        "pack 1 of 4 runs ran out of memory and is halved: its runs train in packs of 2 and 2"
    ]


# Runs that exist already.


def configs_of(overrides: list[str], *seeds: int) -> list[RunConfig]:
    return [compose_run([*overrides, "train.steps=2", f"seed={seed}"]) for seed in seeds]


@pytest.mark.exhaustive
def test_runs_that_were_trained_differently_are_reported(
    plan: Callable[..., PlannedSweep], overrides: list[str], run_command: Command
) -> None:
    for config in configs_of(overrides, 0, 1, 2):
        train(config, trackers=[])
    grid = ("train.steps=2", "seed=range(12)", "sweep.pack=4")
    made = plan(*grid).plan
    note = (
        "3 of 12 runs exist already and were trained in other packs (of size 1), so their rounding differs; "
        "set sweep.pack=off to train all runs alone, or another results_dir to train all runs again"
    )
    assert (made.notes, sizes_of(made)) == ([note], [3, 3, 3])
    assert f"note    {note}\n" in run_command("sweep", *overrides, *grid, "--dry-run")[1]
    # Both suggestions of the note help.
    assert plan(*grid[:2], "sweep.pack=off").plan.notes == []
    other = f"{compose_run(overrides).results_dir}_2"
    assert plan(*grid, f"results_dir={other}").plan.notes == []
    # A run that was started and not finished is no different, and resumes alone.
    run = run_of(plan(*grid).folder, made.runs[1])
    run.write_status({**run.status(), "state": "interrupted"})
    assert plan(*grid).plan.notes[1:] == [note]


def test_runs_of_other_packs_are_reported_and_those_of_the_same_are_not(
    plan: Callable[..., PlannedSweep], overrides: list[str]
) -> None:
    train_pack(configs_of(overrides, 0, 1), [[], []], pack={"sweep": "before", "number": 1})
    assert plan("train.steps=2", "seed=range(4)", "sweep.pack=2").plan.notes == []
    (note,) = plan("train.steps=2", "seed=1,0,2,3", "sweep.pack=4").plan.notes
    assert "2 of 4 runs exist already and were trained in other packs (of size 2)" in note
    (note,) = plan("train.steps=2", "seed=0,2,1,3", "sweep.pack=2").plan.notes
    assert "2 of 4 runs exist already and were trained in other packs (of size 2)" in note
    (note,) = plan("train.steps=2", "seed=0,1", "sweep.pack=off").plan.notes
    assert "2 of 2 runs exist already and were trained in other packs (of size 2)" in note
    assert "sweep.pack=off" not in note


@pytest.mark.process
def test_pack_and_members_are_in_the_record_of_every_run(
    plan: Callable[..., PlannedSweep], overrides: list[str], run_command: Command
) -> None:
    """Also in those of single runs, and of the halves of a pack that ran out of memory."""
    grid = ("train.steps=2", "seed=range(3)", "sweep.pack=2", "sweep.name=x")
    made = plan(*grid)
    halved = made.plan.halve(made.plan.packs[0])
    before, number = configs_of(overrides, 0, 1), made.plan.packs[0].number
    for config in before:  # as left by a pack that ran out of memory in its first step
        RunFolder.create(
            run_of(made.folder, made.plan.runs[config.seed]).path, record_of(overrides, config, made.plan, number)
        )
    made.folder.mkdir(parents=True)
    write_plan(made.folder, halved)
    code, _, err = run_command("sweep", *overrides, *grid)
    assert code == 0, err
    for pack in halved.packs:
        (job,) = halved.runs_of(pack)
        run = run_of(made.folder, job)
        assert run.last_pack() == [job.run_id]
        assert run.status()["pack"] == {"sweep": "x", "number": pack.number, "runs": [job.run_id]}
    # `train` may resume a run that a sweep trained alone.
    assert run_command("train", *overrides, "train.steps=2", "seed=2")[0] == 0


def record_of(overrides: list[str], config: RunConfig, made: Plan, number: int) -> dict:
    """Return a run.json as the start of a pack writes it."""
    elsewhere = compose_run(
        [*overrides, "train.steps=2", f"seed={config.seed}", f"results_dir={config.results_dir}_other"]
    )
    run = train(elsewhere, trackers=[]).folder.run()
    ids = [job.run_id for job in made.runs_of(made.pack_of(number))]
    return {**run, "pack": {"sweep": made.name, "number": number, "runs": ids}}
