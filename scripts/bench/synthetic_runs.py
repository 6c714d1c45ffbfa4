"""Write the folders of synthetic runs, which benchmarks and tests read instead of trained runs.

`RunFolder`, normlab's own writer, writes the content of a real run: run.json, a row for every step, a pace for every
ten, evaluations, a status with the counts of spikes, and statistics in the columns of a real run
(`synthetic_statistics.py`). The numbers are smooth with some noise and depend only on the run's options; their effect
on the loss is made up and says nothing about any norm.

Shapes: S steps.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import synthetic_statistics
from numpy.typing import NDArray

from normlab.analysis.spikes import count_spikes
from normlab.base.options import plain_tree
from normlab.catalogue.optimizers.options import ParameterGroups
from normlab.catalogue.statistics.profiles import Array
from normlab.catalogue.statistics.statistic import CORE
from normlab.store.format import COMPLETED_STATES, DIVERGED, FAILED, FINISHED, RUNS_FOLDER
from normlab.store.outcome import STUCK, References, outcome
from normlab.store.plans import Pack, Plan, PlannedRun, sweep_folder
from normlab.store.runs import RunFolder
from normlab.sweeps.files import write_plan

BASELINES = {"uniform": 5.549, "unigram": 3.238, "bigram": 2.512, "targets": 64 * 128}
LOG_EVERY, EVAL_EVERY, CHECKPOINT_EVERY = 10, 100, 200
TOKENS_PER_S = 7e4
BLOW_UP = 30
"""Steps from the start of a divergence to NaN."""

FORMULAS = {
    "rmsnorm": "x / sqrt(mean(x^2) + eps) * gain",
    "layernorm": "(x - mean(x)) / sqrt(var(x) + eps) * gain + bias",
    "batchnorm": "(x - mean_batch(x)) / sqrt(var_batch(x) + eps) * gain + bias",
    "dyt": "tanh(alpha * x) * gain + bias",
    "scalenorm": "g * x / max(|x|, eps)",
}
BY_NORM = {"rmsnorm": 0.0, "layernorm": 0.01, "scalenorm": 0.05, "dyt": 0.07, "batchnorm": 0.15}
BY_PLACEMENT = {"pre": (0.0, 3e-3), "peri": (-0.02, 3e-3), "deepnorm": (0.03, 1e-3), "post": (0.06, 1e-3)}
"""The amount that each placement adds to the loss, and its best learning rate."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The options and the outcome of one run."""

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
    tokens_per_parameter: float | None = None
    outcome: str = FINISHED
    """A state of `status.json`, or `STUCK`. Readers report a running run as killed unless its lock is held."""
    at: int | None = None
    """The step of the divergence, the failure or the last record; by default half of the steps."""
    spike_at: int | None = None
    """The step at which the loss jumps; it recovers within about twenty steps."""
    stats_every: int | None = 10
    """Steps between two measured steps; None for a run without statistics."""

    @property
    def last(self) -> int:
        if self.outcome in (FINISHED, STUCK):
            return self.steps
        return self.steps // 2 if self.at is None else self.at

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the part of the config that the run's identity contains."""
        norm = {"name": self.norm, "gain": True, "unit_offset": False, "bias": False, "eps": 1e-6}
        norm |= {"eps_mode": "inside_ms"}
        model = {"depth": self.depth, "width": self.width, "heads": 4, "context": self.context}
        model |= {"positions": "learned", "rope_theta": None, "rope_fraction": 1.0}
        model |= {"mlp": "gelu", "mlp_width": 4 * self.width}
        model |= {"bias": True, "tie_embeddings": True, "qk_norm": "off", "qk_norm_after_rope": False, "qk_scale": 1.0}
        model |= {"attn_gate": "off", "embed_scale": 1.0, "logit_softcap": None, "scaling": "none", "z_loss": 0.0}
        model |= {
            "base_width": None,
            "base_depth": None,
            "attn_softcap": None,
            "v_norm": False,
            "value_residual": "off",
            "value_embed": False,
        }
        data = {"name": "stdlib", "tokenizer": "bytes", "seed": self.seed, "val_fraction": 0.05}
        optim = {"name": "adamw", "lr": self.lr, "schedule": "cosine", "warmup_steps": self.warmup_steps}
        optim |= {"groups": plain_tree(ParameterGroups())}
        optim |= {"final_lr_fraction": 0.1, "decay_fraction": None, "clip": 1.0, "weight_decay": 0.1}
        optim |= {
            "decay_mode": "proportional",
            "decay": "matrices",
            "qk_clip": None,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
        }
        train = {"steps": self.steps, "batch_size": self.batch_size, "accumulation": 1}
        return {
            "norm": norm, "placement": {"name": self.placement}, "model": model, "data": data, "optim": optim,
            "train": train, "eval": {"sequences": 64, "ema": None}, "seed": self.seed, "init": "gpt2_scaled",
        }  # fmt: skip

    @cached_property
    def digest(self) -> str:
        """Return a hash of the options and the outcome, which seeds the numbers, whatever the format of a record."""
        content: list[Any] = []
        for field in fields(self):
            if field.name not in ("stats_every", "tokens_per_parameter"):
                content.append(getattr(self, field.name))
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def run_id(self) -> str:
        return f"{self.norm}-{self.placement}-d{self.depth}w{self.width}-{self.digest[:10]}"

    def complete_config(self) -> dict[str, Any]:
        """Return every option, as in run.json."""
        config, on = self.config, self.stats_every is not None
        return {
            **config,
            "norm": {
                "preset": "", "at": {}, **config["norm"], "taper_steps": None, "taper_warmup": 100, "compute": "fp32",
                "rounding": "scale_then_cast",
            },
            "placement": {
                **config["placement"], "embedding_norm": None, "final_norm": None, "branch_warmup": None,
                "branch_factor": 1.0, "residual_affine": False,
            },
            "data": {**config["data"], "vocab_size": None, "max_tokens": None},
            "model": {"preset": "gpt2_tiny", **config["model"]},
            "train": {
                **config["train"], "start_from": None, "log_every": LOG_EVERY, "checkpoint_every": CHECKPOINT_EVERY,
                "graph": "auto", "keep": [], "tokens_per_parameter": self.tokens_per_parameter,
            },
            "eval": {"every": EVAL_EVERY, **config["eval"]},
            "stats": {
                "preset": "core" if on else "off", "tiers": ["core"] if on else [], "also": [],
                "every": self.stats_every, "extended_every": None,
            },
            "tracking": {"wandb": "off", "project": "normlab", "entity": None},
            "run": {"name": None, "fresh": False},
            "init": "auto", "device": "auto", "devices": 1, "precision": "auto", "compile": "auto",
            "deterministic": None,
            "plugins": [],
        }  # fmt: skip

    def overrides(self) -> list[str]:
        """Return the overrides in which the runs of a sweep differ."""
        return [
            f"norm={self.norm}", f"placement={self.placement}", f"model.depth={self.depth}", f"optim.lr={self.lr}",
            f"seed={self.seed}",
        ]  # fmt: skip

    @property
    def flops_per_token(self) -> float:
        """Return the model FLOPs per token of a training step, as `model/flops.py`: no norm multiplies matrices."""
        weights = self.depth * 12 * self.width**2 + 257 * self.width
        return 6.0 * weights + 12 * self.depth * self.context * self.width

    def run(self) -> dict[str, Any]:
        """Return the content of run.json."""
        return {
            "run_id": self.run_id,
            "name": self.run_id,
            "config": self.complete_config(),
            "resolved": {
                "device": "cpu", "precision": "fp32", "compile": "off", "deterministic": True, "init": "gpt2_scaled",
                "device_name": "cpu", "device_uuid": None, "devices": 1, "graph": "off", "threads": 1,
                "wait_policy": "default", "instructions": "AVX2", "decayed": "matrices",
                "attention": "flash_attention",
            },
            "corpus": {
                "name": "stdlib", "sha256": "b" * 64, "tokenizer": "bytes", "vocab_size": 257,
                "train_tokens": 11_392_404, "val_tokens": 688_061, "documents": 729, "split": "documents",
                "read": {"rows": 729, "documents": 729, "empty": 0, "null": 0},
                "baselines": BASELINES,
            },
            "identity": {
                "config": self.config, "corpus": "b" * 64, "device": "cpu", "precision": "fp32", "compile": "off",
                "versions": {"norm": 1, "placement": 1, "init": 1, "optim": 1},
            },
            "flops_per_token": self.flops_per_token,
            "warnings": [],
            "norm": {
                "formula": FORMULAS.get(self.norm, "x"), "causal": self.norm != "batchnorm",
                "batch_statistics": self.norm == "batchnorm", "source": "",
            },
            "versions": {
                "normlab": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "wandb": "0.31.0",
            },
            "git": {"commit": "c" * 40, "diff": ""},
            "created": 1_760_000_000.0,
            "pack": {"sweep": None, "number": None, "runs": []},
            "fingerprint": "32c244796f76d676",
            "parameters": [
                {"parameter": name, "group": "matrices", "shape": f"{self.width} x {self.width}",
                 "lr": f"{self.lr:g}", "decay": "0.1", "eps": "1e-08", "update": "adamw", "init": "normal, sd 0.02"}
                for name in ("blocks.0-3.attn.q.weight", "blocks.0-3.mlp.up.weight")
            ],
        }  # fmt: skip


@dataclass(frozen=True)
class Series:
    loss: NDArray[np.float64]
    """Shape (S,), as the other arrays."""
    grad_norm: NDArray[np.float64]
    clip_factor: NDArray[np.float64]
    lr: NDArray[np.float64]
    excess: Array
    """Factor of activations and gradients: 1, or more during a spike or divergence."""
    validation: dict[int, float]


def series(record: Record, rng: np.random.Generator) -> Series:
    diverges = record.outcome == DIVERGED
    step = np.arange(record.last + diverges)  # the row of the step with NaN is written too
    excess = np.ones(len(step))
    if diverges:
        excess = np.maximum(1, 10 ** ((step - record.last + BLOW_UP) / (BLOW_UP / 4)))
    if record.spike_at is not None:
        since = step - record.spike_at
        excess = excess + np.where(since >= 0, 9 * np.exp(-np.maximum(since, 0) / 5), 0)
    smooth = _curve(record, np.arange(record.last + 1), rng)
    jump = 0.9 * np.log(excess)
    loss = smooth[: len(step)] + 0.05 * rng.standard_normal(len(step)) + jump
    typical = 0.4 + 2.5 * np.exp(-_scaled(record, step) / 60)
    grad_norm = typical * excess * np.exp(0.25 * rng.standard_normal(len(step)))
    if diverges:
        loss[-1] = grad_norm[-1] = math.nan
    due = {*range(0, record.last + (not diverges), EVAL_EVERY)}
    if record.outcome in (FINISHED, STUCK):
        due.add(record.last)
    return Series(
        _single(loss),
        _single(grad_norm),
        _single(np.minimum(1, 1 / grad_norm)),
        learning_rates(record, step),
        excess,
        {at: float(np.float32(smooth[at] + 0.02 + 0.004 * rng.standard_normal())) for at in sorted(due)},
    )


def _curve(record: Record, step: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the loss without noise: a fast fall and then a slow one, scaled to the number of steps."""
    scaled, start = _scaled(record, step), BASELINES["uniform"]
    if record.outcome == STUCK:
        floor = 1.005 * BASELINES["unigram"]
        return floor + (start - floor) * np.exp(-scaled / 40)
    extra, best = BY_PLACEMENT.get(record.placement, (0.05, 3e-3))
    floor = 2.1 + BY_NORM.get(record.norm, 0.1) + extra - 0.06 * math.log2(record.depth / 4)
    floor += 0.25 * math.log10(record.lr / best) ** 2
    floor += 0.015 * np.random.default_rng(record.seed).standard_normal()  # shared by all runs of a seed
    floor += 0.01 * rng.standard_normal()
    return floor + (start - floor) * (0.6 * np.exp(-scaled / 40) + 0.4 * (1 + scaled / 150) ** -0.8)


def _scaled(record: Record, step: NDArray[np.int64]) -> NDArray[np.float64]:
    return 2000 * step / record.steps


def _single(values: Array) -> NDArray[np.float64]:
    """Round to float32, as in the trainer."""
    return values.astype(np.float32).astype(np.float64)


def learning_rates(record: Record, step: NDArray[np.int64]) -> NDArray[np.float64]:
    warmup = record.warmup_steps
    progress = np.clip((step - warmup) / max(1, record.steps - warmup), 0, 1)
    cosine = 0.1 + 0.9 * (1 + np.cos(np.pi * progress)) / 2
    return record.lr * np.where(step < warmup, (step + 1) / max(1, warmup), cosine)


def write_run(runs: Path, record: Record) -> RunFolder:
    """Write and return the folder of a run.

    Raises:
        StoreError: The folder exists, or cannot be written.
    """
    rng = np.random.default_rng(int(record.digest[:16], 16))
    folder = RunFolder.create(runs / record.run_id, record.run())
    numbers = series(record, rng)
    speed = TOKENS_PER_S * 4 / record.depth * float(np.exp(0.05 * rng.standard_normal()))
    with folder.lock():
        folder.append(_rows(record, numbers, speed))
        if record.stats_every is not None:
            size = synthetic_statistics.Size(
                norm=record.norm, placement=record.placement, depth=record.depth, width=record.width,
                context=record.context,
            )  # fmt: skip
            steps = np.arange(0, len(numbers.loss), record.stats_every)
            statistics = synthetic_statistics.profiles(
                size, steps, steps / record.steps, numbers.lr[steps], numbers.excess[steps], rng
            )
            folder.statistics.append(CORE, statistics)
        status = _status(record, numbers, speed)
        if status["state"] in COMPLETED_STATES:
            metrics, statistics = folder.digests()
            status["metrics"] = asdict(metrics)
            status["statistics"] = {name: asdict(each) for name, each in statistics.items()}
        folder.write_status(status)
    return folder


def _rows(record: Record, numbers: Series, speed: float) -> list[dict[str, Any]]:
    """Return the rows in the order in which a run writes them."""
    per_step = record.batch_size * record.context / speed
    columns = zip(
        numbers.loss.tolist(),
        numbers.grad_norm.tolist(),
        numbers.clip_factor.tolist(),
        numbers.lr.tolist(),
        strict=True,
    )
    trained = [
        {"kind": "train", "step": step, "loss": loss, "grad_norm": grad_norm, "clip": factor, "lr": lr}
        for step, (loss, grad_norm, factor, lr) in enumerate(columns)
    ]
    rows: list[dict[str, Any]] = [{"kind": "eval", "step": 0, "loss": numbers.validation[0]}]
    for start in range(0, len(trained), LOG_EVERY):
        rows += trained[start : start + LOG_EVERY]
        done = min(start + LOG_EVERY, record.last)
        rows.append({"kind": "pace", "step": done, "seconds": done * per_step, "tokens_per_s": speed})
        if done in numbers.validation:
            rows.append({"kind": "eval", "step": done, "loss": numbers.validation[done]})
    return rows


def _status(record: Record, numbers: Series, speed: float) -> dict[str, Any]:
    finite = numbers.loss[: record.last]
    tokens = record.last * record.batch_size * record.context
    best = min(numbers.validation, key=numbers.validation.__getitem__)
    detections = count_spikes(
        {"loss": numbers.loss, "grad_norm": numbers.grad_norm, "clip_factor": numbers.clip_factor}
    )
    state = FINISHED if record.outcome == STUCK else record.outcome
    status = {
        "state": state,
        "step": record.last,
        "train_loss": float(finite[-1]) if len(finite) else None,
        "val_loss": numbers.validation[max(numbers.validation)],
        "val_loss_batch_statistics": None,
        "val_loss_ema": None,
        "best_val_loss": numbers.validation[best],
        "best_val_step": best,
        "seconds": tokens / speed,
        "changes_at_resume": [],
        "steps": record.steps,
        "tokens": tokens,
        "tokens_per_s": speed,
        "peak_memory_bytes": 10**9,
        "checkpoint": record.last if state == FINISHED else record.last // CHECKPOINT_EVERY * CHECKPOINT_EVERY,
    }
    if state in COMPLETED_STATES:
        references = References(BASELINES["uniform"], BASELINES["unigram"], BASELINES["bigram"], numbers.validation[0])
        name = outcome(status["val_loss"], status["best_val_loss"], references, finite=state != DIVERGED)
        status |= {"initial_val_loss": numbers.validation[0], "outcome": name}
        status["spikes"] = {
            detection.rule: {"spikes": len(detection.spikes), "of_steps": detection.scored} for detection in detections
        }
    if state == DIVERGED:
        before = {"step": record.last - 1, "loss": float(numbers.loss[-2]), "grad_norm": float(numbers.grad_norm[-2])}
        nan = {"loss": math.nan, "grad_norm": math.nan}
        status["diverged"] = {"step": record.last, **nan, "last_finite": before if len(finite) else None}
    if state == FAILED:
        status["error"] = "RuntimeError: a synthetic failure"
    return status


def write_sweep(results: Path, name: str, records: Sequence[Record]) -> Path:
    """Write a sweep's plan and its runs, and return the sweep's folder."""
    folder = sweep_folder(results, name)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [PlannedRun(record.run_id, record.overrides(), record.complete_config()) for record in records]
    write_plan(folder, Plan(name, "1", jobs, [Pack(index, [index]) for index in range(len(jobs))]))
    for record in records:
        write_run(results / RUNS_FOLDER, record)
    return folder
