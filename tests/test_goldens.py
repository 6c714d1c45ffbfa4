"""Golden losses: what a refactor must reproduce bit for bit, and a change of maths must refresh and explain.

Bits hold where torch, the CPU's instructions and the number of threads are those recorded; elsewhere the
losses agree to 1e-5. `scripts/refresh_goldens.py` writes the files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from normlab.launch import compose_run
from normlab.train.start import train

GOLDEN = Path(__file__).with_name("golden")


def environment() -> dict[str, object]:
    return {
        "torch": torch.__version__.partition("+")[0],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def losses(words: list[str]) -> list[str]:
    """The losses of a run in the order of its record, as exact hexadecimal floats."""
    rows = train(compose_run(words), sinks=[]).folder.rows().rows
    return [row["loss"].hex() for row in rows if "loss" in row]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden(path: Path, words: list[str]) -> None:
    golden = json.loads(path.read_text())
    seen = losses([*words, *golden["words"]])
    if golden["environment"] == environment():
        assert seen == golden["losses"]
    else:
        values = [[float.fromhex(loss) for loss in side] for side in (seen, golden["losses"])]
        torch.testing.assert_close(torch.tensor(values[0]), torch.tensor(values[1]), atol=1e-5, rtol=0)


def test_there_are_goldens() -> None:
    assert len(list(GOLDEN.glob("*.json"))) >= 4
