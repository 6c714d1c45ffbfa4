"""Overrides of a run of seconds."""

from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "corpus.txt"


def one_run_at_a_time(overrides: Sequence[str]) -> list[str]:
    """Return the options of a sweep without packs and with one job, except those that `overrides` set."""
    options = [override.partition("=")[0] for override in overrides]
    return [default for default in ("sweep.pack=off", "sweep.jobs=1") if default.partition("=")[0] not in options]


def small_run(results: Path, *more: str) -> list[str]:
    """Return the overrides of a run of seconds on the repository's corpus, with `more` overrides or others."""
    overrides = [
        "model=gpt2_nano",
        "data=files",
        f"data.path=[{CORPUS}]",
        "train.steps=12",
        "train.batch_size=4",
        "eval.sequences=8",
        "tracking.wandb=off",
        "device=cpu",
        f"results_dir={results}",
    ]
    return without_replaced([*overrides, *more])


def without_replaced(overrides: Sequence[str]) -> list[str]:
    """Return the last override of each option: a command would warn of the others."""
    return list({override.partition("=")[0]: override for override in overrides}.values())
