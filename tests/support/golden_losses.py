"""Losses of runs as golden files store them.

Run as a script with a list of runs, each a list of overrides, as JSON: prints their losses and the environment as JSON.
"""

import json
import sys
from pathlib import Path

import torch

from normlab.config.compose import compose_run
from normlab.training.start import train

GOLDEN = Path(__file__).parents[1] / "golden"


def cpu() -> str:
    """Return the CPU's vendor, family and model, by which MKL chooses its kernels; empty if unknown."""
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


def losses(overrides: list[str]) -> list[str]:
    """Return the losses of a run in the order of its record, as exact hexadecimal floats."""
    rows = train(compose_run(overrides), trackers=[]).folder.rows().rows
    return [row["loss"].hex() for row in rows if "loss" in row]


if __name__ == "__main__":
    print(json.dumps([[losses(overrides) for overrides in json.loads(sys.argv[1])], environment()]))
