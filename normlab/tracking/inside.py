"""What a tracker is told of a measured step: as many keys at every depth, and each block's own only on request.

Shapes: P places that a statistic has.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from normlab.errors import StatisticsError
from normlab.stats.profiles import Array, Profiles, slope_over_layers
from normlab.stats.statistic import layers_of, values_of

PROFILED = (
    "resid_rms", "attn_rms", "mlp_rms", "attn_ratio", "mlp_ratio", "resid_uniform", "resid_kurt", "resid_crest",
    "adj_cos", "dresid_rms",
    "attn_logit_max", "attn_entropy", "token_cos", "part_ratio", "layer_drop", "erank",
)  # fmt: skip
"""Statistics with a number a block, of which five numbers and the profile are sent; the last six with stats=full."""
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
"""Statistics with one number a step, or one a site, and what that is called."""
LARGEST = {"update_ratio": ".weight", "gain_absmax": "", "resid_nonfinite": ""}
"""Statistics of which the largest number of all places is sent, and how the sites end that are looked at."""
SUMMED_BY_MAX = ("out/logit_absmax", "stats/resid_crest/max", "stats/resid_nonfinite/max")
"""Keys whose largest value, not the last, stands for a run."""
MOST_BINS = 512
"""W&B's: a deeper profile is not sent."""


class Keys(NamedTuple):
    """What is sent of one step."""

    numbers: dict[str, float]
    profiles: dict[str, Array]
    """Values by place, (P,), by the statistic's key; all of them finite and none negative."""


def keys_of(profiles: Profiles, *, layers: bool = False) -> Keys:
    """The numbers and the profiles of the last of some measured steps; what was not measured is left out.

    Args:
        profiles: At least one step.
        layers: Whether to add `layers/<statistic>/L03` for each place of each profile.
    """
    numbers: dict[str, float] = {}
    shapes: dict[str, Array] = {}
    for name in PROFILED:
        for site, whole in _last(profiles, name).items():
            places = np.flatnonzero(layers_of(profiles, name)[site])
            known = whole[places]
            told = {
                "first": known[0],
                "mid": known[(len(known) - 1) // 2],
                "last": known[-1],
                "max": known.max(),
                "slope": slope_over_layers(whole[None], places)[0],
            }
            numbers |= {f"stats/{name}/{which}": float(value) for which, value in told.items()}
            if np.isfinite(known).all() and known.min() >= 0 and len(known) <= MOST_BINS:
                shapes[f"profiles/{name}"] = known
            if layers:
                numbers |= {f"layers/{name}/L{place:02d}": float(whole[place]) for place in places}
    for name, key in SINGLE.items():
        for site, whole in _last(profiles, name).items():
            numbers[key.format(site=site)] = float(whole if whole.ndim == 0 else whole[-1])
    for name, ending in LARGEST.items():
        if found := [whole for site, whole in _last(profiles, name).items() if site.endswith(ending)]:
            numbers[f"stats/{name}/max"] = float(np.nanmax(np.stack(found)))
    return Keys(numbers, shapes)


def _last(profiles: Profiles, name: str) -> dict[str, Array]:
    """A statistic at the last step, by site; nothing where it was not measured."""
    try:
        return {site: values[-1] for site, values in values_of(profiles, name).items()}
    except StatisticsError:
        return {}
