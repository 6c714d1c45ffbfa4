#!/usr/bin/env python3
"""Mutate every file of a record, and test that it is rejected or read as written.

    .venv/bin/python scripts/prove/fuzz_records.py [--count 1000] [--seed 0] [--only 17]

A case damages one file of a run: run.json, status.json, metrics.jsonl, tokenizer.json, or a file of a checkpoint. It
calls the command line, in this process and in a folder of its own. Each call must satisfy:

- it exits with 0 or 2, and never with a traceback;
- an error is one line, names the input, and changes no file;
- a run with damaged files is rejected, or resumes and ends bit for bit like the undamaged run;
- a damaged record is shown as damaged, or shows only values of the undamaged record.

Prints a table, and each failure with the options that repeat it; exits with 1 after a failure.
"""

import argparse
import contextlib
import faulthandler
import hashlib
import io
import json
import os
import random
import re
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS, STOPPED = 6, 4
"""Steps of the finished run, and the step at which the other run was stopped."""

SMALL = [
    "model=gpt2_nano", "model.depth=1", "model.width=16", "model.context=16", "train.batch_size=2",
    "eval.sequences=2", "data=files", "tracking.wandb=off", "device=cpu",
]  # fmt: skip

LEAKS = re.compile(r"Traceback|\b(Key|Type|Value|Attribute|Index|Runtime|Assertion)Error\b|<class '|object at 0x|\x1b")
"""Python's own terms, which a message must not contain."""

SAMPLE = ["sample", "rmsnorm", "--prompt", "the", "--tokens", "8", "--seed", "1"]


# Calling.


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str
    raised: str = ""


@dataclass(slots=True)
class Lab:
    """The corpus and the undamaged runs that all cases share."""

    scratch: Path
    corpus: Path
    finished: Path = Path()
    """A results folder with a finished run of `STEPS` steps."""
    stopped: Path = Path()
    """The same run, interrupted after `STOPPED` steps."""
    overrides: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The undamaged row of `summarize`, by folder."""
    samples: set[str] = field(default_factory=set)
    """Texts that the undamaged checkpoints generate."""


def call(*arguments: str) -> Result:
    from normlab import cli

    out, err, code, raised = io.StringIO(), io.StringIO(), 0, ""
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(list(arguments))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except Exception:
        code, raised = 1, traceback.format_exc()
    return Result(code, out.getvalue(), err.getvalue(), raised)


def files_of(folder: Path) -> dict[str, str]:
    """Return every file below with its SHA-256, or its size if it is huge, and every folder; locks are left out."""

    def content(path: Path) -> str:
        size = path.stat().st_size
        return hashlib.sha256(path.read_bytes()).hexdigest() if size < 2**30 else f"{size} bytes"

    return {
        str(path.relative_to(folder)): content(path) if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
        if path.name != "lock" and not (path.is_dir() and path.name in ("runs", "results"))
    }


# Conditions of every call.


def exit_problem(result: Result, names: Sequence[str] = ()) -> str:
    """Return the problem with a call's exit code or output, or an empty text.

    An error message must contain one of `names`.
    """
    if result.raised:
        return "traceback: " + result.raised.strip().splitlines()[-1][:300]
    if result.code not in (0, 2):
        return f"exit {result.code}: {result.err[-300:]}"
    if leak := LEAKS.search(result.err):
        return f"leaks {leak[0]!r}: {result.err[:300]}"
    if result.code == 0:
        return ""
    lines = [line for line in result.err.splitlines() if not line.startswith("normlab: ")]
    if len(lines) != 1 or not lines[0].startswith("error: ") or result.out:
        return f"an error of {len(lines)} lines: {result.err[:400]}{result.out[:200]}"
    # A message shows control characters as escapes, and white space as a single blank.
    shown = [" ".join(name.encode(errors="backslashreplace").decode().split()) for name in names]
    return "" if not names or any(name in lines[0] for name in shown) else f"does not name {names}: {lines[0]}"


@dataclass(slots=True)
class Case:
    """Calls in a folder, and the condition on each."""

    description: str
    calls: list[list[str]]
    prepare: Callable[[Path], Any]
    names: list[str]
    judge: Callable[[Path, Result, list[str]], str]
    """Returns the problem with an accepted call, or an empty text."""


def mutate_bytes(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """Return a description of the mutation and the mutated bytes, which always differ."""
    size = len(content)
    # A fraction of the length, since times in the content change the length by a few bytes.
    at = int(draw.random() * size)
    how = draw.choice(["flip", "cut", "empty", "append", "zeros", "garbage", "drop", "twice"])
    mutated = {
        "flip": content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :],
        "cut": content[:at],
        "empty": b"",
        "append": content + draw.randbytes(draw.randint(1, 40)),
        "zeros": content[:at] + bytes(min(64, size - at)) + content[at + 64 :],
        "garbage": draw.randbytes(size),
        "drop": content[:at] + content[at + draw.randint(1, 64) :],
        "twice": content + content,
    }[how]
    return (f"{how} at {at} of {size}", mutated) if mutated != content else ("append", content + b"x")


# Records and checkpoints.


def only_run(folder: Path) -> Path:
    return next((folder / "results" / "runs").iterdir())


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the record's rows without times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] != "pace"]


def damaged_record(draw: random.Random, lab: Lab) -> Case:
    """Return a case with a damaged file of a run, which is listed, summarised, sampled from and resumed."""
    source = draw.choice(["finished", "stopped"])
    original = lab.finished if source == "finished" else lab.stopped
    saved = f"checkpoints/{max((only_run(original) / 'checkpoints').iterdir()).name}"
    names = ["run.json", "status.json", "metrics.jsonl", "tokenizer.json", f"{saved}/state.safetensors"]
    file = draw.choice([*names, f"{saved}/meta.json", f"{saved}/manifest.json"])
    how, made = mutate_bytes(draw, (only_run(original) / file).read_bytes())

    def prepare(folder: Path) -> None:
        shutil.copytree(original, folder, dirs_exist_ok=True)
        damaged = only_run(folder) / file
        damaged.unlink() if not made else damaged.write_bytes(made)

    def judge(folder: Path, result: Result, arguments: list[str]) -> str:
        if arguments[0] == "sample" and file != "tokenizer.json":
            return "" if result.out in lab.samples else f"sampled {result.out!r}"
        if arguments[0] == "summarize":
            return wrong_row(json.loads(result.out), lab.summary[source])
        if arguments[0] == "train" and source == "stopped" and rows_of(only_run(folder)) != lab.rows:
            return "ended differently from the undamaged run"
        return ""

    calls = [["summarize", "results", "--format", "json"], ["compare", "results", "-o", "page.html"]]
    known = [Path(file).name, "checkpoint", only_run(original).name, "no run"]
    return Case(f"{source} {file}: {how}", [*calls, SAMPLE, ["train", *lab.overrides]], prepare, known, judge)


def wrong_row(rows: list[dict[str, Any]], undamaged: dict[str, Any]) -> str:
    """Return the problem with the summary of a damaged run, or an empty text."""
    if len(rows) != 1:
        return f"{len(rows)} rows"
    (row,) = rows
    if row["state"] == "damaged":
        return "" if row["note"] else "damaged, without a note"
    # The note explains what is missing; a run without a name is shown by its id.
    ignored = {"note", "run"} | ({"state"} if row["state"] in ("killed", "running") and row["note"] else set())
    other = {key for key, value in row.items() if value is not None and value != undamaged[key]} - ignored
    if other:
        return "shows " + ", ".join(f"{key} {row[key]!r} for {undamaged[key]!r}" for key in sorted(other))
    blank = {key for key, value in row.items() if value is None and undamaged[key] is not None}
    return f"finished without {sorted(blank)}, no note" if blank and not row["note"] else ""


# The command.


@contextlib.contextmanager
def laboratory() -> Iterator[Lab]:
    """Make a folder with a corpus, a finished run and a stopped one, and restore the environment at the end."""
    scratch = Path(tempfile.mkdtemp(prefix="normlab_fuzz_"))
    before, here = dict(os.environ), Path.cwd()
    os.environ.update(
        NORMLAB_CACHE=str(scratch / "cache"), HOME=str(scratch), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
        PYTHONPATH=str(Path(__file__).resolve().parents[2]),
    )  # fmt: skip
    try:
        yield make_lab(scratch)
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(scratch, ignore_errors=True)


def make_lab(scratch: Path) -> Lab:
    """Make the corpus and the undamaged runs."""
    from normlab.training import checkpoint

    draw = random.Random(0)
    corpus = scratch / "corpus.txt"
    corpus.write_text(
        "\n".join(
            " ".join(draw.choices(["the", "norm", "a", "layer", "scales", "its", "mean"], k=9)) for _ in range(80)
        )
    )
    lab = Lab(scratch, corpus, scratch / "finished", scratch / "stopped")
    lab.overrides = [
        *SMALL, f"data.path={corpus}", f"train.steps={STEPS}", "train.checkpoint_every=2", "eval.every=3",
        "train.log_every=1", "data.tokenizer=chars",
    ]  # fmt: skip
    real = checkpoint.save

    def save(folder: Path, step: int, *arguments: Any, **options: Any) -> None:
        real(folder, step, *arguments, **options)
        if step == STOPPED:
            raise KeyboardInterrupt

    for name in ("finished", "stopped"):
        (scratch / name).mkdir()
        os.chdir(scratch / name)
        if name == "stopped":
            checkpoint.save = save
        try:
            result = call("train", *lab.overrides)
        finally:
            checkpoint.save = real
        if result.code != (0 if name == "finished" else 130):
            raise RuntimeError(result.err + result.raised)
        lab.summary[name] = json.loads(call("summarize", "--format", "json").out)[0]
        lab.samples.add(call(*SAMPLE).out)
        run = only_run(scratch / name)
        # Sample from the older checkpoint too, because normlab uses it if the newest is damaged.
        newest = max((run / "checkpoints").iterdir())
        newest.rename(scratch / "aside")
        lab.samples.add(call(*SAMPLE).out)
        (scratch / "aside").rename(newest)
    lab.rows = rows_of(only_run(lab.finished))
    return lab


def run_case(lab: Lab, case: Case, folder: Path) -> tuple[Counter[str], list[str]]:
    """Run the calls of a case; return counts of their outcomes and the problems."""
    folder.mkdir()
    case.prepare(folder)
    os.chdir(folder)
    counts: Counter[str] = Counter()
    problems: list[str] = []
    try:
        for arguments in case.calls:
            before = files_of(folder)
            result = call(*arguments)
            counts["refused" if result.code == 2 else "accepted" if result.code == 0 else "broken"] += 1
            problem = exit_problem(result, case.names)
            if not problem and result.code == 2 and files_of(folder) != before:
                changed = {name for name, _ in files_of(folder).items() ^ before.items()}
                problem = f"refused, and changed {sorted(changed)}: {result.err.strip()[:200]}"
            if not problem and result.code == 0:
                problem = case.judge(folder, result, arguments)
            if problem:
                shown = " ".join(text for text in arguments if text not in (*SMALL, *lab.overrides))
                problems.append(f"normlab {shown[:200]}: {problem}".replace(str(lab.scratch), "..."))
    finally:
        os.chdir(lab.scratch)
        shutil.rmtree(folder, ignore_errors=True)
    return counts, problems


def fuzz(seed: int, cases: Sequence[int]) -> tuple[Counter[str], list[str]]:
    """Run the cases of these numbers; return counts of outcomes, and the failures."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    with laboratory() as lab:
        for number in cases:
            case = damaged_record(random.Random(f"{seed}/{number}"), lab)
            outcomes, problems = run_case(lab, case, lab.scratch / "case")
            counts += Counter({"cases": 1, "failures": bool(problems)}) + outcomes
            failures += [f"{number} [{case.description[:120]!r}] {problem}" for problem in problems]
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="number of cases (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default 0)")
    parser.add_argument("--only", type=int, help="one case by its number in a failure")
    options = parser.parse_args()
    # Print the stack if a library aborts: the outputs of calls are captured.
    faulthandler.enable(os.fdopen(os.dup(2), "w"))
    counts, failures = fuzz(options.seed, range(options.count) if options.only is None else [options.only])
    print(", ".join(f"{counts[name]} {name}" for name in ("cases", "accepted", "refused", "broken", "failures")))
    for failure in failures:
        print(f"FAILED {failure.encode(errors='backslashreplace').decode()}")
    if failures:
        print(f"repeat one with --seed {options.seed} --only NUMBER")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
