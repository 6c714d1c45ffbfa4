"""Reference implementation of the core statistics: forward hooks in plain torch, float64, one batch.

Shapes: L blocks, N tokens, D width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normlab.model.gpt import GPT

Key = tuple[str, str, int]
"""Statistic, site, layer."""

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
    """Return every core statistic of one step, and make the step.

    Args:
        model: The model, in float64.
        placement: pre, post or peri.
        tokens: (B, T).
        targets: (B, T).
        optimizer: A torch optimiser of the model's parameters.
        clip: The largest gradient norm.
        offset: The unit offset of the norms' gains, 1 or 0.
    """
    depth = len(model.blocks)
    outputs: dict[tuple[str, str, int], Tensor] = {}
    streams: list[Tensor] = []
    handles = []

    def keep(key: tuple[str, str, int]) -> Any:
        return lambda module, args, output: outputs.__setitem__(key, output)

    def keep_both(site: str, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            outputs["norm_in", site, layer], outputs["norm_out", site, layer] = args[0], output

        return hook

    def keep_stream(module: nn.Module, args: Any) -> None:
        args[0].retain_grad()
        streams.append(args[0])

    for part in (*model.blocks, model.head):
        handles.append(part.register_forward_pre_hook(keep_stream))
    for layer, block in enumerate(model.blocks, start=1):
        for name, path in zip(("attn", "mlp"), BRANCHES[placement], strict=True):
            handles.append(block.get_submodule(path).register_forward_hook(keep((name, "", layer))))
        for sub in ("attn", "mlp"):
            for norm in NORMS[placement]:
                module = block.get_submodule(f"wiring.{sub}.norms.{norm}")
                handles.append(module.register_forward_hook(keep_both(f"{sub}.{norm}", layer)))
    if placement != "post":
        assert model.head.close is not None
        handles.append(model.head.close.register_forward_hook(keep_both("close", depth + 1)))
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    for handle in handles:
        handle.remove()

    values: dict[Key, float] = {}
    for layer, x in enumerate(streams, start=1):
        values |= _of_stream("resid", layer, x)
        values["resid_uniform", "", layer] = _uniform(x)
        assert x.grad is not None
        values["dresid_rms", "", layer] = tokens.numel() * x.grad.square().mean().sqrt().item()
        if layer <= depth:
            cosine = nn.functional.cosine_similarity(x, streams[layer], dim=-1)
            values["adj_cos", "", layer] = cosine.mean().item()
    for (what, site, layer), x in outputs.items():
        if what in ("attn", "mlp"):
            values |= _of_stream(what, layer, x)
        else:
            values[f"{what}_rms", site, layer] = x.square().mean().sqrt().item()
            if what == "norm_in":
                values["norm_in_uniform", site, layer] = _uniform(x)
    values |= dict(_of_logits(logits.detach(), depth + 1))
    values |= dict(_of_gains(model, depth, offset))

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        site, layer = where(name, depth)
        assert p.grad is not None
        values["grad_norm", site, layer] = p.grad.norm().item()
        values["param_norm", site, layer] = p.detach().norm().item()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    for name, p in model.named_parameters():
        site, layer = where(name, depth)
        values["update_norm", site, layer] = (p.detach() - before[name]).norm().item()
    return values


def _of_stream(site: str, layer: int, x: Tensor) -> dict[Key, float]:
    x = x.detach()
    square = x.square().mean(-1)
    return {
        (f"{site}_rms", "", layer): x.square().mean().sqrt().item(),
        (f"{site}_kurt", "", layer): (x.pow(4).mean(-1) / square.square()).mean().item(),
        (f"{site}_absmax", "", layer): x.abs().max().item(),
        (f"{site}_nonfinite", "", layer): 0.0,
    }


def _uniform(x: Tensor) -> float:
    x = x.detach()
    ones = torch.ones_like(x)
    return x.shape[-1] * nn.functional.cosine_similarity(x, ones, dim=-1).square().mean().item()


def _of_logits(z: Tensor, layer: int) -> Iterator[tuple[Key, float]]:
    total = z.exp().sum(-1).log()
    yield ("logz", "", layer), total.mean().item()
    yield ("logz2", "", layer), total.square().mean().item()
    yield ("logit_mean", "", layer), z.mean().item()
    yield ("logit_absmax", "", layer), z.abs().max().item()


def _of_gains(model: GPT, depth: int, offset: float) -> Iterator[tuple[Key, float]]:
    for name, p in model.named_parameters():
        if name.endswith(".affine.gain"):
            whole, layer = where(name, depth)
            site = whole.removesuffix(".affine.gain").replace("wiring.", "").replace("norms.", "").replace("head.", "")
            g = p.detach() + offset
            yield ("gain_rms", site, layer), g.square().mean().sqrt().item()
            yield ("gain_min", site, layer), g.min().item()
            yield ("gain_absmax", site, layer), g.abs().max().item()
            yield ("gain_cv", site, layer), ((g - g.mean()).square().mean().sqrt() / g.mean().abs()).item()
            yield ("gain_negative", site, layer), (g < 0).double().mean().item()


def where(name: str, depth: int) -> tuple[str, int]:
    parts = name.split(".")
    if parts[0] == "blocks":
        return ".".join(parts[2:]), int(parts[1]) + 1
    return name, 0 if parts[0] == "embed" else depth + 1
