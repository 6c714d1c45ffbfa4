"""The compute-equivalent speed-up on runs whose losses follow a known law."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from scipy import stats

FLOPS_PER_TOKEN = 1e6
BUDGETS = (1e3, 2e3, 4e3, 8e3)


def law(tokens: float, offset: float = 2.0) -> float:
    return offset + 40 * (tokens * FLOPS_PER_TOKEN) ** -0.2


@pytest.fixture
def make(make_run):
    """Make a run of some tokens and a loss."""
    number = itertools.count()

    def make_one(norm: str, tokens: float, loss: float, seed: int = 0, *, flops: float | None = FLOPS_PER_TOKEN):
        config = {
            "norm": {"name": norm}, "placement": {"name": "pre"}, "model": {"depth": 4, "width": 128},
            "optim": {"name": "adamw", "lr": 1e-3}, "train": {"steps": int(tokens)}, "data": {"seed": seed},
            "seed": seed,
        }  # fmt: skip
        status = {"tokens": tokens, "val_loss": loss, "best_val_loss": loss}
        return make_run(f"run{next(number):04}", run={"config": config, "flops_per_token": flops}, status=status)

    return make_one


@pytest.fixture
def summarize(tmp_path, run_command):
    def call(*arguments: str) -> str:
        code, out, err = run_command("summarize", str(tmp_path), "--against", "norm=rmsnorm", *arguments)
        assert code == 0, err
        return out

    return call


def rows_of(text: str) -> dict[tuple[str, int], dict]:
    return {(row["norm"], row["train.steps"]): row for row in json.loads(text)}


def test_a_cell_of_half_the_compute_has_a_speedup_of_two(make, summarize):
    for seed in range(3):
        for tokens in BUDGETS[:3]:
            make("rmsnorm", tokens, law(tokens) + 0.01 * seed, seed)
        make("dyt", 1500, law(3000) + 0.01 * seed, seed)
    row = rows_of(summarize("--format", "json"))["dyt", 1500]
    assert row["speedup"] == pytest.approx(2, rel=0.02)
    assert (row["speedup_bound"], row["speedup_seeds"]) == ("", 3)
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]


def test_the_interval_is_that_of_the_logarithm_over_seeds(make, summarize):
    ratios = (1.0, 2.0, 4.0)  # to losses of the baseline
    for seed, ratio in enumerate(ratios):
        for tokens in BUDGETS:
            make("rmsnorm", tokens, law(tokens), seed)
        make("dyt", 2000, law(2000 * ratio), seed)
    row = rows_of(summarize("--format", "json"))["dyt", 2000]
    logs = [math.log(ratio) for ratio in ratios]
    low, high = stats.t.interval(0.95, 2, loc=sum(logs) / 3, scale=stats.sem(logs))
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == pytest.approx(
        (math.exp(sum(logs) / 3), math.exp(low), math.exp(high))
    )


def test_outside_the_range_of_the_baseline_there_is_a_bound(make, summarize):
    for tokens in BUDGETS:
        make("rmsnorm", tokens, law(tokens))
    make("dyt", 4e3, law(9e3))
    make("layernorm", 4e3, law(900))
    text = summarize("--format", "markdown", "--columns", "compute speed-up")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    texts = {tuple(cells[:2]): cells[2] for cells in lines}
    assert texts["dyt", "4000"].replace("&gt;", ">") == "> 2.00"
    assert texts["layernorm", "4000"].replace("&lt;", "<") == "< 0.25"
    assert texts["rmsnorm", "4000"] == ""
    assert "linear interpolation in ln C" in text


def test_no_speedup_without_budgets_flops_or_a_decreasing_law(make, summarize):
    for tokens in BUDGETS[:2]:
        make("rmsnorm", tokens, law(tokens))
    make("dyt", 1500, law(3000))
    assert not any("speedup" in row for row in rows_of(summarize("--format", "json")).values())
    make("rmsnorm", 4e3, law(4e3), flops=None)
    assert not any("speedup" in row for row in rows_of(summarize("--format", "json")).values())
    make("rmsnorm", 8e3, law(500))  # a longer run with a higher loss
    assert not any("speedup" in row for row in rows_of(summarize("--format", "json")).values())
    assert "compute speed-up" not in summarize()
