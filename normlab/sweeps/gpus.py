"""The GPUs of a sweep, and errors that a broken GPU causes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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


def visible_gpus() -> list[Gpu]:
    """Return all GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    return [gpu_of(index) for index in range(torch.cuda.device_count())]


def fault_of(log: Sequence[str]) -> str:
    """Return the first line that reports an error of the GPU itself, or "" without one."""
    return next((line for line in log if any(text in line for text in _FAULTS)), "")
