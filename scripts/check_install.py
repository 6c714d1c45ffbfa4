"""The wheel and the sdist, each installed in a fresh environment outside the checkout, train a run.

    python scripts/check_install.py                          # with every Python 3.11 to 3.13 on this machine
    python scripts/check_install.py --python python3.12      # with this one

Prints a line for each Python and each kind of package: what was installed and what it trained. A Python for
which pip finds no torch at the pinned version says so; exit 1 where anything else went wrong.
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


class Failed(Exception):
    """A command that did not end well; its last lines."""


def call(*arguments: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command and return what it printed."""
    done = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Failed("\n".join((done.stdout + done.stderr).strip().splitlines()[-8:]))
    return done.stdout


def pythons() -> list[str]:
    """Every Python on this machine that normlab is for."""
    found = {}
    for minor in (11, 12, 13):
        name = f"python3.{minor}"
        places = [shutil.which(name), *map(str, Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))]
        for place in places:
            if place and name not in found:
                try:
                    version = call(place, "-c", "import sys, venv; print(*sys.version_info[:2])", cwd=ROOT).split()
                except (Failed, OSError):
                    continue
                if version == ["3", str(minor)]:
                    found[name] = place
    return list(found.values())


def build(folder: Path) -> list[Path]:
    """The wheel and the sdist of a copy of the tracked files, so that nothing else gets into them."""
    source = folder / "source"
    source.mkdir()
    names = call("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    call(sys.executable, "-m", "hatchling", "build", "-d", folder / "dist", cwd=source)
    return sorted((folder / "dist").glob("normlab-*"), reverse=True)


def check(python: str, package: Path, folder: Path) -> str:
    """Install a package in a fresh environment, train, and look at the run; what was seen."""
    venv, work = folder / "venv", folder / "some where else"
    work.mkdir(parents=True)
    call(python, "-m", "venv", venv, cwd=folder)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS]
    try:
        call(*pip, "torch", cwd=folder)
    except Failed as error:
        if "No matching distribution found for torch" in str(error):
            return "no torch for this Python at the pinned version here: not checked"
        raise
    call(*pip, package, cwd=folder)
    normlab = venv / "bin" / "normlab"
    call(normlab, *RUN, cwd=work, NORMLAB_CACHE=str(folder / "cache"))
    summary = call(normlab, "summarize", "--format", "csv", cwd=work)
    if "finished" not in summary or "rmsnorm_llama" not in summary:
        raise Failed(summary)
    call(normlab, "doctor", cwd=work)
    loss = call(
        venv / "bin" / "python", "-c", "import normlab; print(normlab.load('rmsnorm').status['val_loss'])", cwd=work
    )
    return f"trained, summarized, loaded; validation loss {float(loss):.6f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="append", help="which Python; may be given several times")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        packages = build(Path(temporary))
        for python in options.python or pythons():
            version = call(python, "-V", cwd=ROOT).strip()
            for package in packages:
                since = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        seen = check(python, package, Path(folder))
                    except Failed as error:
                        failed, seen = True, f"FAILED: {error}"
                print(f"{version:15} {package.name:28} {seen} ({time.monotonic() - since:.0f} s)", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
