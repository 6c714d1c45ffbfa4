"""The fingerprint of a run's block: 16 hex digits that depend on its computation only.

Every block of the run's depth is built small, in float64, with weights and an input made from SHA-256. Each output and
gradient, in training and in evaluation, is reduced to two numbers, rounded to five digits and hashed. Machines
and versions of torch differ only near the sixteenth digit, which the rounding removes.

The fingerprint ignores sizes and the init. Options that may have no effect in float64 and five digits
(`NARROW_OPTIONS`) are hashed by value. If half of an eps gives the same digits
(an eps that only clamps), its value is hashed, too.

Shapes: B batch, T time, D width.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from normlab.base.errors import ConfigError
from normlab.config.schema import RunConfig
from normlab.model.small import build_small, hashed_numbers, shrink, tokens

DIGITS = 5
NARROW_OPTIONS = ("compute", "rounding", "iterations", "taper_steps", "taper_warmup")
"""Options of norms and placements that may have no effect in float64 and five digits."""
SCALES = (1.0, 1e-3)
"""Scales of the input; at 1e-3 an eps of the usual size changes the result."""


def fingerprint(config: RunConfig) -> str:
    """Return the fingerprint, 16 hex digits; empty if no small model is valid.

    Args:
        config: The fingerprint depends on its norm, placement, depth, and kinds of attention and MLP.
    """
    try:
        small = shrink(config)
    except ConfigError:
        return ""
    content = hashlib.sha256()
    for part in (small.norm, small.placement):
        for field in dataclasses.fields(part):
            if field.name in NARROW_OPTIONS and (value := getattr(part, field.name)) != field.default:
                content.update(f"{field.name} {value}\n".encode())
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        lines = list(_lines(small))
        content.update("".join(lines).encode())
        if eps := getattr(small.norm, "eps", 0):
            norm = dataclasses.replace(small.norm, eps=eps / 2)  # pyright: ignore[reportCallIssue]
            halved = _lines(dataclasses.replace(small, norm=norm))
            if all(line == other for line, other in zip(lines, halved, strict=True)):
                content.update(f"eps {eps}\n".encode())
    return content.hexdigest()[:16]


def _lines(config: RunConfig) -> Iterator[str]:
    return (f"{name} {_digest(value)}\n" for name, value in _outcomes(config))


def _outcomes(config: RunConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every output, gradient and buffer of each block, and the logits, with a name."""
    small = build_small(config, alike=True)
    torch.default_generator.manual_seed(0)  # for a plugin whose forward pass draws random numbers
    for number, norm in enumerate(small.norms):
        for name, parameter in norm.named_parameters():
            if parameter.dim() > 1:  # its values come from torch's generator, which may differ between versions
                yield f"norm {number} {name}", torch.tensor(parameter.shape)
    start = stream = small.gpt.embed(tokens())
    for layer, block in enumerate(small.gpt.blocks, start=1):
        after = stream
        modes = ("train", "eval") if config.norm.batch_statistics else ("train",)
        for mode, scale in product(modes, SCALES):
            getattr(block, mode)()
            # Every block gets the same input, of the shape of its own.
            inputs = [
                (hashed_numbers(f"stream {i}", *y.shape) * scale).requires_grad_()
                for i, y in enumerate(_numbers(stream))
            ]
            after = block(_with_numbers(stream, iter(inputs)))
            outputs = _numbers(after)
            loss = sum((y * hashed_numbers(f"cotangent {i}", *y.shape)).sum() for i, y in enumerate(outputs))
            assert isinstance(loss, Tensor)
            names, parameters = zip(*block.named_parameters(), strict=True)
            grads = torch.autograd.grad(loss, [*inputs, *parameters], allow_unused=True)
            yield from ((f"{layer} {mode} {scale} output {i}", y.detach()) for i, y in enumerate(outputs))
            for name, grad in zip([*(f"input {i}" for i in range(len(inputs))), *names], grads, strict=True):
                yield f"{layer} {mode} {scale} {name}", torch.zeros(1) if grad is None else grad
        yield from ((f"{layer} {name}", buffer) for name, buffer in block.named_buffers())
        stream = _with_numbers(after, (y.detach() for y in _numbers(after)))
    yield "logits", small.gpt.head(start).detach()


def _numbers(stream: Any) -> list[Tensor]:
    """Return the tensors in a stream, a tensor or tuples and dicts of tensors, without integers."""
    if isinstance(stream, Tensor):
        return [stream] if stream.is_floating_point() else []
    parts = stream.values() if isinstance(stream, dict) else stream
    return [y for part in parts for y in _numbers(part)]


def _with_numbers(stream: Any, numbers: Iterator[Tensor]) -> Any:
    """Return a stream with other tensors in place of `_numbers`."""
    if isinstance(stream, Tensor):
        return next(numbers) if stream.is_floating_point() else stream
    if isinstance(stream, dict):
        return {name: _with_numbers(part, numbers) for name, part in stream.items()}
    return tuple(_with_numbers(part, numbers) for part in stream)


def _digest(value: Tensor) -> str:
    """Return a tensor's length and its cosine with a fixed direction, rounded to five digits."""
    flat = value.detach().double().flatten()
    length = float(torch.linalg.vector_norm(flat))
    if not length > 1e-9:  # the rounding errors of a sum that is zero
        return "0" if length == length else "nan"
    cosine = float(flat @ hashed_numbers("direction", len(flat)) / length)
    return f"{length:.{DIGITS - 1}e} {round(cosine * 10**DIGITS)}"
