"""Runs with other cadences of statistics, and the bits of a run."""

import hashlib
from pathlib import Path
from typing import Any

from normlab.config.compose import compose_run
from normlab.store.runs import RunFolder
from normlab.training import checkpoint
from normlab.training.start import train

CORPUS = Path(__file__).parents[1] / "corpus.txt"


OVERRIDES = [
    "data=files", f"data.path=[{CORPUS}]", "device=cpu", "tracking.wandb=off", "model=gpt2_nano", "model.depth=4",
    "train.steps=21", "train.batch_size=4", "eval.sequences=4", "optim.lr=1e-2",
]  # fmt: skip


CADENCES = {"always": ["stats.every=1"], "now and then": [], "never": ["stats=off"]}


def trained(results: Path, *overrides: str) -> RunFolder:
    return train(compose_run([*OVERRIDES, f"results_dir={results}", *overrides]), trackers=[]).folder


def bits(folder: RunFolder) -> tuple[Any, str]:
    """Return every loss, gradient norm and clip factor, and a hash of the final state."""
    rows = [tuple(row.values()) for row in folder.rows().rows if row["kind"] != "pace"]
    state = hashlib.sha256()
    saved, _ = checkpoint.read_newest(folder.path / "checkpoints")
    assert saved is not None
    for name in sorted(saved.tensors):
        state.update(saved.tensors[name].contiguous().numpy().tobytes())
    return rows, state.hexdigest()
