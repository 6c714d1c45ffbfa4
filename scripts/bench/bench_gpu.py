"""Measure everything that needs a GPU, on a machine that is lent for some minutes.

    scripts/gpu --minutes 12 --nanogpt DIR    # all parts, the most important first
    scripts/gpu --part correctness --part packs
    scripts/gpu --dry-run                     # the same parts with tiny models on a CPU, in a minute

Each measurement is one line of JSON in measurements.jsonl as soon as it is made, so a machine that is taken away leaves
what was measured before. Each part has its share of the minutes, and is stopped after them; a part that fails is one
line with its error, and the others run. results.md is a page of the measurements; messages.txt has what parts print.

All sides of a part (`sides.py`) start together; then they take 10 steps each, in turn. Baselines: train.py of a
clone of karpathy/nanoGPT, eager and compiled, alone and as processes at once; and a plain loop over normlab's model.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import nanogpt
import torch
from bench_sweep import nanogpt_seconds, sweep_seconds
from sides import MODELS_ON_GPU, VOCABULARIES, NanoGPT, Normlab, PlainLoop, Training, describe
from turns import Side, SideError, shorten, table, take_turns

from normlab.store.throughput import peak_flops

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS, PAGE, MESSAGES = "measurements.jsonl", "results.md", "messages.txt"
SETUP_SHARE = 0.7
"""A side whose set-up takes longer than this share of the part's time is left out."""

Measurement = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """What the parts measure, and how long."""

    dry_run: bool
    nanogpt: Path | None
    deadline: float = 0.0
    """Of the part, in `time.monotonic` seconds."""

    @property
    def rounds(self) -> int:
        return 2 if self.dry_run else 15

    def vocab_size(self, name: str) -> int | None:
        """Return the vocabulary of random tokens of a model, or None for one that reads text."""
        return 1000 if self.dry_run and name in VOCABULARIES else VOCABULARIES.get(name)

    def model(self, name: str) -> tuple[str, ...]:
        """Return the overrides of a model; the dry run has one tiny model."""
        if self.dry_run:
            return ("model=gpt2_nano", "device=cpu", "deterministic=false")
        return (*MODELS_ON_GPU[name], "device=cuda")


# Measuring.


def ways(options: Options, model: str, runs: int = 1) -> dict[str, Training]:
    """Return normlab's ways to train some runs."""
    overrides, vocab_size = options.model(model), options.vocab_size(model)
    pack = f" pack of {runs}" if runs > 1 else ""
    eager, graph = (*overrides, "train.graph=off"), (*overrides, "train.graph=on")
    return {
        f"normlab{pack}, eager": Normlab(eager, runs=runs, vocab_size=vocab_size),
        f"normlab{pack}, graph": Normlab(graph, runs=runs, vocab_size=vocab_size),
        f"normlab{pack}, compiled": Normlab(eager, compiled=True, runs=runs, vocab_size=vocab_size),
        f"normlab{pack}, compiled, graph": Normlab(graph, compiled=True, runs=runs, vocab_size=vocab_size),
    }


def baselines(options: Options, model: str) -> dict[str, Training]:
    overrides, vocab_size = options.model(model), options.vocab_size(model)
    sides: dict[str, Training] = {}
    if options.nanogpt is not None:
        theirs = NanoGPT(overrides, vocab_size=vocab_size, clone=options.nanogpt)
        sides = {"nanoGPT, eager": theirs, "nanoGPT, compiled": theirs.as_compiled()}
    plain = PlainLoop(overrides, vocab_size=vocab_size)
    return sides | {
        "plain loop, eager": plain,
        "plain loop, compiled": plain.as_compiled(),
        "plain loop, CUDA graphs": plain.as_compiled("reduce-overhead"),
    }


def choose(options: Options, sides: Mapping[str, Training], *patterns: str) -> dict[str, Training]:
    """Return the sides whose names match a pattern completely; a dry run has no compiled ones and no graphs."""
    return {
        name: side
        for name, side in sides.items()
        if any(re.fullmatch(pattern, name) for pattern in patterns)
        and not (options.dry_run and (side.compiled or "train.graph=on" in side.overrides))
    }


def set_up(options: Options, model: str, sides: Mapping[str, Training], ready: list[Side]) -> Iterator[Measurement]:
    """Start all sides at the same time; add those that are ready in time to `ready`, and yield the others' errors."""
    start = time.monotonic()
    ready_by = start + SETUP_SHARE * (options.deadline - start)
    for side in [Side(name, work, fork=True) for name, work in sides.items()]:
        try:
            side.set_up(max(0.0, ready_by - time.monotonic()))
            ready.append(side)
        except SideError as error:
            yield {"model": model, "side": side.name, "error": str(error)}
            side.stop()


def compare(options: Options, model: str, sides: Mapping[str, Training]) -> Iterator[Measurement]:
    """Measure sides in turns; yield the measurement of each."""
    ready: list[Side] = []
    yield from set_up(options, model, sides, ready)
    for each in [*ready]:
        try:
            each.turn()  # the first one warms the caches
            each.turns.clear()
        except SideError as error:
            ready.remove(each)
            yield {"model": model, "side": each.name, "error": str(error)}
    if ready:
        take_turns(ready, options.rounds)
    for each in ready:
        yield {"model": model, **describe(each, sides[each.name])}
    for side in ready:
        side.stop()


def at_once(options: Options, model: str, name: str, work: Training, count: int) -> Iterator[Measurement]:
    """Measure processes that train at the same time; a turn ends when the last one has made its 10 steps."""
    sides = {f"{name}: process {number + 1}": work for number in range(count)}
    ready: list[Side] = []
    yield from set_up(options, model, sides, ready)
    if len(ready) == count:
        seconds: list[float] = []
        for _ in range(options.rounds + 1):
            start = time.perf_counter()
            for side in ready:
                side.start_turn()
            ready[0].turns.append(max((side.wait() for side in ready), key=lambda turn: turn.seconds))
            seconds.append(time.perf_counter() - start)
        found = {"model": model, **describe(ready[0], work, seconds[1:])}
        found |= {key: count * found[key] for key in ("runs", "tokens_per_s", "flops_per_s")}
        found["ms_per_step_and_run"] /= count
        found["peak_gib"] = found["peak_gib"] and count * found["peak_gib"]
        yield found | {"side": f"{name}: {count} processes at once"}
    for side in ready:
        side.stop()


# The parts.


def machine(options: Options) -> Iterator[Measurement]:
    """The machine and the software."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    yield {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": nanogpt.commit_of(ROOT),
        "nanogpt_commit": None if options.nanogpt is None else nanogpt.commit_of(options.nanogpt),
        "device_name": "cpu (dry run)" if options.dry_run else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpu": next((line.partition(": ")[2] for line in cpus if line.startswith("model name")), None),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "nvidia_smi": nvidia_smi(),
    }


def nvidia_smi() -> str | None:
    """Return driver, clocks, power limit and memory of the first GPU, or None without nvidia-smi."""
    fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,memory.total,mig.mode.current"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        first = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.partition("\n")[0]
        values = first.split(", ")
        return ", ".join(f"{field} {value}" for field, value in zip(fields.split(","), values, strict=True))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def correctness(options: Options) -> Iterator[Measurement]:
    """Tests marked gpu."""
    # Only their files: the others' imports need packages that a machine with a GPU may lack.
    tests = ROOT / "tests"
    files = [str(path) for path in sorted(tests.rglob("test_*.py")) if re.search(r"\bmark\.gpu\b", path.read_text())]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", *files]
    start, line = time.monotonic(), ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)  # to the messages
            if found := re.match(r"(\S+::.+?) (FAILED|ERROR)\b", line):
                yield {"side": found[1], "error": f"{found[2].lower()}; see {MESSAGES}"}
    counts = {f"{each}": int(number) for number, each in re.findall(r"(\d+) (passed|failed|skipped)", line)}
    found = {"side": "all", **counts, "seconds": time.monotonic() - start}
    yield found | ({"error": f"pytest: exit code {process.returncode}"} if process.returncode else {})


def single(options: Options) -> Iterator[Measurement]:
    """4x128, a single run: eager, compiled and as a CUDA graph."""
    sides = baselines(options, "4x128") | ways(options, "4x128")
    yield from compare(options, "4x128", choose(options, sides, ".*"))


def packs(options: Options) -> Iterator[Measurement]:
    """4x128 in packs, and processes of nanoGPT at once."""
    sizes = (2,) if options.dry_run else (16, 8, 32)
    sides: dict[str, Training] = {}
    for runs in sizes:
        kinds = (".*, eager", ".*, graph") + ((".*, compiled",) if runs == 16 else ())
        sides |= choose(options, ways(options, "4x128", runs), *kinds)
    yield from compare(options, "4x128", sides)
    for name, work in choose(options, baselines(options, "4x128"), "nanoGPT, .*").items():
        yield from at_once(options, "4x128", name, work, sizes[0])


def large(options: Options) -> Iterator[Measurement]:
    """GPT-2 124M and 6x384, a single run: tok/s and MFU."""
    for model in ("gpt2_124m", "6x384"):
        sides = baselines(options, model) | ways(options, model)
        kinds = ("nanoGPT, compiled", "normlab, compiled(, graph)?", "normlab, eager")
        yield from compare(options, model, choose(options, sides, *kinds))


def measured(options: Options) -> Iterator[Measurement]:
    """4x128 with statistics: never, every 10 steps, every step, and an extended pass every 10 steps."""
    cadences = {
        "no statistics": ("stats=off",),
        "core every 10 steps": (),
        "core every step": ("stats.every=1",),
        "core and an extended pass every 10 steps": ("stats.tiers=[core,extended]", "stats.extended_every=10"),
    }
    sides: dict[str, Training] = {}
    for name, overrides in cadences.items():
        for kind, graph in (("eager", ("train.graph=off",)), ("graph", ("train.graph=on",))):
            sides[f"{name}, {kind}"] = Normlab((*options.model("4x128"), *overrides, *graph))
    yield from compare(options, "4x128", choose(options, sides, ".*"))


def sweeps(options: Options) -> Iterator[Measurement]:
    """Wall-clock time of 16 runs of 500 steps of 4x128, with the starts of processes."""
    runs, steps = (2, 20) if options.dry_run else (16, 500)
    overrides = options.model("4x128")
    found = {"model": "4x128", "runs": runs, "steps": steps}
    seconds = sweep_seconds(overrides, runs, steps)
    yield {**found, "side": "normlab sweep", "seconds": seconds, "s_per_run": seconds / runs}
    if options.nanogpt is not None:
        for compiled in (False,) if options.dry_run else (False, True):
            side = f"nanoGPT, {'compiled' if compiled else 'eager'}, {runs} at once"
            seconds = nanogpt_seconds(options.nanogpt, overrides, runs, steps, runs, compiled=compiled)
            yield {**found, "side": side, "seconds": seconds, "s_per_run": seconds / runs}


@dataclass(frozen=True, slots=True)
class Part:
    seconds: int
    """Its seconds of eleven minutes; in proportion if there are others."""
    measure: Callable[[Options], Iterator[Measurement]]


PARTS: Mapping[str, Part] = {
    "machine": Part(10, machine),
    "correctness": Part(180, correctness),
    "single": Part(90, single),
    "packs": Part(150, packs),
    "large": Part(140, large),
    "statistics": Part(40, measured),
    "sweeps": Part(50, sweeps),
}
"""The most important first."""


# Running parts.


def run_part(name: str, options: Options, seconds: float, messages: int) -> Iterator[Measurement]:
    """Yield the measurements of a part that runs in a process of its own, at most for some seconds."""
    deadline = time.monotonic() + seconds
    receiving, sending = multiprocessing.Pipe(duplex=False)
    # Forked, so that torch is imported once: this process never uses CUDA, nor a thread of torch.
    process = multiprocessing.get_context("fork").Process(
        target=measure_part, args=(name, options, deadline, sending, messages)
    )
    process.start()
    sending.close()
    try:
        while receiving.poll(max(0.0, deadline - time.monotonic())):
            yield receiving.recv()
        yield {"error": f"stopped after {seconds:.0f} s"}
    except EOFError:
        process.join()
        if process.exitcode:
            yield {"error": f"the process ended with exit code {process.exitcode}; see {MESSAGES}"}
    finally:
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its sides too
        process.join()


def measure_part(name: str, options: Options, deadline: float, pipe: Connection, messages: int) -> None:
    """Send the measurements of a part, in a process group of its own."""
    os.setpgid(0, 0)
    for stream in (1, 2):
        os.dup2(messages, stream)
    options = Options(options.dry_run, options.nanogpt, deadline)
    try:
        for measurement in PARTS[name].measure(options):
            pipe.send(measurement)
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"error": f"{type(error).__name__}: {error}"})


# The page.

COLUMNS = {
    "model": "model", "batch": "batch", "side": "side", "runs": "runs", "ms_per_step": "ms/step",
    "quartiles": "quartiles", "ms_per_step_and_run": "ms/step per run", "tokens_per_s": "tok/s", "mfu": "MFU",
    "peak_gib": "peak GiB", "setup_s": "set-up s", "steps": "steps", "seconds": "s", "s_per_run": "s per run",
    "passed": "passed", "failed": "failed", "skipped": "skipped", "error": "error",
}  # fmt: skip


def page(lines: Sequence[Measurement]) -> str:
    here = next((line for line in lines if "device_name" in line), {})
    sections = [f"# Measured by scripts/gpu: {here.get('device_name', 'unknown machine')}\n"]
    sections += [f"- {name}: {value}" for name, value in here.items() if name != "part" and value is not None]
    for name, part in PARTS.items():
        if rows := [with_mfu(line, here) for line in lines if line["part"] == name and line is not here]:
            sections.append(f"\n## {name}: {part.measure.__doc__}\n\n{table(rows, COLUMNS)}")
    return "\n".join(sections) + "\n"


def with_mfu(line: Measurement, here: Measurement) -> Measurement:
    """Return a measurement with its MFU, where the GPU's peak is known."""
    precision = "bf16" if line.get("precision") == "auto" else line.get("precision")
    peak = peak_flops(here.get("device_name"), precision)
    return line | {"mfu": f"{line['flops_per_s'] / peak:.1%}"} if peak and "flops_per_s" in line else line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="a part to measure (default: all)")
    parser.add_argument("--minutes", type=float, default=12, help="time for all parts (default: 12)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder (default: results/bench/gpu-TIME)")
    nanogpt.add_option(parser, " as a baseline")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args(arguments)
    if options.dry_run:  # small enough for one thread, which needs no idle cores
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"
    end = time.monotonic() + 60 * options.minutes
    names = ["machine", *(name for name in PARTS if name != "machine" and name in (options.part or PARTS))]
    folder = options.out or ROOT / "results" / "bench" / f"gpu-{datetime.now():%Y-%m-%d-%H%M%S}"
    if (folder / MEASUREMENTS).exists():
        parser.error(f"--out {folder}: has measurements; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[Measurement] = []
    with (folder / MEASUREMENTS).open("w") as file, (folder / MESSAGES).open("w") as messages:
        for number, name in enumerate(names):
            share = PARTS[name].seconds / sum(PARTS[each].seconds for each in names[number:])
            seconds = share * (end - time.monotonic())  # what a part leaves, the next ones share
            if seconds < 1:
                found: Iterator[Measurement] = iter([{"skipped_part": "the minutes are used up"}])
            else:
                found = run_part(name, Options(options.dry_run, options.nanogpt), seconds, messages.fileno())
            for measurement in found:
                line = {"part": name, **measurement}
                file.write(json.dumps(line) + "\n")
                file.flush()
                lines.append(line)
                print("  ".join(f"{key} {shorten(value)}" for key, value in line.items()), flush=True)
                if name == "machine" and "error" in line and not options.dry_run:
                    print("error: torch sees no GPU; use --dry-run, or a machine with a GPU", file=sys.stderr)
                    return 2
            (folder / PAGE).write_text(page(lines))  # after each part: the machine may be taken away
    print(folder / PAGE)
    return int(any("error" in line for line in lines))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes of a part end too
    sys.exit(main())
