"""Find out why torch cannot use an NVIDIA GPU, and what its compiler lacks there, without a library for GPUs."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path("/")
"""The folder of `dev` and `proc`."""


def driver_version() -> str:
    """Return the version of the loaded NVIDIA driver, or "" without one. A container sees that of its host."""
    try:
        text = (ROOT / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    version = re.search(r"\b\d+(\.\d+)+\b", text)
    return version[0] if version else "unknown"


def unused_gpu() -> str:
    """Return why torch sees none of the GPUs that this process may use, and what to do; "" if it may use none.

    The process may use a GPU if it may open the GPU's device file, and the user does not hide it by
    CUDA_VISIBLE_DEVICES. Call this function where `torch.cuda.is_available()` is false.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    files = [file for file in (ROOT / "dev").glob("nvidia[0-9]*") if os.access(file, os.R_OK | os.W_OK)]
    if not files or not re.match(r"\s*(\d|GPU-|MIG-)", visible):
        return ""
    gpus = f"the NVIDIA GPU{'s' * (len(files) > 1)} (driver {driver_version() or 'unknown'})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA, so it cannot use {gpus}; install a build with CUDA"
    reason = "CUDA does not start"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # its message names the cause: an old driver, a broken GPU
        reason = str(error).partition(". ")[0]
    return (
        f"torch {torch.__version__} cannot use {gpus} ({reason}); check nvidia-smi, and update the driver or install a "
        f"build of torch for an older CUDA than {torch.version.cuda}"
    )


def has_kernels(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether a build of torch has kernels for a GPU; True if the architectures of the build are unknown.

    Code for sm_XY runs on compute capability X.Z with Z >= Y, and code for sm_XYa on X.Y only. Intermediate code for
    compute_XY is compiled for every newer GPU. Source: CUDA C++ Programming Guide, "Binary compatibility".

    Args:
        capability: The compute capability, X and Y.
        architectures: `torch.cuda.get_arch_list()`.
    """
    known = [name for name in architectures if name.startswith(("sm_", "compute_"))]
    for name in known:
        kind, _, code = name.partition("_")
        version = int(code.rstrip("af"))
        oldest = version // 10, version % 10
        if code.endswith("a"):
            runs = capability == oldest
        else:
            runs = capability >= oldest and (kind == "compute" or capability[0] == oldest[0])
        if runs:
            return True
    return not known


def c_compiler() -> str:
    """Return the C compiler with which Triton builds what starts its kernels: $CC, else gcc or clang.

    Source: triton/runtime/build.py.
    """
    return os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang")), "gcc")


def python_headers() -> Path:
    """Return the folder in which Triton's C code finds Python.h. Source: triton/runtime/build.py."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def missing_for_triton() -> str:
    """Return what compile=on lacks on a GPU, and what to do; "" if nothing is missing."""
    if find_spec("triton") is None:
        return "triton is not installed; install it"
    if shutil.which(c_compiler()) is None:
        return f"the C compiler {c_compiler()!r} was not found; install gcc, or set CC to a compiler"
    if not (python_headers() / "Python.h").exists():
        return f"{python_headers() / 'Python.h'} is missing; install the headers of Python (python3-dev)"
    return ""
