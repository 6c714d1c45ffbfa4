#!/usr/bin/env python3
"""Kill training runs, go on with them, and hold them bit for bit against runs that nobody killed.

    .venv/bin/python scripts/kill_and_resume.py [--kills 25] [--in-save 5] [--compiled 5] [--seed 0]

Every run is `python -m normlab train ...` in a process of its own. A kill is SIGKILL: from outside at a
random step, or inside the write of a checkpoint, where the process kills itself at a chosen point (functions
are replaced in that process; the package has no hook for it). A run is killed one to three times, then the
same command finishes it. Equal must be: every tensor of every checkpoint that is left, every row of the
record but for times, the final status but for times and memory, and the names of all files.

Exits with 1 where anything differs, or where fewer kills came about than were asked for.
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
from normlab.train import checkpoint

STEPS, CHECKPOINT_EVERY = 120, 9
LAST_TARGET = STEPS - 20
"""No kill from outside is aimed at a later step: the run might end before it arrives."""

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
"""What differs between any two runs."""

SESSION_SECONDS = 600
"""The most that one process may take: a machine that is busy with other work compiles slowly."""


# Inside a process that is to die in a save.

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


def run_to_point(point: str, number: int, words: Sequence[str]) -> None:
    """Be `normlab`, and SIGKILL this process when it passes `point` for the `number`-th time."""

    def half_of_state(tensors: Any, path: Path) -> None:
        content = save(tensors)
        path.write_bytes(content[: len(content) // 2])

    def half_of_manifest(path: Path, content: bytes) -> None:
        real(path, content[: len(content) // 2])

    def half_of_folder(folder: Path, **_: Any) -> None:
        (folder / "state.safetensors").unlink()

    # Which function is replaced, for which of its arguments, and what doing half of it means.
    moment, _, place = point.partition(" the ")
    owner, name, counts, half = {
        "state": (checkpoint, "save_file", lambda _, path: True, half_of_state),
        "manifest": (Path, "write_bytes", lambda path, _: path.name == "manifest.json", half_of_manifest),
        "rename": (Path, "rename", lambda path, _: path.name.startswith(".step_"), None),
        "pruning": (shutil, "rmtree", lambda path, **_: Path(path).name.startswith("step_"), half_of_folder),
    }[place]
    real, passed = getattr(owner, name), itertools.count(1)

    def deadly(*args: Any, **options: Any) -> Any:
        if not counts(*args, **options) or next(passed) != number:
            return real(*args, **options)
        if moment == "half of":
            half(*args, **options)
        elif moment == "after":
            real(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, deadly)
    cli.main(list(words))


# Processes.


class Processes:
    """All processes of ours, so that none outlives this one."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._alive: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False

    @contextlib.contextmanager
    def start(self, words: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A Python process, in a session of its own with its compilers; dead at the end of the block."""
        with self._lock, log.open("wb") as file:
            if self._closed:
                raise InterruptedError("no more processes")
            process = subprocess.Popen(
                [sys.executable, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
            self._alive.add(process)
        try:
            yield process
        finally:
            with self._lock:
                self._alive.discard(process)
                end(process)
            process.wait()

    def run(self, words: Sequence[str], log: Path) -> int:
        """Run a process to its end; its exit status, 124 where it takes too long."""
        with self.start(words, log) as process, contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(SESSION_SECONDS)
        return 124

    def close(self) -> None:
        """Kill those there are, and start no more."""
        with self._lock:
            self._closed = True
            for process in self._alive:
                end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process and its children, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# Looking into a run's folder, also while it is written.


def run_folder(results: Path) -> Path:
    """The one run of a results folder, or a path where nothing is."""
    return next((results / "runs").glob("*"), results / "runs" / "none")


def recorded(folder: Path) -> int:
    """Training steps in the record, whose last line may be torn."""
    with contextlib.suppress(FileNotFoundError):
        for line in reversed((folder / "metrics.jsonl").read_bytes().splitlines()):
            with contextlib.suppress(ValueError):
                if (row := json.loads(line))["kind"] == "train":
                    return row["step"] + 1
    return 0


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoints, whole or not."""
    return checkpoint.steps(folder / "checkpoints")


def newest(folder: Path) -> int:
    """Step of the newest whole checkpoint, 0 without any."""
    saved, _ = checkpoint.read_newest(folder / "checkpoints")
    return saved.step if saved else 0


# Trials.


@dataclass(slots=True)
class Kill:
    """One kill, and how it went."""

    point: str | None
    """Where in a checkpoint's write; None: from outside, at a step."""
    recorded: int = 0
    """Steps in the record when it came."""
    checkpoints: list[int] = field(default_factory=list)
    """Steps of the checkpoints that were there then, whole or not."""
    resumed: int = 0
    """Step of the checkpoint that the run then went on from."""


@dataclass(slots=True)
class Trial:
    """One run that is killed once or more often, and then finished."""

    number: int
    variant: str
    folder: Path
    """Holds its results, and what its processes printed."""
    words: list[str]
    planned: list[Kill]
    draw: random.Random
    kills: list[Kill] = field(default_factory=list)
    """Those that came about."""
    verdict: str = ""

    @property
    def results(self) -> Path:
        """Its results folder."""
        return self.folder / "results"

    def run(self, processes: Processes, reference: Path) -> Trial:
        """Start, kill, start again, ..., finish, compare."""
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
            code = self._die(kill, start, len(self.planned) - session, processes, log)
            if code not in (0, -signal.SIGKILL):
                return f"exit {code}, see {log}"
            if problem := wrong_start(log, start):
                return problem
            if code == 0:
                break  # it was over before the kill came
            folder = run_folder(self.results)
            start = kill.resumed = newest(folder)
            kill.recorded, kill.checkpoints = recorded(folder), checkpoints(folder)
            self.kills.append(kill)
        log = self.folder / "last.log"
        code = processes.run(self.words, log)
        problems = [f"exit {code}, see {log}"] if code else differences(reference, run_folder(self.results))
        return wrong_start(log, start) or "; ".join(problems[:3]) or "bit for bit"

    def _die(self, kill: Kill, start: int, left: int, processes: Processes, log: Path) -> int:
        """Run it until the kill, early enough for all that are left of them; the exit status."""
        if kill.point is None:
            last = start + (LAST_TARGET - start) // left
            return self._killed_at(self.draw.randint(start, last), processes, log)
        # The saves still to come; all but the first two of a run push out an older checkpoint.
        saves = (STEPS - 1) // CHECKPOINT_EVERY - start // CHECKPOINT_EVERY + 1
        if "pruning" in kill.point:
            saves -= max(0, 2 - len(checkpoints(run_folder(self.results))))
        number = str(self.draw.randint(1, -(-saves // left)))
        # The words begin with `-m normlab`, which the child is instead.
        return processes.run([__file__, "--child", kill.point, number, *self.words[2:]], log)

    def _killed_at(self, target: int, processes: Processes, log: Path) -> int:
        """Kill it once `target` steps are in the record; for 0, once it has a folder."""
        before, deadline = self._changed(), time.monotonic() + SESSION_SECONDS
        with processes.start(self.words, log) as process:
            while process.poll() is None and time.monotonic() < deadline:
                folder = run_folder(self.results)
                # What an earlier process left in the record does not count: it is cut back first.
                there = self._changed() != before and recorded(folder) >= target
                if there or (target == 0 and folder.exists()):
                    break
                time.sleep(0.002)
            end(process)
            return process.wait()

    def _changed(self) -> int:
        try:
            return (run_folder(self.results) / "metrics.jsonl").stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def wrong_start(log: Path, start: int) -> str:
    """What is wrong with where a process says that it went on from; nothing, if it did not come to say so."""
    said = log.read_text()
    match = re.search(r"^resumes +from step (\d+)$", said, re.MULTILINE)
    found = int(match[1]) if match else 0
    # The line about the first step comes after the header.
    return f"went on from {found}, not {start}, see {log}" if "\nstep " in said and found != start else ""


# Comparing.


def differences(reference: Path, other: Path) -> list[str]:
    """What two runs' folders differ in, beyond times and memory."""
    names, other_names = ({str(path.relative_to(f)) for path in f.rglob("*")} for f in (reference, other))
    if names != other_names or reference.name != other.name:
        return [f"files {sorted(names ^ other_names)} of {reference.name} and {other.name}"]
    found = [line for step in checkpoints(reference) for line in differing_state(reference, other, step)]
    for one, two in itertools.zip_longest(rows(reference), rows(other)):
        if one != two:
            found.append(f"record: {one} and {two}")
            break
    for one, two in zip(statistics(reference), statistics(other), strict=True):
        if one.read_bytes() != two.read_bytes():
            found.append(f"statistics: {one.name}")
    status, other_status = (timeless(RunFolder(f).status()) for f in (reference, other))
    if status != other_status or status["state"] not in ("finished", "diverged"):
        found.append(f"status: {status} and {other_status}")
    return found


def differing_state(reference: Path, other: Path, step: int) -> list[str]:
    """What two checkpoints of a step differ in."""
    one, two = (checkpoint.read(folder / "checkpoints", step) for folder in (reference, other))
    found = [
        f"step {step}: {name}"
        for name in sorted({*one.tensors, *two.tensors})
        if bits(one.tensors.get(name)) != bits(two.tensors.get(name))
    ]
    # Times are written in more or fewer characters, so the record's length is no constant.
    metas = [timeless(saved.meta["progress"]) | {"last": saved.meta["last_finite"]} for saved in (one, two)]
    return found + ([f"step {step}: {metas[0]} and {metas[1]}"] if metas[0] != metas[1] else [])


def bits(tensor: Any) -> Any:
    """A tensor as bytes: a NaN equals itself, and 0 is not -0."""
    return tensor if tensor is None else (tensor.dtype, tensor.shape, tensor.contiguous().numpy().tobytes())


def rows(folder: Path) -> list[str]:
    """The record's lines, without those that hold times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if json.loads(line)["kind"] != "pace"]


def statistics(folder: Path) -> list[Path]:
    """The files of the statistics."""
    return sorted((folder / "stats").glob("*"))


def timeless(numbers: dict[str, Any]) -> dict[str, Any]:
    """Numbers without times and memory."""
    return {name: value for name, value in numbers.items() if name not in TIMES}


# The whole.


def plan(options: argparse.Namespace) -> list[tuple[str, list[Kill]]]:
    """A variant and one to three kills for each run."""
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
    """The references, then the trials, a few processes at a time."""
    draw = random.Random(options.seed)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(1, 7))) for _ in range(60)]
    text = scratch / "text.txt"
    text.write_text("\n".join(" ".join(draw.choices(words, k=10)) for _ in range(300)))
    own = {
        "NORMLAB_CACHE": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    processes = Processes(os.environ | own)

    def command(variant: str, results: Path) -> list[str]:
        words = f"-m normlab train {COMMON} {(EAGER | COMPILED)[variant]}".split()
        return [*words, f"data.path={text}", f"results_dir={results}"]

    def untouched(variant: str) -> Path:
        folder = scratch / f"reference_{variant.replace(' ', '_')}"
        folder.mkdir()
        code = processes.run(command(variant, folder / "results"), folder / "log")
        if code != 0:
            raise RuntimeError(f"the run of {variant} that nobody killed: exit {code}\n{(folder / 'log').read_text()}")
        return run_folder(folder / "results")

    trials: list[Trial] = []
    pool = ThreadPoolExecutor(options.jobs)
    try:
        runs = plan(options)
        # The compiled ones come first in the plan, being the slowest.
        pending = {variant: pool.submit(untouched, variant) for variant in dict.fromkeys(v for v, _ in runs)}
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
            # A kill that a run was too far for is made good by another run.
            runs = [(t.variant, missed) for t in batch if (missed := t.planned[len(t.kills) :])]
            if not runs:
                break
    finally:
        processes.close()
        pool.shutdown(cancel_futures=True)
    return trials


def report(trials: list[Trial], options: argparse.Namespace) -> bool:
    """Print the table and the counts; whether everything is as it must be."""
    trials = [trial for trial in trials if trial.kills or trial.verdict != "bit for bit"]
    form = "{:>5}  {:<18}  {:>9}  {:<18}  {:>7}  {:<20}  {}"
    print(form.format("trial", "variant", "killed at", "checkpoints", "went on", "inside the save", "verdict"))
    for trial in trials:
        for index, kill in enumerate(trial.kills, 1):
            there = " ".join(map(str, kill.checkpoints)) or "none"
            verdict = trial.verdict if index == len(trial.kills) else "killed again"
            cells = kill.recorded, there, kill.resumed, kill.point or "", verdict
            print(form.format(trial.number, trial.variant, *cells))
    kills = [(trial, kill) for trial in trials for kill in trial.kills]
    found = {
        "kills": (len(kills), options.kills),
        "after a checkpoint": (sum(kill.resumed > 0 for _, kill in kills), options.kills * 2 // 5),
        "inside a save": (sum(kill.point is not None for _, kill in kills), options.in_save),
        "compiled": (sum(trial.variant in COMPILED for trial, _ in kills), options.compiled),
    }
    print(", ".join(f"{number} {name}" for name, (number, _) in found.items()), f"in {len(trials)} runs")
    lacking = [f"{number} {name}, not {least}" for name, (number, least) in found.items() if number < least]
    differing = [f"trial {trial.number}: {trial.verdict}" for trial in trials if trial.verdict != "bit for bit"]
    print("\n".join([*lacking, *differing]) or f"all {len(kills)} bit for bit")
    return not lacking and not differing


def main() -> int:
    """Run everything; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    helps = {
        "kills": (25, "kills in all"),
        "in-save": (5, "those of them inside a save"),
        "compiled": (5, "those of them in compiled runs"),
        "seed": (0, "draws the steps and the points"),
        "jobs": (2, "processes at a time"),
    }
    for name, (default, text) in helps.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    options = parser.parse_args()
    if options.kills < options.in_save + options.compiled:
        parser.error("--kills counts those of --in-save and --compiled too")
    # So that the `finally`s run.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    since = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="normlab_kill_"))
    good = None
    try:
        good = report(run_all(options, scratch), options)
        print(f"{time.monotonic() - since:.0f} s" + ("" if good else f"; everything is kept in {scratch}"))
    finally:
        if good is not False:
            shutil.rmtree(scratch, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_to_point(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(main())
