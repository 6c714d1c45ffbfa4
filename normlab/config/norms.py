"""The norms of a model: at which sites they stand, and with which options. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from normlab.base.errors import ConfigError
from normlab.base.options import override_text
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.placements.base import Placement
from normlab.catalogue.sites import LAYERS, OUTSIDE_BLOCKS, SITES, parts_of, selected_layers, split_key
from normlab.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class PlacedNorm:
    site: str
    layer: int | None
    """The block, from 0; None outside the blocks."""
    shape: tuple[int, ...]
    """The shape of a token's vector there; (H, K) for the vectors of H heads, (n, D) for n streams with one norm."""
    norm: NormConfig
    """Its options."""


def placed_norms(norm: NormConfig, placement: Placement, model: ModelConfig) -> list[PlacedNorm]:
    """Return the norms of a model, block by block."""
    by_layer = any(split_key(key)[1] == LAYERS for key in norm.at)
    at_site: dict[tuple[str, int | None], NormConfig] = {}
    placed: list[PlacedNorm] = []
    for site, layer, shape in _places(placement, model):
        # The blocks of most models have equal norms.
        key = site, layer if by_layer else None
        if key not in at_site:
            at_site[key] = norm_at(norm, model, site, layer)
        placed.append(PlacedNorm(site, layer, shape, at_site[key]))
    return placed


def norm_at(norm: NormConfig, model: ModelConfig, site: str, layer: int | None = None) -> NormConfig:
    """Return the norm of a site, in the block `layer` (from 0)."""
    # The norm of `model.v_norm` has no gain and bias, as in Gemma 4.
    return norm.at_site(site, layer, model.depth, plain=site == "v" and model.v_norm)


def _places(placement: Placement, model: ModelConfig) -> Iterator[tuple[str, int | None, tuple[int, ...]]]:
    """Yield the site of each norm of a model, its block, and the shape of a token's vector there."""
    of_heads = model.heads, model.width // model.heads
    for layer in range(model.depth):
        inner = placement.inner_sites(layer, model.depth)
        for site in SITES:
            if site in inner:
                yield site, layer, _shape_inside(site, model)
        # On queries and keys a placement and `model.qk_norm` may both have a norm.
        if model.qk_norm != "off":
            for site in ("q", "k"):
                yield site, layer, (model.width,) if model.qk_norm == "full" else of_heads
        if model.v_norm:
            yield "v", layer, of_heads
        for site in placement.wiring_sites(layer, model.depth):
            shape = (model.width,)
            if site == "streams":
                shape = placement.streams_in_tensors[0], model.width
            yield site, layer, shape
    for site in placement.end_sites():
        yield site, None, (model.width,)


def _shape_inside(site: str, model: ModelConfig) -> tuple[int, ...]:
    """Return the shape of a token's vector that the placement normalises inside a sub-layer."""
    if site in ("q", "k", "v"):
        return model.heads, model.width // model.heads
    if site == "inner_mlp":
        assert model.mlp_width is not None  # resolved
        return (model.mlp_width,)
    return (model.width,)


def check_norms(norm: NormConfig, placement: Placement, model: ModelConfig) -> None:
    """Check the norms of a model, and that each setting of `norm.at` is for one of its sites.

    Raises:
        ConfigError: A norm does not fit its width, its placement or its own options; a site has no norm.
    """
    norm.validate()
    norm.check_width(model.width)
    placed = placed_norms(norm, placement, model)
    present = dict.fromkeys(part.site for part in placed)
    for key in norm.at:
        _check_key(key, norm, model, list(present))
    changed = {part for key in norm.at for part in parts_of(split_key(key)[0])}
    checked: list[tuple[str, tuple[int, ...], NormConfig]] = []
    for part in placed:
        case = part.site, part.shape, part.norm
        if case in checked:
            continue
        checked.append(case)
        is_changed = part.site in changed
        try:
            # At other sites the norm has the options of the run, which are checked already. What a site changes by
            # itself contradicts none of them.
            if is_changed:
                part.norm.validate()
            part.norm.check_width(part.shape[-1])
            placement.check_norm(part.site, part.norm)
        except ConfigError as error:
            if not is_changed:
                raise
            raise ConfigError(_at_site(part.site, str(error))) from error


def _at_site(site: str, message: str) -> str:
    """Return a message about a norm as one about the norm at a site: `norm.groups=4: ...` has the site in its name."""
    for sign in ".=":
        if message.startswith(f"norm{sign}"):
            return f"norm.at.{site}{message.removeprefix('norm')}"
    return f"norm.at.{site}: {message}"


def _check_key(key: str, norm: NormConfig, model: ModelConfig, present: list[str]) -> None:
    """Check that a key of `norm.at` is for a site where the model has a norm."""
    site, name = split_key(key)
    value = override_text(norm.at[key])
    if name == LAYERS:
        # Quoted, because the colon of a slice such as `1:` would look like the end of the setting in a message.
        value = f"'{value}'"
    setting = f"norm.at.{key}={value}"
    if not set(parts_of(site)) & set(present):
        known = [name for name in SITES if set(parts_of(name)) & set(present)]
        has = f"has norms at {', '.join(known)}" if known else "has no norms"
        raise ConfigError(f"{setting}: the model has no norm at {site}, and norm.at adds none; it {has}")
    if name != LAYERS:
        return
    if site in OUTSIDE_BLOCKS:
        raise ConfigError(f"{setting}: {site} is not in the blocks; leave it out")
    selected_layers(site, norm.at[key], model.depth)
    sites_of_others = [split_key(at)[0] for at in norm.at if at != key]
    if site not in sites_of_others:
        raise ConfigError(f"{setting}: selects blocks for no setting; add norm.at.{site}=NORM or one of its options")


def without_defaults(norm: NormConfig, placement: Placement, model: ModelConfig) -> NormConfig:
    """Return the norm without the settings of `norm.at` that change no norm of the model, the others in one order."""
    order = list(SITES)
    keys = sorted(norm.at, key=lambda key: (order.index(split_key(key)[0]), key))
    settings: dict[str, Any] = {key: norm.at[key] for key in keys}
    norm = dataclasses.replace(norm, at=settings)
    placed = placed_norms(norm, placement, model)
    for key in keys:
        fewer = {name: value for name, value in settings.items() if name != key}
        reduced = dataclasses.replace(norm, at=fewer)
        if _have_norms(reduced, placement, model, placed):
            norm, settings = reduced, fewer
    return norm


def _have_norms(norm: NormConfig, placement: Placement, model: ModelConfig, placed: list[PlacedNorm]) -> bool:
    """Return whether a norm's settings give the norms `placed`."""
    try:
        return placed_norms(norm, placement, model) == placed
    except ConfigError:  # without the name of a site's norm, the run's norm may lack an option that is set there
        return False
