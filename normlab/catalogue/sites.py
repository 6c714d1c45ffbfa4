"""The sites of norms in a model, by the names that papers use. Imports no torch.

A placement says at which sites it has norms, and `norm.at.SITE` changes the norm there (`at_site`). Within a site may
be others, for attention and for the MLP: `input` is `input_attn` and `input_mlp`, and of two settings that of the
narrower site wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from normlab.base.errors import ConfigError, unknown
from normlab.base.options import override_text

LAYERS = "layers"
"""The option of a site that selects blocks; all others are options of the norm there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    meaning: str
    """What a norm there normalises."""
    within: str = ""
    """The wider site that it is a part of."""
    group: str
    """The group of the gains there in the optimiser (`optim.groups.gains`)."""
    resets: tuple[str, ...] = ()
    """Options that a norm there does not take from the run's norm, but has at their defaults."""


SITES: dict[str, Site] = {
    "input": Site(meaning="the input of a sub-layer", group="input"),
    "input_attn": Site(meaning="the input of attention", within="input", group="input"),
    "input_mlp": Site(meaning="the input of the MLP", within="input", group="input"),
    "output": Site(meaning="the output of a sub-layer, before it is added", group="output"),
    "output_attn": Site(meaning="the output of attention, before it is added", within="output", group="output"),
    "output_mlp": Site(meaning="the output of the MLP, before it is added", within="output", group="output"),
    "residual": Site(meaning="the stream, after a sub-layer is added", group="output"),
    "residual_attn": Site(meaning="the stream, after attention is added", within="residual", group="output"),
    "residual_mlp": Site(meaning="the stream, after the MLP is added", within="residual", group="output"),
    "qk": Site(meaning="the queries and the keys", group="qk"),
    "q": Site(meaning="the queries", within="qk", group="qk"),
    "k": Site(meaning="the keys", within="qk", group="qk"),
    "v": Site(meaning="the values of each head", group="qk"),
    "inner": Site(meaning="the input of a sub-layer's last matrix", group="input"),
    "inner_attn": Site(
        meaning="the joined outputs of the heads, before the output projection", within="inner", group="input"
    ),
    "inner_mlp": Site(meaning="the hidden activations, before the down projection", within="inner", group="input"),
    "streams": Site(meaning="one of several streams, where no sub-layer reads it", group="input"),
    "embedding": Site(meaning="the embeddings, before the first block", group="input"),
    "final": Site(
        # A taper keeps the last norm, because nothing else bounds the logits (Kanavalau et al. 2026, section 3).
        meaning="the stream, before the LM head", group="final", resets=("taper_steps", "taper_warmup")
    ),
}  # fmt: skip
"""The sites by name. Those outside the blocks are `embedding` and `final`."""
OUTSIDE_BLOCKS = ("embedding", "final")


def parts_of(site: str) -> list[str]:
    """Return the sites that a setting of a site is for: itself, and those within it."""
    return [site, *(name for name, part in SITES.items() if part.within == site)]


def of_sub_layer(site: str, sub_layer: str) -> str:
    """Return the part of a wider site for a sub-layer, `attn` or `mlp`; the site itself if it has no parts."""
    name = f"{site}_{sub_layer}"
    return name if name in SITES else site


def split_key(key: str) -> tuple[str, str]:
    """Return the site and the option of a key of `norm.at`; the option is empty if the key names a norm.

    Raises:
        ConfigError: There is no such site.
    """
    site, _, name = key.partition(".")
    if site not in SITES:
        raise ConfigError(f"norm.at.{key}: " + unknown("site", site, SITES))
    return site, name


def selected_layers(site: str, text: Any, depth: int) -> Sequence[int]:
    """Return the blocks that the text of `norm.at.SITE.layers` selects, counted from 0.

    Args:
        text: A block, `3`, or a slice as in Python: `1:` are all but the first, `::2` every second one.

    Raises:
        ConfigError: The text is neither, or selects none of the blocks.
    """
    # Quoted, because the colon of a slice such as `1:` would look like the end of the setting in a message.
    setting = f"norm.at.{site}.{LAYERS}='{override_text(text)}'"
    numbers: list[int | None] = []
    try:
        for part in str(text).split(":"):
            numbers.append(int(part) if part.strip() else None)
        layers = range(depth)[slice(*numbers)] if len(numbers) > 1 else (range(depth)[int(text)],)
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{setting}: no block or slice of model.depth={depth} blocks, counted from 0; write 3, 1: or ::2"
        ) from error
    if not layers:
        raise ConfigError(f"{setting}: selects none of model.depth={depth} blocks; choose another slice")
    return layers


def rows() -> list[dict[str, str]]:
    """Return the sites for `normlab list sites`."""
    return [{"site": name, "norm of": site.meaning, "part of": site.within} for name, site in SITES.items()]
