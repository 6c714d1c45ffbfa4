"""Statistics of a synthetic run, for `synthetic_runs.py`: a real run's columns, smooth numbers.

The columns are those of a GPT-2 at `stats=core`. The numbers follow known results: a pre-norm stream grows with every
block, a post-norm gradient vanishes below the top, gains drift, and updates follow the learning rate.

Shapes: S measured steps, P layers of a group.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normlab.catalogue.statistics.profiles import Array, Layout, Profiles, StatisticColumn

VOCABULARY = 257
PARAMETERS = {
    "layernorm": ("affine.gain", "affine.bias"),
    "batchnorm": ("affine.gain", "affine.bias"),
    "rmsnorm": ("affine.gain",),
    "dyt": ("alpha", "affine.gain", "affine.bias"),
    "scalenorm": ("radius",),
}
SITES = {
    "pre": ("in",),
    "peri": ("in", "out"),
    "post": ("res",),
    "deepnorm": ("res",),
}
"""Sites of a placement's norms: on a sub-layer's input, on its output, or on the stream."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The options of a model that its statistics depend on."""

    norm: str
    placement: str
    depth: int
    width: int
    context: int

    @property
    def norms_on_stream(self) -> bool:
        """Whether the norms are on the stream; such a placement has no norm before the head."""
        return SITES[self.placement] == ("res",)

    def parameters(self) -> dict[str, tuple[int, float]]:
        """Return by site the number of parameters in a layer and their RMS at initialisation."""
        width, std = self.width, 0.02
        last = std / math.sqrt(2 * self.depth)
        parameters = {
            "embed.tokens.weight": (VOCABULARY * width, std),
            "embed.positions.weight": (self.context * width, std),
        }
        for matrix, rms in (("q", std), ("k", std), ("v", std), ("out", last)):
            parameters |= {f"attn.{matrix}.weight": (width**2, rms), f"attn.{matrix}.bias": (width, 0.0)}
        for matrix, rms, outputs in (("up", std, 4 * width), ("down", last, width)):
            parameters |= {f"mlp.{matrix}.weight": (4 * width**2, rms), f"mlp.{matrix}.bias": (outputs, 0.0)}
        of_norm = {
            "affine.gain": (width, 1.0),
            "affine.bias": (width, 0.0),
            "alpha": (1, 0.5),
            "radius": (1, math.sqrt(width)),
        }
        where = [f"wiring.{part}.norms.{site}" for part in ("attn", "mlp") for site in SITES[self.placement]]
        for norm in [*where, *([] if self.norms_on_stream else ["head.close"])]:
            parameters |= {f"{norm}.{name}": of_norm[name] for name in PARAMETERS[self.norm]}
        return parameters


def layout(size: Size) -> Layout:
    """Return the columns of a real run of that size, in order."""
    blocks, streams, head = range(1, size.depth + 1), range(1, size.depth + 2), [size.depth + 1]
    close = [] if size.norms_on_stream else [("close", head)]
    inner = [(f"{part}.{site}", blocks) for part in ("attn", "mlp") for site in SITES[size.placement]]
    sites = sorted([*inner, *close])
    groups = [
        (f"{part}_absmax", "", layers) for part, layers in (("resid", streams), ("attn", blocks), ("mlp", blocks))
    ]
    groups += [("logit_absmax", "", head)]
    groups += [(f"resid_{what}", "", streams) for what in ("kurt", "nonfinite", "uniform")]
    groups += [(f"{part}_{what}", "", blocks) for part in ("attn", "mlp") for what in ("kurt", "nonfinite")]
    groups += [("adj_cos", "", blocks), *(("norm_in_uniform", site, layers) for site, layers in sites)]
    groups += [(name, "", head) for name in ("logz", "logz2", "logit_mean")]
    groups += [
        ("resid_rms", "", streams),
        ("dresid_rms", "", streams),
        ("attn_rms", "", blocks),
        ("mlp_rms", "", blocks),
    ]
    groups += [(name, site, layers) for name in ("norm_in_rms", "norm_out_rms") for site, layers in sites]
    where = {site: {"embed": [0], "head": head}.get(site.partition(".")[0], blocks) for site in size.parameters()}
    groups += [(name, site, layers) for name in ("grad_norm", "param_norm") for site, layers in where.items()]
    if "affine.gain" in PARAMETERS[size.norm]:
        of_gain = ("gain_rms", "gain_min", "gain_absmax", "gain_cv", "gain_negative")
        groups += [(name, site, layers) for name in of_gain for site, layers in [*inner, *close]]
    groups += [("update_norm", site, layers) for site, layers in where.items()]
    columns = [StatisticColumn(name, site, layer) for name, site, layers in groups for layer in layers]
    return Layout.of(columns, size.depth, {site: _family(site) for site in where})[0]


def _family(site: str) -> str:
    first = site.partition(".")[0]
    return "norm" if first in ("wiring", "head") else first


def profiles(
    size: Size,
    steps: NDArray[np.int64],
    progress: Array,
    lr: Array,
    excess: Array,
    rng: np.random.Generator,
) -> Profiles:
    """Return the statistics of a run.

    Args:
        size: The size of the model.
        steps: The measured steps, (S,).
        progress: The fraction of the run before each step, (S,).
        lr: The learning rate at each step, (S,).
        excess: The factor of activations and gradients during a spike or divergence, (S,).
        rng: Draws the seed of the noise.
    """
    columns, seed = layout(size), int(rng.integers(2**32))
    learned, lr, excess = (values[:, None] for values in (1 - np.exp(-6 * progress), lr, excess))
    shapes = _shapes(size, learned, lr, excess)
    parts = []
    for name, site, layers in columns.groups:
        # Each statistic has its own noise, so that a new one leaves the numbers of the others as they are.
        noise = np.random.default_rng([seed, zlib.crc32(f"{name} {site}".encode())])
        factor = np.exp(0.03 * noise.standard_normal((len(steps), len(layers))))
        parts.append(shapes[name](np.array(layers)[None], site) * factor)
    return Profiles(columns, steps, np.concatenate(parts, axis=1).astype(np.float32))


def _shapes(size: Size, learned: Array, lr: Array, excess: Array) -> dict[str, Callable[[Array, str], Array]]:
    """Return by statistic a function of (layers, site) that gives values (S, P)."""
    depth, sizes = size.depth, size.parameters()
    rising = {"attn": 0.8, "mlp": 1.2, "resid": 1.0}

    def stream(layer: Array) -> Array:
        first = 0.03 + 0.6 * learned
        if size.norms_on_stream:
            return np.where(layer == 1, first, 1 + 0.2 * learned)
        if "out" in SITES[size.placement]:  # every branch has RMS 1
            return np.sqrt(first**2 + 2 * (layer - 1))
        return first * (1 + 0.12 * (layer - 1)) ** (0.5 + 1.5 * learned)

    def branch(layer: Array, part: str) -> Array:
        rms = 1 + 0.1 * learned if "out" in SITES[size.placement] else (0.1 + 0.6 * learned) * stream(layer)
        return rising[part] * rms

    def backward(layer: Array) -> Array:
        above = depth + 1 - layer
        decay = 0.25 if size.placement == "post" else 0.05
        return np.exp(-decay * above) if size.norms_on_stream else 1 + 0.4 * above / (depth + 1) * (1 - 0.5 * learned)

    def gradient(layer: Array, site: str) -> Array:
        count, _ = sizes[site]
        return excess * backward(layer) * (0.02 + 0.1 * (1 - learned)) * (count / size.width) ** 0.25

    def parameter(layer: Array, site: str) -> Array:
        count, start = sizes[site]
        return math.sqrt(count) * np.sqrt(start**2 + (0.02 * learned * (1 + 0.1 * layer / depth)) ** 2)

    def nonfinite(layer: Array, site: str) -> Array:
        return np.where(excess > 100, layer / (depth + 1), 0.0)

    def gain(layer: Array, site: str) -> Array:
        return 1 + 0.3 * learned * layer / (depth + 1)

    shapes: dict[str, Callable[[Array, str], Array]] = {
        "resid_rms": lambda layer, site: excess * stream(layer),
        "resid_absmax": lambda layer, site: excess * stream(layer) * (4 + 6 * learned),
        "resid_uniform": lambda layer, site: 1 - 0.3 * learned * layer / (depth + 1),
        "norm_in_rms": lambda layer, site: excess * stream(layer),
        "norm_in_uniform": lambda layer, site: 1 - 0.3 * learned * layer / (depth + 1),
        "norm_out_rms": lambda layer, site: gain(layer, site),
        "adj_cos": lambda layer, site: 0.9 - 0.3 * learned / layer,
        "logz": lambda layer, site: math.log(VOCABULARY) - 0.5 * learned,
        "logz2": lambda layer, site: (math.log(VOCABULARY) - 0.5 * learned) ** 2,
        "logit_mean": lambda layer, site: -0.5 * learned,
        "logit_absmax": lambda layer, site: excess * (0.7 + 14 * learned),
        "dresid_rms": lambda layer, site: excess * backward(layer) * (0.7 - 0.5 * learned),
        "grad_norm": gradient,
        "param_norm": parameter,
        "update_norm": lambda layer, site: 0.4 * lr * math.sqrt(sizes[site][0]) + 0 * layer,
        "gain_rms": gain,
        "gain_min": lambda layer, site: 1 - 0.3 * learned,
        "gain_absmax": lambda layer, site: gain(layer, site) + 0.4 * learned,
        "gain_cv": lambda layer, site: 0.2 * learned,
        "gain_negative": lambda layer, site: 0 * learned,
    }
    for part in ("attn", "mlp"):
        shapes |= {
            f"{part}_rms": lambda layer, site, part=part: excess * branch(layer, part),
            f"{part}_absmax": lambda layer, site, part=part: excess * branch(layer, part) * (4 + 8 * learned),
        }
    for part in rising:
        shapes |= {
            f"{part}_kurt": lambda layer, site, part=part: 3 + rising[part] * learned * layer / depth,
            f"{part}_nonfinite": nonfinite,
        }
    return shapes
