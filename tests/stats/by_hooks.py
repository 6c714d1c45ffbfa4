"""What a measured step should say, written without normlab's own taps: hooks, float64, one batch, plain torch.

Shapes: L blocks, N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normlab.model.gpt import GPT

Key = tuple[str, str, int]
"""Statistic, site, place."""

BRANCHES = {
    "pre": ("attn", "mlp"),
    "post": ("attn", "mlp"),
    "peri": ("wiring.attn.norms.out", "wiring.mlp.norms.out"),
}
"""The modules of a block whose outputs are added to the stream, by placement."""
NORMS = {"pre": ("in",), "post": ("res",), "peri": ("in", "out")}
"""The norms of a sub-layer."""


def reference(
    model: GPT,
    placement: str,
    tokens: Tensor,
    targets: Tensor,
    optimizer: torch.optim.Optimizer,
    clip: float,
    offset: float = 0.0,
) -> dict[Key, float]:
    """Every statistic that is measured in one step of a float64 model, which the optimiser moves.

    Args:
        model: In float64.
        placement: pre, post or peri.
        tokens: (B, T).
        targets: (B, T).
        optimizer: Of the model's parameters; torch's own.
        clip: The largest norm of the gradient.
        offset: What is added to a stored gain.
    """
    depth = len(model.blocks)
    shown: dict[tuple[str, str, int], Tensor] = {}
    streams: list[Tensor] = []
    handles = []

    def keep(key: tuple[str, str, int]) -> Any:
        return lambda module, args, output: shown.__setitem__(key, output)

    def keep_both(site: str, place: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            shown["norm_in", site, place], shown["norm_out", site, place] = args[0], output

        return hook

    def keep_stream(module: nn.Module, args: Any) -> None:
        args[0].retain_grad()
        streams.append(args[0])

    for part in (*model.blocks, model.head):
        handles.append(part.register_forward_pre_hook(keep_stream))
    for place, block in enumerate(model.blocks, start=1):
        for name, path in zip(("attn", "mlp"), BRANCHES[placement], strict=True):
            handles.append(block.get_submodule(path).register_forward_hook(keep((name, "", place))))
        for sub in ("attn", "mlp"):
            for norm in NORMS[placement]:
                module = block.get_submodule(f"wiring.{sub}.norms.{norm}")
                handles.append(module.register_forward_hook(keep_both(f"{sub}.{norm}", place)))
    if placement != "post":
        handles.append(model.head.close.register_forward_hook(keep_both("close", depth + 1)))
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    for handle in handles:
        handle.remove()

    found: dict[Key, float] = {}
    for place, x in enumerate(streams, start=1):
        found |= _of_stream("resid", place, x)
        found["resid_uniform", "", place] = _uniform(x)
        found["dresid_rms", "", place] = tokens.numel() * x.grad.square().mean().sqrt().item()
        if place <= depth:
            cosine = nn.functional.cosine_similarity(x, streams[place], dim=-1)
            found["adj_cos", "", place] = cosine.mean().item()
    for (what, site, place), x in shown.items():
        if what in ("attn", "mlp"):
            found |= _of_stream(what, place, x)
        else:
            found[f"{what}_rms", site, place] = x.square().mean().sqrt().item()
            if what == "norm_in":
                found["norm_in_uniform", site, place] = _uniform(x)
    found |= dict(_of_logits(logits.detach(), depth + 1))
    found |= dict(_of_gains(model, depth, offset))

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        site, place = where(name, depth)
        found["grad_norm", site, place] = p.grad.norm().item()
        found["param_norm", site, place] = p.detach().norm().item()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    for name, p in model.named_parameters():
        site, place = where(name, depth)
        found["update_norm", site, place] = (p.detach() - before[name]).norm().item()
    return found


def _of_stream(site: str, place: int, x: Tensor) -> dict[Key, float]:
    x = x.detach()
    square = x.square().mean(-1)
    return {
        (f"{site}_rms", "", place): x.square().mean().sqrt().item(),
        (f"{site}_kurt", "", place): (x.pow(4).mean(-1) / square.square()).mean().item(),
        (f"{site}_absmax", "", place): x.abs().max().item(),
        (f"{site}_nonfinite", "", place): 0.0,
    }


def _uniform(x: Tensor) -> float:
    x = x.detach()
    ones = torch.ones_like(x)
    return x.shape[-1] * nn.functional.cosine_similarity(x, ones, dim=-1).square().mean().item()


def _of_logits(z: Tensor, place: int) -> Iterator[tuple[Key, float]]:
    total = z.exp().sum(-1).log()
    yield ("logz", "", place), total.mean().item()
    yield ("logz2", "", place), total.square().mean().item()
    yield ("logit_mean", "", place), z.mean().item()
    yield ("logit_absmax", "", place), z.abs().max().item()


def _of_gains(model: GPT, depth: int, offset: float) -> Iterator[tuple[Key, float]]:
    for name, p in model.named_parameters():
        if name.endswith(".affine.gain"):
            whole, place = where(name, depth)
            site = whole.removesuffix(".affine.gain").replace("wiring.", "").replace("norms.", "").replace("head.", "")
            g = p.detach() + offset
            yield ("gain_rms", site, place), g.square().mean().sqrt().item()
            yield ("gain_min", site, place), g.min().item()
            yield ("gain_absmax", site, place), g.abs().max().item()
            yield ("gain_cv", site, place), ((g - g.mean()).square().mean().sqrt() / g.mean().abs()).item()
            yield ("gain_negative", site, place), (g < 0).double().mean().item()


def where(name: str, depth: int) -> tuple[str, int]:
    words = name.split(".")
    if words[0] == "blocks":
        return ".".join(words[2:]), int(words[1]) + 1
    return name, 0 if words[0] == "embed" else depth + 1
