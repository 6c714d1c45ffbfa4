"""Slurm: programs that answer as Slurm's do."""

import builtins
import os
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from normlab.base.errors import ConfigError, StoreError
from normlab.config.compose import compose_sweep
from normlab.store.plans import read_plan, run_of, sweep_folder
from normlab.store.runs import RunFolder
from normlab.sweeps import slurm, supervisor, task
from normlab.sweeps.files import (
    PackOutcome,
    read_outcomes,
    read_queue,
    read_task_outcome,
    slurm_folder,
    write_queue,
    write_task_outcome,
)
from normlab.sweeps.plan import make_plan
from normlab.sweeps.slurm import SlurmExecutor
from support.fake_workers import FINISHED_STATUS
from support.processes import run_sweep

Command = Callable[..., tuple[int, str, str]]
# With fake programs of Slurm.


@dataclass
class Cluster:
    """The scripts that sbatch received, and the report of squeue."""

    folder: Path

    @property
    def scripts(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("job_*.sh"))]

    def says(self, **states: str) -> None:
        """Set the states that squeue reports, by task: t12_0 is task 0 of array 12; "" means unknown to squeue."""
        tasks = [f"t{job}{task}" for job in range(12, 20) for task in ("", *(f"_{index}" for index in range(8)))]
        reported = dict.fromkeys(tasks, "RUNNING") | states
        lines = [f"{task.removeprefix('t')}|{state}\n" for task, state in reported.items() if state]
        path = self.folder / "squeue.txt"
        path.with_suffix(".new").write_text("".join(lines))
        path.with_suffix(".new").replace(path)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    programs = {
        "sbatch": f'[ -e {bin_folder}/refuse ] && {{ echo "sbatch: error: invalid partition" >&2; exit 1; }}\n'
        f'n=$(ls {bin_folder}/job_*.sh 2>/dev/null | wc -l); cp "$1" {bin_folder}/job_$n.sh\n'
        'echo "Submitted batch job $((n + 12))"',
        "srun": "exit 1",
        "squeue": f"cat {bin_folder}/squeue.txt",
    }
    for name, lines in programs.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (bin_folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setattr(supervisor, "POLL_EVERY_S", 0.01)
    monkeypatch.setattr(slurm, "POLL_EVERY_S", 0.0)
    monkeypatch.setattr(slurm, "GONE_FOR_S", 0.0)
    cluster = Cluster(bin_folder)
    cluster.says()
    return cluster


THERE = ["sweep.on=slurm", "sweep.slurm.gpus=0", "sweep.name=x"]


def finish(folder: Path, number: int) -> None:
    """Do what the task of a pack does, once: finish its runs, and write its outcome."""
    if read_task_outcome(folder, number) is not None:  # refreshed again before the supervisor checked the outcome
        return
    plan = read_plan(folder)
    for job in plan.runs_of(plan.pack_of(number)):
        run = RunFolder.create(run_of(folder, job).path, {"run_id": job.run_id})
        run.write_status(FINISHED_STATUS)
    write_task_outcome(folder, PackOutcome(number, "finished"))


def finish_all(folder: Path, cluster: Cluster) -> Callable[[], None]:
    """Return a function that finishes all packs in the queue."""

    def call() -> None:
        queue = read_queue(folder)
        for number in queue:
            finish(folder, number)
        cluster.says(**{f"t{job}": "COMPLETED" for job in queue.values()})

    return call


def test_options_of_the_sbatch_script(overrides: list[str], tmp_path: Path, cluster: Cluster) -> None:
    folder = sweep_folder(tmp_path / "results", "x")
    settings = ["partition='short,long'", "account=lab", "time_minutes=90", "gpus=1", "gpu_type=a100", "cpus=7"]
    settings += ["memory_gb=12.5", "extra=['qos=high',exclusive]"]
    grid = [override for override in overrides if not override.startswith("device=")]
    grid += [*THERE, "sweep.slurm.gpus=1", "device=cuda", "precision=bf16", "seed=range(3)", "sweep.jobs=2"]
    grid += ["sweep.pack=off", *(f"sweep.slurm.{override}" for override in settings)]
    outcome, events, _ = run_sweep(grid, finish_all(folder, cluster))
    assert outcome.code == 0
    assert [event[1] for event in events if event[0] == "finished"] == [1, 2, 3]
    (script,) = cluster.scripts
    lines = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert lines >= {
        "array=0-2%2", "partition=short,long", "account=lab", "time=90", "gpus-per-node=a100:1", "cpus-per-task=7",
        "mem=12800MB", "qos=high", "exclusive", "signal=USR2@120", "job-name=x", "nodes=1", "ntasks-per-node=1",
    }  # fmt: skip
    assert "gres" not in script


def test_outcome_of_a_task_that_reported_none_is_slurms_state(
    overrides: list[str], tmp_path: Path, cluster: Cluster
) -> None:
    """Lack of memory halves the pack, into an array of its own; a cancelled task is submitted again on request."""
    grid = [*overrides, *THERE, "seed=range(4)", "optim=adamw", "sweep.pack=2", "norm=layernorm,rmsnorm"]
    folder = sweep_folder(tmp_path / "results", "x")

    def on_refresh() -> None:
        queue = read_queue(folder)
        states = {"t12_0": "COMPLETED", "t12_1": "OUT_OF_MEMORY", "t12_2": "CANCELLED by 1000", "t12_3": "NODE_FAIL"}
        for number in {1, 5, 6} & queue.keys():
            finish(folder, number)
        if queue.keys() & {5, 6}:
            states |= {"t13_0": "COMPLETED", "t13_1": "COMPLETED"}
        cluster.says(**states)

    outcome, events, _ = run_sweep(grid, on_refresh)
    assert [event for event in events if isinstance(event, tuple) and event[0] != "start"] == [
        ("finished", 1, []), ("out of memory", 2, [5, 6]), ("interrupted", 3, []), ("failed", 4, []),
        ("finished", 5, []), ("finished", 6, []),
    ]  # fmt: skip
    log = os.path.relpath(folder / "slurm" / "12_3_0_log.out")
    assert {number: end.detail for number, end in outcome.failed.items()} == {
        4: f"Slurm state NODE_FAIL; the log of the task is {log}"
    }
    assert len(cluster.scripts) == 2
    assert "--array=0-1%2" in cluster.scripts[1]
    # The same command again: the failed pack waits, the cancelled one is submitted.
    outcome, events, _ = run_sweep(grid, finish_all(folder, cluster))
    assert events[0] == ("start", 1, [4])
    assert ("finished", 3, []) in events
    assert outcome.code == 1
    assert len(cluster.scripts) == 3


def test_only_an_answer_of_squeue_is_evidence_that_a_task_is_gone(
    overrides: list[str], tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a task that is gone may be late, so the time since squeue has first missed it counts."""
    monkeypatch.setattr(slurm, "GONE_FOR_S", 60.0)
    folder = sweep_folder(tmp_path / "results", "x")
    slurm_folder(folder).mkdir(parents=True)
    options, composed = compose_sweep([*overrides, *THERE, "seed=0,1", "sweep.pack=off"])
    plan = make_plan(options, composed).plan
    clock = 100.0
    monkeypatch.setattr(slurm.time, "monotonic", lambda: clock)

    def ended(program: str, executor: SlurmExecutor | None = None) -> list[tuple[int, str]]:
        (cluster.folder / "squeue").write_text(f"#!/bin/sh\n{program}\n")
        write_queue(folder, {1: "12_0", 2: "12_1"})
        executor = executor or SlurmExecutor(folder, options)
        executor.load_queue()
        return [(end.pack, end.cause) for end in executor.outcomes(plan)]

    missing = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    watch = SlurmExecutor(folder, options)
    assert ended(missing, watch) == []
    clock = 159.0
    assert ended(missing, watch) == []
    clock = 170.0
    assert ended("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1") == []
    assert ended("echo '12_0|PENDING|Priority'; echo '12_1|REQUEUED|None'", watch) == []
    clock = 229.0
    assert ended(missing, watch) == []
    clock = 290.0
    assert ended(missing, watch) == [(1, "failed"), (2, "failed")]
    assert ended("echo '12_0|CANCELLED by 1000'; echo '12_1|COMPLETING|None'") == [(1, "interrupted")]
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{cluster.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(task, "ANSWER_WITHIN_S", 0.2)
    assert ended("exec sleep 60") == []


def test_squeue_is_called_once_for_all_tasks_and_not_too_often(
    overrides: list[str], tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, folder = cluster.folder / "calls", sweep_folder(tmp_path / "results", "x")
    (cluster.folder / "squeue").write_text(f'#!/bin/sh\necho "$@" >> {calls}; cat {cluster.folder}/squeue.txt\n')
    cluster.says(t12_0="PENDING|Priority", t12_1="PENDING|Priority")
    monkeypatch.setattr(slurm, "POLL_EVERY_S", 1000.0)
    refreshes = iter([None] * 5)

    def interrupt() -> None:
        if next(refreshes, "over"):
            os.kill(os.getpid(), signal.SIGINT)

    _, events, _ = run_sweep([*overrides, *THERE, "seed=range(3)", "sweep.pack=off"], interrupt)
    assert [line.split()[-1] for line in calls.read_text().splitlines()] == ["--jobs=12"]
    assert "tasks in Slurm: 2 PENDING (Priority), 1 RUNNING" in events
    assert read_queue(folder).keys() == {1, 2, 3}


def test_outcomes_without_a_supervisor_are_recorded_later(
    overrides: list[str], tmp_path: Path, cluster: Cluster, run_command: Command
) -> None:
    grid = [*overrides, *THERE, "seed=range(3)", "sweep.pack=1"]
    folder = sweep_folder(tmp_path / "results", "x")
    outcome, events, _ = run_sweep(grid, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert outcome.code == 130
    assert "stopped watching 3 packs in Slurm; use the same command to watch again, or `scancel 12` to" in str(events)
    assert read_queue(folder) == {number: f"12_{number - 1}" for number in (1, 2, 3)}
    # A sweep on this machine would train the packs a second time.
    here = [override for override in grid if not override.startswith(("sweep.on", "sweep.slurm"))]
    code, _, err = run_command("sweep", *here)
    assert code == 2
    assert "job 12 in Slurm has 3 packs of it" in err
    finish(folder, 1)
    cluster.says(t12_0="COMPLETED", t12_1="RUNNING", t12_2="TIMEOUT")
    outcome, events, _ = run_sweep(grid, finish_all(folder, cluster))
    assert outcome.code == 0
    assert ("start", 2, []) in events
    assert [end.cause for end in read_outcomes(folder)] == ["finished", "interrupted", "finished", "finished"]
    assert len(cluster.scripts) == 2, "the second pack was not submitted again"


def test_job_that_slurm_rejects(overrides: list[str], tmp_path: Path, cluster: Cluster, run_command: Command) -> None:
    (cluster.folder / "refuse").touch()
    code, _, err = run_command("sweep", *overrides, *THERE, "seed=0,1")
    assert code == 2
    assert "Slurm rejected the job (sbatch: error: invalid partition); change the sweep.slurm options" in err
    assert read_queue(sweep_folder(tmp_path / "results", "x")) == {}


# Errors.


def test_without_submitit_or_slurm(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Command
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run_command("sweep", *overrides, *THERE)
    assert code == 2
    assert "Slurm is not installed on this machine (no sbatch or srun)" in err
    assert not (tmp_path / "results").exists()
    imported = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("submitit"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    code, _, err = run_command("sweep", *overrides, *THERE)
    assert code == 2
    assert "needs submitit, which is not installed; pip install submitit" in err
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sweep.slurm.cpus=4"], r"sweep.slurm.cpus=4: has no effect with sweep.on=local"),
        (["sweep.on=slurm", "device=cpu"], r"gpus=1: does not fit devices=1 and device=cpu; set"),
        (["sweep.on=slurm", "sweep.slurm.gpus=0", "device=cuda"], r"gpus=0: does not fit devices=1 and device=cuda"),
        (["sweep.on=slurm", "sweep.slurm.gpus=4", "precision=bf16"], r"gpus=4: does not fit devices=1"),
        (["sweep.on=slurm", "sweep.slurm.gpus=0", "sweep.slurm.gpu_type=a100"], r"gpu_type=a100: has no effect"),
        (["sweep.on=slurm", "sweep.slurm.extra=['--qos=high']"], r"extra=--qos=high: has leading dashes"),
        (["sweep.on=slurm", "sweep.slurm.extra=['time=3']"], r"extra=time=3: .*set by normlab"),
        (["sweep.on=slurm", "sweep.slurm.gpus=0", "sweep.slurm.memory_gb=0.001"], r"a task \(sweep.slurm.memory_gb\)"),
    ],
)
def test_invalid_slurm_options(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(*compose_sweep(overrides))


def test_gpu_of_a_node_is_not_queried(monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> None:
    """On a login node without a GPU, device=auto follows from the options, and precision must be set."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    grid = [*(override for override in overrides if not override.startswith("device=")), "sweep.on=slurm"]
    with pytest.raises(ConfigError, match=r"precision=auto: depends on the GPU, and this machine has none"):
        make_plan(*compose_sweep(grid))
    planned = make_plan(*compose_sweep([*grid, "precision=bf16"]))
    named = make_plan(*compose_sweep([*grid, "precision=bf16", "device=cuda"]))
    on_cpu = make_plan(*compose_sweep([*grid, "precision=bf16", "sweep.slurm.gpus=0"]))
    assert [job.run_id for job in planned.plan.runs] == [job.run_id for job in named.plan.runs]
    assert [job.run_id for job in planned.plan.runs] != [job.run_id for job in on_cpu.plan.runs]


def test_damaged_queue_is_named(tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    write_queue(tmp_path, {3: "12_0"})
    path = tmp_path / "slurm" / "queue.json"
    path.write_text(path.read_text().replace("12_0", "12_1"))
    with pytest.raises(StoreError, match=r"queue.json: is damaged .* check with `squeue` that none"):
        read_queue(tmp_path)
