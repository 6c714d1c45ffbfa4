"""What W&B receives of a run: its config, the rows of an interval, and the metrics of a measured step.

The keys of a measured step are the same at every depth, unless `tracking.layers` is set.

Shapes: P layers of a statistic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from normlab.errors import StatisticsError
from normlab.stats.derived import slope_over_layers
from normlab.stats.profiles import Array, Profiles
from normlab.stats.registry import layers_of, values_of
from normlab.store.outcome import final_losses
from normlab.store.status import Status
from normlab.store.throughput import Compute
from normlab.tracking.tracker import Row

PROFILED = (
    "resid_rms", "attn_rms", "mlp_rms", "attn_ratio", "mlp_ratio", "resid_uniform", "resid_kurt", "resid_crest",
    "adj_cos", "dresid_rms",
    "attn_logit_max", "attn_entropy", "token_cos", "part_ratio", "layer_drop", "erank",
)  # fmt: skip
"""Statistics per layer, sent as five summary numbers and a profile; the last six need stats=full."""
SINGLE = {
    "resid_growth": "stats/resid_growth",
    "dresid_growth": "stats/dresid_growth",
    "logz": "out/logz",
    "logz2": "out/logz2",
    "logit_mean": "out/logit_mean",
    "logit_absmax": "out/logit_absmax",
    "grad_share": "grad_share/{site}",
    "sharpness": "probe/sharpness",
    "sharpness_pre": "probe/sharpness_pre",
}
"""Statistics with one number per step or per site, and the key of each."""
LARGEST = {"update_ratio": ".weight", "gain_absmax": "", "resid_nonfinite": ""}
"""Statistics logged as the maximum over sites whose names end with the suffix."""
SUMMARIZED_BY_MAX = ("out/logit_absmax", "stats/resid_crest/max", "stats/resid_nonfinite/max")
"""Keys whose summary of a run is the largest value, not the last."""
MOST_BINS = 512
"""W&B's limit on the bins of a histogram; longer profiles are not sent."""


class StepMetrics(NamedTuple):
    """The metrics of one step, by key."""

    numbers: dict[str, float]
    profiles: dict[str, Array]
    """Values by layer, (P,), finite and at least 0."""


def step_metrics(profiles: Profiles, *, layers: bool = False) -> StepMetrics:
    """Return the metrics of the last measured step, without statistics that were not measured.

    Args:
        profiles: Statistics of at least one step.
        layers: Whether to add `layers/<statistic>/L03` for each layer of each profile.
    """
    numbers: dict[str, float] = {}
    shapes: dict[str, Array] = {}
    for name in PROFILED:
        for site, values in _last_step(profiles, name).items():
            measured = np.flatnonzero(layers_of(profiles, name)[site])
            profile = values[measured]
            summary = {
                "first": profile[0],
                "mid": profile[(len(profile) - 1) // 2],
                "last": profile[-1],
                "max": profile.max(),
                "slope": slope_over_layers(values[None], measured)[0],
            }
            numbers |= {f"stats/{name}/{key}": float(value) for key, value in summary.items()}
            if np.isfinite(profile).all() and profile.min() >= 0 and len(profile) <= MOST_BINS:
                shapes[f"profiles/{name}"] = profile
            if layers:
                numbers |= {f"layers/{name}/L{layer:02d}": float(values[layer]) for layer in measured}
    for name, key in SINGLE.items():
        for site, values in _last_step(profiles, name).items():
            numbers[key.format(site=site)] = float(values if values.ndim == 0 else values[-1])
    for name, ending in LARGEST.items():
        if candidates := [values for site, values in _last_step(profiles, name).items() if site.endswith(ending)]:
            numbers[f"stats/{name}/max"] = float(np.nanmax(np.stack(candidates)))
    return StepMetrics(numbers, shapes)


def _last_step(profiles: Profiles, name: str) -> dict[str, Array]:
    """Return a statistic at the last step, by site; empty if the statistic was not measured."""
    try:
        return {site: values[-1] for site, values in values_of(profiles, name).items()}
    except StatisticsError:
        return {}


def payloads(rows: Sequence[Row], tokens_per_step: int, compute: Compute) -> list[dict[str, float]]:
    """Return an interval's payloads, oldest first: a dict per step, with its evaluation and pace merged in.

    Only the last training row is sent, because a call of W&B's for each step is too expensive. It carries the largest
    loss of the interval (NaN if one was), so that a spike in between is visible.
    """
    training = [row for row in rows if row["kind"] == "train"]
    merged: dict[int, dict[str, float]] = {}
    for row in [*training[-1:], *(row for row in rows if row["kind"] != "train")]:
        step = row["step"]
        payload = merged.setdefault(step, {"train/step": step, "train/tokens": step * tokens_per_step})
        payload |= {name: row[key] for key, name in _NAMES[row["kind"]].items() if key in row}
        if row["kind"] == "pace":
            payload |= _speeds(compute, row["tokens_per_s"])
    if training:
        losses = (row["loss"] for row in training)
        merged[training[-1]["step"]]["train/loss_max"] = max(losses, key=lambda x: (math.isnan(x), x))
    return [merged[step] for step in sorted(merged)]


def _speeds(compute: Compute, tokens_per_s: float) -> dict[str, float]:
    """Return the model FLOP/s in units of 10^12, and the MFU from 0 to 1, if they are known."""
    flops_per_s, mfu = compute.flops(tokens_per_s), compute.mfu(tokens_per_s)
    speeds = {"perf/tflops_per_s": None if flops_per_s is None else flops_per_s / 1e12, "perf/mfu": mfu}
    return {key: value for key, value in speeds.items() if value is not None}


_NAMES = {
    "train": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "clip": "train/clip_coef",
        "lr": "train/lr",
    },
    "eval": {"loss": "eval/loss", "loss_batch_statistics": "eval/loss_batch_statistics"},
    "pace": {"tokens_per_s": "perf/tokens_per_s", "seconds": "perf/seconds"},
}


def flat_config(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the W&B config of a run: settings to group by at the top level, and the full tree under `config`."""
    config, resolved, corpus = run["config"], run["resolved"], run["corpus"]
    model, train = config["model"], config["train"]
    return {
        "norm": config["norm"]["preset"] or config["norm"]["name"],
        "placement": config["placement"]["name"],
        "model": model["preset"],
        **{key: model[key] for key in ("depth", "width", "heads", "context")},
        "seed": config["seed"],
        "data_seed": config["data"]["seed"],
        "optim": config["optim"]["name"],
        "lr": config["optim"]["lr"],
        "batch_size": train["batch_size"],
        "steps": train["steps"],
        "tokens": train["steps"] * train["batch_size"] * model["context"],
        "flops_per_token": run.get("flops_per_token"),  # older records have none
        **{key: resolved[key] for key in ("init", "device", "precision")},
        "corpus": corpus["name"],
        "corpus_sha256": corpus["sha256"],
        "vocab_size": corpus["vocab_size"],
        "baselines": corpus["baselines"],
        "fingerprint": run.get("fingerprint"),
        "causal": run["norm"]["causal"],
        "config": config,
        "versions": run["versions"],
        "git": run["git"],
    }


def final_summary(status: Status) -> dict[str, Any]:
    """Return what the W&B summary holds of the last status: state, outcome, losses and the number of spikes."""
    summary: dict[str, Any] = {key: getattr(status, key) for key in ("state", "outcome", "best_val_loss")}
    summary["val_loss"], summary["last_val_loss"] = final_losses(status.state, status.val_loss)
    summary |= {f"spike/{rule}": spikes["spikes"] for rule, spikes in (status.spikes or {}).items()}
    return {key: value for key, value in summary.items() if value is not None}
