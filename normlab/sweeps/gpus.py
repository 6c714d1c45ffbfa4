"""The GPUs of a sweep: those that `sweep.gpus` chooses, and errors that a broken GPU causes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from normlab.errors import ConfigError
from normlab.training.machine import NO_GPU, Gpu, gpu_of

_FAULTS = (
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error",
    "CUDA-capable device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "No CUDA GPUs are available",
    "GPU is lost",
    "GPU has fallen off the bus",
    NO_GPU,
)
"""Errors that no program can cause: the memory or a link of the GPU is broken, or the driver no longer offers the GPU.

All other errors of CUDA (device-side assert, illegal memory access, unspecified launch failure, unknown error) may be
bugs. If such an error counted as a fault, the bug of one pack would take out one GPU after another. Lines with Xid are
in the log of the kernel, not of the worker, and programs cause many of them.
"""


def choose_gpus(choice: str) -> list[Gpu]:
    """Return the GPUs that `sweep.gpus=choice` names: by index, or by the beginning of a UUID, as CUDA does.

    Raises:
        ConfigError: A name matches no visible GPU or several, or two names match the same GPU.
    """
    visible = [gpu_of(index) for index in range(torch.cuda.device_count())]
    chosen: list[Gpu] = []
    for name in choice.split(",") if choice != "all" else []:
        matches = [gpu for gpu in visible if name == str(gpu.index) or gpu.uuid.startswith(name)]
        problem = "no" if not matches else "more than one" if len(matches) > 1 else ""
        if problem or matches[0] in chosen:
            problem = f"{problem} visible GPU is named {name}" if problem else f"GPU {matches[0].index} is listed twice"
            raise ConfigError(f"sweep.gpus={choice}: {problem}; choose from {', '.join(map(str, visible))}")
        chosen += matches
    return chosen or visible


def fault_of(log: Sequence[str]) -> str:
    """Return the first line that reports an error of the GPU itself, or "" without one."""
    return next((line for line in log if any(text in line for text in _FAULTS)), "")
