"""Install the wheel and the sdist in new environments, and train a run with each.

    python scripts/check_install.py                          # every Python 3.11 to 3.13 on this machine
    python scripts/check_install.py --python python3.12      # this Python

Prints a line for each Python and package: what was installed and the validation loss. A Python without torch at the
pinned version is reported and skipped; any other failure exits with 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
RUN = [
    "train", "norm=rmsnorm_llama", "placement=post", "model=gpt2_nano", "train.steps=3", "train.batch_size=2",
    "eval.sequences=2", "tracking.wandb=offline", "device=cpu",
]  # fmt: skip


class CommandError(Exception):
    """A command failed; the message is the last lines of its output."""


def call(*arguments: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command and return its output."""
    done = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise CommandError("\n".join((done.stdout + done.stderr).strip().splitlines()[-8:]))
    return done.stdout


def pythons() -> list[str]:
    """Return every supported Python on this machine."""
    paths = {}
    for minor in (11, 12, 13):
        name = f"python3.{minor}"
        candidates = [shutil.which(name), *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))]
        for path in candidates:
            if path and name not in paths:
                try:
                    version = call(path, "-c", "import sys, venv; print(*sys.version_info[:2])", cwd=ROOT).split()
                except (CommandError, OSError):
                    continue
                if version == ["3", str(minor)]:
                    paths[name] = path
    return list(paths.values())


def build(folder: Path) -> list[Path]:
    """Build the wheel and the sdist from a copy of the tracked files only."""
    source = folder / "source"
    source.mkdir()
    names = call("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    call(sys.executable, "-m", "hatchling", "build", "-d", folder / "dist", cwd=source)
    return sorted((folder / "dist").glob("normlab-*"), reverse=True)


def check(python: str, package: Path, folder: Path) -> str:
    """Install a package in a new environment, train and read the run; return the result as text."""
    venv, work = folder / "venv", folder / "some where else"
    work.mkdir(parents=True)
    call(python, "-m", "venv", venv, cwd=folder)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS]
    try:
        call(*pip, "torch", cwd=folder)
    except CommandError as error:
        if "No matching distribution found for torch" in str(error):
            return "skipped: pip finds no torch at the pinned version for this Python"
        raise
    call(*pip, package, cwd=folder)
    normlab = venv / "bin" / "normlab"
    call(normlab, *RUN, cwd=work, NORMLAB_CACHE=str(folder / "cache"))
    summary = call(normlab, "summarize", "--format", "csv", cwd=work)
    if "finished" not in summary or "rmsnorm_llama" not in summary:
        raise CommandError(summary)
    call(normlab, "doctor", cwd=work)
    loss = call(
        venv / "bin" / "python", "-c", "import normlab; print(normlab.load('rmsnorm').status.val_loss)", cwd=work
    )
    return f"trained, summarised, loaded; validation loss {float(loss):.6f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="append", help="a Python to check; can be repeated (default: all)")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        packages = build(Path(temporary))
        for python in options.python or pythons():
            version = call(python, "-V", cwd=ROOT).strip()
            for package in packages:
                start = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        result = check(python, package, Path(folder))
                    except CommandError as error:
                        failed, result = True, f"FAILED: {error}"
                print(f"{version:15} {package.name:28} {result} ({time.monotonic() - start:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
