"""Limits of this process by cgroups, with which containers, Slurm and systemd divide a machine."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def allowed_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: its affinity, or less by the quota of a cgroup.

    A quota is rounded down: threads that wait for each other are as slow as the one that has part of a core.

    Args:
        root: The folder of `proc` and `sys`.
    """
    cores = float(len(os.sched_getaffinity(0)))
    quotas = (text.split() for text in limits("cpu", "cpu.max", root))
    quotas_v1 = zip(limits("cpu", "cpu.cfs_quota_us", root), limits("cpu", "cpu.cfs_period_us", root), strict=False)
    for quota, period in (*quotas, *quotas_v1):
        if quota not in ("max", "-1"):
            cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def limits(controller: str, file: str, root: Path = Path("/")) -> Iterator[str]:
    """Yield the content of a file in the cgroup of this process and in each cgroup around it.

    Args:
        controller: The controller of the file in cgroups v1, which has a hierarchy of its own.
        file: The name of the file.
        root: The folder of `proc` and `sys`.
    """
    mounts = root / "sys/fs/cgroup"
    # A system without cgroups has no such file, and no limits.
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, names, group = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            # In a container, the path may be that of the host, and only the root of the hierarchy exists.
            for folder in (Path(group), *Path(group).parents):
                # Version 2 has no names of controllers; beside version 1 it is mounted at `unified`.
                mount_points = (mounts / names,) if names else (mounts, mounts / "unified")
                for mount in mount_points:
                    with contextlib.suppress(OSError):
                        yield (mount / folder.relative_to("/")).joinpath(file).read_text().strip()
