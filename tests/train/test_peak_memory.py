"""The peak memory of a run does not include that of an earlier run in the same process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normlab.config.compose import compose_run
from normlab.training.peak_memory import PeakMemory
from normlab.training.start import train

MIB = 2**20


def peak_of(overrides: list[str], *more: str) -> int:
    status = train(compose_run([*overrides, *more]), trackers=[]).status
    assert status.peak_memory_bytes is not None
    return int(status.peak_memory_bytes)


def test_a_run_after_a_large_one_reports_its_own_peak(overrides: list[str]) -> None:
    small = peak_of(overrides, "train.steps=1", "seed=1")
    large = peak_of(overrides, "train.steps=1", "seed=2", "train.batch_size=2048", "eval.sequences=2")
    after = peak_of(overrides, "train.steps=1", "seed=3")
    assert large > small + 64 * MIB
    assert after < large - 32 * MIB


def test_the_peak_counts_memory_that_is_free_again() -> None:
    peak = PeakMemory("cpu")
    before = peak.num_bytes()
    assert before is not None
    torch.ones(64 * MIB)  # 256 MiB
    after = peak.num_bytes()
    assert after is not None
    assert after > before + 200 * MIB
    later = PeakMemory("cpu").num_bytes()
    assert later is not None
    assert later < after - 200 * MIB


def test_a_peak_that_cannot_be_reset_is_unknown(tmp_path: Path) -> None:
    """A process of which it is not the first run may have had its peak before."""
    assert PeakMemory("cpu", tmp_path).num_bytes() is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("VmPeak:\t  2000 kB\nVmHWM:\t  1000 kB\n")
    (tmp_path / "proc/self/clear_refs").mkdir()  # a file that cannot be written, even by root
    assert PeakMemory("cpu", tmp_path).num_bytes() is None
    (tmp_path / "proc/self/clear_refs").rmdir()
    assert PeakMemory("cpu", tmp_path).num_bytes() == 1000 * 1024
    assert (tmp_path / "proc/self/clear_refs").read_text() == "5"


def test_on_a_gpu_the_counter_of_torch_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    peak = PeakMemory("cuda")
    assert (calls, peak.num_bytes(), calls) == (["reset"], 7, ["reset"])
