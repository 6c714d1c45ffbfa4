"""Sweeps on a real Slurm: a node with four cores, on which a partition preempts another."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from compare_runs import differences
from slurm_cluster import NODE, ClusterError, SlurmCluster

from normlab.store.plans import read_plan, run_of, sweep_folder
from normlab.sweeps import slurm as executor
from normlab.sweeps.files import log_of, read_outcomes, read_queue
from support.processes import run_sweep, wait_for, worker_of

CORES = 4
THERE = ["sweep.on=slurm", "sweep.slurm.gpus=0", "sweep.slurm.cpus=1", "sweep.slurm.memory_gb=1"]
SWEEP = ["sweep.name=x", "model.depth=1", "train.steps=150", "train.checkpoint_every=50", "deterministic=true"]


@pytest.fixture(autouse=True)
def _frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "POLL_EVERY_S", 1.0)
    monkeypatch.setattr(executor, "GONE_FOR_S", 5.0)


class Tasks:
    """The tasks of a sweep, each frozen in the middle of its training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.frozen: dict[int, int] = {}
        """The frozen worker of each task, by the number of its pack."""
        self.jobs: dict[int, str] = {}
        """Slurm's name of each task."""

    def freeze(self, count: int) -> bool:
        """Freeze each task that has trained for some steps, and return whether `count` of them are frozen."""
        if (self.folder / "plan.json").exists():
            plan, queue = read_plan(self.folder), read_queue(self.folder)
            for pack in plan.packs:
                runs = [run_of(self.folder, run) for run in plan.runs_of(pack)]
                is_new = pack.number in queue and pack.number not in self.frozen
                if is_new and all(run.exists() and run.size() > 5_000 for run in runs):
                    self.frozen[pack.number] = worker_of(self.folder, pack.number)
                    os.kill(self.frozen[pack.number], signal.SIGSTOP)
                    self.jobs[pack.number] = queue[pack.number]
        return len(self.frozen) == count

    def release(self, *numbers: int) -> None:
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.frozen[number], signal.SIGCONT)

    def are_asked_to_stop(self, *numbers: int) -> bool:
        """Return whether each worker has got a signal that it acts on when it is released, or is released already.

        A worker that is released before could train to its end meanwhile.
        """
        for number in numbers:
            try:
                status = Path(f"/proc/{self.frozen[number]}/status").read_text()
            except FileNotFoundError:
                continue
            fields = dict(line.split(":", 1) for line in status.splitlines())
            pending = int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16)
            is_frozen = fields["State"].split()[0] == "T"
            if is_frozen and not pending & 1 << (signal.SIGTERM - 1):
                return False
        return True

    def log(self, number: int) -> str:
        return (self.folder / "slurm" / f"{self.jobs[number]}_0_log.out").read_text()

    def parent(self, number: int) -> int:
        """Return the process that watches a worker."""
        return int(Path(f"/proc/{self.frozen[number]}/stat").read_text().rpartition(")")[2].split()[1])


def test_disturbed_sweep_equals_a_local_sweep_bit_for_bit(
    overrides: list[str], tmp_path: Path, slurm: SlurmCluster
) -> None:
    """Of eight packs one is preempted, one out of time, and one cancelled; the same command resumes the last."""
    grid = [*overrides, *SWEEP, "seed=range(8)", "sweep.pack=1"]
    local, _, local_folder = run_sweep([*grid, f"results_dir={tmp_path / 'local'}", "sweep.jobs=2"])
    assert local.code == 0
    tasks = Tasks(sweep_folder(tmp_path / "results", "x"))
    disturbed: list[int] = []

    def disturb() -> Iterator[None]:
        while not tasks.freeze(CORES):
            yield
        slurm.call("sbatch", "--partition=high", "--mem=100", "--output=/dev/null", "--wrap=sleep 1")
        while not (preempted := [number for number, job in tasks.jobs.items() if is_preempted(slurm, job)]):
            yield
        cancelled, late, other = sorted(tasks.jobs.keys() - preempted)
        disturbed.extend([*preempted, late, cancelled])
        while not tasks.are_asked_to_stop(*preempted):
            yield
        tasks.release(other, *preempted)
        # Slurm sends its notice two minutes before the time limit, when it next checks the limits.
        set_time_limit(slurm, 2, tasks.jobs[late], tasks.jobs[cancelled])
        while not tasks.are_asked_to_stop(late, cancelled):
            yield
        set_time_limit(slurm, 60, tasks.jobs[late])
        # If the task queued itself again after its notice, it would undo scancel.
        slurm.call("scancel", tasks.jobs[cancelled])
        tasks.release(late, cancelled)

    try:
        script = disturb()
        outcome, events, folder = run_sweep([*grid, *THERE], lambda: next(script, None))
    finally:
        tasks.release(*tasks.frozen)
    *_, cancelled = disturbed
    assert outcome.code == 1
    assert {end.pack for end in read_outcomes(folder) if end.cause == "interrupted"} == {cancelled}
    assert [tasks.log(number).count("Starting with") for number in disturbed] == [2, 2, 1]
    outcome, events, _ = run_sweep([*grid, *THERE])
    assert (outcome.code, events[0]) == (0, ("start", 1, []))
    for number in disturbed:
        assert "interrupted at step" in log_of(folder, number).read_text()
    for one, other in zip(local.plan.runs, outcome.plan.runs, strict=True):
        assert differences(run_of(local_folder, one).path, run_of(folder, other).path) == []


def set_time_limit(slurm: SlurmCluster, minutes: int, *jobs: str) -> None:
    for job in jobs:
        slurm.call("scontrol", "update", f"jobid={job}", f"TimeLimit={minutes}")


def is_preempted(slurm: SlurmCluster, job: str) -> bool:
    return "PreemptTime=None" not in slurm.call("scontrol", "show", "job", job)


def test_outcome_of_each_end_of_a_task(overrides: list[str], tmp_path: Path, slurm: SlurmCluster) -> None:
    """A requeue, a failure and a cancelled array; then a drained node, a killed supervisor, and a node that is down."""
    grid = [*overrides, *SWEEP, *THERE, "seed=range(3)", "sweep.pack=1"]
    folder = sweep_folder(tmp_path / "results", "x")
    tasks = Tasks(folder)

    def end() -> Iterator[None]:
        while not tasks.freeze(3):
            yield
        slurm.call("scontrol", "requeue", tasks.jobs[1])
        os.kill(tasks.parent(2), signal.SIGKILL)
        tasks.release(1, 2)
        while len(read_queue(folder)) > 1 or tasks.jobs[1] in slurm.call("squeue", "--array", "--format=%i"):
            yield
        slurm.call("scancel", tasks.jobs[3].partition("_")[0])
        tasks.release(3)

    try:
        script = end()
        outcome, events, _ = run_sweep(grid, lambda: next(script, None))
    finally:
        tasks.release(*tasks.frozen)
    assert outcome.code == 1
    ends = {end.pack: (end.cause, end.detail.partition(";")[0]) for end in read_outcomes(folder)}
    assert ends == {
        1: ("finished", ""),
        2: ("failed", "Slurm state FAILED"),
        3: ("interrupted", "stopped"),
    }
    assert outcome.failed[2].detail.endswith(os.path.relpath(folder / "slurm" / f"{tasks.jobs[2]}_0_log.out"))

    slurm.call("scontrol", "update", f"nodename={NODE}", "state=drain", "reason=test")
    text = tmp_path / "output"
    with text.open("w") as output:  # not a pipe, which the tasks would hold open
        command = [sys.executable, "-m", "normlab", "sweep", *grid, "--retry-failed"]
        supervisor = subprocess.Popen(command, stdout=output, stderr=output)
    wait_for(lambda: "2 PENDING (Nodes required for job are DOWN, DRAINED" in text.read_text())
    supervisor.kill()
    supervisor.wait()
    slurm.call("scontrol", "update", f"nodename={NODE}", "state=resume")
    wait_for(lambda: "RUNNING" in slurm.call("squeue", "--noheader", "--format=%T"))
    slurm.call("scontrol", "update", f"nodename={NODE}", "state=down", "reason=test")
    with contextlib.suppress(ClusterError):  # the node may have come back by itself
        slurm.call("scontrol", "update", f"nodename={NODE}", "state=resume")
    outcome, events, _ = run_sweep(grid)
    assert (outcome.code, ("start", 2, []) in events[:2]) == (0, True)  # perhaps after a line of their states
    assert len(list((folder / "slurm").glob("*_submission.sh"))) == 2, "no pack is submitted twice"
