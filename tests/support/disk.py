"""A small disk, and how to fill it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """Mount a disk of 2 MiB; skip the test without the right to do so."""
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Take all that is free on a disk but `leave` bytes."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        while (free := shutil.disk_usage(disk).free) > leave:
            try:
                os.write(file.fileno(), bytes(min(free - leave, 1 << 16)))
            except OSError:
                break
    return filler
