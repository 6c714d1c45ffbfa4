#!/usr/bin/env python3
"""Exchange the files of two runs, and damage them, and read the results with every command that reads.

    .venv/bin/python scripts/prove/swap_files.py [--damages 100] [--seed 0]

Two finished runs, each of its own sweep, and two killed runs are trained, which differ in the seed only, so that each
file of one fits the other. Then each file of the first finished run, of its sweep and of the first killed run is
exchanged with that of the second; and files that are chosen at random are changed by a bit, cut, emptied or deleted.

After each change every command must either print what it prints without the change, or say which run or file is
damaged. It never ends with a traceback. A command need not name damage in a file that it does not read. The rows at the
end of an unfinished run may be cut off: it is then a run that was killed earlier.

Exits with 1 if a command shows changed numbers without a word.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from normlab import cli
from normlab.store.runs import RunFolder
from normlab.training import checkpoint

COMMON = (
    "model=gpt2_nano model.depth=2 model.width=32 data=stdlib data.max_tokens=20000 train.batch_size=4 "
    "eval.sequences=8 eval.every=5 tracking.wandb=off data.tokenizer=chars stats.every=5 train.log_every=1"
)
FINISHED = tuple(
    f"sweep {COMMON} train.steps=20 seed={seed} run.name=finished{seed} sweep.name=sweep{seed}" for seed in (0, 1)
)
KILLED = tuple(
    f"train {COMMON} train.steps=24 train.checkpoint_every=8 seed={seed} run.name=k{seed}" for seed in (0, 1)
)
READ = (
    "summarize results", "summarize results --runs", "summarize results --target 9.0 --by seed",
    "compare results -o page.html", "figure loss results -o loss.svg",
    "figure layers results -o layers.svg --statistic resid_rms", "inspect {run}",
    "inspect {run} resid_rms --json", "inspect {run} spikes", "eval {run}", "sample {run} --tokens 5 --seed 0",
    "list sweeps", "summarize sweep0", "share sweep0 -o it.zip",
)  # fmt: skip
"""What is read: `{run}` is the run whose file is changed."""
WRITTEN = ("page.html", "loss.svg", "layers.svg")
NEW = "it.zip"
"""What a command writes and does not replace; a damaged file may be in it, since whoever reads it names the damage."""
VARYING = re.compile(r"[ -]{2,}|[\d.]+ (seconds|s|B|KiB|MiB)\b|\d+ tok/s|\d{4}-\d\d-\d\dT?[\d:.]*|\"written\":[\d.]+")
"""Texts that differ from one call to the next, and the widths of columns, which follow from them."""
DAMAGED = re.compile(
    r"damaged|is missing|are missing|no intact|are gone|is of run|restore|left out|no run|not the tokenizer|is of sweep"
)
"""Words of a line that names damage."""
DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {}


def damage(function: Callable[[Path, random.Random], None]) -> Callable[[Path, random.Random], None]:
    DAMAGES[function.__name__] = function
    return function


@damage
def flip_a_bit(path: Path, choose: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)


@damage
def cut(path: Path, choose: random.Random) -> None:
    os.truncate(path, choose.randrange(path.stat().st_size))


@damage
def empty(path: Path, _: random.Random) -> None:
    os.truncate(path, 0)


@damage
def delete(path: Path, _: random.Random) -> None:
    path.unlink()


def call(command: str) -> tuple[int, str, str]:
    """Return the exit status of a command line of normlab and what it printed, with what it wrote."""
    Path(NEW).unlink(missing_ok=True)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(command.split()) or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    written = ""
    for name in WRITTEN:
        if code == 0 and name in command:
            written = Path(name).read_text(encoding="utf-8", errors="replace")
    return int(code), VARYING.sub("", out.getvalue() + written), err.getvalue()


def kill_after(steps: int) -> None:
    """End a training of this process as a kill would, when it has written a checkpoint of these steps."""
    save = checkpoint.save

    def save_and_die(folder: Path, step: int, *arguments: object, **options: object) -> None:
        save(folder, step, *arguments, **options)  # pyright: ignore[reportArgumentType]
        if step >= steps:
            os._exit(0)

    checkpoint.save = save_and_die


def train_all() -> None:
    for command in FINISHED:
        if call(command)[0]:
            raise RuntimeError(command)
    for command in KILLED:
        child = os.fork()
        if not child:
            kill_after(16)
            call(command)
            os._exit(1)
        os.waitpid(child, 0)


def changes(damages: int, seed: int) -> Iterator[tuple[str, Path, Callable[[], None]]]:
    """Yield the text of each change, the folder of its run, and a function that makes it."""
    by_seed = {RunFolder(path).run()["name"]: path for path in sorted(Path("results/runs").iterdir())}
    sweeps = [Path("results/sweeps", name) for name in ("sweep0", "sweep1")]
    pairs = ((by_seed["finished0"], by_seed["finished1"]), (by_seed["k0"], by_seed["k1"]), sweeps)
    for first, second in pairs:
        for path in files(first):
            other = second / path.relative_to(first)
            if other.exists():

                def swap(one: Path = path, two: Path = other) -> None:
                    content = one.read_bytes()
                    one.write_bytes(two.read_bytes())
                    two.write_bytes(content)

                yield f"{path} exchanged", first, swap
    choose = random.Random(seed)
    for _ in range(damages):
        folder = choose.choice([*sorted(by_seed.values()), *sweeps])
        path, name = choose.choice(files(folder)), choose.choice(sorted(DAMAGES))
        is_rows = path.name == "metrics.jsonl" or path.suffix == ".bin"
        if name == "cut" and is_rows and RunFolder(folder).state() != "finished":
            continue
        if name == "delete" and path.name == "plan.json":  # the folder is no sweep then, and not in a list of sweeps
            continue
        yield f"{path} {name}", folder, lambda path=path, name=name: DAMAGES[name](path, choose)


def _names_damage(text: str, folder: Path, path: str) -> bool:
    """Whether a line, or its continuation, names a run or its file, and the damage; a list of sweeps has a number."""
    joined = text.replace("\n  ", " ")
    if re.search(r"\d damaged\b", joined):
        return True
    return any((folder.name in line or path in line) and DAMAGED.search(line) for line in joined.splitlines())


def files(folder: Path) -> list[Path]:
    """Return the files of a run or a sweep that a command reads."""
    unread = ("lock", "wandb.lock", "ends.jsonl")
    found = (path for path in folder.rglob("*") if path.is_file() and path.name not in unread and path.suffix != ".log")
    return sorted(path for path in found if path.stat().st_size)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    problems: list[str] = []
    named = same = 0
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):
        train_all()
        shutil.copytree("results", "original")
        made_changes = list(changes(options.damages, options.seed))
        expected: dict[str, tuple[int, str, str]] = {}
        for text, folder, change in made_changes:
            shutil.rmtree("results")
            shutil.copytree("original", "results")
            run = folder.name if folder.parent.name == "runs" else "finished0"
            commands = [command.format(run=run) for command in READ]
            for command in commands:
                if command not in expected:
                    expected[command] = call(command)
            change()
            for command in commands:
                code, out, err = call(command)
                if (code, out) == expected[command][:2] and err == expected[command][2]:
                    same += 1
                elif _names_damage(out + err, folder, text.split()[0]) and "Traceback" not in err:
                    named += 1
                else:
                    problems.append(f"{text}: {command}: exits with {code}: {err.splitlines()[-1:] or 'nothing said'}")
    print("\n".join(problems))
    print(
        f"{len(made_changes)} changes: {named} readings name it, {same} do not read it, {len(problems)} show it unnamed"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
