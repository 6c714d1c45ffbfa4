"""Run folders as the trainer writes them, of runs that were never trained: what benches and tests read.

    python scripts/records.py FOLDER                 # a results folder: the sweep `demo24` and its 24 runs
    python scripts/records.py FOLDER --runs 200      # the first 200 of a larger grid, as the sweep `demo200`

They are written by `RunFolder`, the product's own writer, with the content of a real run: a run.json as long, a row for
every step, a pace for every ten of them, evaluations, a status that counts the spikes that there are, and statistics in
the columns of a real run (`records_inside.py`). The numbers are plausible, smooth but for some noise, and the same for
the same choice; what a norm, a placement, a depth or a learning rate does to a loss here says nothing about any norm.

Shapes: S steps.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import records_inside
from numpy.typing import NDArray

from normlab.stats.profiles import Array
from normlab.stats.spikes import count
from normlab.stats.statistic import CORE
from normlab.store.outcome import STUCK
from normlab.store.plans import Job, Pack, Plan, sweep_folder, write_plan
from normlab.store.runs import RunFolder
from normlab.store.schema import DIVERGED, ENDED, FAILED, FINISHED, RUNS_FOLDER

BASELINES = {"uniform": 5.549, "unigram": 3.238, "bigram": 2.512, "targets": 64 * 128}
LOG_EVERY, EVAL_EVERY, CHECKPOINT_EVERY = 10, 100, 200
TOKENS_PER_S = 7e4
BLOW_UP = 30
"""Steps over which a run that diverges does so."""

FORMULAS = {
    "rmsnorm": "x / sqrt(mean(x^2) + eps) * gain",
    "layernorm": "(x - mean(x)) / sqrt(var(x) + eps) * gain + bias",
    "batchnorm": "(x - mean_batch(x)) / sqrt(var_batch(x) + eps) * gain + bias",
    "dyt": "tanh(alpha * x) * gain + bias",
    "scalenorm": "g * x / max(|x|, eps)",
}
BY_NORM = {"rmsnorm": 0.0, "layernorm": 0.01, "scalenorm": 0.05, "dyt": 0.07, "batchnorm": 0.15}
BY_PLACEMENT = {"pre": (0.0, 3e-3), "peri": (-0.02, 3e-3), "deepnorm": (0.03, 1e-3), "post": (0.06, 1e-3)}
"""What a placement adds to the loss, and the learning rate at which it is lowest."""

NORMS, PLACEMENTS, DEPTHS, RATES, SEEDS = ("layernorm", "rmsnorm"), ("pre", "post"), (4, 8), (1e-3,), 3
"""The grid of 24 runs."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run: what it was told, and how it came out."""

    norm: str = "rmsnorm"
    placement: str = "pre"
    depth: int = 4
    width: int = 128
    context: int = 128
    lr: float = 1e-3
    seed: int = 0
    steps: int = 2000
    batch_size: int = 8
    warmup_steps: int = 50
    outcome: str = FINISHED
    """One of the states that a run writes of itself, or `STUCK`. Who reads a run that says running calls it killed,
    unless somebody holds its folder's lock."""
    at: int | None = None
    """The step at which it diverged, failed or was last seen; half of them unless said."""
    spike_at: int | None = None
    """The step at which the loss jumps; it comes back within some twenty."""
    stats_every: int | None = 10
    """None: without statistics."""

    @property
    def last(self) -> int:
        """Updates made."""
        if self.outcome in (FINISHED, STUCK):
            return self.steps
        return self.steps // 2 if self.at is None else self.at

    @cached_property
    def config(self) -> dict[str, Any]:
        """What its identity is made of."""
        part = {"name": self.norm, "gain": True, "unit_offset": False, "bias": False, "eps": 1e-6}
        part |= {"eps_mode": "inside_ms"}
        model = {"depth": self.depth, "width": self.width, "heads": 4, "context": self.context}
        model |= {"positions": "learned", "rope_theta": None, "mlp": "gelu", "mlp_width": 4 * self.width}
        model |= {"bias": True, "tie_embeddings": True, "qk_norm": "off"}
        data = {"name": "stdlib", "tokenizer": "bytes", "seed": self.seed, "val_fraction": 0.05}
        optim = {"name": "adamw", "lr": self.lr, "schedule": "cosine", "warmup_steps": self.warmup_steps}
        optim |= {"final_lr_fraction": 0.1, "decay_fraction": None, "clip": 1.0, "weight_decay": 0.1}
        optim |= {"decay": "matrices", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
        train = {"steps": self.steps, "batch_size": self.batch_size, "accumulation": 1}
        return {
            "norm": part, "placement": {"name": self.placement}, "model": model, "data": data, "optim": optim,
            "train": train, "eval": {"sequences": 64}, "seed": self.seed, "init": "gpt2_scaled",
        }  # fmt: skip

    @cached_property
    def digest(self) -> str:
        """Of what it was told and how it came out: two records of one choice are two runs."""
        told = [self.config, self.outcome, self.at, self.spike_at]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return f"{self.norm}-{self.placement}-d{self.depth}w{self.width}-{self.digest[:10]}"

    def whole_config(self) -> dict[str, Any]:
        """Every option, as run.json has them."""
        config, on = self.config, self.stats_every is not None
        return {
            **config,
            "norm": {"preset": "", **config["norm"]},
            "model": {"preset": "gpt2_tiny", **config["model"]},
            "train": {**config["train"], "log_every": LOG_EVERY, "checkpoint_every": CHECKPOINT_EVERY},
            "eval": {"every": EVAL_EVERY, "sequences": 64},
            "stats": {
                "preset": "core" if on else "off", "tiers": ["core"] if on else [], "also": [], "without": [],
                "every": self.stats_every, "extended_every": None, "probe_share": None,
            },
            "tracking": {
                "wandb": "off", "project": "normlab", "entity": None, "group": None, "tags": [], "layers": False,
            },
            "run": {"name": None, "fresh": False},
            "init": "auto", "device": "auto", "precision": "auto", "compile": "auto", "deterministic": None,
            "results_dir": "results", "plugins": [],
        }  # fmt: skip

    def words(self) -> list[str]:
        """Those that tell it from the others of a sweep."""
        return [
            f"norm={self.norm}", f"placement={self.placement}", f"model.depth={self.depth}", f"optim.lr={self.lr}",
            f"seed={self.seed}",
        ]  # fmt: skip

    def run(self) -> dict[str, Any]:
        """A run.json, with what a real one has."""
        return {
            "run_id": self.run_id,
            "name": self.run_id,
            "config": self.whole_config(),
            "resolved": {
                "device": "cpu", "precision": "fp32", "compile": "off", "deterministic": True, "init": "gpt2_scaled",
                "device_name": "cpu", "threads": 1, "instructions": "AVX2",
            },
            "corpus": {
                "name": "stdlib", "sha256": "b" * 64, "tokenizer": "bytes", "vocab_size": 257,
                "train_tokens": 11_392_404, "val_tokens": 688_061, "documents": 729, "split": "documents",
                "baselines": BASELINES,
            },
            "identity": {
                "config": self.config, "corpus": "b" * 64, "device": "cpu", "precision": "fp32", "compile": "off",
                "versions": {"norm": 1, "placement": 1, "init": 1},
            },
            "trunk": None,
            "doubts": [],
            "norm": {
                "formula": FORMULAS.get(self.norm, "x"), "causal": self.norm != "batchnorm",
                "batch_statistics": self.norm == "batchnorm",
            },
            "placement": {"name": self.placement},
            "versions": {
                "normlab": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "wandb": "0.31.0",
            },
            "git": {"commit": "c" * 40, "diff": ""},
            "command": ["normlab train", *self.words()],
            "created": 1_760_000_000.0,
            "fingerprint": "32c244796f76d676",
        }  # fmt: skip


@dataclass(frozen=True)
class Series:
    """The numbers of a run, of every step that it has a row of."""

    loss: NDArray[np.float64]
    """(S,), as the others."""
    grad_norm: NDArray[np.float64]
    clip: NDArray[np.float64]
    lr: NDArray[np.float64]
    excess: Array
    """How much too large the inside is, 1 but where the run spikes or blows up."""
    validation: dict[int, float]
    """By step."""


def series(record: Record, chance: np.random.Generator) -> Series:
    """What its rows are to say."""
    diverges = record.outcome == DIVERGED
    step = np.arange(record.last + diverges)  # the row of the step that is not finite is written too
    excess = np.ones(len(step))
    if diverges:
        excess = np.maximum(1, 10 ** ((step - record.last + BLOW_UP) / (BLOW_UP / 4)))
    if record.spike_at is not None:
        since = step - record.spike_at
        excess = excess + np.where(since >= 0, 9 * np.exp(-np.maximum(since, 0) / 5), 0)
    smooth = _curve(record, np.arange(record.last + 1), chance)
    jump = 0.9 * np.log(excess)
    loss = smooth[: len(step)] + 0.05 * chance.standard_normal(len(step)) + jump
    usual = 0.4 + 2.5 * np.exp(-_scaled(record, step) / 60)
    grad_norm = usual * excess * np.exp(0.25 * chance.standard_normal(len(step)))
    if diverges:
        loss[-1] = grad_norm[-1] = math.nan
    due = {*range(0, record.last + (not diverges), EVAL_EVERY)}
    if record.outcome in (FINISHED, STUCK):
        due.add(record.last)
    return Series(
        *(_single(values) for values in (loss, grad_norm, np.minimum(1, 1 / grad_norm))),
        learning_rates(record, step),
        excess,
        {at: float(np.float32(smooth[at] + 0.02 + 0.004 * chance.standard_normal())) for at in sorted(due)},
    )


def _curve(record: Record, step: NDArray[np.int64], chance: np.random.Generator) -> NDArray[np.float64]:
    """The loss without its noise: a quick fall, and a slow one after it, whatever the number of steps."""
    scaled, start = _scaled(record, step), BASELINES["uniform"]
    if record.outcome == STUCK:
        floor = 1.005 * BASELINES["unigram"]
        return floor + (start - floor) * np.exp(-scaled / 40)
    extra, best = BY_PLACEMENT.get(record.placement, (0.05, 3e-3))
    floor = 2.1 + BY_NORM.get(record.norm, 0.1) + extra - 0.06 * math.log2(record.depth / 4)
    floor += 0.25 * math.log10(record.lr / best) ** 2
    floor += 0.015 * np.random.default_rng(record.seed).standard_normal()  # what all runs of a seed share
    floor += 0.01 * chance.standard_normal()
    return floor + (start - floor) * (0.6 * np.exp(-scaled / 40) + 0.4 * (1 + scaled / 150) ** -0.8)


def _scaled(record: Record, step: NDArray[np.int64]) -> NDArray[np.float64]:
    return 2000 * step / record.steps


def _single(values: Array) -> NDArray[np.float64]:
    """As the trainer has them, in float32."""
    return values.astype(np.float32).astype(np.float64)


def learning_rates(record: Record, step: NDArray[np.int64]) -> NDArray[np.float64]:
    """Warm-up, then a cosine to a tenth."""
    warmup = record.warmup_steps
    progress = np.clip((step - warmup) / max(1, record.steps - warmup), 0, 1)
    cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * progress)) / 2
    return record.lr * np.where(step < warmup, (step + 1) / max(1, warmup), cosine)


def write_run(runs: Path, record: Record) -> RunFolder:
    """A run's folder, as a run leaves it.

    Raises:
        StoreError: There is one already, or the system refused.
    """
    chance = np.random.default_rng(int(record.digest[:16], 16))
    folder = RunFolder.create(runs / record.run_id, record.run())
    seen = series(record, chance)
    speed = TOKENS_PER_S * 4 / record.depth * float(np.exp(0.05 * chance.standard_normal()))
    with folder.lock():
        folder.append(_rows(record, seen, speed))
        if record.stats_every is not None:
            size = records_inside.Size(
                norm=record.norm,
                placement=record.placement,
                depth=record.depth,
                width=record.width,
                context=record.context,
            )
            steps = np.arange(0, len(seen.loss), record.stats_every)
            inside = records_inside.profiles(
                size, steps, steps / record.steps, seen.lr[steps], seen.excess[steps], chance
            )
            folder.arrays.begin(0, {CORE: record.stats_every})
            folder.arrays.append(CORE, inside)
        status = _status(record, seen, speed)
        folder.write_status(status | ({"metrics": folder.metrics_digest()} if status["state"] in ENDED else {}))
    return folder


def _rows(record: Record, seen: Series, speed: float) -> list[dict[str, Any]]:
    """The rows in the order in which a run writes them."""
    per_step = record.batch_size * record.context / speed
    columns = zip(seen.loss.tolist(), seen.grad_norm.tolist(), seen.clip.tolist(), seen.lr.tolist(), strict=True)
    trained = [
        {"kind": "train", "step": step, "loss": loss, "grad_norm": grad_norm, "clip": clip, "lr": lr}
        for step, (loss, grad_norm, clip, lr) in enumerate(columns)
    ]
    rows: list[dict[str, Any]] = [{"kind": "eval", "step": 0, "loss": seen.validation[0]}]
    for start in range(0, len(trained), LOG_EVERY):
        rows += trained[start : start + LOG_EVERY]
        done = min(start + LOG_EVERY, record.last)
        rows.append({"kind": "pace", "step": done, "seconds": done * per_step, "tokens_per_s": speed})
        if done in seen.validation:
            rows.append({"kind": "eval", "step": done, "loss": seen.validation[done]})
    return rows


def _status(record: Record, seen: Series, speed: float) -> dict[str, Any]:
    finite = seen.loss[: record.last]
    tokens = record.last * record.batch_size * record.context
    best = min(seen.validation, key=seen.validation.__getitem__)
    found = count({"loss": seen.loss, "grad_norm": seen.grad_norm, "clip": seen.clip})
    state = FINISHED if record.outcome == STUCK else record.outcome
    status = {
        "state": state,
        "step": record.last,
        "train_loss": float(finite[-1]) if len(finite) else None,
        "val_loss": seen.validation[max(seen.validation)],
        "val_loss_batch_statistics": None,
        "best_val_loss": seen.validation[best],
        "best_val_step": best,
        "seconds": tokens / speed,
        "elsewhere": [],
        "steps": record.steps,
        "tokens": tokens,
        "tokens_per_s": speed,
        "peak_memory_bytes": 10**9,
        "checkpoint": record.last if state == FINISHED else record.last // CHECKPOINT_EVERY * CHECKPOINT_EVERY,
    }
    if state in ENDED:
        status |= {"initial_val_loss": seen.validation[0], "outcome": record.outcome}
        status["spikes"] = {one.rule.name: {"spikes": len(one.spikes), "of_steps": one.scored} for one in found}
    if state == DIVERGED:
        before = {"step": record.last - 1, "loss": float(seen.loss[-2]), "grad_norm": float(seen.grad_norm[-2])}
        nan = {"loss": math.nan, "grad_norm": math.nan}
        status["diverged"] = {"step": record.last, **nan, "last_finite": before if len(finite) else None}
    if state == FAILED:
        status["error"] = "RuntimeError: it was to fail"
    return status


def write_sweep(results: Path, name: str, records: Sequence[Record]) -> Path:
    """A sweep's plan and all its runs; returns the sweep's folder."""
    folder = sweep_folder(results, name)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [Job(record.run_id, record.words(), record.whole_config()) for record in records]
    write_plan(folder, Plan(name, "1", jobs, [Pack(index, [index]) for index in range(len(jobs))]))
    for record in records:
        write_run(results / RUNS_FOLDER, record)
    return folder


def grid(runs: int) -> list[Record]:
    """So many runs: the grid of 24, or the beginning of one with more norms, placements, depths, rates and seeds."""
    norms, placements, depths, rates, seeds = NORMS, PLACEMENTS, DEPTHS, RATES, SEEDS
    if runs > 24:
        norms, placements = tuple(BY_NORM), tuple(BY_PLACEMENT)
        depths, rates = (4, 8, 16), (3e-4, 1e-3, 3e-3, 1e-2)
        seeds = -(-runs // (len(norms) * len(placements) * len(depths) * len(rates)))
    choices = itertools.product(range(seeds), rates, depths, placements, norms)
    return [
        Record(norm=norm, placement=placement, depth=depth, lr=lr, seed=seed)
        for seed, lr, depth, placement, norm in itertools.islice(choices, runs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the results folder that is made, or added to")
    parser.add_argument("--runs", type=int, default=24, help="how many (24)")
    options = parser.parse_args()
    print(write_sweep(options.folder, f"demo{options.runs}", grid(options.runs)))


if __name__ == "__main__":
    main()
