"""The wait policy of OpenMP threads, as libgomp prints it when it is loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normlab.system import openmp

assert torch.__version__  # loads torch, so that /proc/self/maps lists its OpenMP library
HAS_LIBGOMP = sys.platform == "linux" and "libgomp" in Path("/proc/self/maps").read_text()


@pytest.mark.process
@pytest.mark.skipif(not HAS_LIBGOMP, reason="torch uses another OpenMP")
@pytest.mark.parametrize(
    ("variables", "setting", "value"),
    [
        ({}, "GOMP_SPINCOUNT", str(openmp.SPIN_COUNT)),
        ({"GOMP_SPINCOUNT": "77"}, "GOMP_SPINCOUNT", "77"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "OMP_WAIT_POLICY", "ACTIVE"),
    ],
)
def test_spin_count_is_limited_unless_the_user_sets_a_policy(
    variables: dict[str, str], setting: str, value: str
) -> None:
    env = {name: text for name, text in os.environ.items() if name not in openmp.VARIABLES}
    done = subprocess.run(
        # This loads torch, then fails because the file does not exist.
        [sys.executable, "-m", "normlab", "train", "data=files", "data.path=[nothing_here.txt]"],
        env=env | {"OMP_DISPLAY_ENV": "VERBOSE"} | variables,
        capture_output=True,
        text=True,
    )
    printed = dict(line.strip().split(" = ", 1) for line in done.stderr.splitlines() if " = " in line)
    assert printed[setting] == f"'{value}'"
