"""Whatever becomes of W&B, the run is what it is with W&B off, and hardly later."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from resuming import WORDS, differences

KEY = {"WANDB_API_KEY": "a" * 40}

IN_THE_MIDDLE = """
import os, signal, subprocess, sys
from normlab.tracking.console import Console
from normlab.train import start

number = getattr(signal, sys.argv.pop(1))

class Striking(Console):
    def log(self, rows):
        super().log(rows)
        if rows[-1]["step"] == 8:
            found = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True)
            os.kill(int(found.stdout), number)

start.Console = Striking
from normlab.cli import main
main()
"""
"""Trains, and at step 8 sends W&B's own process the signal that is the first word."""


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def train(results: Path, *before: str, mode: str, **variables: str) -> tuple[str, float]:
    """Train the run of WORDS in a process of its own: what it said on stderr, and the seconds that it took."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    words = [sys.executable, *(before or ("-m", "normlab")), "train", *WORDS]
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


@pytest.mark.parametrize("case", ["refused", "silent", "no key", "killed", "stopped"])
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
