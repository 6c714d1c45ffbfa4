"""The norms of a model by site, for `normlab list placements NAME`."""

from typing import Any

from normlab.catalogue.sites import SITES
from normlab.config.schema import RunConfig
from normlab.model.modules import build_norm
from normlab.verify.variants import label_of


def norms_by_site(config: RunConfig) -> list[dict[str, Any]]:
    """Return a row for each site, and for each norm that it has in some of the blocks."""
    blocks_of: dict[tuple[str, str], list[int]] = {}
    parameters_of: dict[tuple[str, str], int] = {}
    for placed in config.placed_norms:
        key = placed.site, label_of(placed.norm)
        blocks = blocks_of.setdefault(key, [])
        if placed.layer is not None and placed.layer not in blocks:
            blocks.append(placed.layer)
        if key not in parameters_of:
            module = build_norm(placed.norm, placed.shape[-1])
            parameters_of[key] = sum(parameter.numel() for parameter in module.parameters())
    rows: list[dict[str, Any]] = []
    for site, norm in sorted(blocks_of, key=lambda key: list(SITES).index(key[0])):
        blocks = blocks_of[site, norm]
        text = "all blocks"
        if not blocks:
            text = ""
        elif len(blocks) < config.model.depth:
            numbers = ", ".join(map(str, blocks))
            text = f"blocks {numbers}" if len(blocks) > 1 else f"block {numbers}"
        rows.append({"site": site, "blocks": text, "norm": norm, "parameters": parameters_of[site, norm]})
    return rows
