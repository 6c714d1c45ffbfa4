"""Runs of the W&B tracker in processes of their own, and a reader of W&B's files.

W&B starts one more process, keeps sockets open until exit and patches `sys.exit`, so no test imports it.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.wandb_server import Server

ROOT = Path(__file__).parents[2]

RUN: dict[str, Any] = {
    "run_id": "derf-peri-3fa9c1",
    "name": "derf peri, seed 3",
    "config": {
        "norm": {"name": "derf", "preset": "", "alpha": 0.5},
        "placement": {"name": "peri"},
        "model": {"preset": "nano", "depth": 4, "width": 128, "heads": 2, "context": 64},
        "data": {"name": "stdlib", "tokenizer": "bytes", "seed": 7},
        "optim": {"name": "adamw", "lr": 0.002},
        "train": {"steps": 40, "batch_size": 16},
        "tracking": {"wandb": "auto"},
        "seed": 3,
    },
    "resolved": {
        "device": "cpu",
        "precision": "fp32",
        "compile": "off",
        "deterministic": True,
        "threads": 2,
        "init": "gpt2",
    },
    "corpus": {
        "name": "stdlib",
        "sha256": "ab" * 32,
        "vocab_size": 257,
        "train_tokens": 1000,
        "val_tokens": 100,
        "baselines": {"uniform": 5.5491, "unigram": 3.2134, "bigram": 2.5046, "targets": 8192},
    },
    "fingerprint": "cd" * 32,
    "norm": {"causal": True},
    "versions": {"torch": "2.13"},
    "git": {"commit": "c0ffee", "dirty": False},
    "created": "2026-01-01T00:00:00Z",
}


PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from normlab.config.schema import TrackingConfig
from normlab.store.parts import parse_part
from normlab.store.status import Status
from normlab.tracking import wandb as tracking
from normlab.tracking.wandb import WandbTracker, wait_for_finish, wait_for_start
from normlab.tracking.wandb_service import SETTINGS

# A busy machine is slow. Tests of the limits set them shorter.
PATIENCE = tracking.WAIT_S = 90.0
SETTINGS |= {"init_timeout": PATIENCE, "finish_timeout": PATIENCE}

run, folder = json.loads(sys.argv[1]), Path(sys.argv[2])

def interval(first, odd_loss=None):
    rows = [{"kind": "train", "step": s, "loss": 4 - s / 100, "grad_norm": 1.5, "clip": 0.66, "lr": 0.002}
            for s in range(first + 1, first + 11)]
    if odd_loss is not None:
        rows[3]["loss"] = odd_loss
    return rows + [{"kind": "eval", "step": first + 10, "loss": 3 - first / 100},
                   {"kind": "pace", "step": first + 10, "seconds": 0.5, "tokens_per_s": 20480.0}]

def begin(mode, first=0):
    tracker = WandbTracker(TrackingConfig(wandb=mode, tags=["mine"]), folder)
    tracker.start(run, first)
    wait_for_start([tracker])
    return tracker

def end(tracker, state="finished"):
    ended = {"state": state, "step": 40, "steps": 40, "val_loss": 2.7, "best_val_loss": 2.6}
    spikes = {"loss_lightning": {"spikes": 1, "of_steps": 9}, "clipped": {"spikes": 3, "of_steps": 9}}
    tracker.finish(parse_part(Status, {**ended, "spikes": spikes}))
    wait_for_finish([tracker])

def mirror(mode, first=0, state="finished", odd_loss=9.0):
    tracker = begin(mode, first)
    for step in range(first, 40, 10):
        tracker.log(interval(step, odd_loss if step == 20 else None))
    end(tracker, state)
"""


def drive(home: Path, body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `body` after the preamble, in a process without this machine's W&B settings."""
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(body), json.dumps(RUN), str(home / "run")],
        env=environment(home, **variables),
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def environment(home: Path, **variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "NETRC", "XDG"))}
    return {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT), **variables}


def quiet(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 0 and done.stderr == ""


def sync_command(line: str) -> list[str]:
    """Return the upload command in a line that the tracker printed."""
    return shlex.split(line.partition("upload later with: ")[2])


def prints_the_sync_command(done: subprocess.CompletedProcess[str], home: Path) -> bool:
    """Return whether each offline part printed one line: the command that uploads all folders so far."""
    lines, made = done.stderr.splitlines(), {str(folder) for folder in folders(home, "offline-run")}
    offline = all(line.startswith("normlab: W&B was offline: ") for line in lines)
    named = [set(sync_command(line)[2:]) for line in lines if sync_command(line)[:2] == ["wandb", "sync"]]
    grows = [len(each) for each in named] == list(range(1, len(lines) + 1))
    return done.returncode == 0 and offline and grows and named[-1] == made


def sync(home: Path, server: Server, line: str) -> None:
    """Run the upload command in a line that the tracker printed, from another folder."""
    command = sync_command(line)
    command[0] = str(Path(sys.executable).with_name(command[0]))
    subprocess.run(command, env=environment(home, **server.login), cwd="/", check=True, timeout=180)


def warning(done: subprocess.CompletedProcess[str]) -> str:
    """Return the only line on stderr, which is a warning of the tracker."""
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("normlab: W&B ")
    assert "The local record has everything" in line
    return line


def steps_by_part(server: Server) -> dict[str, list[int]]:
    """Return the uploaded steps of each part of RUN, by the suffix of its id."""
    return {run_id.removeprefix(RUN["run_id"]): run.steps() for run_id, run in server.runs.items()}


def folders(home: Path, kind: str) -> list[Path]:
    """Return W&B's folders of one kind (run, offline-run), oldest first."""
    return sorted((home / "run" / "wandb").glob(f"{kind}-*"))


def read(folder: Path) -> tuple[Any, dict[str, Any], list[dict[str, Any]], dict[str, Any], int | None]:
    """Return the run, config, rows, summary and exit code in a folder of W&B."""
    run, config, rows, summary, exit_code = None, {}, [], {}, None
    for record in records(folder):
        if record.HasField("run"):
            run = record.run
            config |= {item.key: json.loads(item.value_json) for item in run.config.update}
        elif record.HasField("history"):
            rows.append({name(item): json.loads(item.value_json) for item in record.history.item})
        elif record.HasField("summary"):
            summary |= {name(item): json.loads(item.value_json) for item in record.summary.update}
        elif record.HasField("exit"):
            exit_code = record.exit.exit_code
    return run, config, rows, summary, exit_code


def name(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: 7 bytes of header, then LevelDB's log, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data = path.read_bytes()
    at, whole, last_part = 7, b"", (1, 4)
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in last_part:
            yield Record.FromString(whole)
            whole = b""
