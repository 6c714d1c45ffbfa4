"""What a run that was never trained would have been inside: the columns of a real one, and smooth numbers for them.

The columns are those of a GPT-2 at `stats=core`. The numbers tell the field's own story: a pre-norm stream grows with
every block, a post-norm gradient vanishes below the top, gains drift, and updates follow the learning rate.

Shapes: S measured steps, P places of a group, N numbers a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from normlab.stats import options  # noqa: F401  (with it every statistic is known)
from normlab.stats.profiles import Array, Column, Layout, Profiles

VOCABULARY = 257
LEARNS = {
    "layernorm": ("affine.gain", "affine.bias"),
    "batchnorm": ("affine.gain", "affine.bias"),
    "groupnorm": ("affine.gain", "affine.bias"),
    "rmsnorm": ("affine.gain",),
    "dyt": ("alpha", "affine.gain", "affine.bias"),
    "derf": ("alpha", "shift", "affine.gain", "affine.bias"),
    "scalenorm": ("radius",),
    "l2norm": (),
}
"""What a norm learns."""
SITES = {
    "pre": ("in",),
    "peri": ("in", "out"),
    "sandwich": ("in", "out"),
    "post": ("res",),
    "deepnorm": ("res",),
}
"""Where a placement has its norms in each sub-layer: on what enters it, what leaves it, or on the stream itself."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is built, as far as its statistics depend on it."""

    norm: str
    placement: str
    depth: int
    width: int
    context: int

    @property
    def on_the_stream(self) -> bool:
        """Whether the norms are on the stream itself; then there is none before the head."""
        return SITES[self.placement] == ("res",)

    def parameters(self) -> dict[str, tuple[int, float]]:
        """How many numbers each has at a place, and their root mean square at the start, by site."""
        width, std = self.width, 0.02
        last = std / math.sqrt(2 * self.depth)
        found = {
            "embed.tokens.weight": (VOCABULARY * width, std),
            "embed.positions.weight": (self.context * width, std),
        }
        for matrix, rms in (("q", std), ("k", std), ("v", std), ("out", last)):
            found |= {f"attn.{matrix}.weight": (width**2, rms), f"attn.{matrix}.bias": (width, 0.0)}
        for matrix, rms, outputs in (("up", std, 4 * width), ("down", last, width)):
            found |= {f"mlp.{matrix}.weight": (4 * width**2, rms), f"mlp.{matrix}.bias": (outputs, 0.0)}
        of_norm = {
            "affine.gain": (width, 1.0),
            "affine.bias": (width, 0.0),
            "alpha": (1, 0.5),
            "shift": (1, 0.0),
            "radius": (1, math.sqrt(width)),
        }
        where = [f"wiring.{part}.norms.{site}" for part in ("attn", "mlp") for site in SITES[self.placement]]
        for norm in [*where, *([] if self.on_the_stream else ["head.close"])]:
            found |= {f"{norm}.{name}": of_norm[name] for name in LEARNS[self.norm]}
        return found


def layout(size: Size) -> Layout:
    """The columns of a real run of that size, in its order."""
    blocks, streams, head = range(1, size.depth + 1), range(1, size.depth + 2), [size.depth + 1]
    seen_of_norm = ("norm_in_rms", "norm_in_uniform", "norm_out_rms")
    close = [] if size.on_the_stream else [("close", head)]
    inner = [(f"{part}.{site}", blocks) for part in ("attn", "mlp") for site in SITES[size.placement]]
    groups = [(f"resid_{what}", "", streams) for what in ("rms", "kurt", "nonfinite", "uniform")]
    groups += [(name, site, places) for site, places in inner for name in seen_of_norm]
    groups += [(f"{part}_{what}", "", blocks) for part in ("attn", "mlp") for what in ("rms", "kurt", "nonfinite")]
    groups += [("adj_cos", "", blocks), ("resid_absmax", "", streams)]
    groups += [(f"{part}_absmax", "", blocks) for part in ("attn", "mlp")]
    groups += [(name, site, places) for site, places in close for name in seen_of_norm]
    groups += [(name, "", head) for name in ("logz", "logz2", "logit_mean", "logit_absmax")]
    groups += [("dresid_rms", "", streams)]
    where = {site: {"embed": [0], "head": head}.get(site.partition(".")[0], blocks) for site in size.parameters()}
    groups += [(name, site, places) for name in ("grad_norm", "param_norm") for site, places in where.items()]
    if "affine.gain" in LEARNS[size.norm]:
        of_gain = ("gain_rms", "gain_min", "gain_absmax", "gain_cv", "gain_negative")
        groups += [(name, site, places) for name in of_gain for site, places in [*inner, *close]]
    groups += [("update_norm", site, places) for site, places in where.items()]
    columns = [Column(name, site, place) for name, site, places in groups for place in places]
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
    chance: np.random.Generator,
) -> Profiles:
    """What would have been measured.

    Args:
        size: Of what.
        steps: When, (S,).
        progress: How much of the run lay behind each, 0 to 1, (S,).
        lr: The learning rate of each, (S,).
        excess: By what factor it is too large what blows up when the loss does, (S,).
        chance: Of the noise.
    """
    own = layout(size)
    learned, lr, excess = (values[:, None] for values in (1 - np.exp(-6 * progress), lr, excess))
    shapes = _shapes(size, learned, lr, excess)
    parts = []
    for name, site, places in own.groups:
        values = shapes[name](np.array(places)[None], site)
        parts.append(np.broadcast_to(values, (len(steps), len(places))))
    noise = np.exp(0.03 * chance.standard_normal((len(steps), own.width), dtype=np.float32))
    return Profiles(own, steps, (np.concatenate(parts, axis=1) * noise).astype(np.float32))


def _shapes(size: Size, learned: Array, lr: Array, excess: Array) -> dict[str, Callable[[Array, str], Array]]:
    """By statistic, its values (S, P) of the places and the site."""
    depth, sizes = size.depth, size.parameters()
    rising = {"attn": 0.8, "mlp": 1.2, "resid": 1.0}

    def stream(place: Array) -> Array:
        first = 0.03 + 0.6 * learned
        if size.on_the_stream:
            return np.where(place == 1, first, 1 + 0.2 * learned)
        if "out" in SITES[size.placement]:  # every branch adds as much
            return np.sqrt(first**2 + 2 * (place - 1))
        return first * (1 + 0.12 * (place - 1)) ** (0.5 + 1.5 * learned)

    def branch(place: Array, part: str) -> Array:
        whole = 1 + 0.1 * learned if "out" in SITES[size.placement] else (0.1 + 0.6 * learned) * stream(place)
        return rising[part] * whole

    def backward(place: Array) -> Array:
        above = depth + 1 - place
        decay = 0.25 if size.placement == "post" else 0.05
        return np.exp(-decay * above) if size.on_the_stream else 1 + 0.4 * above / (depth + 1) * (1 - 0.5 * learned)

    def gradient(place: Array, site: str) -> Array:
        count, _ = sizes[site]
        return excess * backward(place) * (0.02 + 0.1 * (1 - learned)) * (count / size.width) ** 0.25

    def parameter(place: Array, site: str) -> Array:
        count, start = sizes[site]
        return math.sqrt(count) * np.sqrt(start**2 + (0.02 * learned * (1 + 0.1 * place / depth)) ** 2)

    def nonfinite(place: Array, site: str) -> Array:
        return np.where(excess > 100, place / (depth + 1), 0.0)

    def gain(place: Array, site: str) -> Array:
        return 1 + 0.3 * learned * place / (depth + 1)

    shapes: dict[str, Callable[[Array, str], Array]] = {
        "resid_rms": lambda place, site: excess * stream(place),
        "resid_absmax": lambda place, site: excess * stream(place) * (4 + 6 * learned),
        "resid_uniform": lambda place, site: 1 - 0.3 * learned * place / (depth + 1),
        "norm_in_rms": lambda place, site: excess * stream(place),
        "norm_in_uniform": lambda place, site: 1 - 0.3 * learned * place / (depth + 1),
        "norm_out_rms": lambda place, site: gain(place, site),
        "adj_cos": lambda place, site: 0.9 - 0.3 * learned / place,
        "logz": lambda place, site: math.log(VOCABULARY) - 0.5 * learned,
        "logz2": lambda place, site: (math.log(VOCABULARY) - 0.5 * learned) ** 2,
        "logit_mean": lambda place, site: -0.5 * learned,
        "logit_absmax": lambda place, site: excess * (0.7 + 14 * learned),
        "dresid_rms": lambda place, site: excess * backward(place) * (0.7 - 0.5 * learned),
        "grad_norm": gradient,
        "param_norm": parameter,
        "update_norm": lambda place, site: 0.4 * lr * math.sqrt(sizes[site][0]) + 0 * place,
        "gain_rms": gain,
        "gain_min": lambda place, site: 1 - 0.3 * learned,
        "gain_absmax": lambda place, site: gain(place, site) + 0.4 * learned,
        "gain_cv": lambda place, site: 0.2 * learned,
        "gain_negative": lambda place, site: 0 * learned,
    }
    for part in ("attn", "mlp"):
        shapes |= {
            f"{part}_rms": lambda place, site, part=part: excess * branch(place, part),
            f"{part}_absmax": lambda place, site, part=part: excess * branch(place, part) * (4 + 8 * learned),
        }
    for part in rising:
        shapes |= {
            f"{part}_kurt": lambda place, site, part=part: 3 + rising[part] * learned * place / depth,
            f"{part}_nonfinite": nonfinite,
        }
    return shapes
