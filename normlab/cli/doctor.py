"""`normlab doctor`: check versions, device, compiler, W&B and disks of this machine.

Checks send nothing over the network, and leave no file except the folder that W&B makes for its logs.
"""

import fcntl
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

from normlab.base.errors import counted
from normlab.base.paths import cache_dir
from normlab.base.version import __version__
from normlab.cli.app import ResultsDir, app, echo

GOOD, NOTE, BAD = "ok", "note", "bad"
"""The state of a check: training works, works with a limitation, or fails."""

Result = tuple[str, str, str]
"""The state, the finding, and the remedy, which may be empty."""


def checks(results_dir: str) -> Iterator[dict[str, str]]:
    """Run the checks, and yield the name, state, finding and remedy of each as soon as it is known."""
    functions = {
        "normlab": _versions,
        "device": _device,
        "compile": _compiler,
        "W&B": _wandb,
        "results": lambda: _disk(Path(results_dir), "choose another results_dir=..."),
        "cache": lambda: _disk(cache_dir(), "set NORMLAB_CACHE to another folder"),
        "forecast": lambda: _forecasts(Path(results_dir)),
    }
    for name, function in functions.items():
        try:
            state, finding, remedy = function()
        except Exception as error:  # a failed check must not hide the others
            state, remedy = NOTE, "fix the cause of the error"
            finding = f"the check failed: {type(error).__name__}: {error}"
        yield {"check": name, "state": state, "finding": " ".join(finding.split()), "remedy": remedy}


def _versions() -> Result:
    from importlib import metadata

    from packaging.requirements import Requirement

    versions = [f"{__version__} on Python {platform.python_version()}"]
    # Packages of extras may be missing, and their marker names the extra.
    for requirement in map(Requirement, metadata.requires("normlab") or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            versions.append(f"{requirement.name} {metadata.version(requirement.name)}")
    return GOOD, ", ".join(versions), ""


def _device() -> Result:
    import torch

    from normlab.training.machine import NO_GPU, may_use_gpu

    if not torch.cuda.is_available():
        finding = f"CPU ({torch.backends.cpu.get_cpu_capability()}), fp32"
        # The driver has a GPU for this process, and torch does not find it.
        if may_use_gpu():
            do = "check nvidia-smi, the driver and the build of torch, or train with device=cpu"
            return BAD, f"{finding}; {NO_GPU}, but this process has access to an NVIDIA GPU", do
        return GOOD, f"{finding}; no GPU", ""
    precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    free, total = torch.cuda.mem_get_info()
    finding = f"{torch.cuda.get_device_name()}, {precision}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return GOOD, finding, ""


def _compiler() -> Result:
    import torch

    from normlab.system.compilers import compiler_of, missing_compiler

    device = "cuda" if torch.cuda.is_available() else "cpu"
    missing = missing_compiler(device)
    if missing:
        problem, _, do = missing.rpartition("; ")
        return NOTE, f"{problem}, so compile=on does not work", f"{do}, or train with compile=off"
    return GOOD, compiler_of(device), ""


def _wandb() -> Result:
    from normlab.tracking.wandb import NO_LOGIN, wandb_environment

    mode, host = wandb_environment()
    if mode == "online":
        return GOOD, f"online at {host}", ""
    if mode == NO_LOGIN:
        return NOTE, f"no login at {host}: runs are not sent; `normlab sync` sends them later", "wandb login"
    return GOOD, f"{mode} (set by the user)", ""


def _disk(folder: Path, remedy: str) -> Result:
    import tempfile

    parent = folder.absolute()
    try:
        # The results folder is made by the first run, so the disk is that of the nearest folder above it.
        while not parent.exists():
            parent = parent.parent
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"x")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return BAD, f"{parent}: cannot be written and locked ({error.strerror})", remedy
    return GOOD, f"{folder}: {shutil.disk_usage(parent).free / 2**30:.1f} GiB free", ""


def _forecasts(results_dir: Path) -> Result:
    """Compare the times of packs with their forecasts."""
    from statistics import median

    from normlab.sweeps.cost import recorded_errors

    ratios = recorded_errors(results_dir) if results_dir.is_dir() else []
    if not ratios:
        return GOOD, f"{results_dir}: no pack with a forecast yet", ""
    finding = f"{counted(len(ratios), 'pack')} took {median(ratios):.3g} times the forecast"
    if len(ratios) > 1:
        finding += f" (median; {ratios[0]:.3g} to {ratios[-1]:.3g})"
    return GOOD, f"{results_dir}: {finding}", ""


@app.command()
def doctor(results_dir: ResultsDir = "results") -> int:
    """Check whether this machine can train.

    Prints a remedy for each problem. Exit code 1 if a run would fail.
    """
    states = []
    for check in checks(results_dir):
        states.append(check["state"])
        echo(f"{check['check']:8} {check['state']:5}{check['finding']}")
        if check["remedy"]:
            echo(f"{'':14}-> {check['remedy']}")
    return int(BAD in states)
