"""A run of one second whose state has everything, and helpers that inspect and damage its folder."""

from collections.abc import Callable
from pathlib import Path

from compare_runs import differences as differences

from normlab.store.runs import RunFolder
from normlab.training import checkpoint

Command = Callable[..., tuple[int, str, str]]
Train = Callable[..., RunFolder]

CORPUS = Path(__file__).parents[1] / "corpus.txt"
SCRIPT = Path(__file__).parents[2] / "scripts" / "prove" / "kill_and_resume.py"
OVERRIDES = [
    "norm=batchnorm", "placement=pre", "model=gpt2_nano", "data=files", f"data.path=[{CORPUS}]", "device=cpu",
    "tracking.wandb=off", "eval.sequences=8", "train.batch_size=4", "train.steps=16",
    "train.checkpoint_every=4", "eval.every=4", "eval.ema=0.9", "train.log_every=3",
]  # fmt: skip
"""Overrides of a run whose state has buffers, two moments and a mean of the weights. Checkpoints at 4, 8, 12 and 16."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage(folder: RunFolder, step: int) -> None:
    flip_a_bit(folder.path / "checkpoints" / f"step_{step:08d}" / "state.safetensors")


def steps_of(folder: RunFolder) -> list[int]:
    return checkpoint.steps(folder.path / "checkpoints")
