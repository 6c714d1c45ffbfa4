"""Which norms of a model change nothing, because the norms behind them undo what they do.

RMSNorm multiplies a token by a number. If only linear layers without biases read it, and a norm of the same kind is
behind each of them, that number cancels, but for eps (FlashNorm: Graef et al. 2024, arXiv:2407.09577).
"""

import dataclasses
from collections import defaultdict

import torch
from torch import nn

from normlab.config.schema import RunConfig
from normlab.model.small import build_small, shrink, tokens
from normlab.stats.instrument import norm_site
from normlab.verify.check import Check

TOLERANCE = 1e-9
"""Largest relative change of the logits, in float64, that counts as none."""
SMALL_EPS = 1e-14


def redundancy_check(config: RunConfig, subject: str) -> Check:
    """Return a line that names the norms that change nothing; it always passes."""
    sites = redundant_norms(config)
    result = (
        f"but for eps, {' or '.join(sites)} alone changes nothing: the norms behind it undo it"
        if sites
        else "all of them"
    )
    return Check(subject, "needs each of its norms", passed=True, result=result)


@torch.no_grad()
def redundant_norms(config: RunConfig) -> list[str]:
    """Return the sites of norms that change no logit but for eps: in every block where the site has one.

    Each norm of a small model with random weights is replaced by its gain and bias alone. A norm that has neither gain
    nor bias in an `affine` module, but other parameters, is not replaced.
    """
    if config.norm.name == "none":
        return []
    if (getattr(config.norm, "eps", 0) or 0) > SMALL_EPS:
        config = dataclasses.replace(config, norm=dataclasses.replace(config.norm, eps=SMALL_EPS))  # pyright: ignore[reportCallIssue]
    small = build_small(shrink(config))
    expected = small.gpt(tokens())
    is_redundant: dict[str, list[bool]] = defaultdict(list)
    for name, module in small.gpt.named_modules():
        affine = getattr(module, "affine", None)
        affine = affine if isinstance(affine, nn.Module) else None
        if module not in small.norms or (affine is None and list(module.parameters())):
            continue
        site = norm_site(name.partition(".")[2].partition(".")[2] if name.startswith("blocks.") else name)
        instead = nn.Identity() if affine is None else affine
        handle = module.register_forward_hook(lambda _, inputs, __, instead=instead: instead(*inputs))
        change = (small.gpt(tokens()) - expected).abs().max() / expected.abs().max()
        handle.remove()
        is_redundant[site].append(bool(change < TOLERANCE))
    return [site for site, found in is_redundant.items() if all(found)]
