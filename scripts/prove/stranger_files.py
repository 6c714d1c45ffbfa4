#!/usr/bin/env python3
"""Give hostile files of a stranger to normlab's commands, and print what each command answers, reads and takes.

    .venv/bin/python scripts/prove/stranger_files.py [NAME ...]

Each attack has a folder `inside`, in which the command runs, and a folder `outside`, which belongs to the user. A hook
in the process of the command records each file that it opens, each folder that it lists, each module that it imports,
each process that it starts and each connection that it makes, outside of the installation and of `inside`. Libraries in
Rust and C++ open files without the hook; so nothing of `outside` may appear in what is printed or written either.

Exits with 1 if a command reads outside, takes more than `SECONDS` or `LIMIT` bytes of memory, ends with a traceback, or
accepts an attack without an error.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 90.0
LIMIT = 2**34
"""Bytes of address space: torch maps several gigabytes without using them."""
MOST_MEMORY = 3 * 2**30
SECRET = "the secret of the user"
SMALL = (
    "model=gpt2_nano model.depth=1 model.width=32 norm=layernorm train.batch_size=4 eval.sequences=8 train.steps=4 "
    "train.checkpoint_every=2 tracking.wandb=off device=cpu"
)
OWN = f"{SMALL} data=files data.path=[text.txt] data.tokenizer=chars"
TEXT = "".join(f"line {number} of a text, which is long enough to be split.\n" for number in range(400))
ROWS = "".join(json.dumps({"text": f"document {number}: {TEXT[:200]}"}) + "\n" for number in range(60))

HARMLESS = ("/proc", "/sys", "/dev/null", "/dev/urandom", "/dev/shm", "/usr", "/lib", "/etc/ld.so", "/etc/localtime",
            "/etc/mime.types", "/etc/apache2/mime.types", "/etc/httpd", "/etc/nginx", "/etc/ssl", "/etc/os-release",
            "/etc/passwd", "/etc/nsswitch.conf", "/etc/debian_version", "/etc/lsb-release", "/bin")  # fmt: skip
"""What Python and its libraries read of every machine."""
PATHS = (
    "open",
    "os.listdir",
    "os.scandir",
    "os.remove",
    "os.rename",
    "os.truncate",
    "os.link",
    "os.symlink",
    "os.mkdir",
)
OTHERS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect")


# The process of a command


def run_watched(log: str, allowed: Sequence[str], command: Sequence[str]) -> None:
    """Run a command of normlab, and write what it touches outside of the allowed folders into a log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    permitted = tuple(os.path.realpath(path) for path in allowed)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        is_own_commit = event == "subprocess.Popen" and list(arguments[1])[:3] == ["git", "-C", str(ROOT)]
        if event in OTHERS and not is_own_commit:
            os.write(descriptor, f"{event} {arguments[:2]!r:.200}\n".encode())
        elif event in PATHS or event == "import":
            path = arguments[1] if event == "import" else arguments[0]
            if not isinstance(path, str | bytes) or not path:
                return
            real = os.path.realpath(os.fsdecode(path))
            if not any(real == each or real.startswith(f"{each}/") for each in permitted):
                os.write(descriptor, f"{event} {real}\n".encode(errors="replace"))

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    sys.addaudithook(note)
    sys.argv = ["normlab", *command]
    from normlab.cli import main as normlab_main

    sys.exit(normlab_main(list(command)))


# The attacks


@dataclass(frozen=True)
class Attack:
    name: str
    build: Callable[[Path, Path], None]
    """Writes the files of the attack into the folders `inside` and `outside`."""
    command: str
    answer: str
    """A regular expression of the error; empty if the command does its work without touching `outside`."""


ATTACKS: list[Attack] = []


def attack(name: str, command: str, answer: str) -> Callable[[Callable[[Path, Path], None]], None]:
    return lambda build: ATTACKS.append(Attack(name, build, command, answer))


def dataset(inside: Path, card: object = None) -> Path:
    (folder := inside / "dataset").mkdir()
    (folder / "a.jsonl").write_text(ROWS)
    if card is not None:
        (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    return folder


HUB = f"train {SMALL} data=hub data.name=dataset"
CARDS: dict[str, dict[str, object]] = {
    "card: a folder above": {"data_files": "../../outside/secret.jsonl"},
    "card: an absolute path": {"data_files": "OUTSIDE/secret.jsonl"},
    "card: a split": {"data_files": [{"split": "train", "path": ["a.jsonl", "OUTSIDE/*.jsonl"]}]},
    "card: data_dir": {"data_dir": "../../outside"},
    "card: an address": {"data_files": "http://127.0.0.1:9/x.jsonl"},
    "card: the hub": {"data_files": "hf://datasets/org/x/a.jsonl"},
    "card: an archive": {"data_files": "zip://a.jsonl::OUTSIDE/x.zip"},
}
for title, options in CARDS.items():

    @attack(title, HUB, r"README\.md: data_\w+ names .*, which is outside of")
    def _(inside: Path, outside: Path, options: dict[str, object] = options) -> None:
        text = json.dumps({"configs": [{"config_name": "default", **options}]}).replace("OUTSIDE", str(outside))
        dataset(inside, json.loads(text))


@attack("data: a link", HUB, "is a link to .*, outside of")
def _(inside: Path, outside: Path) -> None:
    (dataset(inside) / "b.jsonl").symlink_to(outside / "secret.jsonl")


@attack("data: a linked folder", HUB, "linked: is a link to")
def _(inside: Path, outside: Path) -> None:
    card = {"configs": [{"config_name": "default", "data_files": "linked/*.jsonl"}]}
    (dataset(inside, card) / "linked").symlink_to(outside)


@attack("data: a loading script", HUB, "scripts are no longer supported")
def _(inside: Path, outside: Path) -> None:
    (dataset(inside) / "dataset.py").write_text(f"open({str(outside / 'secret.jsonl')!r}).read()")


@attack("data: references that multiply", HUB, "README.md: cannot be read .has more than")
def _(inside: Path, outside: Path) -> None:
    (dataset(inside) / "README.md").write_text(f"---\n{bomb()}\n---\n")


@attack("data: a pipe", f"train {SMALL} data=files data.path=[pipe]", "is a device, a pipe")
def _(inside: Path, outside: Path) -> None:
    os.mkfifo(inside / "pipe")


@attack("data: a terabyte of holes", f"train {SMALL} data=files data.path=[huge.txt]", "of which the disk holds 0")
def _(inside: Path, outside: Path) -> None:
    sparse(inside / "huge.txt")


def bomb() -> str:
    levels = zip("abcdefgh", "bcdefghi", strict=True)
    return "\n".join(["a: &a [x]", *(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in levels)])


def sparse(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(2**40)


CONFIGS: dict[str, tuple[str, str]] = {
    "config: a package": ("defaults: [train, _self_]\nhydra: {searchpath: ['pkg://foreign']}", "sets 'hydra'"),
    "config: a folder": ("defaults: [train, _self_]\nhydra: {searchpath: ['file://OUTSIDE']}", "sets 'hydra'"),
    "config: a launcher": ("defaults: [train, {override hydra/launcher: x}]", "sets 'override hydra/launcher'"),
    "config: a file above": ("defaults: [train, {override norm: ../../../outside/secret}]", "its defaults list names"),
    "config: a variable": ("defaults: [train, _self_]\nrun: {name: '${oc.env:SECRET}'}", "reads the environment"),
    "config: a hidden variable": (
        "defaults: [train, _self_]\nrun: {name: '${oc.${tracking.project}:SECRET}'}\ntracking: {project: env}",
        "reads the environment",
    ),
    "config: references": (f"defaults: [train, _self_]\n{bomb()}", "has more than 131072 values"),
}  # fmt: skip
for title, (content, expected) in CONFIGS.items():

    @attack(title, f"train {OWN} -cd=configs -cn=mine", expected)
    def _(inside: Path, outside: Path, content: str = content) -> None:
        (inside / "configs" / "norm").mkdir(parents=True)
        (inside / "configs" / "mine.yaml").write_text(content.replace("OUTSIDE", str(outside)))
        (inside / "foreign").mkdir()
        (inside / "foreign" / "__init__.py").write_text(f"open({str(outside / 'secret.jsonl')!r}).read()")


@attack("config: a link", f"train {OWN} -cd=configs -cn=mine", "is a link to .*, outside of")
def _(inside: Path, outside: Path) -> None:
    (inside / "configs").mkdir()
    (inside / "configs" / "mine.yaml").symlink_to(outside / "secret.yaml")


MODEL = f"train {OWN} train.start_from=model"


def of_model(title: str, answer: str, name: str, make: Callable[[Path, Path], object]) -> None:
    """Add an attack that replaces a file of a model folder."""

    @attack(title, MODEL, answer)
    def _(inside: Path, outside: Path) -> None:
        path = inside / "model" / name
        path.unlink()
        make(path, outside)


of_model(
    "model: a pipe", "model.safetensors: cannot be read .is a pipe", "model.safetensors", lambda p, o: os.mkfifo(p)
)
of_model("model: a terabyte of holes", "of which the disk holds 0", "model.safetensors", lambda p, o: sparse(p))
of_model("model: a link", "is a link to", "model.safetensors", lambda p, o: p.symlink_to(o / "secret.jsonl"))
of_model("model: a folder", "Is a directory", "model.safetensors", lambda p, o: p.mkdir())
LIE = b'{"wte.weight": {"dtype": "F32", "shape": [274877906944], "data_offsets": [0, 1099511627776]}}'
of_model(
    "model: a header that lies", "and its header declares", "model.safetensors",
    lambda p, o: p.write_bytes(struct.pack("<Q", len(LIE)) + LIE),
)  # fmt: skip
of_model("model: a linked config", "is a link to", "config.json", lambda p, o: p.symlink_to(o / "secret.json"))
of_model("model: a config of a terabyte", "config.json: cannot be read .has", "config.json", lambda p, o: sparse(p))


def tokenizer_of(**parts: object) -> Callable[[Path, Path], None]:
    def build(inside: Path, outside: Path) -> None:
        definition = json.loads((inside / "model" / "tokenizer.json").read_text())
        (inside / "tokenizer.json").write_text(json.dumps(definition | parts))
        (inside / "text.txt").write_text(f"{'a' * 60}\n" * 400)

    return build


REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 10**6}
NFKC = [{"type": "Replace", "pattern": {"Regex": "[^x]"}, "content": "\ufdfa"}, {"type": "NFKC"}]
CHAIN = {"type": "Sequence", "normalizers": NFKC * 5}
DOUBLING = {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 40}
TABLE = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 4).decode()}
REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
SUBWORDS = f"train {SMALL} data=files data.path=[text.txt] data.tokenizer=tokenizer.json"
ATTACKS += [
    Attack("tokenizer: a long replacement", tokenizer_of(normalizer=REPLACE), SUBWORDS, "Replace has 1000000 char"),
    Attack("tokenizer: a chain", tokenizer_of(normalizer=CHAIN), SUBWORDS, r"takes more than 2\d\d MiB of memory"),
    Attack("tokenizer: a decoder", tokenizer_of(decoder=DOUBLING), SUBWORDS, r"takes more than 2\d\d MiB of memory"),
    Attack("tokenizer: a damaged table", tokenizer_of(normalizer=TABLE), SUBWORDS, "precompiled_charsmap is damaged"),
    Attack("tokenizer: exponential time", tokenizer_of(pre_tokenizer=REGEX), SUBWORDS, "cannot encode the text"),
]


def the_run(inside: Path) -> Path:
    (folder,) = (inside / "results" / "runs").iterdir()
    return folder


def stopped(inside: Path) -> Path:
    """Make the run one that was killed after its first checkpoint."""
    folder = the_run(inside)
    shutil.rmtree(folder / "checkpoints" / "step_00000004")
    (folder / "status.json").unlink()
    return folder


@attack("record: hard-linked metrics", f"train {OWN}", "")
def _(inside: Path, outside: Path) -> None:
    metrics = stopped(inside) / "metrics.jsonl"
    shutil.move(metrics, outside / "secret.metrics")
    os.link(outside / "secret.metrics", metrics)


@attack("record: a hard-linked lock", f"train {OWN}", "")
def _(inside: Path, outside: Path) -> None:
    (lock := stopped(inside) / "lock").unlink(missing_ok=True)
    os.link(outside / "secret.jsonl", lock)


@attack("record: linked checkpoints", f"train {OWN}", "is a symbolic link to")
def _(inside: Path, outside: Path) -> None:
    shutil.move(stopped(inside) / "checkpoints", outside / "checkpoints")
    (the_run(inside) / "checkpoints").symlink_to(outside / "checkpoints")


@attack("record: metrics that are a pipe", "summarize results", "")
def _(inside: Path, outside: Path) -> None:
    (metrics := the_run(inside) / "metrics.jsonl").unlink()
    os.mkfifo(metrics)


@attack("record: a checkpoint that is a pipe", "sample RUN --tokens 2", "damaged")
def _(inside: Path, outside: Path) -> None:
    for weights in (the_run(inside) / "checkpoints").glob("*/state.safetensors"):
        weights.unlink()
        os.mkfifo(weights)


@attack("archive: a path outside", "open file.zip -o opened", "is no file of a record")
def _(inside: Path, outside: Path) -> None:
    with ZipFile(inside / "file.zip", "w") as archive:
        archive.writestr("runs/x/run.json", "{}")
        archive.writestr("../outside/secret.jsonl", "forged")


@attack("archive: a page", "open file.zip -o opened", "")
def _(inside: Path, outside: Path) -> None:
    folder = the_run(inside)
    with ZipFile(inside / "file.zip", "w") as archive:
        archive.write(folder / "run.json", f"runs/{folder.name}/run.json")
        archive.writestr("sweeps/x/compare.html", "<script>alert(1)</script>")


@attack("report: a forged caption", "study report depth", r"report\.json: is damaged")
def _(inside: Path, outside: Path) -> None:
    from normlab.store.format import with_checksum

    folder = inside / "results" / "studies" / "depth"
    shutil.copytree(ROOT / "results" / "studies" / "depth", folder)
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_bytes(with_checksum(report | {"captions": [3]}))


# Running them


def environment(inside: Path) -> dict[str, str]:
    made = {"HOME": "home", "TMPDIR": "tmp", "NORMLAB_CACHE": "cache", "HF_HOME": "home/hf"}
    for folder in made.values():
        (inside / folder).mkdir(parents=True, exist_ok=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return {
        **kept, **{name: str(inside / folder) for name, folder in made.items()}, "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0", "SECRET": SECRET, "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip


def call(command: Sequence[str], inside: Path, log: Path) -> tuple[int, str, float, int]:
    """Return the exit status of a watched command, what it printed, its seconds and its peak memory in bytes."""
    allowed = [str(inside), str(ROOT), sys.prefix, sys.base_prefix, *HARMLESS]
    watched = [sys.executable, str(Path(__file__).resolve()), "--watched", str(log), json.dumps(allowed), *command]
    start = time.monotonic()
    with (log.parent / "printed").open("w+b") as printed:
        process = subprocess.Popen(
            watched, cwd=inside, env=environment(inside), stdout=printed, stderr=printed, stdin=subprocess.DEVNULL
        )
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - start > SECONDS:
                process.kill()
            time.sleep(0.02)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, text, time.monotonic() - start, 1024 * usage.ru_maxrss


def make_base(base: Path) -> None:
    """Train a run, and export it as a model folder."""
    inside = base / "inside"
    inside.mkdir(parents=True)
    (inside / "text.txt").write_text(TEXT)
    (base / "outside").mkdir()
    for name in ("secret.jsonl", "secret.yaml", "secret.json", "x.zip"):
        (base / "outside" / name).write_text(json.dumps({"text": SECRET}) + "\n")
    for command in (f"train {OWN}", "export RUN -o model"):
        code, text, *_ = call(arguments(command, inside), inside, base / "log")
        if code:
            raise RuntimeError(f"{command}: {text}")


def arguments(command: str, inside: Path) -> list[str]:
    runs = inside / "results" / "runs"
    return [the_run(inside).name if word == "RUN" and runs.exists() else word for word in command.split()]


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def judge(each: Attack, base: Path, folder: Path) -> tuple[list[str], list[str]]:
    """Return the row of an attack, and its problems."""
    shutil.copytree(base, folder, symlinks=True)
    inside, outside, log = folder / "inside", folder / "outside", folder / "log"
    log.unlink(missing_ok=True)
    each.build(inside, outside)
    before = contents(outside)
    code, text, seconds, memory = call(arguments(each.command, inside), inside, log)
    touched = sorted(set(log.read_text().splitlines())) if log.exists() else []
    lines = text.strip().splitlines() or [""]
    problems = [f"touches {line}" for line in touched]
    if contents(outside) != before:
        problems.append("changes a file outside")
    written = [path for path in (inside / "results").rglob("*") if path.is_file() and path.stat().st_nlink == 1]
    if SECRET in text or any(SECRET.encode() in path.read_bytes() for path in written):
        problems.append("shows the secret")
    if seconds > SECONDS:
        problems.append("takes too long")
    if memory > MOST_MEMORY:
        problems.append("takes too much memory")
    if "Traceback" in text:
        problems.append("ends with a traceback")
    if each.answer and not (code == 2 and lines[-1].startswith("error: ") and re.search(each.answer, lines[-1])):
        problems.append(f"exits with {code}: {lines[-1]:.200}")
    if not each.answer and code:
        problems.append(f"exits with {code}: {lines[-1]:.200}")
    answer = lines[-1].replace(str(folder), "...").replace(str(inside), ".")
    verb = " ".join(each.command.split()[:1])
    row = [each.name, verb, f"{answer:.110}", str(len(touched)), f"{memory / 2**20:.0f} MiB", f"{seconds:.1f} s"]
    return row, problems


def main(names: Sequence[str]) -> int:
    failed = 0
    print("| attack | command | answer | touched outside | peak memory | time |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as made:
        base = Path(made).resolve() / "base"
        make_base(base)
        for number, each in enumerate(ATTACKS):
            if names and not any(name in each.name for name in names):
                continue
            folder = base.with_name(f"attack{number}")
            row, problems = judge(each, base, folder)
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |", flush=True)
            for problem in problems:
                print(f"FAILED {each.name}: {problem}", flush=True)
            failed += bool(problems)
            shutil.rmtree(folder)
    print(f"{len(ATTACKS)} attacks, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watched"]:
        run_watched(sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of attacks; all by default")
    sys.exit(main(parser.parse_args().names))
