"""What this machine has for training, and what to do about what is missing: `normlab doctor`.

Each check looks for itself and never raises; what a check says is what a run would meet. Nothing is sent
anywhere, and nothing is left behind but the folder that W&B makes for its logs.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from normlab import __version__
from normlab.errors import NormlabError
from normlab.openmp import wait_policy
from normlab.paths import cache_dir

GOOD, NOTE, BAD = "ok", "note", "bad"
"""Fine; fine, but something could be better; something will not work."""

LITTLE_DISK = 2**30
"""Free bytes below which a disk is called nearly full: two checkpoints of a 124M model and its moments are 3 GB,
those of the default model 20 MB."""

Check = dict[str, str]
"""`check`, `state`, `seen`, and `do`: what to do, empty where there is nothing."""


def checks(results_dir: str) -> Iterator[Check]:
    """Every check, each as soon as it is made."""
    looks: list[tuple[str, Callable[[], tuple[str, str, str]]]] = [
        ("normlab", _versions),
        ("device", _device),
        ("threads", _threads),
        ("compile", _compiler),
        ("corpus", _corpus),
        ("W&B", _wandb),
        ("results", lambda: _disk(Path(results_dir), "choose another results_dir=...")),
        ("cache", lambda: _disk(cache_dir(), "set NORMLAB_CACHE to another folder")),
    ]
    for name, look in looks:
        try:
            state, seen, do = look()
        except Exception as error:  # what is broken in one place is no reason to be silent about the others
            state, seen, do = NOTE, f"could not be looked at: {type(error).__name__} {error}", "mend what it names"
        yield {"check": name, "state": state, "seen": " ".join(seen.split()), "do": do}


def _versions() -> tuple[str, str, str]:
    from packaging.requirements import Requirement

    seen = [f"{__version__} on Python {platform.python_version()}"]
    wrong: dict[str, str] = {}
    for requirement in map(Requirement, metadata.requires("normlab") or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong[wanted] = f"{requirement.name} is missing"
            continue
        seen.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            wrong[wanted] = f"{requirement.name} should be {requirement.specifier}"
    if wrong:
        return BAD, f"{', '.join(seen)}; {', '.join(wrong.values())}", f"pip install {' '.join(map(repr, wrong))}"
    return GOOD, ", ".join(seen), ""


def _device() -> tuple[str, str, str]:
    import torch

    if not torch.cuda.is_available():
        seen = f"CPU ({torch.backends.cpu.get_cpu_capability()}), fp32"
        if torch.version.cuda is None and torch.version.hip is None and _has_nvidia():
            return NOTE, f"{seen}; there is an NVIDIA GPU, and torch is a build without CUDA", "install torch with CUDA"
        if _has_nvidia():
            return NOTE, f"{seen}; there is an NVIDIA GPU that torch cannot use", "update the driver (nvidia-smi)"
        return GOOD, f"{seen}; no GPU", ""
    precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    free, total = torch.cuda.mem_get_info()
    seen = f"{torch.cuda.get_device_name()}, {precision}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return GOOD, seen, ""


def _has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _threads() -> tuple[str, str, str]:
    import torch

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    seen = f"{threads} threads on {cores} cores, load {load:.1f}, {wait_policy()}"
    if threads > cores:
        return NOTE, seen, f"set OMP_NUM_THREADS={cores}: more threads than cores wait for each other"
    if load > cores / 2:
        return NOTE, f"{seen}: the machine is busy", "a run is slower beside other processes; end them, or train later"
    return GOOD, seen, ""


def _compiler() -> tuple[str, str, str]:
    import torch

    from normlab.train.resolve import cpp_compiler

    if torch.cuda.is_available():
        try:
            return GOOD, f"triton {metadata.version('triton')}", ""
        except metadata.PackageNotFoundError:
            return NOTE, "no triton, so compile=on does not work", "install triton, or train with compile=off"
    compiler = shutil.which(cpp_compiler())
    if compiler is None:
        do = "install g++, or set CXX to a compiler (compile=off is the default on a CPU)"
        return NOTE, f"no C++ compiler {cpp_compiler()!r}, so compile=on does not work", do
    # A compiler without its headers is found and does not work; this is the one way to know.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [compiler, "-x", "c++", "-shared", "-fPIC", "-fopenmp", "-o", f"{folder}/x.so", "-"],
            input='#include <cmath>\n#include <omp.h>\nextern "C" double x(double y) { return std::exp(y); }\n',
            capture_output=True,
            text=True,
            timeout=60,
        )
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        return NOTE, f"{compiler} does not work: {said}", "install g++ whole, or set CXX to a compiler"
    return GOOD, compiler, ""


def _corpus() -> tuple[str, str, str]:
    from normlab.corpora import StdlibData
    from normlab.data.sources import find_sources

    try:
        sources = find_sources(StdlibData())
    except NormlabError as error:
        return NOTE, str(error), "train with data=files data.path=..."
    size = sum(source.path.stat().st_size for source in sources)
    return GOOD, f"Python's standard library, {len(sources)} files, {size / 1e6:.1f} MB (data=stdlib)", ""


def _wandb() -> tuple[str, str, str]:
    from normlab.tracking.wandb import wandb_environment

    try:
        seen = wandb_environment()
    except ValueError as error:  # pydantic's, over several lines
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = " ".join(lines[1:3])
        return NOTE, f"its settings are refused ({told}): runs are kept here only", "mend the WANDB_ variables"
    if seen.mode == "online":
        return GOOD, f"online at {seen.host}", ""
    if not seen.has_login and seen.mode == "offline" and "WANDB_MODE" not in os.environ:
        kept = "runs are kept offline, and the end of each names the command that sends it later"
        return NOTE, f"no login at {seen.host}: {kept}", "wandb login"
    return GOOD, f"{seen.mode}, as it was set", ""


def _disk(folder: Path, otherwise: str) -> tuple[str, str, str]:
    # The folder need not be there yet: what counts is where it will be.
    there = folder.absolute()
    try:
        while not there.exists():
            there = there.parent
    except OSError as error:  # a name that is too long; a folder that may not be looked into
        return BAD, f"{there}: cannot be looked at ({error.strerror})", otherwise
    if not there.is_dir():
        return BAD, f"{there}: is a file", otherwise
    free = shutil.disk_usage(there).free
    seen = f"{folder}: {free / 2**30:.1f} GiB free"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return BAD, f"{seen}; cannot be written and locked ({error.strerror})", otherwise
    if free < LITTLE_DISK:
        return NOTE, f"{seen}, which is little", f"make room, or {otherwise}"
    return GOOD, seen, ""


def line(check: dict[str, Any]) -> str:
    """A check as lines for a terminal."""
    do = f"\n{'':14}-> {check['do']}" if check["do"] else ""
    return f"{check['check']:8} {check['state']:5}{check['seen']}{do}"
