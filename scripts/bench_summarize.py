"""How long `normlab summarize --by norm,placement` takes over 1,000 runs of 2,000 steps.

    python scripts/bench_summarize.py            # two to four minutes on two CPU cores, most of it the writing
    python scripts/bench_summarize.py --check    # exit 1 above the bar: the median of two seconds

The folders are written by `RunFolder`, the product's own writer, in the order and the sizes in which a run does it:
a run.json as long as a real one, 2,000 rows of training in parts of ten with their paces, 21 evaluations, and a
status with the counts of spikes. Five norms, four placements, five learning rates, ten seeds; one in fifty diverged.
They are not trained: what reading costs does not depend on what the numbers are.

Every time is that of a fresh process, from its start to its end, as a shell sees it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from normlab.stats.spikes import RULES
from normlab.store.runs import RunFolder
from normlab.store.schema import RUNS_FOLDER

NORMS = ("rmsnorm", "layernorm", "batchnorm", "dyt", "scalenorm")
PLACEMENTS = ("pre", "post", "peri", "deepnorm")
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SEEDS = 10
STEPS = 2000
LOG_EVERY, EVAL_EVERY = 10, 100
BAR = 2.0
"""Seconds, of the median."""


def run_record(run_id: str, norm: str, placement: str, lr: float, seed: int) -> dict[str, Any]:
    """A run.json, with what a real one has."""
    part = {"name": norm, "gain": True, "unit_offset": False, "bias": False, "eps": 1e-6, "eps_mode": "inside_ms"}
    model = {"depth": 8, "width": 256, "heads": 4, "context": 256, "positions": "learned", "rope_theta": None}
    model |= {"mlp": "gelu", "mlp_width": 1024, "bias": True, "tie_embeddings": True, "qk_norm": "off"}
    data = {"name": "stdlib", "tokenizer": "bytes", "seed": 0, "val_fraction": 0.05}
    optim = {"name": "adamw", "lr": lr, "schedule": "cosine", "warmup_steps": 50, "final_lr_fraction": 0.1}
    optim |= {"decay_fraction": None, "clip": 1.0, "weight_decay": 0.1, "decay": "matrices", "beta1": 0.9}
    optim |= {"beta2": 0.95, "eps": 1e-8}
    train = {"steps": STEPS, "batch_size": 8, "accumulation": 1}
    config = {
        "norm": part, "placement": {"name": placement}, "model": model, "data": data, "optim": optim,
        "train": train, "eval": {"sequences": 64}, "seed": seed, "init": "gpt2_scaled",
    }  # fmt: skip
    whole = {
        **config,
        "norm": {"preset": "", **part},
        "model": {"preset": "gpt2_tiny", **model},
        "train": {**train, "log_every": LOG_EVERY, "checkpoint_every": 200},
        "eval": {"every": EVAL_EVERY, "sequences": 64},
        "stats": {"preset": "core", "tiers": ["core"], "also": [], "without": [], "every": 10, "extended_every": None},
        "tracking": {"wandb": "off", "project": "normlab", "entity": None, "group": None, "tags": [], "layers": False},
        "run": {"name": None, "fresh": False},
        "init": "auto", "device": "auto", "precision": "auto", "compile": "auto", "deterministic": None,
        "results_dir": "results", "plugins": [],
    }  # fmt: skip
    return {
        "run_id": run_id,
        "name": run_id,
        "config": whole,
        "resolved": {
            "device": "cpu", "precision": "fp32", "compile": "off", "deterministic": True, "init": "gpt2_scaled",
            "device_name": "cpu", "threads": 1, "instructions": "AVX2",
        },
        "corpus": {
            "name": "stdlib", "sha256": "b" * 64, "tokenizer": "bytes", "vocab_size": 257, "train_tokens": 11_392_404,
            "val_tokens": 688_061, "documents": 729, "split": "documents",
            "baselines": {"uniform": 5.549, "unigram": 3.238, "bigram": 2.512},
        },
        "identity": {
            "config": config, "corpus": "b" * 64, "device": "cpu", "precision": "fp32", "compile": "off",
            "sources": {name: name[0] * 64 for name in ("norm", "placement", "init")},
        },
        "trunk": None,
        "doubts": [],
        "norm": {"formula": "x / sqrt(mean(x^2) + eps) * gain", "causal": True, "batch_statistics": False},
        "placement": {"name": placement},
        "versions": {"normlab": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "wandb": "0.31.0"},
        "git": {"commit": "c" * 40, "diff": ""},
        "command": ["normlab train", f"norm={norm}", f"placement={placement}", f"optim.lr={lr}", f"seed={seed}"],
        "created": 1_760_000_000.0,
        "fingerprint": "32c244796f76d676",
    }  # fmt: skip


def write_run(runs: Path, norm: str, placement: str, lr: float, seed: int) -> int:
    """A run's folder, as a run leaves it; returns how many bytes its rows take."""
    chance = random.Random(f"{norm} {placement} {lr} {seed}")
    run_id = f"{norm}-{placement}-d8w256-{chance.getrandbits(40):010x}"
    folder = RunFolder.create(runs / run_id, run_record(run_id, norm, placement, lr, seed))
    diverged_at = chance.randrange(200, STEPS) if chance.random() < 0.02 else None
    loss, last = 5.5, diverged_at or STEPS
    with folder.lock():
        folder.append([{"kind": "eval", "step": 0, "loss": loss}])
        for start in range(0, last, LOG_EVERY):
            rows: list[dict[str, Any]] = []
            for step in range(start, min(start + LOG_EVERY, last)):
                loss = 2.2 + 3.3 * 0.998**step + chance.gauss(0, 0.05)
                rows.append(
                    {
                        "kind": "train",
                        "step": step,
                        "loss": loss,
                        "grad_norm": 2 * chance.random(),
                        "clip": chance.random(),
                        "lr": lr * chance.random(),
                    }
                )
            done = min(start + LOG_EVERY, last)
            folder.append(
                [*rows, {"kind": "pace", "step": done, "seconds": done / 31, "tokens_per_s": 7e4 * chance.random()}]
            )
            if done % EVAL_EVERY == 0:
                folder.append([{"kind": "eval", "step": done, "loss": loss}])
        counts = {rule.name: {"spikes": chance.randrange(9), "of_steps": last} for rule in RULES}
        status = {
            "step": last, "train_loss": loss, "val_loss": loss, "val_loss_batch_statistics": None,
            "best_val_loss": loss, "best_val_step": last, "seconds": last / 31, "elsewhere": [], "steps": STEPS,
            "tokens": last * 2048, "tokens_per_s": 63488.0, "peak_memory_bytes": 10**9, "checkpoint": last,
            "spikes": counts,
        }  # fmt: skip
        if diverged_at is None:
            folder.write_status({"state": "finished", **status})
        else:
            seen = {"step": last, "loss": float("nan"), "grad_norm": float("nan"), "last_finite": None}
            folder.write_status({"state": "diverged", **status, "diverged": seen})
    return folder.size()


def time_once(words: list[str]) -> float:
    """Seconds of a fresh process that must succeed."""
    since = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "normlab", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"normlab {' '.join(words)}: exit {done.returncode}\n{done.stderr}")
    return time.perf_counter() - since


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=7, help="fresh processes for each command (7)")
    parser.add_argument("--runs", type=int, default=1000, help="run folders (1000)")
    parser.add_argument("--check", action="store_true", help="exit 1 above the bar")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="normlab-bench-") as folder:
        since, size, written = time.perf_counter(), 0, 0
        grid = itertools.product(range(SEEDS), RATES, NORMS, PLACEMENTS)
        for seed, lr, norm, placement in itertools.islice(grid, options.runs):
            size += write_run(Path(folder, RUNS_FOLDER), norm, placement, lr, seed)
            written += 1
        told = f"{written} runs of {STEPS} steps, {size / 2**20:.0f} MiB of rows"
        print(f"{told}, written in {time.perf_counter() - since:.0f} s", flush=True)
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
        by = ["summarize", folder, "--by", "norm,placement"]
        commands = {
            "--by norm,placement": by,
            "... --against norm=layernorm": [*by, "--against", "norm=layernorm"],
            "... --format json": [*by, "--format", "json"],
            "... --target 2.5": [*by, "--target", "2.5"],
        }
        seconds: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(options.times):
            for label, words in commands.items():  # in turns: a busy minute of the machine falls on all of them
                seconds[label].append(time_once(words))
    print(f"\n{'normlab summarize':32} {'least':>7} {'median':>7}")
    for label, times in seconds.items():
        print(f"{label:32} {min(times):7.3f} {statistics.median(times):7.3f}")
    median = statistics.median(seconds["--by norm,placement"])
    kept = median < BAR
    print(f"\n{written} runs in {median:.2f} s, the bar being {BAR:g} s: {'kept' if kept else 'NOT KEPT'}")
    return int(options.check and not kept)


if __name__ == "__main__":
    sys.exit(main())
