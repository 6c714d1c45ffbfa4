#!/usr/bin/env python3
"""Kill training runs, resume them, and compare them bit for bit with uninterrupted runs.

    .venv/bin/python scripts/kill_and_resume.py [--kills 25] [--in-save 5] [--compiled 5] [--seed 0]

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
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save

from normlab import cli
from normlab.errors import NormlabError
from normlab.store.runs import RunFolder
from normlab.training import checkpoint

STEPS, CHECKPOINT_EVERY = 120, 9
LAST_TARGET = STEPS - 20
"""The last step of a kill from outside: later the run might finish first."""

COMMON = (
    "model=gpt2_nano data=files eval.every=16 train.log_every=4 train.batch_size=8 tracking.wandb=off "
    f"deterministic=true device=cpu train.steps={STEPS} train.checkpoint_every={CHECKPOINT_EVERY}"
)
EAGER = {
    "batchnorm": "norm=batchnorm placement=pre",
    "batchnorm sgd": "norm=batchnorm placement=post optim=sgd optim.nesterov=true train.accumulation=2",
    "layernorm wsd": "norm=layernorm placement=post model=llama_nano model.qk_norm=head optim.schedule=wsd "
    "train.accumulation=4 data.tokenizer=chars",
}
COMPILED = {"batchnorm compiled": "norm=batchnorm placement=pre model.depth=1 compile=on"}

TIMES = {"seconds", "tokens_per_s", "peak_memory_bytes", "updated", "metrics"}
"""Keys that differ between any two runs."""

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


class Processes:
    """The child processes; `close` kills all of them."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def start(self, arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Start a Python process in a new session; kill it and its children at the end."""
        with self._lock, log.open("wb") as file:
            if self._closed:
                raise InterruptedError("closed: starts no more processes")
            process = subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
        try:
            yield process
        finally:
            with self._lock:
                self._running.discard(process)
                kill_group(process)
            process.wait()

    def run(self, arguments: Sequence[str], log: Path) -> int:
        """Run a process and return its exit status; 124 on a timeout."""
        with self.start(arguments, log) as process, contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(SESSION_SECONDS)
        return 124

    def close(self) -> None:
        """Kill the running processes and start no more."""
        with self._lock:
            self._closed = True
            for process in self._running:
                kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# Reading a run's folder, also while a process writes it.


def run_folder(results: Path) -> Path:
    """Return the only run of a results folder, or a path that does not exist."""
    return next((results / "runs").glob("*"), results / "runs" / "none")


def recorded_steps(folder: Path) -> int:
    """Return the number of training steps in the record, whose last line may be torn."""
    with contextlib.suppress(FileNotFoundError):
        for line in reversed((folder / "metrics.jsonl").read_bytes().splitlines()):
            with contextlib.suppress(ValueError):
                if (row := json.loads(line))["kind"] == "train":
                    return row["step"] + 1
    return 0


def checkpoints(folder: Path) -> list[int]:
    """Return the steps of the checkpoints, complete or not."""
    return checkpoint.steps(folder / "checkpoints")


def newest(folder: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0."""
    saved, _ = checkpoint.read_newest(folder / "checkpoints")
    return saved.step if saved else 0


# Trials.


@dataclass(slots=True)
class Kill:
    """One kill and its consequences."""

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

    number: int
    variant: str
    folder: Path
    """The folder of the results and of the logs."""
    arguments: list[str]
    planned: list[Kill]
    draw: random.Random
    kills: list[Kill] = field(default_factory=list)
    """The kills that took place."""
    verdict: str = ""

    @property
    def results(self) -> Path:
        """Return the results folder."""
        return self.folder / "results"

    def run(self, processes: Processes, reference: Path) -> Trial:
        """Start, kill and resume the run, finish it, and compare it."""
        self.folder.mkdir()
        try:
            self.verdict = self._run(processes, reference)
        except NormlabError as error:
            self.verdict = str(error)
        return self

    def _run(self, processes: Processes, reference: Path) -> str:
        start = 0
        for session, kill in enumerate(self.planned):
            log = self.folder / f"session_{session}.log"
            if start > LAST_TARGET:
                break
            code = self._run_until_kill(kill, start, len(self.planned) - session, processes, log)
            if code not in (0, -signal.SIGKILL):
                return f"exit {code}, see {log}"
            if problem := wrong_start(log, start):
                return problem
            if code == 0:
                break  # the run finished before the kill
            folder = run_folder(self.results)
            start = kill.resumed = newest(folder)
            kill.recorded, kill.checkpoints = recorded_steps(folder), checkpoints(folder)
            self.kills.append(kill)
        log = self.folder / "last.log"
        code = processes.run(self.arguments, log)
        problems = [f"exit {code}, see {log}"] if code else differences(reference, run_folder(self.results))
        return wrong_start(log, start) or "; ".join(problems[:3]) or "bit for bit"

    def _run_until_kill(self, kill: Kill, start: int, left: int, processes: Processes, log: Path) -> int:
        """Run until the kill, early enough for the remaining kills, and return the exit status."""
        if kill.point is None:
            last = start + (LAST_TARGET - start) // left
            return self._kill_at_step(self.draw.randint(start, last), processes, log)
        # The remaining saves; all but the first two of a run remove an older checkpoint.
        saves = (STEPS - 1) // CHECKPOINT_EVERY - start // CHECKPOINT_EVERY + 1
        if "pruning" in kill.point:
            saves -= max(0, 2 - len(checkpoints(run_folder(self.results))))
        number = str(self.draw.randint(1, -(-saves // left)))
        # The arguments begin with `-m normlab`, which the child replaces.
        return processes.run([__file__, "--child", kill.point, number, *self.arguments[2:]], log)

    def _kill_at_step(self, target: int, processes: Processes, log: Path) -> int:
        """Kill the run when its record has `target` steps; for 0, when its folder exists."""
        before, deadline = self._changed(), time.monotonic() + SESSION_SECONDS
        with processes.start(self.arguments, log) as process:
            while process.poll() is None and time.monotonic() < deadline:
                folder = run_folder(self.results)
                # The rows of an earlier process do not count: a resumed run truncates them first.
                reached = self._changed() != before and recorded_steps(folder) >= target
                if reached or (target == 0 and folder.exists()):
                    break
                time.sleep(0.002)
            kill_group(process)
            return process.wait()

    def _changed(self) -> int:
        try:
            return (run_folder(self.results) / "metrics.jsonl").stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def wrong_start(log: Path, start: int) -> str:
    """Return an error if a process printed that it resumes from another step; empty if it printed no step."""
    text = log.read_text()
    match = re.search(r"^resumes +from step (\d+)$", text, re.MULTILINE)
    step = int(match[1]) if match else 0
    # The line about the first step comes after the header.
    return f"resumed from {step}, not {start}, see {log}" if "\nstep " in text and step != start else ""


# Comparing.


def differences(reference: Path, other: Path) -> list[str]:
    """Return the differences between two runs' folders, except times and memory."""
    names, other_names = ({str(path.relative_to(f)) for path in f.rglob("*")} for f in (reference, other))
    if names != other_names or reference.name != other.name:
        return [f"files {sorted(names ^ other_names)} of {reference.name} and {other.name}"]
    problems = [line for step in checkpoints(reference) for line in differing_state(reference, other, step)]
    for one, two in itertools.zip_longest(rows(reference), rows(other)):
        if one != two:
            problems.append(f"record: {one} and {two}")
            break
    for one, two in zip(statistics(reference), statistics(other), strict=True):
        if one.read_bytes() != two.read_bytes():
            problems.append(f"statistics: {one.name}")
    status, other_status = (timeless(RunFolder(f).status()) for f in (reference, other))
    if status != other_status or status["state"] not in ("finished", "diverged"):
        problems.append(f"status: {status} and {other_status}")
    return problems


def differing_state(reference: Path, other: Path, step: int) -> list[str]:
    """Return the differences between two checkpoints of a step."""
    one, two = (checkpoint.read(folder / "checkpoints", step) for folder in (reference, other))
    problems = [
        f"step {step}: {name}"
        for name in sorted({*one.tensors, *two.tensors})
        if bits(one.tensors.get(name)) != bits(two.tensors.get(name))
    ]
    # The record's length varies with the digits of its times.
    metas = [timeless(saved.meta["progress"]) | {"last": saved.meta["last_finite"]} for saved in (one, two)]
    return problems + ([f"step {step}: {metas[0]} and {metas[1]}"] if metas[0] != metas[1] else [])


def bits(tensor: Any) -> Any:
    """Return a tensor as bytes, so that NaN equals NaN and 0 differs from -0."""
    return tensor if tensor is None else (tensor.dtype, tensor.shape, tensor.contiguous().numpy().tobytes())


def rows(folder: Path) -> list[str]:
    """Return the record's lines without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if json.loads(line)["kind"] != "pace"]


def statistics(folder: Path) -> list[Path]:
    """Return the files of the statistics."""
    return sorted((folder / "stats").glob("*"))


def timeless(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers without times and memory."""
    return {name: value for name, value in numbers.items() if name not in TIMES}


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
    environment = {
        "NORMLAB_CACHE": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    processes = Processes(os.environ | environment)

    def command(variant: str, results: Path) -> list[str]:
        arguments = f"-m normlab train {COMMON} {(EAGER | COMPILED)[variant]}".split()
        return [*arguments, f"data.path={text}", f"results_dir={results}"]

    def uninterrupted(variant: str) -> Path:
        folder = scratch / f"reference_{variant.replace(' ', '_')}"
        folder.mkdir()
        code = processes.run(command(variant, folder / "results"), folder / "log")
        if code != 0:
            raise RuntimeError(f"the uninterrupted run of {variant}: exit {code}\n{(folder / 'log').read_text()}")
        return run_folder(folder / "results")

    trials: list[Trial] = []
    pool = ThreadPoolExecutor(options.jobs)
    try:
        runs = plan(options)
        # The compiled runs are the slowest and come first.
        pending = {variant: pool.submit(uninterrupted, variant) for variant in dict.fromkeys(v for v, _ in runs)}
        references = {variant: future.result() for variant, future in pending.items()}
        for _ in range(5):
            batch = [
                Trial(
                    number, variant, scratch / f"trial_{number}", command(variant, scratch / f"trial_{number}/results"),
                    kills, random.Random(f"{options.seed}/{number}"),
                )
                for number, (variant, kills) in enumerate(runs, len(trials) + 1)
            ]  # fmt: skip
            futures = [pool.submit(trial.run, processes, references[trial.variant]) for trial in batch]
            trials += [future.result() for future in futures]
            # Kills planned for a step after the end of their run are repeated with another run.
            runs = [(t.variant, missed) for t in batch if (missed := t.planned[len(t.kills) :])]
            if not runs:
                break
    finally:
        processes.close()
        pool.shutdown(cancel_futures=True)
    return trials


def report(trials: list[Trial], options: argparse.Namespace) -> bool:
    """Print the table and the counts; return whether all runs are equal and enough were killed."""
    trials = [trial for trial in trials if trial.kills or trial.verdict != "bit for bit"]
    form = "{:>5}  {:<18}  {:>9}  {:<18}  {:>7}  {:<20}  {}"
    print(form.format("trial", "variant", "killed at", "checkpoints", "resumed", "inside the save", "verdict"))
    for trial in trials:
        for index, kill in enumerate(trial.kills, 1):
            steps = " ".join(map(str, kill.checkpoints)) or "none"
            verdict = trial.verdict if index == len(trial.kills) else "killed again"
            cells = kill.recorded, steps, kill.resumed, kill.point or "", verdict
            print(form.format(trial.number, trial.variant, *cells))
    kills = [(trial, kill) for trial in trials for kill in trial.kills]
    counts = {
        "kills": (len(kills), options.kills),
        "after a checkpoint": (sum(kill.resumed > 0 for _, kill in kills), options.kills * 2 // 5),
        "inside a save": (sum(kill.point is not None for _, kill in kills), options.in_save),
        "compiled": (sum(trial.variant in COMPILED for trial, _ in kills), options.compiled),
    }
    print(", ".join(f"{number} {name}" for name, (number, _) in counts.items()), f"in {len(trials)} runs")
    missing = [f"{number} {name}, fewer than {least}" for name, (number, least) in counts.items() if number < least]
    differing = [f"trial {trial.number}: {trial.verdict}" for trial in trials if trial.verdict != "bit for bit"]
    print("\n".join([*missing, *differing]) or f"all {len(kills)} bit for bit")
    return not missing and not differing


def main() -> int:
    """Run the trials and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    helps = {
        "kills": (25, "number of kills"),
        "in-save": (5, "kills inside a save"),
        "compiled": (5, "kills of compiled runs"),
        "seed": (0, "seed of the steps and points"),
        "jobs": (2, "processes at a time"),
    }
    for name, (default, text) in helps.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    options = parser.parse_args()
    if options.kills < options.in_save + options.compiled:
        parser.error("--kills: must be at least --in-save plus --compiled")
    # SIGTERM must run the `finally` blocks, which kill the children.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    since = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="normlab_kill_"))
    passed = None
    try:
        passed = report(run_all(options, scratch), options)
        print(f"{time.monotonic() - since:.0f} s" + ("" if passed else f"; the files are in {scratch}"))
    finally:
        if passed is not False:
            shutil.rmtree(scratch, ignore_errors=True)
    return 0 if passed else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_to_point(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(main())
