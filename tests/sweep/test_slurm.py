"""Slurm: submitit's own processes in its bin_folder, and programs that answer as Slurm's do."""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kill_and_resume import differences

from normlab.config.compose import compose_sweep
from normlab.errors import ConfigError, StoreError
from normlab.store.plans import (
    PackOutcome,
    SubmittedPack,
    read_outcomes,
    read_plan,
    read_queue,
    read_task_outcome,
    run_of,
    sweep_folder,
    write_queue,
    write_task_outcome,
)
from normlab.store.runs import RunFolder
from normlab.sweeps import slurm, squeue, supervisor
from normlab.sweeps.plan import make_plan
from normlab.sweeps.squeue import Squeue
from support.processes import children_of, run_sweep, wait_for

Command = Callable[..., tuple[int, str, str]]
HERE = ["sweep.on=slurm", "sweep.slurm.cluster=local", "sweep.slurm.gpus=0", "sweep.slurm.cpus=1"]
"""Run the tasks as submitit's processes on this machine."""


# With submitit's processes on this machine.


@pytest.mark.process
def test_preempted_task_resumes_bit_for_bit(overrides: list[str], tmp_path: Path) -> None:
    """It is queued again, resumes from the step that all its runs have, and ends bit for bit the same."""
    grid = [*overrides, "seed=range(4)", "sweep.pack=2", "sweep.name=x", "train.steps=300", "deterministic=true"]
    whole, _, folder = run_sweep([*grid, f"results_dir={tmp_path / 'whole'}", "sweep.jobs=2"])
    reference = [run_of(folder, job) for job in whole.plan.runs]
    members = [index for pack in whole.plan.packs for index in pack.runs if 1 in pack.runs]
    packs = len(whole.plan.packs)
    folder = sweep_folder(tmp_path / "results", "x")
    tasks: list[int] = []
    steps: set[int] = set()

    def preempt() -> None:
        """Send the task the signal of Slurm, after some steps."""
        runs = [runs_of(folder)[index] for index in members]
        if not tasks and all(run.exists() and run.size() > 5_000 for run in runs):
            number = next(pack.number for pack in read_plan(folder).packs if 1 in pack.runs)
            tasks.extend(children_of(int(read_queue(folder)[number].job)))
            os.kill(tasks[0], signal.SIGUSR2)
        if tasks:
            steps.update(run.status()["checkpoint"] for run in runs if run.status()["state"] == "interrupted")

    outcome, events, folder = run_sweep([*grid, *HERE], preempt)
    assert outcome.code == 0
    (step,) = steps
    assert 0 < step < 300
    assert [end.cause for end in read_outcomes(folder)] == ["finished"] * packs
    assert sorted(event[1] for event in events if event[0] == "started") == list(range(1, packs + 1))
    logs = [log.read_text() for log in (folder / "slurm").glob("*_log.out")]
    assert sorted(log.count("Starting with") for log in logs) == [1] * (packs - 1) + [2]
    assert sum("this job is preempted" in log and "Requeued job" in log for log in logs) == 1
    for run, job in zip(reference, outcome.plan.runs, strict=True):
        assert differences(run.path, run_of(folder, job).path) == []
    assert read_queue(folder) == {}


@pytest.mark.process
def test_supervisor_may_stop_and_continue_to_watch(
    overrides: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C leaves the tasks alone; the same command watches them, and submits nothing twice."""
    grid = [*overrides, *HERE, "seed=0,1", "sweep.name=x", "sweep.pack=off", "stats=off"]
    grid += ["train.steps=1000000", "train.log_every=1", "eval.every=0"]
    folder = sweep_folder(tmp_path / "results", "x")
    command = [sys.executable, "-m", "normlab", "sweep", *grid]
    output = tmp_path / "output"
    with output.open("w") as log:  # not a pipe, which the tasks would hold open
        first = subprocess.Popen(command, stdout=log, stderr=log)
    wait_for(lambda: len(read_queue(folder)) == 2)
    jobs = [int(submitted.job) for submitted in read_queue(folder).values()]
    request.addfinalizer(lambda: end_all(jobs))
    wait_for(lambda: all(run.size() > 5_000 for run in runs_of(folder)))
    first.send_signal(signal.SIGINT)
    code, text = first.wait(timeout=60), output.read_text()
    assert code == 130, text
    queue = read_queue(folder)
    assert "2 packs continue in Slurm; use the same command to watch again, or `kill " in text
    assert queue[1].job in text
    assert "2 left to train" in text
    with pytest.raises(StoreError, match=r"sweep x: 2 of its packs are in Slurm; use sweep.on=slurm to watch"):
        run_sweep([override for override in grid if "sweep.slurm" not in override and "sweep.on" not in override])

    before = [run.rows("train").rows[-1]["step"] for run in runs_of(folder)]
    outcome, events, _ = run_sweep(grid, lambda: end_all(jobs))
    assert outcome.code == 1, "tasks that were stopped from outside have not failed, and are not completed"
    assert events[0] == ("start", [1, 2], 0, [])
    assert sorted((end.pack, end.cause) for end in read_outcomes(folder)) == [(1, "interrupted"), (2, "interrupted")]
    assert all(run.status()["checkpoint"] >= step for run, step in zip(runs_of(folder), before, strict=True))
    assert len(list((folder / "slurm").glob("*_submitted.pkl"))) == 2
    assert read_queue(folder) == {}


def end_all(jobs: list[int]) -> None:
    """Send SIGTERM to the tasks, once."""
    while jobs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(jobs.pop(), signal.SIGTERM)


def runs_of(folder: Path) -> list[RunFolder]:
    return [run_of(folder, job) for job in read_plan(folder).runs]


# With fake programs of Slurm.


@dataclass
class Cluster:
    """The scripts that sbatch received, and the reports of squeue and sacct."""

    folder: Path

    @property
    def scripts(self) -> list[str]:
        return [path.read_text() for path in sorted(self.folder.glob("job_*.sh"))]

    def says(self, **states: str) -> None:
        """Set the states that squeue reports, by task: t12_0 is task 0 of array 12; "" means unknown to squeue."""
        tasks = [f"t{job}{task}" for job in range(12, 20) for task in ("", *(f"_{index}" for index in range(8)))]
        self._report("squeue", dict.fromkeys(tasks, "RUNNING") | states)

    def has_accounting(self, **states: str) -> None:
        """Set the states that sacct reports; without a call sacct fails, as without accounting."""
        self._report("sacct", states)

    def _report(self, program: str, states: dict[str, str]) -> None:
        lines = [f"{task.removeprefix('t')}|{state}\n" for task, state in states.items() if state]
        path = self.folder / f"{program}.txt"
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
        "sacct": f"cat {bin_folder}/sacct.txt 2>&- || {{ echo Slurm accounting storage is disabled >&2; exit 1; }}",
    }
    for name, lines in programs.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (bin_folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setattr(supervisor, "POLL_EVERY_S", 0.01)
    monkeypatch.setattr(slurm, "POLL_EVERY_S", 0.02)
    monkeypatch.setattr(squeue, "ASK_EVERY_S", 0.0)
    monkeypatch.setattr(slurm, "GONE_FOR_S", 0.0)
    cluster = Cluster(bin_folder)
    cluster.says()
    return cluster


THERE = ["sweep.on=slurm", "sweep.slurm.gpus=0", "sweep.name=x"]


def finish(folder: Path, number: int) -> None:
    """Do what the task of a pack does, once: finish its runs, write its outcome, and leave submitit's result."""
    if read_task_outcome(folder, number) is not None:  # refreshed again before the supervisor checked the outcome
        return
    plan = read_plan(folder)
    for job in plan.runs_of(plan.pack_of(number)):
        run = RunFolder.create(run_of(folder, job).path, {"run_id": job.run_id})
        run.write_status({"state": "finished"})
    write_task_outcome(folder, PackOutcome(number, "finished", "", 0, 1.0, time.time()))
    (folder / "slurm" / f"{read_queue(folder)[number].job}_0_result.pkl").touch()


def test_options_of_the_sbatch_script(overrides: list[str], tmp_path: Path, cluster: Cluster) -> None:
    folder = sweep_folder(tmp_path / "results", "x")
    settings = ["partition=short,long", "account=lab", "time_minutes=90", "gpus=1", "gpu_type=a100", "cpus=7"]
    settings += ["memory_gb=12.5", "extra=['qos=high',exclusive]"]
    grid = [override for override in overrides if not override.startswith("device=")]
    grid += [*THERE, "sweep.slurm.gpus=1", "device=cuda", "precision=bf16", "seed=range(3)", "sweep.jobs=2"]
    grid += ["sweep.pack=off"]
    settings[0] = "partition='short,long'"

    def finish_all() -> None:
        for number in read_queue(folder):
            finish(folder, number)

    outcome, events, _ = run_sweep([*grid, *(f"sweep.slurm.{override}" for override in settings)], finish_all)
    assert outcome.code == 0
    assert [event[1] for event in events if event[0] == "finished"] == [1, 2, 3]
    (script,) = cluster.scripts
    lines = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert lines >= {
        "array=0-2%2", "partition=short,long", "account=lab", "time=90", "gpus-per-node=a100:1", "cpus-per-task=7",
        "mem=12800MB", "qos=high", "exclusive", "signal=USR2@120", "job-name=x", "nodes=1", "ntasks-per-node=1",
    }  # fmt: skip
    assert "gres" not in script


@pytest.mark.parametrize("program", ["squeue", "sacct"])
def test_outcome_of_a_task_that_reported_none_is_slurms_state(
    overrides: list[str], tmp_path: Path, cluster: Cluster, program: str
) -> None:
    """Lack of memory halves the pack, into an array of its own; a cancelled task is submitted again on request."""
    grid = [*overrides, *THERE, "seed=range(4)", "optim=adamw", "sweep.pack=2", "norm=layernorm,rmsnorm"]
    folder = sweep_folder(tmp_path / "results", "x")

    def on_refresh() -> None:
        queue = read_queue(folder)
        if set(queue) >= {1, 2, 3, 4}:
            finish(folder, 1)
            states = {"t12_1": "OUT_OF_MEMORY", "t12_2": "CANCELLED by 1000", "t12_3": "NODE_FAIL"}
            if program == "sacct":
                cluster.has_accounting(**states)
            cluster.says(**(states if program == "squeue" else dict.fromkeys(states, "")))
        for number in {5, 6} & set(queue):
            finish(folder, number)

    outcome, events, _ = run_sweep(grid, on_refresh)
    assert [event for event in events if isinstance(event, tuple) and not event[0].startswith("start")] == [
        ("finished", 1, []), ("memory", 2, [5, 6]), ("interrupted", 3, []), ("killed", 4, []),
        ("finished", 5, []), ("finished", 6, []),
    ]  # fmt: skip
    log = os.path.relpath(folder / "slurm" / "12_3_0_log.out")
    assert {number: end.detail for number, end in outcome.failed.items()} == {
        4: f"Slurm state NODE_FAIL; the log of the task is {log}"
    }
    assert len(cluster.scripts) == 2
    assert "--array=0-1%2" in cluster.scripts[1]
    # The same command again: the failed pack waits, the cancelled one is submitted.
    outcome, events, _ = run_sweep(grid, lambda: [finish(folder, number) for number in read_queue(folder)] and None)
    assert events[0] == ("start", [3], 3, [4])
    assert ("finished", 3, []) in events
    assert outcome.code == 1
    assert len(cluster.scripts) == 3


def test_task_that_left_the_queue_without_an_outcome_has_failed(
    overrides: list[str], tmp_path: Path, cluster: Cluster
) -> None:
    """Without accounting, and once squeue has forgotten the task: it has failed, and --retry-failed submits it."""
    grid = [*overrides, *THERE, "seed=range(3)", "sweep.pack=off"]
    folder = sweep_folder(tmp_path / "results", "x")
    refreshes = iter(range(1000))

    def on_refresh() -> None:
        assert next(refreshes, None) is not None, "the missing task is still shown as running"
        if {1, 2, 3} <= set(read_queue(folder)):
            finish(folder, 1)
            cluster.says(t12_1="")
        elif 2 not in read_queue(folder):
            finish(folder, 3)

    outcome, events, _ = run_sweep(grid, on_refresh)
    assert ("unreported", 2, []) in events
    assert outcome.code == 1
    assert {number: end.cause for number, end in outcome.failed.items()} == {2: "unreported"}
    assert outcome.failed[2].detail == (
        f"squeue and sacct do not list its task, whose log is {os.path.relpath(folder / 'slurm' / '12_1_0_log.out')}"
    )
    assert [end.cause for end in read_outcomes(folder)] == ["finished", "unreported", "finished"]
    outcome, events, _ = run_sweep(grid)
    assert events[0] == ("start", [], 2, [2])
    assert run_sweep(grid, lambda: finish(folder, 2), retry_failed=True)[0].code == 0


def test_task_that_ended_without_an_outcome_exited(overrides: list[str], tmp_path: Path, cluster: Cluster) -> None:
    """As where its plan cannot be read, or the disk is full."""
    folder = sweep_folder(tmp_path / "results", "x")

    def end_task() -> None:
        for submitted in read_queue(folder).values():
            (folder / "slurm" / f"{submitted.job}_0_result.pkl").touch()

    outcome, _, _ = run_sweep([*overrides, *THERE, "seed=0"], end_task)
    assert outcome.code == 1
    assert outcome.failed[1].cause == "exited"
    assert "Slurm state COMPLETED; the log of the task is" in outcome.failed[1].detail


def test_only_an_answer_of_squeue_is_evidence_that_a_task_is_gone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(program: str, watch: Squeue | None = None) -> dict[str, tuple[str, float]]:
        (cluster.folder / "squeue").write_text(f"#!/bin/sh\n{program}\n")
        watch = watch or Squeue()
        watch.ask({"12_0", "12_1"})
        return watch.gone({"12_0", "12_1"})

    assert gone("echo '12_0|PENDING|Priority'; echo '12_1|REQUEUED|None'") == {}
    assert gone("echo '12_0|COMPLETING|None'") == {"12_1": ("", 0)}
    unknown = {"12_0": ("", 0), "12_1": ("", 0)}
    assert gone("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1") == unknown
    assert gone("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1") == {}
    (cluster.folder / "sacct.txt").write_text("12_0|TIMEOUT\n12_1|RUNNING\n12_[2-9]|PENDING\n")
    assert gone(":") == {"12_0": ("TIMEOUT", 0), "12_1": ("", 0)}
    # The time is that between two answers that miss the task, and so do all answers between them.
    clock = 100.0
    monkeypatch.setattr(squeue.time, "monotonic", lambda: clock)
    watch = Squeue()
    gone(":", watch)
    clock = 130.0
    assert gone("echo '12_0|RUNNING|None'", watch) == {"12_1": ("", 30)}
    clock = 170.0
    assert gone("exit 1", watch) == {"12_1": ("", 30)}
    assert gone(":", watch) == {"12_0": ("TIMEOUT", 0), "12_1": ("", 70)}
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{cluster.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(squeue, "ANSWER_WITHIN_S", 0.2)
    assert gone("exec sleep 60") == {}


def test_squeue_is_called_once_for_all_tasks_and_not_too_often(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = cluster.folder / "calls"
    for name in ("squeue", "sacct"):
        (cluster.folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\n')
    monkeypatch.setattr(squeue, "ASK_EVERY_S", 1000.0)
    watch = Squeue()
    for _ in range(5):
        watch.ask({"12_0", "12_1", "13"})
        watch.gone({"12_0", "12_1", "13"})
    assert [(call.split()[0], call.split()[-1]) for call in calls.read_text().splitlines()] == [
        ("squeue", "--jobs=12,13"),
        ("sacct", "--jobs=12,13"),
    ]


def test_outcomes_without_a_supervisor_are_recorded_later(
    overrides: list[str], tmp_path: Path, cluster: Cluster
) -> None:
    grid = [*overrides, *THERE, "seed=range(3)", "sweep.pack=1"]
    folder = sweep_folder(tmp_path / "results", "x")

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    outcome, events, _ = run_sweep(grid, interrupt)
    assert outcome.code == 130
    assert "3 packs continue in Slurm; use the same command to watch again, or `scancel 12` to cancel" in str(events)
    assert read_queue(folder) == {
        1: SubmittedPack("slurm", "12_0"),
        2: SubmittedPack("slurm", "12_1"),
        3: SubmittedPack("slurm", "12_2"),
    }
    finish(folder, 1)
    cluster.says(t12_1="RUNNING", t12_2="TIMEOUT")
    state = iter(["RUNNING", "COMPLETED"])

    def finish_later() -> None:
        if next(state, "") == "COMPLETED":
            for number in read_queue(folder):
                finish(folder, number)

    outcome, events, _ = run_sweep(grid, finish_later)
    assert outcome.code == 0
    assert events[0] == ("start", [2, 3], 1, [])
    assert [end.cause for end in read_outcomes(folder)] == ["finished", "interrupted", "finished", "finished"]
    assert len(cluster.scripts) == 2, "the second pack was not submitted again"


@pytest.mark.process
def test_sweep_continues_here_once_slurm_has_no_pack_of_it(
    overrides: list[str], tmp_path: Path, cluster: Cluster, run_command: Command
) -> None:
    grid = [*overrides, *THERE, "seed=0"]
    run_sweep(grid, lambda: os.kill(os.getpid(), signal.SIGINT))
    here = [override for override in grid if not override.startswith(("sweep.on", "sweep.slurm"))]
    code, _, err = run_command("sweep", *here)
    assert code == 2
    assert "1 of its packs are in Slurm" in err
    assert "`scancel 12` to cancel them" in err
    cluster.says(t12="CANCELLED by 1000")
    code, out, err = run_command("sweep", *here)
    assert code == 0, err
    assert "1 finished" in out
    folder = sweep_folder(tmp_path / "results", "x")
    assert [end.cause for end in read_outcomes(folder)] == ["interrupted", "finished"]


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
    ("overrides", "events"),
    [
        (["sweep.slurm.cpus=4"], r"sweep.slurm.cpus=4: has no effect with sweep.on=local"),
        (["sweep.on=slurm", "device=cpu"], r"device=cpu: sweep.slurm.gpus is 1; set sweep.slurm.gpus=0"),
        (
            ["sweep.on=slurm", "sweep.slurm.gpus=0", "device=cuda"],
            r"device=cuda: sweep.slurm.gpus is 0",
        ),
        (["sweep.on=slurm", "sweep.slurm.gpus=4", "precision=bf16"], r"gpus=4: a run uses devices=1 GPUs on 1 node;"),
        (
            ["sweep.on=slurm", "sweep.slurm.nodes=2", "sweep.slurm.gpus=4", "devices=4", "precision=bf16"],
            r"gpus=4: a run uses devices=4 GPUs on 2 nodes; set sweep.slurm.gpus=2",
        ),
        (["sweep.on=slurm", "sweep.slurm.nodes=2"], r"devices=1: cannot be divided among sweep.slurm.nodes=2"),
        (["sweep.on=slurm", "sweep.slurm.nodes=2", "sweep.slurm.cluster=local"], r"nodes=2: has no effect"),
        (["sweep.on=slurm", "sweep.slurm.gpus=0", "sweep.slurm.gpu_type=a100"], r"gpu_type=a100: has no effect"),
        (["sweep.on=slurm", "sweep.slurm.extra=['--qos=high']"], r"extra=--qos=high: has leading dashes"),
        (["sweep.on=slurm", "sweep.slurm.extra=['time=3']"], r"extra=time=3: .*set by normlab"),
        (["sweep.on=slurm", "sweep.slurm.time_minutes=1"], r"sweep.slurm.time_minutes=1: must be at least 5"),
        (["sweep.on=slurm", "sweep.slurm.gpus=0", "sweep.slurm.memory_gb=0.001"], r"a task \(sweep.slurm.memory_gb\)"),
        (["sweep.on=slurm", "sweep.slurm.partitoin=x"], r"partitoin.*did you mean"),
        (["sweep.on=slurms"], r"sweep.on=slurms \(did you mean 'slurm'\?\): choose one of local, slurm"),
    ],
)
def test_invalid_slurm_options(overrides: list[str], events: str) -> None:
    with pytest.raises(ConfigError, match=events):
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
    write_queue(tmp_path, {3: SubmittedPack("slurm", "12_0")})
    path = tmp_path / "slurm" / "queue.json"
    path.write_text(path.read_text().replace("12_0", "12_1"))
    with pytest.raises(StoreError, match=r"queue.json: is damaged .* check with `squeue` that none"):
        read_queue(tmp_path)
