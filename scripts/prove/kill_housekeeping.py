#!/usr/bin/env python3
"""Kill share, open, export, rm and rename at each change of a file, and let the same command finish.

    .venv/bin/python scripts/prove/kill_housekeeping.py [--commands rm,rename]

Two sweeps are trained, one with a search. Each command below runs once without a kill. Then it runs in a fresh copy of
the results again and again, and is killed before its first change of the file system, before its second, and so on.
After each kill:

- with --checkpoints, every model can be loaded that the finished command leaves;
- the same command succeeds, unless it had nothing left to do;
- all files, hidden ones too, are those that the command without a kill has left, byte for byte (but for the content of
  lock files, and the times in a zip file).

A change is one that Python's audit events name: a rename, a deletion, a new folder, a truncation, or a file opened for
writing. Libraries that write by themselves (safetensors) are killed before and after.

Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import signal
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from normlab import cli
from normlab.base.errors import StoreError
from normlab.loaded.run import load
from normlab.store.query import find_runs

COMMON = (
    "model=gpt2_nano model.depth=1 model.width=32 data=stdlib data.max_tokens=20000 train.batch_size=4 "
    "eval.sequences=8 tracking.wandb=off seed=0,1 train.steps=10 train.checkpoint_every=5"
)
SETUP = (
    f"sweep norm=layernorm,rmsnorm sweep.name=first optim.lr=search(1e-4,1e-2) sweep.trials=2 {COMMON}",
    f"sweep placement=pre sweep.name=second {COMMON}",
    f"sweep placement=peri sweep.name=third {COMMON}",
    # A model that transformers has, for export.
    f"train run.name=alone {COMMON}".replace("seed=0,1", "seed=9").replace("gpt2_nano", "llama_nano"),
    "share second -o received.zip",
)
"""The commands that make the results, in a folder in which all others run."""
COMMANDS = (
    "share first -o it.zip",
    "share second -o it.zip --checkpoints",
    "open received.zip -o new",
    "export alone -o model",
    "rm first --yes",
    "rm second third --yes",
    "rm alone --yes",
    "rm first --checkpoints --yes",
    "rename second new",
    "rename first new",
)
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")
"""Python's audit events of changes, beside `open`."""
NOTHING_LEFT = 2
"""The exit status of a command whose input is gone, or whose output exists."""


def in_child(work: Callable[[], int], folder: Path) -> int:
    """Return the exit status of some work in a process of its own, negative for a signal; what it prints is dropped."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 70
    try:
        os.chdir(folder)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        if "DEBUG" not in os.environ:
            os.dup2(silent, 2)
        status = work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def call(command: str) -> Callable[[], int]:
    """Return a function that runs a command line of normlab."""
    return lambda: int(cli.main(command.split()) or 0)


def killed_at(number: int, command: str) -> Callable[[], int]:
    """Return a function that runs a command line, and kills the process before its change of this number."""

    def run() -> int:
        changes = 0

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal changes
            if event in CHANGES or (event == "open" and _writes(*arguments)):
                changes += 1
                if changes == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        return call(command)()

    return run


def _writes(path: object, mode: str | None, flags: int) -> bool:
    """Whether a file is opened for writing, in the working folder."""
    if not isinstance(path, str | bytes | os.PathLike) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return False
    return Path(os.path.abspath(os.fsdecode(path))).is_relative_to(os.getcwd())


def state(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in a folder, by its path; the names and contents of a zip file."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            found[f"{name}/"] = ""
        elif path.name == "lock":
            found[name] = "lock"
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                found |= {f"{name}/{each.filename}": str(each.CRC) for each in archive.infolist()}
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def weights(folder: Path) -> set[str]:
    """Return the ids of the runs in a folder's results whose weights can be loaded."""
    loaded = folder.parent / "loaded"

    def load_all() -> int:
        found: list[str] = []
        for run in find_runs("results"):
            with contextlib.suppress(StoreError):
                load(run.run_id).model  # noqa: B018
                found.append(run.run_id)
        loaded.write_text("\n".join(found))
        return 0

    if code := in_child(load_all, folder):
        raise RuntimeError(f"{folder}: loading the weights ends with {code}")
    return set(loaded.read_text().split())


def prove(command: str, start: Path, scratch: Path) -> list[str]:
    """Return what went wrong in a command that was killed at each of its changes."""
    expected_folder = scratch / "expected"
    shutil.copytree(start, expected_folder)
    if code := in_child(call(command), expected_folder):
        return [f"{command}: exits with {code} without a kill"]
    expected, kept = state(expected_folder), weights(expected_folder)
    problems: list[str] = []
    number = 0
    while True:
        number += 1
        folder = scratch / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        code = in_child(killed_at(number, command), folder)
        if code != -signal.SIGKILL:  # it has fewer changes than that
            problems += [f"{command}: exits with {code} without a kill"] if code else []
            break
        where = f"{command}, killed before change {number}"
        if "--checkpoints" in command and (lost := kept - weights(folder)):
            problems.append(f"{where}: {len(lost)} runs cannot be loaded")
        was_done = state(folder) == expected
        code = in_child(call(command), folder)
        if code != 0 and not (was_done and code == NOTHING_LEFT):
            problems.append(f"{where}: the same command exits with {code}")
        now = state(folder)
        differing = sorted(name for name in {*now, *expected} if now.get(name) != expected.get(name))
        if differing:
            problems.append(f"{where}: differ: {', '.join(differing[:5])}")
    print(f"{command}: killed at {number - 1} changes, {len(problems)} problems", flush=True)
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", default="", help="only those that start with one of these words, with commas")
    options = parser.parse_args(arguments)
    words = tuple(filter(None, options.commands.split(",")))
    chosen = [command for command in COMMANDS if not words or command.startswith(words)]
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as made:
        start = Path(made, "start")
        start.mkdir()
        for command in SETUP:
            if code := in_child(call(command), start):
                print(f"normlab {command}: exits with {code}")
                return 1
        for command in chosen:
            scratch = Path(made, "scratch")
            problems += prove(command, start, scratch)
            shutil.rmtree(scratch)
    print("\n".join(problems) or "every killed command was finished by the same command; nothing is left or lost")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
