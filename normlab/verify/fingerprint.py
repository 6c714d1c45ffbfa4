"""The fingerprint of a run's block: one short word for what it computes, whatever it is called.

Every block of the run's depth is built small, in float64, with weights and an input made from SHA-256. Of what it
gives, forward and back, in training and in evaluation, each tensor is drawn together to two numbers, rounded to five
digits and hashed: two machines and two versions of torch differ in the last of sixteen digits and agree in these.

What it does not see: the sizes and the init. What happens in narrower precisions only (`norm.compute`,
`norm.rounding`), where float64 has nothing to round, counts by the option's value. So does an eps that shows in no
digit of these, half of it giving the same: one that is a clamp, and acts on smaller inputs only.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from normlab.config import RunConfig
from normlab.errors import ConfigError
from normlab.verify.small import built, numbers, small, tokens

DIGITS = 5
NARROW = ("compute", "rounding")
"""Options of norms that only a narrow precision shows."""
SCALES = (1.0, 1e-3)
"""Of the input: at the second an eps of the usual size shows."""


def fingerprint(config: RunConfig) -> str:
    """Sixteen hex digits; an empty text where the norm and the placement fit no small model.

    Args:
        config: A run's. Its norm, its placement, its depth and the kind of its attention and MLP count.
    """
    try:
        subject = small(config)
    except ConfigError:
        return ""
    content = hashlib.sha256()
    for field in dataclasses.fields(subject.norm):
        if field.name in NARROW and (value := getattr(subject.norm, field.name)) != field.default:
            content.update(f"{field.name} {value}\n".encode())
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for name, value in _outcomes(subject):
            content.update(f"{name} {_rounded(value)}\n".encode())
        if (eps := getattr(subject.norm, "eps", 0)) and not _shows(subject, eps):
            content.update(f"eps {eps}\n".encode())
    return content.hexdigest()[:16]


def _shows(config: RunConfig, eps: float) -> bool:
    """Whether another eps gives other digits: one that is half as large, which every norm takes."""
    norm = dataclasses.replace(config.norm, eps=eps / 2)  # pyright: ignore[reportCallIssue]
    other = dataclasses.replace(config, norm=norm)
    pairs = zip(_outcomes(config), _outcomes(other), strict=True)
    return any(_rounded(one) != _rounded(another) for (_, one), (_, another) in pairs)


def _outcomes(config: RunConfig) -> Iterator[tuple[str, Tensor]]:
    model, norms = built(config, alike=True)
    for number, norm in enumerate(norms):
        for name, parameter in norm.named_parameters():
            if parameter.dim() > 1:  # what it draws would be another generator's on another torch
                yield f"norm {number} {name}", torch.tensor(parameter.shape)
    stream = model.embed(tokens())
    for layer, block in enumerate(model.blocks, start=1):
        modes = ("train", "eval") if config.norm.batch_statistics else ("train",)
        for mode, scale in product(modes, SCALES):
            getattr(block, mode)()
            inputs = _leaves(stream, scale)
            outputs = _tensors(block(_like(stream, inputs)))
            loss = sum((y * numbers(f"cotangent {i}", *y.shape)).sum() for i, y in enumerate(outputs))
            assert isinstance(loss, Tensor)
            names, parameters = zip(*block.named_parameters(), strict=True)
            grads = torch.autograd.grad(loss, [*inputs, *parameters], allow_unused=True)
            yield from ((f"{layer} {mode} {scale} output {i}", y.detach()) for i, y in enumerate(outputs))
            for name, grad in zip([*(f"input {i}" for i in range(len(inputs))), *names], grads, strict=True):
                yield f"{layer} {mode} {scale} {name}", torch.zeros(1) if grad is None else grad
        yield from ((f"{layer} {name}", buffer) for name, buffer in block.named_buffers())
    logits_BTV = model.head(stream)
    yield "logits", logits_BTV.detach()


def _tensors(stream: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [stream] if isinstance(stream, Tensor) else list(stream)


def _leaves(stream: Tensor | tuple[Tensor, ...], scale: float) -> list[Tensor]:
    """The same input for every block, of a stream's own shape."""
    return [(numbers(f"stream {i}", *y.shape) * scale).requires_grad_() for i, y in enumerate(_tensors(stream))]


def _like(stream: Tensor | tuple[Tensor, ...], values: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return values[0] if isinstance(stream, Tensor) else tuple(values)


def _rounded(value: Tensor) -> str:
    """The size of a tensor, and where it points: rounded, for two machines to agree on."""
    flat = value.detach().double().flatten()
    size = float(torch.linalg.vector_norm(flat))
    if not size > 1e-9:  # a zero that was summed up is a zero
        return "0" if size == size else "nan"
    angle = float(flat @ numbers("direction", len(flat)) / size)
    return f"{size:.{DIGITS - 1}e} {round(angle * 10**DIGITS)}"
