"""Pretended GPUs: what torch reports of a machine with four GPUs, and of one with MIG devices."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from normlab.training.machine import Gpu

UUIDS = [f"{number}a{number}b0000-0000-4000-8000-00000000000{number}" for number in range(4)]
MEMORY = [80 * 2**30, 80 * 2**30, 40 * 2**30, 80 * 2**30]


def gpus(*indices: int) -> list[Gpu]:
    """Return pretended GPUs by index."""
    return [Gpu(index, f"GPU-{UUIDS[index]}", "Pretended", MEMORY[index], True) for index in indices]


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, name: str = "Pretended", major: Sequence[int] = (9,) * 4) -> None:
    """Replace the functions of torch that describe GPUs; torch's own parser reads CUDA_VISIBLE_DEVICES.

    Args:
        monkeypatch: Replaces the functions.
        name: The name of each GPU.
        major: The major compute capability of each GPU.
    """

    def visible() -> list[int]:
        entries = torch.cuda._parse_visible_devices()
        if entries and str(entries[0]).startswith("MIG-"):
            return [0]  # CUDA lists one MIG device
        numbers = [entry if isinstance(entry, int) else UUIDS.index(entry.removeprefix("GPU-")) for entry in entries]
        return [number for number in numbers if number < len(UUIDS)]

    def properties(device: int | None = None) -> SimpleNamespace:
        number = visible()[device or 0]
        return SimpleNamespace(name=name, uuid=UUIDS[number], total_memory=MEMORY[number], major=major[number], minor=0)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(visible()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
