"""Metrics for a tracker from the statistics of a measured step: the same keys at every depth, by default.

Shapes: P layers of a statistic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from normlab.errors import StatisticsError
from normlab.stats.derived import slope_over_layers
from normlab.stats.profiles import Array, Profiles
from normlab.stats.registry import layers_of, values_of

PROFILED = (
    "resid_rms", "attn_rms", "mlp_rms", "attn_ratio", "mlp_ratio", "resid_uniform", "resid_kurt", "resid_crest",
    "adj_cos", "dresid_rms",
    "attn_logit_max", "attn_entropy", "token_cos", "part_ratio", "layer_drop", "erank",
)  # fmt: skip
"""Statistics with a number per layer, sent as five summary numbers and a profile; the last six need stats=full."""
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
"""Statistics with one number per step or per site, and their keys."""
LARGEST = {"update_ratio": ".weight", "gain_absmax": "", "resid_nonfinite": ""}
"""Statistics logged as their maximum over sites, and the suffix of those sites."""
SUMMARIZED_BY_MAX = ("out/logit_absmax", "stats/resid_crest/max", "stats/resid_nonfinite/max")
"""Keys whose largest value, not the last, is the summary of a run."""
MOST_BINS = 512
"""W&B's limit on the bins of a histogram; a longer profile is not sent."""


class StepMetrics(NamedTuple):
    """The metrics of one step, by key."""

    numbers: dict[str, float]
    profiles: dict[str, Array]
    """Values by layer, (P,), all finite and none negative."""


def step_metrics(profiles: Profiles, *, layers: bool = False) -> StepMetrics:
    """Return the metrics of the last measured step; statistics that were not measured are left out.

    Args:
        profiles: At least one step.
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
    """Return a statistic at the last step, by site; empty where it was not measured."""
    try:
        return {site: values[-1] for site, values in values_of(profiles, name).items()}
    except StatisticsError:
        return {}
