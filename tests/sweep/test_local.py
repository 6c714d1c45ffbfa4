"""The supervisor: a failing process affects its own pack only."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normlab.config.compose import compose_sweep
from normlab.config.sweep_options import SweepOptions
from normlab.errors import ConfigError, StoreError
from normlab.store.lock import file_lock
from normlab.store.plans import lock_of, log_of, read_outcomes, read_plan, run_of, sweep_folder
from normlab.store.runs import RunFolder
from normlab.sweeps import local, process, supervisor, worker
from normlab.sweeps.plan import make_plan
from normlab.sweeps.supervisor import SweepResult, supervise
from support.processes import RecordingDisplay, wait_for, workers_of
from support.small_run import one_run_at_a_time

Command = Callable[..., tuple[int, str, str]]

FAULTY = '''
import os, resource, signal, sys, time
from dataclasses import dataclass
import torch
from normlab.norms.base import NormConfig, register_norm

@register_norm
@dataclass(kw_only=True, slots=True)
class FaultyConfig(NormConfig):
    name: str = "faulty"
    how: str = "well"
    """What it does in the sixth step."""

    def build(self, width):
        return Faulty(self.how)

class Faulty(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.calls = how, 0

    def forward(self, x):
        self.calls += self.training
        if self.calls > 5 and "MISBEHAVE" in os.environ:
            getattr(self, self.how)()
        return torch.tanh(x)

    def well(self): pass
    fine = good = well

    def raises(self): raise RuntimeError("as configured")
    def exits(self): sys.exit(3)
    def kills(self): os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self):
        while True:
            time.sleep(1)

    def exhausts(self):
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, -1))
        torch.zeros(2**30)
'''


@pytest.mark.process
def test_failures_of_five_of_eight_runs_leave_the_others_alone(
    overrides: list[str], tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other three finish; the table shows why the five failed; --retry-failed trains the five only."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    ways = "well,raises,exits,fine,kills,hangs,exhausts,good"
    sweep = ["sweep", *overrides, f"plugins=[{tmp_path / 'faulty.py'}]", "norm=faulty", f"norm.how={ways}"]
    sweep += ["sweep.name=faults", "sweep.jobs=3", "sweep.timeout_minutes=0.75"]
    monkeypatch.setenv("MISBEHAVE", "yes")
    code, out, err = run_command(*sweep)
    assert code == 1
    folder = sweep_folder(tmp_path / "results", "faults")
    causes = {ways.split(",")[end.pack - 1]: end.cause for end in read_outcomes(folder)}
    assert causes == {
        "well": "finished", "fine": "finished", "good": "finished",
        "raises": "raised", "exits": "exited", "kills": "killed", "hangs": "hung", "exhausts": "memory",
    }  # fmt: skip
    for message in (
        "norm.how=raises: RuntimeError: as configured", "norm.how=exits: with code 3", "norm.how=kills: by SIGKILL",
        "norm.how=hangs: wrote nothing", "norm.how=exhausts: the memory ran out",
    ):  # fmt: skip
        assert message in out, out
    for cause in ("raised", "exited", "killed", "hung", "memory"):
        assert cause in {cell for line in out.splitlines() if "norm.how=" in line for cell in line.split()}
    assert "3 finished" in out
    assert "5 failed" in out
    assert "--retry-failed" in out
    assert "norm.how=kills: was killed" in err

    # The same command skips the failed packs, and starts nothing.
    assert run_command(*sweep)[0] == 1
    assert len(read_outcomes(folder)) == 8
    monkeypatch.delenv("MISBEHAVE")
    code, out, err = run_command(*sweep, "--retry-failed")
    assert code == 0, err
    again = read_outcomes(folder)[8:]
    assert sorted(ways.split(",")[end.pack - 1] for end in again) == ["exhausts", "exits", "hangs", "kills", "raises"]
    assert {end.cause for end in again} == {"finished"}
    assert "8 finished" in out


@pytest.mark.process
def test_dead_supervisor_and_ctrl_c_leave_no_process_and_lose_no_step(overrides: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "normlab", "sweep", *overrides, "seed=0,1", "sweep.name=x", "sweep.jobs=2"]
    command += ["train.steps=100000", "train.log_every=1", "eval.every=0", "stats=off"]
    folder = sweep_folder(tmp_path / "results", "x")

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)

    def runs() -> list[RunFolder]:
        return [run_of(folder, job) for job in read_plan(folder).runs]

    parent = begin()
    wait_for(lambda: (folder / "plan.json").exists() and all(run.size() > 20_000 for run in runs()))
    parent.kill()
    parent.wait()
    wait_for(lambda: [run.state() for run in runs()] == ["interrupted"] * 2 and not workers_of(folder))
    reached = [run.status()["checkpoint"] for run in runs()]
    assert min(reached) > 0
    assert read_outcomes(folder) == []

    parent = begin()
    wait_for(lambda: all(run.state() == "running" and (run.rows("train").rows[-1]["step"] > 5 + reached[number])
                         for number, run in enumerate(runs())))  # fmt: skip
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=120) == 130
    assert workers_of(folder) == []
    assert [end.cause for end in read_outcomes(folder)] == ["interrupted"] * 2
    assert all(run.status()["checkpoint"] > step for run, step in zip(runs(), reached, strict=True))
    assert all([row["step"] for row in run.rows("train").rows] == list(range(run.status()["step"])) for run in runs())


def test_a_sweep_of_two_runs(overrides: list[str], run_command: Command, tmp_path: Path) -> None:
    """It trains the same runs as `train`, one diverges, and nothing is trained twice."""
    grid = [
        *overrides,
        "norm=none",
        "optim=sgd",
        "optim.clip=null",
        "optim.lr=1e-3,1e9",
        "train.steps=8",
        "sweep.jobs=2",
    ]
    code, out, err = run_command("sweep", *grid)
    assert code == 0, err
    name = out.split()[1]
    folder = sweep_folder(tmp_path / "results", name)
    assert [end.cause for end in read_outcomes(folder)] == ["finished"] * 2
    assert "2 runs, 1 diverged, 1 finished" in out
    assert f"normlab summarize {folder}" in out
    assert "optim.lr=1000000000.0: diverged" in err
    assert "finished at step 8/8" in (folder / "logs" / "pack_001.log").read_text()
    # `train` finds the same run, which is completed.
    code, out, _ = run_command(
        "train", *(override for override in grid if "sweep." not in override and "1e9" not in override), "optim.lr=1e-3"
    )
    assert code == 0
    assert out.startswith("finished at step 8")
    code, out, _ = run_command("sweep", *grid)
    assert code == 0
    assert "(2 completed already, not trained again)" in out
    assert len(read_outcomes(folder)) == 2
    assert "2 runs, 1 diverged, 1 finished" in out


# With fake processes.


class FakePopen:
    """Replaces a worker: ends each pack after a few polls, in the way that `ways` gives for the seeds of its runs.

    After `finish`, it answers and waits for another pack; after all other ways, it exits.
    """

    ways: dict[int, str] = {}
    most_at_once = 0
    running = 0
    packs: list[list[int]] = []
    """For each process, the numbers of its packs."""
    pid = 2**22 + 1
    """No process has it."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.folder, self.code, self.way = Path(command[-1]), None, ""
        self.stdin = SimpleNamespace(write=self.start, flush=lambda: None, close=lambda: None)
        answers, self.answers = os.pipe()
        self.stdout = os.fdopen(answers, "rb")
        self.numbers: list[int] = []
        self.packs.append(self.numbers)

    def start(self, request: bytes) -> None:
        number, _ = map(int, request.split())
        self.numbers.append(number)
        plan = read_plan(self.folder)
        self.runs = plan.runs_of(plan.pack_of(number))
        seeds = [job.config["seed"] for job in self.runs]
        self.way = next((self.ways[seed] for seed in seeds if seed in self.ways), "finish")
        if self.way == "memory" and len(seeds) == 1:
            self.way = "finish"
        if self.way == "raise":
            log_of(self.folder, number).write_text("error: ValueError: no\n")
        self.polls, self.stopped = 0, False
        type(self).running += 1
        type(self).most_at_once = max(self.most_at_once, self.running)

    def poll(self) -> int | None:
        if self.code is not None or not self.way:
            return self.code
        self.polls += 1
        if self.way == "signal" and self.polls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        if not self.stopped and (self.polls < 3 or self.way in ("hang", "signal")):
            return None
        if self.way in ("finish", "leak"):
            for job in self.runs:
                run = RunFolder.create(run_of(self.folder, job).path, {"run_id": job.run_id})
                run.write_status({"state": "finished"})
        type(self).running -= 1
        if self.way == "finish":
            os.write(self.answers, worker.answer_of(self.numbers[-1]))
        else:
            self.code = {"leak": 0, "memory": 12, "raise": 1, "stopped from outside": 143}.get(self.way, -9)
        self.way = ""
        return self.code

    def send_signal(self, number: int) -> None:
        self.stopped = True

    def kill(self) -> None:
        self.code = -9

    def wait(self, seconds: float) -> None:
        os.close(self.answers)


@pytest.fixture
def fake_sweep(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> Callable[..., tuple[SweepResult, list[Any], Path]]:
    """Supervise a sweep over seeds with fake processes."""
    monkeypatch.setattr(
        process,
        "subprocess",
        SimpleNamespace(Popen=FakePopen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired),
    )
    monkeypatch.setattr(supervisor, "POLL_EVERY_S", 0.001)
    monkeypatch.setattr(FakePopen, "running", 0)
    monkeypatch.setattr(FakePopen, "most_at_once", 0)
    monkeypatch.setattr(FakePopen, "packs", [])

    def call(*more: str, ways: dict[int, str], retry: bool = False) -> tuple[SweepResult, list[Any], Path]:
        monkeypatch.setattr(FakePopen, "ways", ways)
        name = [] if "sweep.name=y" in more else ["sweep.name=x"]
        options, composed = compose_sweep([*overrides, *one_run_at_a_time(more), *name, *more])
        planned, display = make_plan(options, composed), RecordingDisplay()
        outcome = supervise(planned.folder, planned.plan, options, display, retry_failed=retry)
        return outcome, display.events, planned.folder

    return call


def test_pack_that_runs_out_of_memory_is_halved(fake_sweep: Callable[..., Any]) -> None:
    outcome, events, folder = fake_sweep("seed=range(5)", "sweep.pack=4", ways={2: "memory"})
    assert outcome.code == 0
    assert [event for event in events if event[0] in ("memory", "finished")] == [
        ("memory", 1, [3, 4]), ("finished", 3, []), ("memory", 4, [5, 6]), ("finished", 5, []), ("finished", 6, []),
        ("finished", 2, []),
    ]  # fmt: skip
    plan = read_plan(folder)
    assert plan == outcome.plan
    assert [(pack.number, pack.runs, pack.halved_from) for pack in plan.packs] == [
        (3, [0], 1), (5, [1], 4), (6, [2], 4), (2, [3, 4], None),
    ]  # fmt: skip


def test_failed_pack_waits_for_retry_failed(fake_sweep: Callable[..., Any]) -> None:
    ways = {1: "raise", 3: "kill"}
    outcome, events, folder = fake_sweep("seed=range(4)", "sweep.jobs=2", ways=ways)
    assert outcome.code == 1
    assert FakePopen.most_at_once == 2
    assert {number: (end.cause, end.detail) for number, end in outcome.failed.items()} == {
        2: ("raised", "ValueError: no"), 4: ("killed", "by SIGKILL"),
    }  # fmt: skip
    outcome, events, _ = fake_sweep("seed=range(4)", ways={})
    assert events == [("start", [], 2, [2, 4]), "finish"]
    assert outcome.code == 1
    outcome, events, _ = fake_sweep("seed=range(4)", ways={}, retry=True)
    assert events[0] == ("start", [2, 4], 2, [])
    assert outcome.code == 0
    assert len(read_outcomes(folder)) == 6


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_each_slot_has_one_process(fake_sweep: Callable[..., Any], jobs: int) -> None:
    outcome, _, _ = fake_sweep("seed=range(9)", f"sweep.jobs={jobs}", ways={})
    assert outcome.code == 0
    assert len(FakePopen.packs) == FakePopen.most_at_once == jobs
    assert sorted(number for numbers in FakePopen.packs for number in numbers) == [*range(1, 10)]


@pytest.mark.parametrize("way", ["kill", "raise", "leak"])
def test_process_that_exits_is_replaced(fake_sweep: Callable[..., Any], way: str) -> None:
    """Only its pack is affected."""
    _, _, folder = fake_sweep("seed=range(5)", ways={2: way})
    assert FakePopen.packs == [[1, 2, 3], [4, 5]]
    assert [end.pack for end in read_outcomes(folder) if end.cause == "finished"] == (
        [1, 2, 3, 4, 5] if way == "leak" else [1, 2, 4, 5]
    )


def test_packs_that_need_other_switches_of_torch_have_other_processes(fake_sweep: Callable[..., Any]) -> None:
    fake_sweep("precision=fp32,bf16", "seed=range(3)", ways={})
    assert FakePopen.packs == [[1, 2, 3], [4, 5, 6]]


def test_deleted_run_is_trained_again(fake_sweep: Callable[..., Any]) -> None:
    fake_sweep("seed=0,1", ways={})
    outcome, _, folder = fake_sweep("seed=0,1,2", "sweep.name=y", ways={})
    assert [pack.runs for pack in outcome.plan.packs] == [[2]]
    shutil.rmtree(run_of(folder, outcome.plan.runs[1]).path)
    outcome, events, _ = fake_sweep("seed=0,1,2", "sweep.name=y", ways={})
    assert [(pack.number, pack.runs) for pack in outcome.plan.packs] == [(1, [2]), (2, [1])]
    assert events == [("start", [2], 1, []), ("started", 2), ("finished", 2, []), "finish"]
    assert read_plan(folder) == outcome.plan


def test_deleted_run_of_a_pack_is_trained_alone(fake_sweep: Callable[..., Any]) -> None:
    outcome, _, folder = fake_sweep("seed=range(3)", "sweep.pack=3", ways={})
    deleted, *others = outcome.plan.runs
    shutil.rmtree(run_of(folder, deleted).path)
    outcome, events, _ = fake_sweep("seed=range(3)", "sweep.pack=3", ways={})
    assert [(pack.number, pack.runs) for pack in outcome.plan.packs] == [(1, [1, 2]), (2, [0])]
    assert events == [("start", [2], 1, []), ("started", 2), ("finished", 2, []), "finish"]
    assert all(run_of(folder, job).state() == "finished" for job in (deleted, *others))


def test_outcomes_of_a_deleted_plan_are_archived(fake_sweep: Callable[..., Any]) -> None:
    outcome, _, folder = fake_sweep("seed=range(2)", ways={1: "raise"})
    assert outcome.code == 1
    (folder / "plan.json").unlink()
    outcome, _, _ = fake_sweep("seed=1,2", ways={})
    assert (outcome.code, outcome.failed) == (0, {})
    assert [end.cause for end in read_outcomes(folder)] == ["finished"] * 2
    assert len(list(folder.glob("before_*_ends.jsonl"))) == 1


def test_worker_waits_for_the_checkpoint_of_an_earlier_worker(tmp_path: Path) -> None:
    """Its supervisor was killed, and the next supervisor started at once."""
    run = RunFolder(tmp_path / "run")
    locked, deadline = threading.Event(), time.monotonic() + 0.5

    def write_checkpoint() -> None:
        with run.lock():
            locked.set()
            time.sleep(deadline - time.monotonic())

    thread = threading.Thread(target=write_checkpoint)
    thread.start()
    locked.wait()
    worker.wait_until_inactive([run])
    assert time.monotonic() >= deadline
    assert not run.is_active()
    thread.join()


def test_worker_stopped_from_outside_is_incomplete(fake_sweep: Callable[..., Any]) -> None:
    """SIGTERM to a worker from outside: nothing failed, and the exit code reports that a pack is incomplete."""
    outcome, _, folder = fake_sweep("seed=0", ways={0: "stopped from outside"})
    assert [end.cause for end in read_outcomes(folder)] == ["interrupted"]
    assert (outcome.code, outcome.failed, outcome.incomplete) == (1, {}, 1)


@pytest.mark.parametrize("line", ['{"pack":[1]}', "null", "[1]", '{"pack":1,"cause":"whim"}', '{"pack":"1"}'])
def test_invalid_outcome_is_left_out(fake_sweep: Callable[..., Any], line: str) -> None:
    _, _, folder = fake_sweep("seed=0", ways={0: "raise"})
    (known,) = read_outcomes(folder)
    fields = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    changes = json.loads(line)
    with (folder / "ends.jsonl").open("a") as ends:
        ends.write(json.dumps({**fields, **changes} if isinstance(changes, dict) else changes) + "\n")
    assert read_outcomes(folder) == [known]
    assert fake_sweep("seed=0", ways={})[0].code == 1


def test_sweep_started_by_another_command_in_between(fake_sweep: Callable[..., Any], overrides: list[str]) -> None:
    """Both commands plan before either starts: the second one to start finds that the name is taken."""
    options, composed = compose_sweep([*overrides, "sweep.name=x", "seed=5,6"])
    ours = make_plan(options, composed)
    fake_sweep("seed=0", ways={})
    with pytest.raises(ConfigError, match=r"sweep.name=x: the existing sweep of this name has other runs \(1"):
        supervise(ours.folder, ours.plan, options, RecordingDisplay())


def test_hung_process_is_stopped(fake_sweep: Callable[..., Any]) -> None:
    outcome, _, _ = fake_sweep("seed=0", "sweep.timeout_minutes=0.0001", ways={0: "hang"})
    assert [end.cause for end in outcome.failed.values()] == ["hung"]


class SuspendedPopen(subprocess.Popen):
    """Replaces the process of a pack: the first suspends itself, and SIGTERM ends it with its checkpoint."""

    newest = 0

    def __init__(self, command: list[str], **options: Any) -> None:
        script = "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
        script += (
            "os.kill(os.getpid(), signal.SIGSTOP) if sys.stdin.readline() == '1 0\\n' else sys.exit(3); signal.pause()"
        )
        super().__init__([sys.executable, "-S", "-c", script], **options)
        SuspendedPopen.newest = self.pid


def test_suspended_process_writes_its_checkpoint_and_the_next_pack_starts(
    fake_sweep: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with SIGSTOP from outside: the pack is hung, and its process ends by itself before it would be killed."""

    def seconds_silent(_: process.RunningPack) -> float:
        is_suspended = Path(f"/proc/{SuspendedPopen.newest}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return 3600 if is_suspended else 0

    monkeypatch.setattr(
        process,
        "subprocess",
        SimpleNamespace(Popen=SuspendedPopen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired),
    )
    monkeypatch.setattr(process.RunningPack, "seconds_silent", seconds_silent)
    outcome, events, folder = fake_sweep("seed=0,1", "sweep.pack=off", "sweep.jobs=1", ways={})
    assert [(end.pack, end.cause, end.code) for end in read_outcomes(folder)] == [(1, "hung", 143), (2, "exited", 3)]
    assert ("started", 2) in events
    assert outcome.code == 1


def test_closed_pipe_is_not_waited_for(fake_sweep: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays readable, so the supervisor would not sleep until the process has ended."""
    waited_for: list[set[int]] = []

    def wait(pipes: set[int], seconds: float) -> None:
        waited_for.append(pipes)

    class ClosedPopen(FakePopen):
        def start(self, request: bytes) -> None:
            super().start(request)
            os.close(self.answers)

        def wait(self, seconds: float) -> None:
            """Return at once."""

    monkeypatch.setattr(local, "wait", wait)
    monkeypatch.setattr(
        process,
        "subprocess",
        SimpleNamespace(Popen=ClosedPopen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired),
    )
    outcome, *_ = fake_sweep("seed=0", ways={0: "leak"})
    assert outcome.code == 0
    assert [len(pipes) for pipes in waited_for] == [1, 0, 0]


def test_ctrl_c_stops_all_packs_and_starts_no_more(fake_sweep: Callable[..., Any]) -> None:
    before = signal.getsignal(signal.SIGINT)
    outcome, events, _ = fake_sweep("seed=range(3)", "sweep.jobs=2", ways={0: "signal"})
    assert signal.getsignal(signal.SIGINT) is before
    assert outcome.code == 130
    assert ("started", 3) not in events
    assert any("checkpoints" in event for event in events if isinstance(event, str))
    outcome, events, _ = fake_sweep("seed=range(3)", ways={})
    assert events[0][0] == "start"
    assert [*events[0][1]] == [1, 3], "the second was completed before the signal"
    assert outcome.code == 0


def test_one_supervisor_per_sweep(fake_sweep: Callable[..., Any], tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path / "results", "x")
    folder.mkdir(parents=True)
    with (
        file_lock(lock_of(folder), "sweep x"),
        pytest.raises(StoreError, match=r"sweep x is active in process .* or another sweep.name starts another beside"),
    ):
        fake_sweep("seed=0", ways={})
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize(
    ("code", "log", "completed", "stopped", "cause", "detail"),
    [
        (0, ["finished"], True, None, "finished", ""),
        (0, ["finished"], True, ("hung", "why"), "finished", ""),
        (0, ["bye"], False, None, "exited", "with code 0, before its runs were completed"),
        (3, ["said so"], False, None, "exited", "with code 3: said so"),
        (1, ["Traceback", "error: ValueError: no"], False, None, "raised", "ValueError: no"),
        (2, ["error: the disk is full"], False, None, "raised", "the disk is full"),
        (12, ["error: out of memory; lower it"], False, None, "memory", "out of memory; lower it"),
        (-6, ["terminate called", "  what():  std::bad_alloc"], False, None, "memory", "std::bad_alloc (SIGABRT)"),
        (-11, [], False, None, "killed", "by SIGSEGV"),
        (-33, [], False, None, "killed", "by signal 33"),
        (143, [], False, None, "interrupted", "stopped; the same command resumes it"),
        (-2, [], False, None, "interrupted", "stopped; the same command resumes it"),
        (-9, [], False, ("interrupted", "stopped"), "interrupted", "stopped"),
        (143, [], False, ("hung", "why"), "hung", "why"),
    ],
)
def test_cause_of_an_exit(
    code: int, log: list[str], completed: bool, stopped: tuple[str, str] | None, cause: str, detail: str
) -> None:
    found = process.cause_of_exit(code, log, completed=completed, stopped=stopped, memory_kill=False)
    assert found[0] == cause
    assert detail in found[1]


def test_kill_by_the_system_for_lack_of_memory() -> None:
    found = process.cause_of_exit(-9, [], completed=False, stopped=None, memory_kill=True)
    assert found == ("memory", "the system ran out of memory and killed the process (SIGKILL)")


def test_largest_pack() -> None:
    assert [SweepOptions(pack=pack).largest_pack for pack in ("auto", "off", "16")] == [None, 1, 16]
