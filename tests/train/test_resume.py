"""A run that was interrupted, killed or damaged and then resumed equals an uninterrupted run.

`scripts/prove/kill_and_resume.py` repeats this with random kills and compiled models.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import normlab
from normlab.base.options import plain_tree
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.data.batches import validation_windows
from normlab.data.corpus import open_corpus
from normlab.store.format import with_checksum
from normlab.store.runs import RunFolder
from normlab.system.processes import STOP_SIGNALS, collected_signals
from normlab.training import checkpoint
from normlab.training import start as training
from normlab.training.machine import RuntimeSettings
from normlab.training.signals import StopRequest
from support.run_folders import OVERRIDES, SCRIPT, Command, Train, contents, differences, steps_of


def in_a_process(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# Kills and signals.


def test_run_killed_inside_a_save_resumes_bit_identical(train: Train, reference: Path, tmp_path: Path) -> None:
    arguments = ["train", *OVERRIDES, f"results_dir={tmp_path / 'results'}"]
    with in_a_process(str(SCRIPT), "--child", "half of the state", "3", *arguments) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, err
    (path,) = (tmp_path / "results" / "runs").iterdir()
    folder = RunFolder(path)
    assert folder.state() == "killed"
    assert steps_of(folder) == [4, 8]
    assert folder.rows("train").rows[-1]["step"] == 11
    assert differences(reference, train().path) == []


@pytest.mark.parametrize(
    ("step", "number", "code"),
    [(0, signal.SIGTERM, 143), (6, signal.SIGINT, 130), (8, signal.SIGTERM, 143), (7, signal.SIGHUP, 129)],
)
def test_signal_stops_at_the_next_step_and_resume_is_bit_identical(
    step: int,
    number: int,
    code: int,
    train: Train,
    command: Command,
    reference: Path,
    interrupt: Callable[..., None],
) -> None:
    handlers = [signal.getsignal(each) for each in STOP_SIGNALS]
    interrupt(step, number)
    found, out, err = command()
    assert found == code, err
    folder = RunFolder(Path(out.splitlines()[-1]).resolve())
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == handlers
    assert folder.state() == "interrupted"
    stopped = folder.status()["step"]
    assert step <= stopped <= step + 3
    assert steps_of(folder)[-1] == stopped
    assert differences(reference, train().path) == []


LONG_STEP = """
import sys, time
from normlab.cli import main
from normlab.training.loop import Loop
from normlab.training.signals import StopRequest

ordinary, handle = Loop.take_step, StopRequest._handle

def long_step(self, step):
    if step == 6:
        print("in a long step", file=sys.stderr, flush=True)
        for _ in range(600):
            time.sleep(0.1)
    return ordinary(self, step)

def say(self, number, frame):
    handle(self, number, frame)
    print("handled", file=sys.stderr, flush=True)

Loop.take_step, StopRequest._handle = long_step, say
main()
"""
"""A training script with a minute in step 6, which says when it has handled a signal."""


SLOW_START = """
import sys, time
from normlab.cli import main
from normlab.training import start

def open_corpus(data):
    print("opening", file=sys.stderr, flush=True)
    time.sleep(60)

start.open_corpus = open_corpus
main()
"""
"""A training script with a minute before its first step."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)]
)
def test_a_signal_before_the_first_step_is_reported(number: int, code: int, tmp_path: Path) -> None:
    with in_a_process("-c", SLOW_START, "train", *OVERRIDES, f"results_dir={tmp_path / 'results'}") as process:
        try:
            assert process.stderr is not None
            while "opening" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(number)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    message = "normlab: interrupted before the first step: the same command starts the run\n"
    assert (process.returncode, err) == (code, message)
    assert not (tmp_path / "results").exists()


@pytest.mark.process
@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)])
def test_second_signal_stops_at_once(numbers: tuple[int, ...], train: Train, reference: Path, tmp_path: Path) -> None:
    arguments = ["train", *OVERRIDES, f"results_dir={tmp_path / 'results'}"]
    with in_a_process("-c", LONG_STEP, *arguments) as process:
        try:
            assert process.stderr is not None
            # The second one after the first: of two that wait, Python handles the one with the lower number first.
            for said, number in zip(("in a long step", "handled"), numbers, strict=True):
                while said not in process.stderr.readline():
                    assert process.poll() is None
                while not any((tmp_path / "results").glob("runs/*/checkpoints/step_*")):  # a thread writes it
                    assert process.poll() is None
                    time.sleep(0.02)
                process.send_signal(number)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, err) == (-signal.SIGINT, "")
    (path,) = (tmp_path / "results" / "runs").iterdir()
    assert RunFolder(path).state() == "killed"
    assert steps_of(RunFolder(path)) == [4]
    assert differences(reference, train().path) == []


def test_signals_after_the_first_can_be_ignored() -> None:
    """As in a pack in Slurm, which sends SIGTERM to every process of a task."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with StopRequest(only_first=True) as stop:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
        assert stop.received == signal.SIGTERM
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("ends_process", [False, True])
def test_a_second_hang_up_does_not_end_a_run(ends_process: bool) -> None:
    """The shell and the kernel may both send one when a terminal closes."""
    before = signal.getsignal(signal.SIGHUP)
    with collected_signals() as received:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
    assert received == [signal.SIGHUP]
    with StopRequest(ends_process=ends_process) as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
    assert stop.received == signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) is before


def test_nohup_protects_a_run() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop, collected_signals() as received:
            os.kill(os.getpid(), signal.SIGHUP)
        assert (stop.received, received) == (None, [])
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_ends_a_run_at_once_while_its_model_is_built(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the first file of a run is written, there is nothing to finish; deep models take minutes to build."""

    def fingerprint(config: RunConfig) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal did not end the construction")

    monkeypatch.setattr(training, "fingerprint", fingerprint)
    with pytest.raises(KeyboardInterrupt):
        train(results="new")
    assert not (tmp_path / "new").exists()


@pytest.mark.process
def test_second_process_fails_and_sigterm_interrupts(tmp_path: Path, run_command: Command) -> None:
    others = [each for each in OVERRIDES if not each.startswith("train.steps=")]
    arguments = ["train", *others, f"results_dir={tmp_path}", "train.steps=1000000"]
    with in_a_process("-m", "normlab", *arguments) as process:
        try:
            deadline = time.monotonic() + 300
            while not list(tmp_path.glob("runs/*/checkpoints/step_*")):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.02)
            code, _, err = run_command(*arguments)
            assert (code, err.count("\n")) == (2, 1)
            assert f"process {process.pid}" in err
            process.terminate()
            process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 143
    (path,) = (tmp_path / "runs").iterdir()
    assert RunFolder(path).state() == "interrupted"


# The same command again.


def test_finished_run_reports_that_and_changes_nothing(train: Train, command: Command, tmp_path: Path) -> None:
    folder = train()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("*")}
    code, out, err = command()
    assert (code, err) == (0, "")
    assert out.startswith("finished at step 16, validation loss ")
    assert Path(out.splitlines()[-1]).samefile(folder.path)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("*")}


def test_fresh_starts_another_run(train: Train) -> None:
    folder = train("train.steps=4")
    before = contents(folder.path)
    for number in (2, 3):
        other = train("train.steps=4", "run.fresh=true")
        assert other.run_id == other.run()["run_id"] == f"{folder.run_id}.{number}"
        assert other.state() == "finished"
    assert contents(folder.path) == before


def test_fresh_resumes_the_run_that_it_started(train: Train, interrupt: Callable[..., None]) -> None:
    """Also if it was the first run of its command, whose folder has no number."""
    interrupt(6)
    first = train("run.fresh=true")
    assert first.state() == "interrupted"
    assert train("run.fresh=true").run_id == first.run_id
    assert first.state() == "finished"
    interrupt(6)
    second = train("run.fresh=true")
    assert second.run_id == train("run.fresh=true").run_id == f"{first.run_id}.2"


def test_resume_with_other_versions_warns_and_is_recorded(
    train: Train, command: Command, reference: Path, interrupt: Callable[..., None]
) -> None:
    interrupt(9)
    folder = train()
    run = folder.run()
    was = {**run, "versions": {**run["versions"], "torch": "1.0"}, "git": {"commit": "0" * 40, "diff": ""}}
    (folder.path / "run.json").write_bytes(with_checksum(was))
    code, _, err = command()
    assert code == 0
    message = f"torch changed from 1.0 to {run['versions']['torch']}; normlab's commit changed from 0000000000 to "
    assert f"warning: since this run started, {message}" in err.splitlines()[0]
    (noted,) = folder.status()["changes_at_resume"]
    assert noted.startswith(f"from step 11: {message}")
    assert RunFolder(reference).status()["changes_at_resume"] == []


def test_the_warnings_of_the_machine_know_a_resume(
    train: Train, interrupt: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RuntimeSettings, "warnings", lambda settings, config, *, resumed: [f"resumed: {resumed}"])
    interrupt(9)
    train()
    assert "warning: resumed: False\n" in capsys.readouterr().err
    train()
    assert "warning: resumed: True\n" in capsys.readouterr().err


def test_fresh_skips_a_run_of_another_process(train: Train) -> None:
    folder = train("train.steps=4")
    active = RunFolder(f"{folder.path}.2")
    with active.lock():
        RunFolder.create(active.path, {"run_id": active.run_id})
        active.write_status({"state": "running"})
        assert train("train.steps=4", "run.fresh=true").run_id == f"{folder.run_id}.3"


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_name_or_a_label_that_a_run_does_not_take_is_named(
    is_finished: bool, command: Command, interrupt: Callable[..., None]
) -> None:
    if not is_finished:
        interrupt(9)
    command("run.name=one", "tracking.project=p", "train.log_every=2")
    _, _, err = command("run.name=two", "tracking.project=p", "tracking.entity=e", "train.log_every=5")
    (warning,) = (line for line in err.splitlines() if "no effect" in line)
    assert {*warning.removeprefix("warning: ").partition(": no effect")[0].split(", ")} == {
        "run.name=two",
        "tracking.entity=e",
    }
    assert "run.fresh=true" in warning
    assert "no effect" not in command()[2]


# Divergence.

DIVERGING = ["norm=none", "optim=sgd", "optim.lr=1e6", "optim.clip=null", "optim.warmup_steps=4"]


def test_divergence_is_an_outcome_and_keeps_the_last_finite_state(
    train: Train, command: Command, tmp_path: Path
) -> None:
    folder = train(*DIVERGING)
    status = folder.status()
    assert status["state"] == "diverged"
    divergence = status["diverged"]
    assert not (math.isfinite(divergence["loss"]) and math.isfinite(divergence["grad_norm"]))
    assert divergence["last_finite"]["step"] == divergence["step"] - 1
    assert all(math.isfinite(number) for number in divergence["last_finite"].values())
    assert status["step"] == divergence["step"] == folder.rows("train").rows[-1]["step"]
    saved, _ = checkpoint.read_newest(folder.path / "checkpoints")
    assert saved is not None
    assert saved.step == divergence["step"]
    assert all(tensor.isfinite().all() for tensor in saved.tensors.values())

    before = contents(tmp_path / "results")
    code, out, err = command(*DIVERGING)
    assert (code, err) == (0, "")
    assert out.startswith(f"diverged at step {divergence['step']}")
    assert contents(tmp_path / "results") == before


def test_run_killed_before_its_diverged_status_diverges_again(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    untouched = train(*DIVERGING, results="untouched")
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_status", lambda folder, status: None)
        folder = train(*DIVERGING)
    assert folder.state() == "killed"
    train(*DIVERGING)
    assert folder.status()["diverged"] == untouched.status()["diverged"]
    assert folder.rows("train").rows == untouched.rows("train").rows


def test_diverged_state_does_not_depend_on_log_every(train: Train) -> None:
    for log_every in (1, 3):
        folder = train(*DIVERGING, f"train.log_every={log_every}", results=f"every_{log_every}")
        saved, _ = checkpoint.read_newest(folder.path / "checkpoints")
        assert saved is not None
        assert saved.tensors["count"] == saved.step


# Reading a run.


def test_load_returns_config_metrics_and_model(reference: Path, run_command: Command) -> None:
    run = normlab.load(reference)
    composed = compose_run([*OVERRIDES, f"results_dir={run.config.results_dir}"])
    assert composed.init == "auto"
    assert plain_tree(run.config) == plain_tree(composed) | {"init": composed.placement.init}  # as it was trained
    metrics = run.metrics
    assert sorted(metrics["kind"].unique()) == ["eval", "pace", "train"]
    losses = metrics[metrics["kind"] == "eval"].set_index("step")["loss"]
    assert list(losses.index) == [0, 4, 8, 12, 16]
    assert list(metrics[metrics["kind"] == "train"]["step"]) == list(range(16))

    assert not run.model.training
    corpus = open_corpus(run.config.data)
    tokens, targets = validation_windows(corpus.val, run.config.model.context, run.config.eval.sequences)
    with torch.no_grad():
        loss = F.cross_entropy(run.model(tokens).flatten(0, 1), targets.flatten()).item()
    assert loss == pytest.approx(losses[16], abs=1e-6)
    assert loss == pytest.approx(run.status.val_loss, abs=1e-6)

    arguments = ["sample", str(reference), "--prompt", "The norm ", "--tokens", "12", "--seed", "3"]
    code, out, err = run_command(*arguments)
    assert (code, err) == (0, "")
    assert out.startswith("The norm ")
    assert len(out) > len("The norm \n")
    assert run_command(*arguments)[1] == out
