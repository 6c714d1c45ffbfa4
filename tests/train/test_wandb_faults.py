"""Whatever becomes of W&B, the run is what it is with W&B off, and hardly later."""

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
from resuming import OVERRIDES, differences

from normlab.store.runs import RunFolder

KEY = {"WANDB_API_KEY": "a" * 40}

IN_THE_MIDDLE = """
import os, signal, subprocess, sys
from normlab.tracking.console import Console
from normlab.train import start

numbers = [getattr(signal, name) for name in sys.argv.pop(1).split("+")]

class Striking(Console):
    def log(self, rows):
        super().log(rows)
        if rows[-1]["step"] == 8 and numbers:
            found = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True)
            os.kill(int(found.stdout), numbers.pop(0))
            while numbers:
                os.kill(os.getpid(), numbers.pop(0))

start.Console = Striking
from normlab.cli import main
main()
"""
"""Trains, and at step 8 sends W&B's own process the signal that is the first word, and itself those after a +."""


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def train(results: Path, *before: str, mode: str, **variables: str) -> tuple[str, float]:
    """Train the run of OVERRIDES in a process of its own: what it said on stderr, and the seconds that it took."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    words = [sys.executable, *(before or ("-m", "normlab")), "train", *OVERRIDES]
    since = time.monotonic()
    done = subprocess.run(
        [*words, f"tracking.wandb={mode}", f"results_dir={results}"],
        env=kept | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr, time.monotonic() - since


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds that the run takes with W&B off."""
    return train(tmp_path_factory.mktemp("alone"), mode="off")[1]


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ("silent", "no key", "stopped")]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["refused", "killed", *SLOW])
def test_the_run_is_the_same(case: str, reference: Path, alone: float, tmp_path: Path) -> None:
    results = tmp_path / "results"
    if case == "refused":
        said, seconds = train(results, mode="online", WANDB_BASE_URL="http://127.0.0.1:9", **KEY)
        assert "goes on offline" in said
    elif case == "silent":
        with silent_server() as address:
            said, seconds = train(results, mode="online", WANDB_BASE_URL=address, **KEY)
    elif case == "no key":
        said, seconds = train(results, mode="online")
        assert "`wandb login` makes one" in said
    else:
        number = {"killed": "SIGKILL", "stopped": "SIGSTOP"}[case]
        said, seconds = train(results, "-c", IN_THE_MIDDLE, number, mode="offline")
    (line,) = [line for line in said.splitlines() if "The local record has everything" in line]
    assert "can be sent later: wandb sync " in line
    # Ten seconds at either end; and a few for W&B's import and a busy machine.
    assert seconds - alone < 10 + 10 + 5
    folder = results / "runs" / reference.name
    assert Path(line.split()[-1]).is_dir()
    # What W&B keeps in the folder of the run is its own.
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
"""Trains, and stops W&B's own process as soon as there is one."""


@pytest.mark.slow
def test_stopped_while_it_begins(reference: Path, alone: float, tmp_path: Path) -> None:
    """It is waited for once, and the one line does not promise what W&B never got."""
    said, seconds = train(tmp_path / "results", "-c", BEGINNING, mode="offline")
    (line,) = [line for line in said.splitlines() if "W&B" in line]
    assert line.endswith("The local record has everything; W&B got nothing")
    assert seconds - alone < 2 * 10
    folder = tmp_path / "results" / "runs" / reference.name
    subprocess.run(["rm", "-rf", folder / "wandb"], check=True)
    assert differences(reference, folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "awaited", "state"),
    [
        ("SIGSTOP+SIGINT+SIGINT", "", "interrupted"),
        ("SIGSTOP+SIGINT", "interrupted at step", "interrupted"),
        ("SIGSTOP", "finished at step", "finished"),
    ],
)
def test_the_second_ctrl_c_waits_for_nothing(signals: str, awaited: str, state: str, tmp_path: Path) -> None:
    """Nor does any while the end of a run waits for W&B, which is stopped: two of them at once, one before, none."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    words = ["train", *OVERRIDES, "tracking.wandb=offline", f"results_dir={tmp_path}"]
    with subprocess.Popen(
        [sys.executable, "-c", IN_THE_MIDDLE, signals, *words],
        env=kept, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            said = ""
            while (awaited or "step 4/16") not in said:
                said = process.stderr.readline()
                assert said
            since = time.monotonic()
            if awaited:
                time.sleep(0.5)  # W&B is waited for by now
                os.killpg(process.pid, signal.SIGINT)
            _, rest = process.communicate(timeout=60)
            seconds = time.monotonic() - since
        finally:
            process.kill()
    assert process.returncode == 130
    assert seconds < 4, rest
    (line,) = [line for line in rest.splitlines() if "W&B" in line]
    command = shlex.split(line.partition("The local record has everything; what W&B has can be sent later: ")[2])
    assert command[:2] == ["wandb", "sync"]
    assert Path(command[2]).is_dir()
    assert "Traceback" not in rest
    (path,) = (tmp_path / "runs").iterdir()
    assert RunFolder(path).state() == state
