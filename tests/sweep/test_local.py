"""The supervisor: a failing process affects its own pack only."""

import dataclasses
import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.base.errors import ConfigError, StoreError
from normlab.config.compose import compose_sweep
from normlab.store.files import io_error
from normlab.store.lock import file_lock
from normlab.store.plans import read_plan, run_of, sweep_folder
from normlab.store.runs import RunFolder
from normlab.sweeps import worker
from normlab.sweeps.files import PackOutcome, read_outcomes, write_plan
from normlab.sweeps.plan import make_plan
from normlab.sweeps.process import cause_of_death
from normlab.sweeps.supervisor import supervise
from support.fake_workers import FakeSweeps, FakeWorker
from support.processes import RecordingDisplay, wait_for, workers_of

Command = Callable[..., tuple[int, str, str]]

FAULTY = '''
import os, resource, signal, sys, time
from dataclasses import dataclass
import torch
from normlab.catalogue.norms.base import NormConfig, register_norm

@register_norm
@dataclass(kw_only=True, slots=True)
class FaultyConfig(NormConfig):
    formula = "tanh(x)"
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
    """The other three finish; the result shows why the five failed; --retry-failed trains the five only."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    ways = "well,raises,exits,fine,kills,hangs,exhausts,good"
    sweep = ["sweep", *overrides, f"plugins=[{tmp_path / 'faulty.py'}]", "norm=faulty", f"norm.how={ways}"]
    sweep += ["sweep.name=faults", "sweep.jobs=3", "sweep.timeout_minutes=0.75"]
    monkeypatch.setenv("MISBEHAVE", "yes")
    code, out, err = run_command(*sweep)
    assert code == 1
    folder = sweep_folder(tmp_path / "results", "faults")
    causes = {ways.split(",")[end.pack - 1]: end.cause for end in read_outcomes(folder)}
    assert causes == dict.fromkeys(ways.split(","), "failed") | {
        "well": "finished", "fine": "finished", "good": "finished", "exhausts": "out of memory",
    }  # fmt: skip
    for message in (
        "norm.how=raises: RuntimeError: as configured", "norm.how=exits: exited with code 3",
        "norm.how=kills: killed by SIGKILL", "norm.how=hangs: wrote nothing", "norm.how=exhausts: the memory ran out",
        "8 runs, 5 failed, 3 finished", "--retry-failed",
    ):  # fmt: skip
        assert message in out, out
    assert "norm.how=kills: failed: killed by SIGKILL" in err

    # The same command skips the failed packs, as its plan says, and starts nothing.
    code, out, _ = run_command(*sweep)
    assert code == 1
    assert "skipped 5 packs with failed runs; --retry-failed trains them again\npacks   none: nothing is left" in out
    assert len(read_outcomes(folder)) == 8
    assert "packs   5, one run each" in run_command(*sweep, "--retry-failed", "--dry-run")[1]
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


# With fake workers.


@pytest.fixture
def fake_sweep(monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> FakeSweeps:
    return FakeSweeps(overrides, monkeypatch)


def test_pack_that_runs_out_of_memory_is_halved(fake_sweep: FakeSweeps) -> None:
    result, events, folder = fake_sweep("seed=range(5)", "sweep.pack=4", ways={2: "memory"})
    assert result.code == 0
    assert events[1:] == [
        ("out of memory", 1, [3, 4]), ("finished", 3, []), ("out of memory", 4, [5, 6]), ("finished", 5, []),
        ("finished", 6, []), ("finished", 2, []),
    ]  # fmt: skip
    plan = read_plan(folder)
    assert plan == result.plan
    assert [(pack.number, pack.runs, pack.halved_from) for pack in plan.packs] == [
        (3, [0], 1), (5, [1], 4), (6, [2], 4), (2, [3, 4], None),
    ]  # fmt: skip
    assert plan.notes[0] == "pack 1 of 3 runs ran out of memory and is halved: its runs train in packs of 1 and 2"


def test_failed_pack_waits_for_retry_failed(fake_sweep: FakeSweeps) -> None:
    result, _, folder = fake_sweep("seed=range(4)", "sweep.jobs=2", ways={1: "raise", 3: "kill"})
    assert result.code == 1
    assert {number: (end.cause, end.detail) for number, end in result.failed.items()} == {
        2: ("failed", "ValueError: no"), 4: ("failed", "killed by SIGKILL"),
    }  # fmt: skip
    result, events, _ = fake_sweep("seed=range(4)")
    assert (result.code, events) == (1, [("start", 0, [2, 4])])
    result, events, _ = fake_sweep("seed=range(4)", retry=True)
    assert (result.code, events[0]) == (0, ("start", 2, []))
    assert len(read_outcomes(folder)) == 6


@pytest.mark.parametrize("jobs", [1, 3])
def test_each_slot_has_one_process(fake_sweep: FakeSweeps, jobs: int) -> None:
    assert fake_sweep("seed=range(9)", f"sweep.jobs={jobs}")[0].code == 0
    assert len(FakeWorker.all) == FakeWorker.most_at_once == jobs
    assert sorted(number for each in FakeWorker.all for number in each.packs) == [*range(1, 10)]


@pytest.mark.parametrize("way", ["kill", "raise", "leave"])
def test_process_that_ends_is_replaced(fake_sweep: FakeSweeps, way: str) -> None:
    """Only its pack is affected."""
    _, _, folder = fake_sweep("seed=range(5)", ways={2: way})
    assert [each.packs for each in FakeWorker.all] == [[1, 2, 3], [4, 5]]
    assert [end.pack for end in read_outcomes(folder) if end.cause == "finished"] == (
        [1, 2, 3, 4, 5] if way == "leave" else [1, 2, 4, 5]
    )


def test_packs_that_need_other_switches_of_torch_have_other_processes(fake_sweep: FakeSweeps) -> None:
    fake_sweep("precision=fp32,bf16", "seed=range(3)")
    assert [each.packs for each in FakeWorker.all] == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("before", "packs", "remedy"),
    [
        ("seed=0,1", [[2]], "which an earlier sweep had trained; restore its folder, or choose another sweep.name"),
        (
            "seed=5",
            [[0, 1, 2]],
            r"alone it would not have the same bits; .* whole pack to train it again \(.*, .*, .*\)",
        ),
    ],
    ids=["of another sweep", "of a pack"],
)
def test_deleted_run_is_named(fake_sweep: FakeSweeps, before: str, packs: list[list[int]], remedy: str) -> None:
    """Its pack cannot resume as it was: the other runs of it are completed, and bits depend on the pack."""
    fake_sweep(before)
    grid = ("seed=range(3)", "sweep.name=y", "sweep.pack=3")
    result, _, folder = fake_sweep(*grid)
    assert [pack.runs for pack in result.plan.packs] == packs
    shutil.rmtree(run_of(folder, result.plan.runs[1]).path)
    with pytest.raises(ConfigError, match=f"^sweep.name=y: run .* is missing, .*{remedy}"):
        fake_sweep(*grid)
    if packs == [[0, 1, 2]]:
        for run in result.plan.runs:
            shutil.rmtree(run_of(folder, run).path, ignore_errors=True)
        again, _, _ = fake_sweep(*grid)
        assert again.plan.packs == result.plan.packs
        assert all(run_of(folder, run).exists() for run in result.plan.runs)


def test_outcomes_of_a_deleted_plan_are_kept_aside(fake_sweep: FakeSweeps) -> None:
    result, _, folder = fake_sweep("seed=range(2)", ways={1: "raise"})
    assert result.code == 1
    (folder / "plan.json").unlink()
    result, _, _ = fake_sweep("seed=1,2")
    assert (result.code, result.failed) == (0, {})
    assert [end.cause for end in read_outcomes(folder)] == ["finished"] * 2
    assert (folder / "before_ends.jsonl").exists()


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
    thread.join()


def test_worker_stopped_from_outside_is_incomplete(fake_sweep: FakeSweeps) -> None:
    """SIGTERM to a worker from outside: nothing failed, and the exit code reports that a pack is incomplete."""
    result, _, folder = fake_sweep("seed=0", ways={0: "stopped from outside"})
    assert [end.cause for end in read_outcomes(folder)] == ["interrupted"]
    assert (result.code, result.failed, result.incomplete) == (1, {}, 1)


@pytest.mark.parametrize("line", ['{"pack":[1]}', "null", '{"pack":1,"cause":"whim"}', '{"pack":"1"}', '{"pack":1,"ca'])
def test_invalid_outcome_is_left_out(fake_sweep: FakeSweeps, line: str) -> None:
    _, _, folder = fake_sweep("seed=0", ways={0: "raise"})
    (known,) = read_outcomes(folder)
    if line.endswith("}"):
        line = json.dumps({**dataclasses.asdict(known), **json.loads(line)})
    with (folder / "ends.jsonl").open("a") as ends:
        ends.write(f"{line}\n")
    assert read_outcomes(folder) == [known]
    assert fake_sweep("seed=0")[0].code == 1


def test_sweep_started_by_another_command_in_between(fake_sweep: FakeSweeps, overrides: list[str]) -> None:
    """Both commands plan before either starts: the second one to start finds that the name is taken."""
    options, composed = compose_sweep([*overrides, "sweep.name=x", "seed=5,6"])
    ours = make_plan(options, composed)
    fake_sweep("seed=0")
    with pytest.raises(ConfigError, match=r"sweep.name=x: the existing sweep of this name has 1 run; "):
        supervise(ours, options, RecordingDisplay())


def test_a_sweep_is_extended(fake_sweep: FakeSweeps) -> None:
    """The new runs have packs of their own, with the threads of the old ones; a failed old run is not trained again."""
    first, _, folder = fake_sweep("seed=range(3)", "sweep.pack=2", ways={2: "raise"})
    with pytest.raises(ConfigError, match=r"has 3 runs; .* make 5, of which 3 are the same; add --extend, or choose"):
        fake_sweep("seed=range(5)", "sweep.pack=2")
    result, _, _ = fake_sweep("seed=4,3,2,1,0", "sweep.pack=2", extend=True)
    plan = result.plan
    assert [run.config["seed"] for run in plan.runs] == [0, 1, 2, 4, 3]
    assert [(pack.number, pack.runs) for pack in plan.packs] == [(1, [0, 1]), (2, [2]), (3, [3, 4])]
    assert (plan.threads, plan.parallel_packs) == (first.plan.threads, first.plan.parallel_packs)
    assert plan.notes == ["extended from 3 to 5 runs"]
    assert [end.pack for end in read_outcomes(folder)] == [1, 2, 3]
    assert (list(result.failed), result.code) == ([2], 1)
    assert fake_sweep("seed=range(5)", "sweep.pack=2")[0].plan.packs == plan.packs
    assert fake_sweep("seed=range(5)", "sweep.pack=2", extend=True)[0].plan == plan
    with pytest.raises(ConfigError, match="sweep x: these overrides leave out 4 of its 5 runs; give the old"):
        fake_sweep("seed=0,7", "sweep.pack=2", extend=True)
    with pytest.raises(ConfigError, match="--extend: there is no sweep y"):
        fake_sweep("seed=0", "sweep.name=y", extend=True)


def test_a_sweep_that_another_command_changes_is_not_extended(fake_sweep: FakeSweeps, overrides: list[str]) -> None:
    fake_sweep("seed=0")
    options, composed = compose_sweep([*overrides, "sweep.name=x", "sweep.pack=off", "seed=0,5"])
    ours = make_plan(options, composed, extend=True)
    fake_sweep("seed=0,1", extend=True)
    with pytest.raises(ConfigError, match=r"has 2 runs; .* make 2, of which 1 are the same"):
        supervise(ours, options, RecordingDisplay())


def test_hung_process_is_stopped(fake_sweep: FakeSweeps) -> None:
    result, _, _ = fake_sweep("seed=0", "sweep.timeout_minutes=0.0001", ways={0: "hang"})
    assert [end.detail.partition(" for")[0] for end in result.failed.values()] == ["wrote nothing"]


def test_ctrl_c_stops_all_packs_and_starts_no_more(fake_sweep: FakeSweeps) -> None:
    before = signal.getsignal(signal.SIGINT)
    result, events, _ = fake_sweep("seed=range(3)", "sweep.jobs=2", ways={0: "signal"})
    assert signal.getsignal(signal.SIGINT) is before
    assert (result.code, result.incomplete) == (130, 2)
    assert any("checkpoints" in event for event in events if isinstance(event, str))
    assert [each.packs for each in FakeWorker.all] == [[1], [2]]
    result, events, _ = fake_sweep("seed=range(3)")
    assert (result.code, events[0]) == (0, ("start", 2, []))


def test_one_supervisor_per_sweep(fake_sweep: FakeSweeps, tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path / "results", "x")
    folder.mkdir(parents=True)
    with (
        file_lock(folder / "lock", "sweep x"),
        pytest.raises(StoreError, match=r"sweep x is active in process .* or another sweep.name starts another beside"),
    ):
        fake_sweep("seed=0")
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize(
    ("code", "log", "memory_kill", "cause", "detail"),
    [
        (0, ["bye"], False, "failed", "exited with code 0: bye"),
        (3, [], False, "failed", "exited with code 3"),
        (-6, ["terminate called", "  what():  std::bad_alloc"], False, "out of memory", "std::bad_alloc (SIGABRT)"),
        (-11, [], False, "failed", "killed by SIGSEGV"),
        (-33, [], False, "failed", "killed by signal 33"),
        (-9, [], True, "out of memory", "the system ran out of memory and killed the process (SIGKILL)"),
        (-2, [], False, "interrupted", "stopped; the same command resumes it"),
    ],
)
def test_cause_of_a_death(code: int, log: list[str], memory_kill: bool, cause: str, detail: str) -> None:
    found = cause_of_death(code, log, memory_kill=memory_kill)
    assert found[0] == cause
    assert detail in found[1]


@pytest.mark.parametrize(
    ("number", "cause"), [(errno.ENOSPC, "interrupted"), (errno.EDQUOT, "interrupted"), (0, "failed")]
)
def test_the_same_command_resumes_a_pack_that_a_full_disk_stopped(
    number: int, cause: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the message of the error says; other errors need --retry-failed."""
    planned = make_plan(*compose_sweep([*overrides, "sweep.name=x"]))
    planned.folder.mkdir(parents=True)
    write_plan(planned.folder, planned.plan)

    def stop(*_: object, **__: object) -> None:
        raise io_error(Path("metrics.jsonl"), "written", OSError(number, "")) if number else StoreError("damaged")

    monkeypatch.setattr("normlab.training.start.train_pack", stop)
    found, detail = worker.Worker(planned.folder, on_gpu=False).train(1)
    assert found == cause
    assert PackOutcome(1, found, detail).is_failure == (cause == "failed")
    assert ("run the same command again" in detail) == (cause == "interrupted")


def test_a_full_disk_does_not_make_a_pack_fail(fake_sweep: FakeSweeps) -> None:
    first, _, _ = fake_sweep("seed=0", ways={0: "stopped from outside"})
    assert (first.code, first.failed) == (1, {})
    again, _, _ = fake_sweep("seed=0")
    assert again.code == 0


@pytest.mark.parametrize("sweep", ["sweep.name=x", "sweep.name=second"])
def test_a_completed_run_without_an_intact_run_json_is_an_error(
    overrides: list[str], run_command: Command, fake_sweep: FakeSweeps, sweep: str, tmp_path: Path
) -> None:
    """The sweep would not train it again, and no table would have it."""
    fake_sweep("seed=0,1")
    run_file = sorted((tmp_path / "results" / "runs").glob("*/run.json"))[1]
    run_file.write_text("{")
    code, out, err = run_command("sweep", *overrides, "seed=0,1", "sweep.pack=off", sweep)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: {run_file}: is damaged \(.*\); restore a copy, or delete the run's folder .*\n", err)
    assert [path.name for path in (tmp_path / "results" / "sweeps").iterdir()] == ["x"]
