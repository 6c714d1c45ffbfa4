"""Functions that compute derived statistics from measured ones, by site.

Shapes: S measured steps, L blocks.
"""

from __future__ import annotations  # torch's compiler cannot trace the annotations of a nested function

import numpy as np
from numpy.typing import NDArray

from normlab.catalogue.statistics.profiles import Array, Profiles


def quotient(profiles: Profiles, numerator: str, denominator: str) -> dict[str, Array]:
    """Return the quotient of two statistics, (S, L + 2) for each site of the numerator."""
    denominators = profiles.get(denominator)
    # A parameter that is 0 has no ratio: the table shows it as NaN or infinite, without a warning for each.
    with np.errstate(divide="ignore", invalid="ignore"):
        return {site: values / denominators[site] for site, values in profiles.get(numerator).items()}


def resid_growth(profiles: Profiles) -> dict[str, Array]:
    """Return ln(resid_rms at the LM head / at block 1) / L, (S,)."""
    # The stream is measured where it enters a layer: at layer 1 it is the output of the embeddings; layer 0 has none.
    values = profiles.single_site("resid_rms").astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"": np.log(values[:, -1] / values[:, 1]) / profiles.layout.depth}


def dresid_growth(profiles: Profiles) -> dict[str, Array]:
    """Return the slope of ln dresid_rms over the layers, (S,)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = profiles.single_site("dresid_rms")
        return {"": slope_over_layers(np.log(values), np.arange(1, values.shape[1]))}


def gradient_shares(profiles: Profiles) -> dict[str, Array]:
    """Return each parameter family's share of the gradient's squared norm, (S,)."""
    sums: dict[str, Array] = {}
    norms = profiles.get("grad_norm")
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for group in profiles.layout.groups:
            if group.statistic == "grad_norm":
                family = profiles.layout.families[group.site]
                # In float64, because squares of float32 norms overflow from 2e19 on, as in a run that diverges.
                squares = np.square(norms[group.site][:, list(group.layers)], dtype=np.float64)
                sums[family] = sums.get(family, 0.0) + squares.sum(axis=1)
        total = sum(sums.values())
        return {family: share / total for family, share in sums.items()}


def noise_scale(profiles: Profiles) -> dict[str, Array]:
    """Return gns_trace / gns_square by parameter site, (S, L + 2), and the ratio of their totals as "all", (S,).

    Numerator and denominator are averaged over measured steps before the division: the ratio of two noisy numbers is
    biased, and its mean need not exist. NaN where the averaged gns_square is not positive.
    """
    trace, square = profiles.get("gns_trace"), profiles.get("gns_square")

    def ratio(trace: Array, square: Array) -> Array:
        trace, square = mean_of_later_half(trace), mean_of_later_half(square)
        return np.divide(trace, square, out=np.full_like(trace, np.nan), where=square > 0)

    ratios = {site: ratio(trace[site], square[site]) for site in trace}
    # Of all parameters together: the sums over all sites, each averaged before the division too.
    totals = [profiles.select([name]).values.sum(axis=1, dtype=np.float64) for name in ("gns_trace", "gns_square")]
    ratios["all"] = ratio(*totals)
    return ratios


def later_half_sizes(count: int) -> list[int]:
    """Return the size of the later half of the first n steps, for n = 1 to `count`: 1, 1, 2, 2, 3, ..."""
    return [(index + 2) // 2 for index in range(count)]


def mean_of_later_half(values: Array) -> Array:
    """Return at each step the float64 mean over the later half of the measured steps so far.

    The window grows, so the mean of a stationary statistic converges. It leaves out the start of training.

    Args:
        values: (S, ...), sorted by step.
    """
    wide = values.astype(np.float64)
    sizes = later_half_sizes(len(wide))
    means = [wide[stop - size : stop].mean(axis=0) for stop, size in enumerate(sizes, start=1)]
    return np.stack(means) if means else wide


def slope_over_layers(values: Array, layers: NDArray[np.intp]) -> Array:
    """Return the least-squares slope over the given layers, (S,); 0 for a single layer."""
    selected = values[:, layers].astype(np.float64)
    # A slope needs only centred layers: centring the values too would change nothing in the sum.
    centred = layers - layers.mean()
    with np.errstate(invalid="ignore"):  # infinite values have no slope
        return (selected * centred).sum(axis=1) / max((centred**2).sum(), 1)
