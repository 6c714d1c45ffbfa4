"""If W&B fails or hangs, the record equals that of a run with W&B off, and the wait for W&B is bounded."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from normlab.store.runs import RunFolder
from support.run_folders import OVERRIDES, differences

KEY = {"WANDB_API_KEY": "a" * 40}

IN_THE_MIDDLE = """
import os, signal, subprocess, sys
from normlab.tracking.console import Console
from normlab.training import run as training

numbers = [getattr(signal, name) for name in sys.argv.pop(1).split("+")]

class SignalingConsole(Console):
    def log(self, rows):
        super().log(rows)
        if rows[-1]["step"] == 8 and numbers:
            found = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True)
            os.kill(int(found.stdout), numbers.pop(0))
            while numbers:
                os.kill(os.getpid(), numbers.pop(0))

training.Console = SignalingConsole
from normlab.cli import main
main()
"""
"""Trains; at step 8 sends the first signal of its argument to W&B's process, and the others (after +) to itself."""


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def train(results: Path, *before: str, mode: str, **variables: str) -> tuple[str, float]:
    """Train the run of OVERRIDES in a process of its own: return its stderr and its seconds."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    command = [sys.executable, *(before or ("-m", "normlab")), "train", *OVERRIDES]
    since = time.monotonic()
    done = subprocess.run(
        [*command, f"tracking.wandb={mode}", f"results_dir={results}"],
        env=inherited | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr, time.monotonic() - since


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds that the run takes with W&B off."""
    return train(tmp_path_factory.mktemp("alone"), mode="off")[1]


@pytest.mark.network
@pytest.mark.parametrize("case", ["refused", "killed", "silent", "no key", "stopped"])
def test_run_is_the_same_when_wandb_fails(case: str, reference: Path, alone: float, tmp_path: Path) -> None:
    results = tmp_path / "results"
    if case == "refused":
        output, seconds = train(results, mode="online", WANDB_BASE_URL="http://127.0.0.1:9", **KEY)
        assert "continues offline" in output
    elif case == "silent":
        with silent_server() as address:
            output, seconds = train(results, mode="online", WANDB_BASE_URL=address, **KEY)
    elif case == "no key":
        output, seconds = train(results, mode="online")
        assert "`wandb login` makes one" in output
    else:
        number = {"killed": "SIGKILL", "stopped": "SIGSTOP"}[case]
        output, seconds = train(results, "-c", IN_THE_MIDDLE, number, mode="offline")
    (line,) = [line for line in output.splitlines() if "The local record has everything" in line]
    assert "upload later with: wandb sync " in line
    # Ten seconds at the start and at the end; the rest takes longer on a slow or busy machine, as the run alone does.
    assert seconds < 10 + 10 + 3 * alone
    folder = results / "runs" / reference.name
    assert Path(line.split()[-1]).is_dir()
    # W&B's own folder is not part of the record.
    subprocess.run(["rm", "-r", folder / "wandb"], check=True)
    assert differences(reference, folder) == []


BEGINNING = """
import os, signal, subprocess, sys, threading, time
from normlab.cli import main

def stop():
    while True:
        found = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True)
        if found.stdout:
            return os.kill(int(found.stdout), signal.SIGSTOP)
        time.sleep(0.001)

threading.Thread(target=stop, daemon=True).start()
main()
"""
"""Trains, and stops W&B's process as soon as there is one."""


@pytest.mark.network
def test_wandb_process_that_is_stopped_at_the_start(reference: Path, alone: float, tmp_path: Path) -> None:
    """The run waits once, and its one line promises no data that W&B never got."""
    output, seconds = train(tmp_path / "results", "-c", BEGINNING, mode="offline")
    (line,) = [line for line in output.splitlines() if "W&B" in line]
    assert line.endswith("The local record has everything; W&B received no data")
    assert seconds < 2 * 10 + 3 * alone
    folder = tmp_path / "results" / "runs" / reference.name
    subprocess.run(["rm", "-rf", folder / "wandb"], check=True)
    assert differences(reference, folder) == []


@pytest.mark.network
@pytest.mark.parametrize(
    ("signals", "awaited", "state"),
    [
        ("SIGSTOP+SIGINT+SIGINT", "", "interrupted"),
        ("SIGSTOP+SIGINT", "interrupted at step", "interrupted"),
        ("SIGSTOP", "finished at step", "finished"),
    ],
)
def test_second_ctrl_c_waits_for_nothing(signals: str, awaited: str, state: str, tmp_path: Path) -> None:
    """The last Ctrl-C comes while the run waits for a stopped W&B; `signals` holds those before it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    overrides = ["train", *OVERRIDES, "tracking.wandb=offline", f"results_dir={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, "-c", IN_THE_MIDDLE, signals, *overrides],
        env=inherited, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            output = ""
            while (awaited or "step 4/16") not in output:
                output = process.stderr.readline()
                assert output
            start = time.monotonic()
            if awaited:
                time.sleep(0.5)  # by now the run waits for W&B
                os.killpg(process.pid, signal.SIGINT)
            _, rest = process.communicate(timeout=60)
            seconds = time.monotonic() - start
        finally:
            process.kill()
    assert process.returncode == 130
    assert seconds < 4, rest
    (line,) = [line for line in rest.splitlines() if "W&B" in line]
    command = shlex.split(line.partition("The local record has everything; upload later with: ")[2])
    assert command[:2] == ["wandb", "sync"]
    assert Path(command[2]).is_dir()
    assert "Traceback" not in rest
    (path,) = (tmp_path / "runs").iterdir()
    assert RunFolder(path).state() == state
