"""`normlab doctor`: check versions, device, compiler, corpus, W&B and disks of this machine.

A check reports a problem and never raises an error. Checks send nothing over the network, and leave no file except the
folder that W&B makes for its logs.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from normlab.cgroup import allowed_cores
from normlab.cli.app import Json, ResultsDir, app, echo
from normlab.errors import NormlabError
from normlab.openmp import wait_policy
from normlab.paths import cache_dir
from normlab.version import __version__

GOOD, NOTE, BAD = "ok", "note", "bad"
"""The state of a check: training works, works with a limitation, or fails."""

LITTLE_DISK = 2**30
"""Free bytes below which a disk is reported as nearly full: a 124M model needs 3 GB for two checkpoints, the default
model 20 MB."""

Check = dict[str, str]
"""The result of a check: its name `check`, the `state`, the `finding`, and the `remedy` (may be empty)."""


def checks(results_dir: str) -> Iterator[Check]:
    """Run the checks, and yield the result of each as soon as it is known."""
    functions: dict[str, Callable[[], tuple[str, str, str]]] = {
        "normlab": _versions,
        "device": _device,
        "threads": _threads,
        "compile": _compiler,
        "corpus": _corpus,
        "W&B": _wandb,
        "results": lambda: _disk(Path(results_dir), "choose another results_dir=..."),
        "cache": lambda: _disk(cache_dir(), "set NORMLAB_CACHE to another folder"),
    }
    for name, function in functions.items():
        try:
            state, finding, do = function()
        except Exception as error:  # a failed check must not hide the others
            state, finding, do = (
                NOTE,
                f"the check failed: {type(error).__name__}: {error}",
                "fix the cause of the error",
            )
        yield {"check": name, "state": state, "finding": " ".join(finding.split()), "remedy": do}


def _versions() -> tuple[str, str, str]:
    from packaging.requirements import Requirement

    versions = [f"{__version__} on Python {platform.python_version()}"]
    wrong: dict[str, str] = {}
    for requirement in map(Requirement, metadata.requires("normlab") or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        package = f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong[package] = f"{requirement.name} is missing"
            continue
        versions.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong[package] = f"{requirement.name} should be {requirement.specifier}"
    finding = ", ".join(versions)
    if wrong:
        return BAD, f"{finding}; {', '.join(wrong.values())}", f"pip install {' '.join(map(repr, wrong))}"
    return GOOD, finding, ""


def _device() -> tuple[str, str, str]:
    import torch

    from normlab.training.machine import NO_GPU, may_use_gpu

    if not torch.cuda.is_available():
        finding = f"CPU ({torch.backends.cpu.get_cpu_capability()}), fp32"
        if may_use_gpu():
            do = "check nvidia-smi, the driver and the build of torch, or train with device=cpu"
            return BAD, f"{finding}; {NO_GPU}, but this process has access to an NVIDIA GPU", do
        return GOOD, f"{finding}; no GPU", ""
    precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    free, total = torch.cuda.mem_get_info()
    finding = f"{torch.cuda.get_device_name()}, {precision}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return GOOD, finding, ""


def _threads() -> tuple[str, str, str]:
    from normlab.analysis.phrases import counted
    from normlab.training.machine import num_threads

    threads, cores = num_threads(), allowed_cores()
    load = os.getloadavg()[0]
    finding = f"{counted(threads, 'thread')} on {counted(cores, 'core')}, load {load:.1f}, {wait_policy()}"
    if threads > cores:
        return NOTE, f"{finding}: threads compete for cores", f"set OMP_NUM_THREADS={cores}"
    if load > cores / 2:
        return NOTE, f"{finding}: the machine is busy", "end other processes, or train later"
    return GOOD, finding, ""


def _compiler() -> tuple[str, str, str]:
    import torch

    from normlab.training.machine import compiler_of, missing_compiler

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if missing := missing_compiler(device):
        problem, _, do = missing.rpartition("; ")
        return NOTE, f"{problem}, so compile=on does not work", f"{do}, or train with compile=off"
    if device == "cuda":
        options = ["-x", "c", "-I", sysconfig.get_paths()["include"]]
        code = "#include <Python.h>\nint x(void) { return PY_VERSION_HEX; }\n"
    else:
        options = ["-x", "c++", "-fopenmp"]
        code = '#include <cmath>\n#include <omp.h>\nextern "C" double x(double y) { return std::exp(y); }\n'
    compiler = compiler_of(device)
    if problem := _compile([compiler, *options], code):
        return NOTE, f"{compiler} does not work: {problem}", "install it with its headers and those of Python"
    return GOOD, compiler, ""


def _compile(command: list[str], code: str) -> str:
    """Return the first line of a compiler's error, or "": only this shows whether the headers are installed too."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, "-shared", "-fPIC", "-o", f"{folder}/x.so", "-"],
            input=code,
            capture_output=True,
            text=True,
            timeout=60,
        )
    return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0] if done.returncode else ""


def _corpus() -> tuple[str, str, str]:
    from normlab.config.corpora import StdlibData
    from normlab.data.files import find_sources

    try:
        sources = find_sources(StdlibData())
    except NormlabError as error:
        return NOTE, str(error), "train with data=files data.path=..."
    size = sum(source.path.stat().st_size for source in sources)
    return GOOD, f"Python's standard library, {len(sources)} files, {size / 1e6:.1f} MB (data=stdlib)", ""


def _wandb() -> tuple[str, str, str]:
    from normlab.tracking.wandb import NO_LOGIN, wandb_environment

    try:
        mode, host = wandb_environment()
    except ValueError as error:  # from pydantic, over several lines
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[1:3])
        return NOTE, f"invalid W&B settings ({reason}): runs are not sent", "fix the WANDB_ variables"
    if mode == "online":
        return GOOD, f"online at {host}", ""
    if mode == NO_LOGIN:
        return NOTE, f"no login at {host}: runs are not sent; `normlab sync` sends them later", "wandb login"
    return GOOD, f"{mode} (set by the user)", ""


def _disk(folder: Path, remedy: str) -> tuple[str, str, str]:
    parent = folder.absolute()
    try:
        while not parent.exists():
            parent = parent.parent
    except OSError as error:  # a name that is too long, or a folder without permission
        return BAD, f"{parent}: cannot be accessed ({error.strerror})", remedy
    if not parent.is_dir():
        return BAD, f"{parent}: is a file", remedy
    free = shutil.disk_usage(parent).free
    finding = f"{folder}: {free / 2**30:.1f} GiB free"
    try:
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"x")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return BAD, f"{finding}; cannot be written and locked ({error.strerror})", remedy
    if free < LITTLE_DISK:
        return NOTE, f"{finding}: the disk is nearly full", f"free some space, or {remedy}"
    return GOOD, finding, ""


def line(check: Check) -> str:
    """Return a check as one line for a terminal, with its remedy on a second line."""
    do = f"\n{'':14}-> {check['remedy']}" if check["remedy"] else ""
    return f"{check['check']:8} {check['state']:5}{check['finding']}{do}"


@app.command()
def doctor(results_dir: ResultsDir = "results", json: Json = False) -> int:
    """Check whether this machine can train.

    Prints a remedy for each problem. Exit code 1 if a run would fail.
    """
    from normlab.report.tables import render

    results = []
    for check in checks(results_dir):
        results.append(check)
        if not json:
            echo(line(check), keep="\n")
    if json:
        echo(render(results, "json"), keep="\n")
    return int(any(check["state"] == BAD for check in results))
