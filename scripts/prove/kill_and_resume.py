#!/usr/bin/env python3
"""Kill training runs, resume them, and compare them bit for bit with uninterrupted runs.

    .venv/bin/python scripts/prove/kill_and_resume.py [--kills 25] [--in-save 5] [--compiled 5] [--device cpu]

Every run is `python -m normlab train ...` in a process of its own. A kill is SIGKILL: from outside at a random step,
or inside the write of a checkpoint, where the process kills itself at a chosen point (functions are replaced in that
process; the package has no hook for it). A run is killed one to three times, then the same command finishes it.
The comparison covers every tensor of every remaining checkpoint, every row of the record without times, the final
status without times and memory, and the names of all files.

Exits with 1 if anything differs, or if fewer runs were killed than requested.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare_runs import checkpoints, differences
from safetensors.torch import save

from normlab import cli
from normlab.base.errors import NormlabError
from normlab.training import checkpoint

STEPS, CHECKPOINT_EVERY = 120, 9
LAST_TARGET = STEPS - 20
"""The last step of a kill from outside: later the run might finish first."""

COMMON = (
    "model=gpt2_nano data=files eval.every=16 train.log_every=4 train.batch_size=8 tracking.wandb=off "
    f"deterministic=true train.steps={STEPS} train.checkpoint_every={CHECKPOINT_EVERY}"
)
EAGER = {
    "batchnorm": "norm=batchnorm placement=pre",
    "batchnorm sgd": "norm=batchnorm placement=post optim=sgd optim.nesterov=true train.accumulation=2",
    "layernorm wsd": "norm=layernorm placement=post model=llama_nano model.qk_norm=head optim.schedule=wsd "
    "train.accumulation=4 data.tokenizer=chars",
}
COMPILED = {"batchnorm compiled": "norm=batchnorm placement=pre model.depth=1 compile=on"}

EQUAL = "bit for bit"

SESSION_SECONDS = 600
"""Time limit of a process; a busy machine compiles slowly."""


# Inside a process that dies during a save.

POINTS = (
    "before the state",
    "half of the state",
    "after the state",
    "before the manifest",
    "half of the manifest",
    "before the rename",
    "after the rename",
    "half of the pruning",
)


def run_to_point(point: str, number: int, arguments: Sequence[str]) -> None:
    """Run `normlab`, and SIGKILL this process when it passes `point` for the `number`-th time."""

    def half_of_state(tensors: Any, path: Path) -> None:
        content = save(tensors)
        path.write_bytes(content[: len(content) // 2])

    def half_of_manifest(path: Path, content: bytes) -> None:
        real(path, content[: len(content) // 2])

    def half_of_folder(folder: Path, **_: Any) -> None:
        (folder / "state.safetensors").unlink()

    # The function to replace, the test of its arguments that selects a call, and a function that does half of the work.
    moment, _, operation = point.partition(" the ")
    owner, name, selects, half = {
        "state": (checkpoint, "save_file", lambda _, path: True, half_of_state),
        "manifest": (Path, "write_bytes", lambda path, _: path.name == "manifest.json", half_of_manifest),
        "rename": (Path, "rename", lambda path, _: path.name.startswith(".step_"), None),
        "pruning": (shutil, "rmtree", lambda path, **_: Path(path).name.startswith("step_"), half_of_folder),
    }[operation]
    real, calls = getattr(owner, name), itertools.count(1)

    def kill_during(*args: Any, **options: Any) -> Any:
        if not selects(*args, **options) or next(calls) != number:
            return real(*args, **options)
        if moment == "half of":
            half(*args, **options)
        elif moment == "after":
            real(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, kill_during)
    cli.main(list(arguments))


# Processes.


RUNNING: set[subprocess.Popen[bytes]] = set()


@contextlib.contextmanager
def started(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Python process in a new session; kill it and its children at the end."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    RUNNING.add(process)
    try:
        yield process
    finally:
        RUNNING.discard(process)
        kill_group(process)
        process.wait()


def run(arguments: Sequence[str], log: Path) -> int:
    """Run a process and return its exit status; 124 on a timeout."""
    with started(arguments, log) as process, contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(SESSION_SECONDS)
    return 124


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# Reading a run's folder, also while a process writes it.


def run_folder(folder: Path) -> Path:
    """Return the only run of the results in a folder, or a path that does not exist."""
    runs = folder / "results" / "runs"
    return next(runs.glob("*"), runs / "none")


def recorded_steps(folder: Path) -> int:
    """Return the number of training steps in the record, whose last line may be torn."""
    with contextlib.suppress(FileNotFoundError):
        for line in reversed((folder / "metrics.jsonl").read_bytes().splitlines()):
            with contextlib.suppress(ValueError):
                if (row := json.loads(line))["kind"] == "train":
                    return row["step"] + 1
    return 0


def newest(folder: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0."""
    saved, _ = checkpoint.read_newest(folder / "checkpoints")
    return saved.step if saved else 0


# Trials.


@dataclass(slots=True)
class Kill:
    point: str | None
    """The point in the write of a checkpoint; None for a kill from outside."""
    recorded: int = 0
    """Steps in the record at the kill."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the checkpoints at the kill, complete or not."""
    resumed: int = 0
    """Step of the checkpoint that the run resumed from."""


@dataclass(slots=True)
class Trial:
    """One run that is killed at least once and then finished."""

    variant: str
    folder: Path
    """The folder of the results and of the logs."""
    arguments: list[str]
    planned: list[Kill]
    draw: random.Random
    kills: list[Kill] = field(default_factory=list)
    verdict: str = ""

    def run(self, reference: Path) -> Trial:
        """Start, kill and resume the run, finish it, and compare it."""
        self.folder.mkdir()
        try:
            self.verdict = self._run(reference)
        except NormlabError as error:
            self.verdict = str(error)
        return self

    def _run(self, reference: Path) -> str:
        start = 0
        for session, kill in enumerate(self.planned):
            log = self.folder / f"session_{session}.log"
            if start > LAST_TARGET:
                break
            code = self._run_until_kill(kill, start, len(self.planned) - session, log)
            if code not in (0, -signal.SIGKILL):
                return f"exit {code}, see {log}"
            if problem := wrong_start(log, start):
                return problem
            if code == 0:
                break  # the run finished before the kill
            folder = run_folder(self.folder)
            start = kill.resumed = newest(folder)
            kill.recorded, kill.checkpoints = recorded_steps(folder), checkpoints(folder)
            self.kills.append(kill)
        code = run(self.arguments, log := self.folder / "last.log")
        problems = [f"exit {code}, see {log}"] if code else differences(reference, run_folder(self.folder))
        return wrong_start(log, start) or "; ".join(problems[:3]) or EQUAL

    def _run_until_kill(self, kill: Kill, start: int, left: int, log: Path) -> int:
        """Run until the kill, early enough for the remaining kills, and return the exit status."""
        if kill.point is None:
            return self._kill_at_step(self.draw.randint(start, start + (LAST_TARGET - start) // left), log)
        # The remaining saves; all but the first two of a run remove an older checkpoint.
        saves = (STEPS - 1) // CHECKPOINT_EVERY - start // CHECKPOINT_EVERY + 1
        if "pruning" in kill.point:
            saves -= max(0, 2 - len(checkpoints(run_folder(self.folder))))
        number = str(self.draw.randint(1, -(-saves // left)))
        # The arguments begin with `-m normlab`, which the child replaces.
        return run([__file__, "--child", kill.point, number, *self.arguments[2:]], log)

    def _kill_at_step(self, target: int, log: Path) -> int:
        """Kill the run when its record has `target` steps; for 0, when its folder exists."""
        before, deadline = self._changed(), time.monotonic() + SESSION_SECONDS
        with started(self.arguments, log) as process:
            while process.poll() is None and time.monotonic() < deadline:
                folder = run_folder(self.folder)
                # The rows of an earlier process do not count: a resumed run truncates them first.
                reached = self._changed() != before and recorded_steps(folder) >= target
                if reached or (target == 0 and folder.exists()):
                    break
                time.sleep(0.002)
            kill_group(process)
            return process.wait()

    def _changed(self) -> int:
        try:
            return (run_folder(self.folder) / "metrics.jsonl").stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def wrong_start(log: Path, start: int) -> str:
    """Return an error if a process printed that it resumes from another step; empty if it printed no step."""
    text = log.read_text()
    match = re.search(r"^resumes +from step (\d+)$", text, re.MULTILINE)
    step = int(match[1]) if match else 0
    # The line about the first step comes after the header.
    return f"resumed from {step}, not {start}, see {log}" if "\nstep " in text and step != start else ""


# The command.


def plan(options: argparse.Namespace) -> list[tuple[str, list[Kill]]]:
    """Return a variant and one to three kills for each run."""
    draw = random.Random(options.seed)
    points = itertools.cycle(draw.sample(POINTS, len(POINTS)))
    eager = [Kill(next(points)) for _ in range(options.in_save)]
    eager += [Kill(None) for _ in range(options.kills - options.in_save - options.compiled)]
    draw.shuffle(eager)
    runs: list[tuple[str, list[Kill]]] = []
    for kills, variants in (([Kill(None)] * options.compiled, COMPILED), (eager, EAGER)):
        names = itertools.cycle(variants)
        while kills:
            size = draw.randint(1, 3)
            runs.append((next(names), [Kill(kill.point) for kill in kills[:size]]))
            kills = kills[size:]
    return runs


def run_all(options: argparse.Namespace, scratch: Path) -> list[Trial]:
    """Run the references, then the trials, a few processes at a time."""
    draw = random.Random(options.seed)
    vocabulary = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(1, 7))) for _ in range(60)]
    text = scratch / "text.txt"
    text.write_text("\n".join(" ".join(draw.choices(vocabulary, k=10)) for _ in range(300)))
    os.environ |= {
        "NORMLAB_CACHE": str(scratch / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip

    def command(variant: str, folder: Path) -> list[str]:
        arguments = f"-m normlab train {COMMON} device={options.device} {(EAGER | COMPILED)[variant]}".split()
        return [*arguments, f"data.path={text}", f"results_dir={folder / 'results'}"]

    def uninterrupted(variant: str) -> Path:
        folder = scratch / f"reference_{variant.replace(' ', '_')}"
        folder.mkdir()
        code = run(command(variant, folder), folder / "log")
        if code != 0:
            raise RuntimeError(f"the uninterrupted run of {variant}: exit {code}\n{(folder / 'log').read_text()}")
        return run_folder(folder)

    trials: list[Trial] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            runs = plan(options)
            # The compiled runs are the slowest and come first.
            pending = {variant: pool.submit(uninterrupted, variant) for variant in dict.fromkeys(v for v, _ in runs)}
            references = {variant: future.result() for variant, future in pending.items()}
            for _ in range(5):
                batch = []
                for number, (variant, kills) in enumerate(runs, len(trials)):
                    folder, draw = scratch / f"trial_{number}", random.Random(f"{options.seed}/{number}")
                    batch.append(Trial(variant, folder, command(variant, folder), kills, draw))
                futures = [pool.submit(trial.run, references[trial.variant]) for trial in batch]
                trials += [future.result() for future in futures]
                # Kills planned for a step after the end of their run are repeated with another run.
                runs = [(t.variant, missed) for t in batch if (missed := t.planned[len(t.kills) :])]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*RUNNING]:
                kill_group(process)
            raise
    return trials


def report(trials: list[Trial], options: argparse.Namespace) -> bool:
    """Print the table and the counts; return whether all runs are equal and enough were killed."""
    form = "{:<20}  {:>9}  {:<18}  {:>7}  {:<20}  {}"
    print(form.format("variant", "killed at", "checkpoints", "resumed", "inside the save", "verdict"))
    for trial in trials:
        for kill in trial.kills:
            steps = " ".join(map(str, kill.checkpoints)) or "none"
            verdict = trial.verdict if kill is trial.kills[-1] else "killed again"
            print(form.format(trial.variant, kill.recorded, steps, kill.resumed, kill.point or "", verdict))
    kills = [(trial, kill) for trial in trials for kill in trial.kills]
    counts = {
        "kills": (len(kills), options.kills),
        "after a checkpoint": (sum(kill.resumed > 0 for _, kill in kills), options.kills * 2 // 5),
        "inside a save": (sum(kill.point is not None for _, kill in kills), options.in_save),
        "compiled": (sum(trial.variant in COMPILED for trial, _ in kills), options.compiled),
    }
    missing = [f"{number} {name}, fewer than {least}" for name, (number, least) in counts.items() if number < least]
    differing = [f"{trial.folder}: {trial.verdict}" for trial in trials if trial.verdict != EQUAL]
    print(", ".join(f"{number} {name}" for name, (number, _) in counts.items()))
    print("\n".join([*missing, *differing]) or f"all {len(kills)} {EQUAL}")
    return not missing and not differing


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=25, help="number of kills (default 25)")
    parser.add_argument("--in-save", type=int, default=5, help="kills inside a save (default 5)")
    parser.add_argument("--compiled", type=int, default=5, help="kills of compiled runs (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the steps and points (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    options = parser.parse_args()
    if options.kills < options.in_save + options.compiled:
        parser.error("--kills: must be at least --in-save plus --compiled")
    # SIGTERM must run the `except` block, which kills the children.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    scratch = Path(tempfile.mkdtemp(prefix="normlab_kill_"))
    passed = report(run_all(options, scratch), options)
    if passed:
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        print(f"the files are in {scratch}")
    return 0 if passed else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_to_point(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(main())
