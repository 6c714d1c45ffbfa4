"""Golden losses: what a refactor must reproduce bit for bit, and a change of maths must refresh and explain.

Bits hold where torch, the CPU, its instructions and the number of threads are those recorded: torch is told to use
these instructions, and no newer ones, but its matrix products (MKL) choose a path of their own for each CPU. Elsewhere
rounding grows from step to step, to 6e-5 between two CPUs, and the losses agree to 1e-3: a fiftieth of what a step
changes. The first loss, before any update, agrees to 1e-5. `scripts/refresh_goldens.py` writes the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normlab.launch import compose_run
from normlab.train.start import train

GOLDEN = Path(__file__).with_name("golden")


def cpu() -> str:
    """Return the CPU's vendor, family and model, by which MKL chooses its kernels; empty where Linux does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return ""
    fields = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return " ".join(fields.get(name, ":").strip("\t: ") for name in ("vendor_id", "cpu family", "model"))


def environment() -> dict[str, object]:
    return {
        "cpu": cpu(),
        "torch": torch.__version__.partition("+")[0],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def losses(words: list[str]) -> list[str]:
    """The losses of a run in the order of its record, as exact hexadecimal floats."""
    rows = train(compose_run(words), sinks=[]).folder.rows().rows
    return [row["loss"].hex() for row in rows if "loss" in row]


def losses_by(instructions: str, words: list[str]) -> tuple[list[str], dict[str, object]]:
    """The losses with these instructions of the CPU, if it has them; and what they were computed with."""
    code = (
        "import json, sys; from tests import test_goldens as t; "
        "print(json.dumps([t.losses(json.loads(sys.argv[1])), t.environment()]))"
    )
    told = {**os.environ, "ATEN_CPU_CAPABILITY": instructions.lower(), "PYTHONPATH": str(GOLDEN.parent.parent)}
    command = [sys.executable, "-c", code, json.dumps(words)]
    out = subprocess.run(command, env=told, capture_output=True, text=True, check=True).stdout
    found, where = json.loads(out.splitlines()[-1])
    return found, where


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden(path: Path, words: list[str]) -> None:
    golden = json.loads(path.read_text())
    seen, where = losses_by(golden["environment"]["instructions"], [*words, *golden["words"]])
    if golden["environment"] == where:
        assert seen == golden["losses"]
    else:
        values = [[float.fromhex(loss) for loss in side] for side in (seen, golden["losses"])]
        torch.testing.assert_close(torch.tensor(values[0]), torch.tensor(values[1]), atol=1e-3, rtol=0)
        assert abs(values[0][0] - values[1][0]) <= 1e-5


def test_there_are_goldens() -> None:
    assert len(list(GOLDEN.glob("*.json"))) >= 4
