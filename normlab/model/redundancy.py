"""Which norms of a model change nothing, because the norms behind them undo what they do.

RMSNorm multiplies a token by a number. If only linear layers without biases read it, and a norm of the same kind is
behind each of them, that number cancels, but for eps (FlashNorm: Graef et al. 2024, arXiv:2407.09577). What is left of
the norm is its gain, which the linear layers can hold.

Shapes: B batch, T time, V vocabulary.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normlab.config.schema import RunConfig
from normlab.model.instrument import norm_site
from normlab.model.small import build_small, shrink, tokens

TOLERANCE = 1e-9
"""Largest relative change of the logits, in float64, that counts as none."""
SMALL_EPS = 1e-14


def redundancy_text(sites: list[str]) -> str:
    if not sites:
        return "none"
    return (
        f"{' and '.join(sites)}: later norms cancel its scale, except for eps, and the next weights can hold its gain"
    )


@torch.no_grad()
def without_redundant_norms(config: RunConfig) -> tuple[list[str], Tensor]:
    """Return the sites of norms that can be left out, all of them together, and a model's logits without them.

    The norms of a site, in all blocks, are replaced by their gain and bias in a small model with random weights and
    nearly no eps. Norms that have parameters, but none in `affine`, are not replaced.

    Returns:
        The sites, and the logits, (B, T, V), without these norms and their gains.

    Raises:
        ConfigError: No small model is valid.
    """
    config = shrink(config)
    small = build_small(config, with_eps=lambda eps: SMALL_EPS)
    replacements: dict[str, dict[nn.Module, nn.Module]] = defaultdict(dict)
    for name, module in small.gpt.named_modules():
        if module not in small.norms or small.norms[module].norm.is_identity:
            continue
        affine = getattr(module, "affine", None)
        replacement = affine if isinstance(affine, nn.Module) else nn.Identity()
        # Parameters outside `affine` do more than a gain and a bias, which the next matrices could hold.
        if replacement is not affine and list(module.parameters()):
            continue
        name_in_block = name
        if name.startswith("blocks."):
            _, _, name_in_block = name.split(".", 2)
        replacements[norm_site(name_in_block)][module] = replacement
    logits_BTV = small.gpt(tokens())
    sites: list[str] = []
    for site, replacement_of in replacements.items():
        handles: list[RemovableHandle] = []
        for module, replacement in replacement_of.items():
            # A default binds this replacement: a hook would otherwise call that of the last norm.
            def replace(_: Any, inputs: Any, __: Any, replacement: nn.Module = replacement) -> Any:
                return replacement(*inputs)

            handles.append(module.register_forward_hook(replace))
        is_redundant = are_equal(small.gpt(tokens()), logits_BTV)
        for handle in handles:
            handle.remove()
        if is_redundant:
            sites.append(site)
            # They stay out while the next sites are tried: of two norms that undo each other, only one can go.
            for module in replacement_of:
                module.register_forward_hook(lambda _, inputs, __: inputs[0])
            logits_BTV = small.gpt(tokens())
    return sites, logits_BTV


def are_equal(logits_BTV: Tensor, other_BTV: Tensor) -> bool:
    """Return whether two models compute the same but for rounding."""
    return bool((logits_BTV - other_BTV).abs().max() < TOLERANCE * other_BTV.abs().max())
