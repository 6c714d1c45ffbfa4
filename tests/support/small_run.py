"""Overrides of a run of seconds."""

from pathlib import Path

CORPUS = Path(__file__).parents[1] / "corpus.txt"


def small_run(results: Path) -> list[str]:
    """Return the overrides of a run of seconds on the repository's corpus."""
    return [
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
