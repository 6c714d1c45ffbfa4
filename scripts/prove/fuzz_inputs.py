#!/usr/bin/env python3
"""Mutate every input of normlab, and test that it is rejected or used as written.

    .venv/bin/python scripts/prove/fuzz_inputs.py [--count 1000] [--seed 0] [--kind records] [--only records/17]

A case is one or more calls of the command line, in this process and in a folder of its own. Kinds: `overrides` (the
command line) and `records` (run.json, status.json, metrics.jsonl, tokenizer.json, and the files of checkpoints). Each
call must satisfy:

- it exits with 0 or 2, and never with a traceback;
- an error is one line, names the input, and changes no file;
- an accepted override is in the printed config;
- a run with damaged files is rejected, or resumes and ends bit for bit like the undamaged run;
- a damaged record is shown as damaged, or shows only values of the undamaged record.

Prints a table, and each failure with the options that repeat it; exits with 1 after a failure.
"""

from __future__ import annotations

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

import yaml

SHARES = {"overrides": 60, "records": 40}
"""Cases of each kind in a hundred."""
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
    prepare: Callable[[Path], Any] = lambda folder: None
    names: list[str] = field(default_factory=list)
    judge: Callable[[Path, Result, list[str]], str] = lambda folder, result, arguments: ""
    """Returns the problem with an accepted call, or an empty text."""


ODD = (
    "", " ", "null", "None", "true", "yes", "0", "-1", "1", "2", "3", "1.5", "1e3", "1e400", "nan", "inf", "-inf",
    "99999999999999999999", "1" * 5000, "0x10", "1_000", "[]", "[1,2]", "{}", "{a:1}", "a,b", "a b", "é", "日本", "\n",
    "\x00x", "\x1b[31m", "'", '"', "\\", "${seed}", "${foo}", "${oc.env:HOME}", "???", "~", "=", "a=b", "(", "x" * 300,
    "../x", "/dev/null", "/dev/zero", ".", "range(3)", "choice(1,2)", "int(3)", "glob(*)", "\udcff", "%s", "{0}", "&",
    "$(x)", "-", "--", "#", "1e-320", "on", "off", "auto",
)  # fmt: skip


def mutate_text(draw: random.Random, text: str) -> str:
    """Return the text after one to three edits of characters."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text) + 1)
        letter = draw.choice(["", text[at : at + 1] * 2, draw.choice("abz019.=_-+~@[]{}(),:;'\"\\/ $é\t")])
        text = text[:at] + letter + text[at + draw.randint(0, 1) :]
    return text


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


# Overrides.


def options_of_run(lab: Lab) -> dict[str, Any]:
    """Return every option of the undamaged run with its value."""
    from normlab.config.compose import compose_run
    from normlab.options import flatten_options

    return flatten_options(compose_run([*SMALL, f"data.path={lab.corpus}"]))


def overrides(draw: random.Random, lab: Lab) -> Case:
    """Return a case with one or two mutated overrides of `train`, whose config is printed."""
    known = options_of_run(lab)
    groups = {"norm": "rmsnorm", "placement": "pre", "model": "gpt2_nano", "data": "files", "optim": "adamw"}

    def mutated_override() -> str:
        option = draw.choice([*known, *groups])
        value = groups.get(option) or str(known[option])
        number = draw.choice([2, 7, 64, 10**5, 2**31, 2**63, 10**30, -1, 0])
        flags = ("--cfg", "--config-name", "--config-dir", "-m", "-h", "--nope", "--multirun")
        return draw.choice([
            f"{option}={draw.choice(ODD)}", f"{option}={draw.choice(ODD)}", mutate_text(draw, f"{option}={value}"),
            f"{option}={mutate_text(draw, value)}", f"{mutate_text(draw, option)}={value}", draw.choice(ODD),
            draw.choice(["+", "++", "~", "@", "-", "--", " "]) + f"{option}={value}",
            f"{draw.choice([name for name in known if isinstance(known[name], int)])}={number}",
            f"{draw.choice(flags)}={draw.choice(['job', 'x', '', 'é', '/nowhere'])}",
        ])  # fmt: skip

    mutated = [text for text in (mutated_override() for _ in range(draw.choice([1, 1, 1, 2]))) if "\0" not in text]
    mutated = mutated or ["norm"]
    base = [*SMALL, f"data.path={lab.corpus}", "--cfg", "job"]
    names = [part for override in mutated for part in parts_of(override)]
    return Case(" ".join(mutated), [["train", *base, *mutated]], names=names, judge=judge_overrides)


def parts_of(override: str) -> list[str]:
    """Return the option and the value of an override; an error message must show one of them."""
    key, _, value = override.partition("=")
    key = key.strip("+~- @")
    return [part for part in (key, key.rpartition(".")[2], value[:50].strip()) if part.strip("- \n")] or [
        override.strip() or repr(override)[1:-1]
    ]


def judge_overrides(folder: Path, result: Result, arguments: list[str]) -> str:
    """Check that the printed config has each option that was set."""
    config = yaml.safe_load(result.out)
    if not isinstance(config, dict) or "train" not in config:  # a help page
        return ""
    options = {
        text.partition("=")[0].lstrip("+").strip(): text for text in arguments[1:] if "=" in text and text[0] != "-"
    }
    for option, override in options.items():
        value: Any = config
        for part in option.split(".") if "=" in override and not option.startswith("hydra") else ():
            if not isinstance(value, dict) or part not in value:
                return f"accepted {override!r}, and the config has no {option}"
            value = value[part]
        if isinstance(value, dict):
            value = {value.get("name"), value.get("preset")}
        if not means(override.partition("=")[2], value):
            return f"accepted {override[:80]!r}, and the config has {value!r:.80}"
    return ""


def means(text: str, value: Any) -> bool:
    """Return whether an override's text sets this value; only plain numbers and words are judged."""
    text = text.strip(" \t'\"")
    if isinstance(value, set):
        return text in value or "$" in text
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(text) == float(value)
        return "$" in text or "(" in text
    return not text.isalnum() or not isinstance(value, str) or text == value or text.lower() == "null"


# Records and checkpoints.


def only_run(folder: Path) -> Path:
    return next((folder / "results" / "runs").iterdir())


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the record's rows without times."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] != "pace"]


def records(draw: random.Random, lab: Lab) -> Case:
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

    calls = [["summarize", "results", "--format", "json"], ["compare", "results", "-o", "page.html"], ["list", "runs"]]
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

KINDS: dict[str, Callable[[random.Random, Lab], Case]] = {"overrides": overrides, "records": records}


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


def fuzz(seed: int, counts: dict[str, int], only: str = "") -> tuple[dict[str, Counter[str]], list[str]]:
    """Run cases of each kind; return counts of outcomes by kind, and the failures."""
    table: dict[str, Counter[str]] = {kind: Counter() for kind in counts}
    failures: list[str] = []
    with laboratory() as lab:
        for name in [f"{kind}/{number}" for kind, count in counts.items() for number in range(count)]:
            if only in ("", name):
                kind = name.partition("/")[0]
                case = KINDS[kind](random.Random(f"{seed}/{name}"), lab)
                outcomes, problems = run_case(lab, case, lab.scratch / "case")
                table[kind] += Counter({"cases": 1, "failures": bool(problems)}) + outcomes
                failures += [f"{name} [{case.description[:120]!r}] {problem}" for problem in problems]
    return table, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="number of cases (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (default 0)")
    parser.add_argument("--kind", default=",".join(SHARES), help="kinds, separated by commas (default all)")
    parser.add_argument("--only", default="", help="one case by its name in a failure: records/17")
    options = parser.parse_args()
    # Print the stack if a library aborts: the outputs of calls are captured.
    faulthandler.enable(os.fdopen(os.dup(2), "w"))
    chosen = [options.only.partition("/")[0]] if options.only else options.kind.split(",")
    if foreign := set(chosen) - set(SHARES):
        parser.error(f"--kind {','.join(foreign)}: unknown kind; choose from {', '.join(SHARES)}")
    share = sum(SHARES[kind] for kind in chosen)
    counts = {kind: max(1, round(options.count * SHARES[kind] / share)) for kind in chosen}
    table, failures = fuzz(options.seed, counts, options.only)
    columns = ("cases", "accepted", "refused", "broken", "failures")
    print("".join(["kind".ljust(14), *(column.rjust(10) for column in columns)]))
    total = sum(table.values(), Counter())
    for kind, counts in {**table, "all": total}.items():
        print("".join([kind.ljust(14), *(str(counts[column]).rjust(10) for column in columns)]))
    for failure in failures:
        print(f"FAILED {failure.encode(errors='backslashreplace').decode()}")
    if failures:
        print(f"repeat one with --seed {options.seed} --count {options.count} --only KIND/NUMBER")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
