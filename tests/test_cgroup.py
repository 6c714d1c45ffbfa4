"""The cores and the memory that a process may use: affinity, and limits of cgroups v1 and v2."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from normlab.base.errors import ConfigError
from normlab.system.cgroup import allowed_cores, limits
from normlab.training import machine
from support.run_folders import Command

CORES = len(os.sched_getaffinity(0))


def write_files(root: Path, files: Mapping[str, str]) -> None:
    """Write files of /proc and /sys below `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("cgroup", "quotas", "cores"),
    [
        ("0::/user/job", {"user/job/cpu.max": "max 100000", "user/cpu.max": "250000 100000"}, 2),
        ("0::/user/job", {"user/job/cpu.max": "50000 100000", "user/cpu.max": "800000 100000"}, 1),
        ("0::/user/job", {"user/job/cpu.max": "1600000 100000"}, 8),
        ("0::/docker/0a1b", {"cpu.max": "400000 100000"}, 4),  # the path of the host, in a container
        ("4:memory:/job\n0::/job", {"unified/job/cpu.max": "500000 100000"}, 5),
        (
            "3:cpu,cpuacct:/a/b\n0::/",
            {"cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
             "cpu,cpuacct/a/cpu.cfs_quota_us": "100000", "cpu,cpuacct/a/cpu.cfs_period_us": "50000"},
            2,
        ),
        ("1:name=systemd:/", {}, 8),
    ],
)  # fmt: skip
def test_quota_of_a_cgroup_or_of_one_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, quotas: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    write_files(tmp_path, {"proc/self/cgroup": cgroup})
    write_files(tmp_path / "sys/fs/cgroup", quotas)
    assert allowed_cores(tmp_path) == cores


def test_memory_of_a_cgroup_around_the_one_of_the_process(tmp_path: Path) -> None:
    write_files(tmp_path, {"proc/self/cgroup": "7:memory:/a/b", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096"})
    assert [*limits("memory", "memory.limit_in_bytes", tmp_path)] == ["4096"]
    assert [*limits("memory", "memory.max", tmp_path / "nothing")] == []


def test_threads_of_a_command_that_trains_nothing_are_the_allowed_cores(
    run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    before = torch.get_num_threads()

    def stop(*_: Any, **__: Any) -> Any:
        threads.append(torch.get_num_threads())
        raise ConfigError("stop")

    monkeypatch.setattr("normlab.loaded.run.load", stop)
    monkeypatch.setattr(machine, "allowed_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(3)
    try:
        assert run_command("sample", "run")[0] == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [2]
