"""The supervisor: what a process may do to its own pack, and to nothing else."""

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

from normlab.errors import ConfigError, StoreError
from normlab.launch import compose_sweep
from normlab.store.lock import hold
from normlab.store.plans import End, Pack, Plan, lock_of, read_ends, read_plan, run_of, sweep_folder
from normlab.store.runs import RunFolder
from normlab.sweep import local, supervisor
from normlab.sweep import worker as a_worker
from normlab.sweep.ends import end_of
from normlab.sweep.options import SweepOptions
from normlab.sweep.plan import make_plan
from normlab.sweep.process import Worker
from normlab.sweep.supervisor import Outcome, supervise
from tests.sweep.watching import Silent, wait_for, workers_of

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

    def raises(self): raise RuntimeError("as it was told")
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


@pytest.mark.slow
def test_of_eight_runs_five_fail_each_in_its_own_way(
    words: list[str], tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other three finish; the table says why the five did not; --retry-failed runs the five and no other."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    ways = "well,raises,exits,fine,kills,hangs,exhausts,good"
    sweep = ["sweep", *words, f"plugins=[{tmp_path / 'faulty.py'}]", "norm=faulty", f"norm.how={ways}"]
    sweep += ["sweep.name=faults", "sweep.jobs=3", "sweep.timeout_minutes=0.75"]
    monkeypatch.setenv("MISBEHAVE", "yes")
    code, out, err = run_command(*sweep)
    assert code == 1
    folder = sweep_folder(tmp_path / "results", "faults")
    causes = {ways.split(",")[end.pack - 1]: end.cause for end in read_ends(folder)}
    assert causes == {
        "well": "finished", "fine": "finished", "good": "finished",
        "raises": "raised", "exits": "exited", "kills": "killed", "hangs": "hung", "exhausts": "memory",
    }  # fmt: skip
    for told in (
        "norm.how=raises: RuntimeError: as it was told", "norm.how=exits: with code 3", "norm.how=kills: by SIGKILL",
        "norm.how=hangs: no sign of life", "norm.how=exhausts: the memory ran out",
    ):  # fmt: skip
        assert told in out, out
    for cause in ("raised", "exited", "killed", "hung", "memory"):
        assert cause in {cell for line in out.splitlines() if "norm.how=" in line for cell in line.split()}
    assert "3 finished" in out
    assert "5 failed" in out
    assert "--retry-failed" in out
    assert "norm.how=kills: was killed" in err

    # The same command again knows what failed, and starts nothing.
    assert run_command(*sweep)[0] == 1
    assert len(read_ends(folder)) == 8
    monkeypatch.delenv("MISBEHAVE")
    code, out, err = run_command(*sweep, "--retry-failed")
    assert code == 0, err
    again = read_ends(folder)[8:]
    assert sorted(ways.split(",")[end.pack - 1] for end in again) == ["exhausts", "exits", "hangs", "kills", "raises"]
    assert {end.cause for end in again} == {"finished"}
    assert "8 finished" in out


@pytest.mark.slow
def test_neither_a_dead_parent_nor_ctrl_c_leaves_a_process_or_loses_a_step(words: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "normlab", "sweep", *words, "seed=0,1", "sweep.name=x", "sweep.jobs=2"]
    command += ["train.steps=100000", "train.log_every=1", "eval.every=0", "stats=off"]
    folder = sweep_folder(tmp_path / "results", "x")

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)

    def runs() -> list[RunFolder]:
        return [run_of(folder, job) for job in read_plan(folder).jobs]

    parent = begin()
    wait_for(lambda: (folder / "plan.json").exists() and all(run.size() > 20_000 for run in runs()))
    parent.kill()
    parent.wait()
    wait_for(lambda: [run.state() for run in runs()] == ["interrupted"] * 2 and not workers_of(folder))
    reached = [run.status()["checkpoint"] for run in runs()]
    assert min(reached) > 0
    assert read_ends(folder) == []

    parent = begin()
    wait_for(lambda: all(run.state() == "running" and (run.rows("train").rows[-1]["step"] > 5 + reached[number])
                         for number, run in enumerate(runs())))  # fmt: skip
    parent.send_signal(signal.SIGINT)
    assert parent.wait(timeout=120) == 130
    assert workers_of(folder) == []
    assert [end.cause for end in read_ends(folder)] == ["interrupted"] * 2
    assert all(run.status()["checkpoint"] > step for run, step in zip(runs(), reached, strict=True))
    assert all([row["step"] for row in run.rows("train").rows] == list(range(run.status()["step"])) for run in runs())


def test_a_sweep_of_two_runs(words: list[str], run_command: Command, tmp_path: Path) -> None:
    """One path through all of it: what is trained is what `train` trains, one diverges, nothing is done twice."""
    grid = [*words, "norm=none", "optim=sgd", "optim.clip=null", "optim.lr=1e-3,1e9", "train.steps=8", "sweep.jobs=2"]
    code, out, err = run_command("sweep", *grid)
    assert code == 0, err
    name = out.split()[1]
    folder = sweep_folder(tmp_path / "results", name)
    assert [end.cause for end in read_ends(folder)] == ["finished"] * 2
    assert "2 runs, 1 diverged, 1 finished" in out
    assert f"normlab summarize {folder}" in out
    assert "optim.lr=1000000000.0: diverged" in err
    assert "finished at step 8/8" in (folder / "logs" / "pack_001.log").read_text()
    # `train` has the same words for the same run, which has ended.
    code, out, _ = run_command(
        "train", *(word for word in grid if "sweep." not in word and "1e9" not in word), "optim.lr=1e-3"
    )
    assert code == 0
    assert out.startswith("finished at step 8")
    code, out, _ = run_command("sweep", *grid)
    assert code == 0
    assert "2 of them ended already: used, not repeated" in out
    assert len(read_ends(folder)) == 2
    assert "2 runs, 1 diverged, 1 finished" in out


# With processes that only pretend.


class Pretender:
    """Stands for a pack's process: ends at once, as `ways` says of its runs' seeds."""

    ways: dict[int, str] = {}
    most_at_once = 0
    running = 0

    def __init__(self, folder: Path, plan: Plan, pack: Pack, threads: int | None) -> None:
        self.folder, self.pack, self.members, self.threads = folder, pack, plan.members(pack), threads
        self.told: str | None = None
        self.why, self.seconds, self.looks = "", 1.0, 0
        self.process = SimpleNamespace(returncode=None)
        type(self).running += 1
        type(self).most_at_once = max(self.most_at_once, self.running)

    def ended(self) -> bool:
        self.looks += 1
        if self.looks < 3 and self.told is None:
            return False
        seeds = [job.config["seed"] for job in self.members]
        way = next((self.ways[seed] for seed in seeds if seed in self.ways), "finish")
        if way == "memory" and len(seeds) == 1:
            way = "finish"
        if way == "hang" and self.told is None:
            return False
        if way == "signal" and self.told is None:
            os.kill(os.getpid(), signal.SIGINT)
            return False
        if way == "finish":
            for job in self.members:
                run = RunFolder.create(run_of(self.folder, job).path, {"run_id": job.run_id})
                run.write_status({"state": "finished"})
        self.process.returncode = {"finish": 0, "memory": 12, "raise": 1}.get(way, -9)
        type(self).running -= 1
        return True

    def silent_for(self) -> float:
        return 2000.0 if "hang" in self.ways.values() else 0.0

    def system_was_short_of_memory(self) -> bool:
        return False

    mind = Worker.mind

    def stop(self, cause: str = "interrupted", patience: float = 0, why: str = "") -> None:
        self.told, self.why = self.told or cause, why

    def insist(self) -> None: ...
    def let_go(self) -> None: ...

    def kill(self, cause: str) -> None:
        self.told = self.told or cause

    def last_words(self) -> list[str]:
        return ["error: ValueError: no"] if self.process.returncode == 1 else []


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> Callable[..., tuple[Outcome, list[Any], Path]]:
    """Supervise a sweep over seeds whose processes pretend."""
    monkeypatch.setattr(local, "Worker", Pretender)
    monkeypatch.setattr(supervisor, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(Pretender, "running", 0)
    monkeypatch.setattr(Pretender, "most_at_once", 0)

    def call(*more: str, ways: dict[int, str], retry: bool = False) -> tuple[Outcome, list[Any], Path]:
        monkeypatch.setattr(Pretender, "ways", ways)
        options, asked = compose_sweep([*words, *([] if "sweep.name=y" in more else ["sweep.name=x"]), *more])
        planned, watcher = make_plan(options, asked), Silent()
        outcome = supervise(planned.folder, planned.plan, options, watcher, retry_failed=retry)
        return outcome, watcher.told, planned.folder

    return call


def test_what_runs_out_of_memory_goes_on_in_halves(pretend: Callable[..., Any]) -> None:
    outcome, told, folder = pretend("seed=range(5)", "sweep.pack=4", ways={2: "memory"})
    assert outcome.code == 0
    assert [one for one in told if one[0] in ("memory", "finished")] == [
        ("memory", 1, [3, 4]), ("finished", 3, []), ("memory", 4, [5, 6]), ("finished", 5, []), ("finished", 6, []),
        ("finished", 2, []),
    ]  # fmt: skip
    plan = read_plan(folder)
    assert plan == outcome.plan
    assert [(pack.number, pack.jobs, pack.halved_from) for pack in plan.packs] == [
        (3, [0], 1), (5, [1], 4), (6, [2], 4), (2, [3, 4], None),
    ]  # fmt: skip


def test_what_failed_waits_for_its_word(pretend: Callable[..., Any]) -> None:
    ways = {1: "raise", 3: "kill"}
    outcome, told, folder = pretend("seed=range(4)", "sweep.jobs=2", ways=ways)
    assert outcome.code == 1
    assert Pretender.most_at_once == 2
    assert {number: (end.cause, end.detail) for number, end in outcome.failed.items()} == {
        2: ("raised", "ValueError: no"), 4: ("killed", "by SIGKILL"),
    }  # fmt: skip
    outcome, told, _ = pretend("seed=range(4)", ways={})
    assert told == [("begin", [], 2, [2, 4]), "finish"]
    assert outcome.code == 1
    outcome, told, _ = pretend("seed=range(4)", ways={}, retry=True)
    assert told[0] == ("begin", [2, 4], 2, [])
    assert outcome.code == 0
    assert len(read_ends(folder)) == 6


def test_a_run_that_is_gone_since_is_trained_again(pretend: Callable[..., Any]) -> None:
    pretend("seed=0,1", ways={})
    outcome, _, folder = pretend("seed=0,1,2", "sweep.name=y", ways={})
    assert [pack.jobs for pack in outcome.plan.packs] == [[2]]
    shutil.rmtree(run_of(folder, outcome.plan.jobs[1]).path)
    outcome, told, _ = pretend("seed=0,1,2", "sweep.name=y", ways={})
    assert [(pack.number, pack.jobs) for pack in outcome.plan.packs] == [(1, [2]), (2, [1])]
    assert told == [("begin", [2], 1, []), ("started", 2), ("finished", 2, []), "finish"]
    assert read_plan(folder) == outcome.plan


def test_what_is_gone_from_a_pack_takes_none_of_the_others_back(pretend: Callable[..., Any]) -> None:
    outcome, _, folder = pretend("seed=range(3)", "sweep.pack=3", ways={})
    gone, *others = outcome.plan.jobs
    shutil.rmtree(run_of(folder, gone).path)
    outcome, told, _ = pretend("seed=range(3)", "sweep.pack=3", ways={})
    assert [(pack.number, pack.jobs) for pack in outcome.plan.packs] == [(1, [1, 2]), (2, [0])]
    assert told == [("begin", [2], 1, []), ("started", 2), ("finished", 2, []), "finish"]
    assert all(run_of(folder, job).state() == "finished" for job in (gone, *others))


def test_the_ends_of_a_plan_that_is_gone_are_not_those_of_the_next(pretend: Callable[..., Any]) -> None:
    outcome, _, folder = pretend("seed=range(2)", ways={1: "raise"})
    assert outcome.code == 1
    (folder / "plan.json").unlink()
    outcome, _, _ = pretend("seed=1,2", ways={})
    assert (outcome.code, outcome.failed) == (0, {})
    assert [end.cause for end in read_ends(folder)] == ["finished"] * 2
    assert len(list(folder.glob("before_*_ends.jsonl"))) == 1


def test_a_process_waits_for_the_one_before_it_to_write_its_checkpoint(tmp_path: Path) -> None:
    """Its supervisor was killed, and the next one was quick."""
    run = RunFolder(tmp_path / "run")
    held, until = threading.Event(), time.monotonic() + 0.5

    def the_one_before() -> None:
        with run.lock():
            held.set()
            time.sleep(until - time.monotonic())

    thread = threading.Thread(target=the_one_before)
    thread.start()
    held.wait()
    a_worker._wait_for_the_one_before([run])
    assert time.monotonic() >= until
    assert not run.is_active()
    thread.join()


def test_what_others_stop_is_not_done(pretend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to a worker from outside: nothing failed, and the exit code says that something is left."""
    monkeypatch.setattr(
        local, "end_of", lambda worker, all_ended: End(worker.pack.number, "interrupted", "", 143, 0, 0)
    )
    outcome, _, _ = pretend("seed=0", ways={0: "kill"})
    assert (outcome.code, outcome.failed, outcome.left) == (1, {}, 1)


@pytest.mark.parametrize("line", ['{"pack":[1]}', "null", "[1]", '{"pack":1,"cause":"whim"}', '{"pack":"1"}'])
def test_an_end_that_is_none_is_left_out(pretend: Callable[..., Any], line: str) -> None:
    _, _, folder = pretend("seed=0", ways={0: "raise"})
    (known,) = read_ends(folder)
    whole = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    told = json.loads(line)
    with (folder / "ends.jsonl").open("a") as ends:
        ends.write(json.dumps({**whole, **told} if isinstance(told, dict) else told) + "\n")
    assert read_ends(folder) == [known]
    assert pretend("seed=0", ways={})[0].code == 1


def test_a_sweep_that_was_begun_by_others_in_between(pretend: Callable[..., Any], words: list[str]) -> None:
    """Both looked before either had begun: the second one to begin sees whose the name is."""
    options, asked = compose_sweep([*words, "sweep.name=x", "seed=5,6"])
    ours = make_plan(options, asked)
    pretend("seed=0", ways={})
    with pytest.raises(ConfigError, match=r"sweep.name=x: is the name of a sweep of 1 runs"):
        supervise(ours.folder, ours.plan, options, Silent())


def test_a_hang_is_ended(pretend: Callable[..., Any]) -> None:
    outcome, _, _ = pretend("seed=0", ways={0: "hang"})
    assert [end.cause for end in outcome.failed.values()] == ["hung"]


def test_ctrl_c_stops_all_and_starts_no_more(pretend: Callable[..., Any]) -> None:
    before = signal.getsignal(signal.SIGINT)
    outcome, told, _ = pretend("seed=range(3)", "sweep.jobs=2", ways={0: "signal"})
    assert signal.getsignal(signal.SIGINT) is before
    assert outcome.code == 130
    assert ("started", 3) not in told
    assert any("checkpoints" in one for one in told if isinstance(one, str))
    outcome, told, _ = pretend("seed=range(3)", ways={})
    assert told[0][0] == "begin"
    assert [*told[0][1]] == [1, 3], "the second had ended when it was asked"
    assert outcome.code == 0


def test_one_supervisor_a_sweep(pretend: Callable[..., Any], tmp_path: Path) -> None:
    folder = sweep_folder(tmp_path / "results", "x")
    folder.mkdir(parents=True)
    with (
        hold(lock_of(folder), "sweep x"),
        pytest.raises(StoreError, match=r"sweep x is active in process .* or another sweep.name starts another beside"),
    ):
        pretend("seed=0", ways={})
    assert not (folder / "plan.json").exists()


@pytest.mark.parametrize(
    ("code", "last_words", "done", "told", "cause", "detail"),
    [
        (0, ["finished"], True, None, "finished", ""),
        (0, ["bye"], False, None, "exited", "with code 0, before its runs had ended"),
        (3, ["said so"], False, None, "exited", "with code 3: said so"),
        (1, ["Traceback", "error: ValueError: no"], False, None, "raised", "ValueError: no"),
        (2, ["error: the disk is full"], False, None, "raised", "the disk is full"),
        (12, ["error: the memory ran out; lower it"], False, None, "memory", "the memory ran out; lower it"),
        (-6, ["terminate called", "  what():  std::bad_alloc"], False, None, "memory", "std::bad_alloc (SIGABRT)"),
        (-11, [], False, None, "killed", "by SIGSEGV"),
        (143, [], False, None, "interrupted", "stopped; the same command goes on"),
        (-9, [], False, "interrupted", "interrupted", "stopped; the same command goes on"),
        (143, [], False, "hung", "hung", "why"),
    ],
)
def test_causes(code: int, last_words: list[str], done: bool, told: str | None, cause: str, detail: str) -> None:
    worker: Any = SimpleNamespace(
        pack=Pack(7, [0]), process=SimpleNamespace(returncode=code), told=told, why="why", seconds=1.0,
        last_words=lambda: last_words, system_was_short_of_memory=lambda: False,
    )  # fmt: skip
    end = end_of(worker, all_ended=done)
    assert (end.pack, end.cause, end.code) == (7, cause, code)
    assert detail in end.detail


def test_the_system_ends_a_process_for_want_of_memory() -> None:
    worker: Any = SimpleNamespace(
        pack=Pack(7, [0]), process=SimpleNamespace(returncode=-9), told=None, why="", seconds=1.0,
        last_words=list, system_was_short_of_memory=lambda: True,
    )  # fmt: skip
    assert end_of(worker, all_ended=False).cause == "memory"


def test_a_pack_by_its_largest_size() -> None:
    assert [SweepOptions(pack=pack).largest_pack for pack in ("auto", "off", "16")] == [None, 1, 16]
