"""The fingerprint of a run's block: 16 hex digits that depend on its computation only.

Every block of the run's depth is built small, in float64, with weights and an input made from SHA-256. Each output and
gradient, in training and in evaluation, is reduced to two numbers, rounded to five digits and hashed. Machines
and versions of torch differ only near the sixteenth digit, which the rounding removes.

Most blocks of a model are equal, and every block has the same input. So a block that is equal to an earlier one in all
that it computes from has that one's numbers, and is not executed again (`_KnownBlocks`).

The fingerprint ignores sizes and the init. Options that may have no effect in float64 and five digits
(`NARROW_OPTIONS`) are hashed by value. If half of an eps gives the same digits
(an eps that only clamps), its value is hashed, too.

Shapes: B batch, T time, D width.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from normlab.base.errors import ConfigError
from normlab.catalogue.sites import split_key
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
            value = getattr(part, field.name)
            # A default adds nothing: an option that a later version adds leaves the fingerprints of older runs.
            if field.name in NARROW_OPTIONS and value != field.default:
                content.update(f"{field.name} {value}\n".encode())
    for key, value in small.norm.at.items():
        if split_key(key)[1] in NARROW_OPTIONS:
            content.update(f"{key} {value}\n".encode())
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        lines = list(_lines(small))
        content.update("".join(lines).encode())
        all_eps = dict.fromkeys(getattr(norm, "eps", 0) for norm in small.norms)
        if any(all_eps):
            halved = _lines(small, with_eps=lambda eps: eps / 2)
            # Compared one by one: the first line that differs ends the second computation.
            if all(line == line_halved for line, line_halved in zip(lines, halved, strict=True)):
                content.update(f"eps {' '.join(map(str, all_eps))}\n".encode())
    return content.hexdigest()[:16]


def _lines(config: RunConfig, with_eps: Callable[[float], float] | None = None) -> Iterator[str]:
    """Yield the name and the digits of every output, gradient and buffer of each block, and of the logits."""
    small = build_small(config, alike=True, with_eps=with_eps)
    torch.default_generator.manual_seed(0)  # for a plugin whose forward pass draws random numbers
    for number, norm in enumerate(small.norms):
        for name, parameter in norm.named_parameters():
            if parameter.dim() > 1:  # its values come from torch's generator, which may differ between versions
                yield f"norm {number} {name} {_digest(torch.tensor(parameter.shape))}\n"
    start = stream = small.gpt.embed(tokens())
    modes = ("train", "eval") if config.batch_statistics else ("train",)
    blocks = _KnownBlocks()
    for layer, block in enumerate(small.gpt.blocks, start=1):
        digits, stream = blocks.execute(block, stream, modes)
        yield from (f"{layer} {line}" for line in digits)
    yield f"logits {_digest(small.gpt.head(start).detach())}\n"


class _KnownBlocks:
    """Executes blocks, and returns for a block that is equal to an earlier one what that one gave."""

    def __init__(self) -> None:
        self._results: dict[Any, tuple[list[str], Any]] = {}

    def execute(self, block: nn.Module, stream: Any, modes: Sequence[str]) -> tuple[list[str], Any]:
        """Return the lines of a block, without its number, and the stream after it."""
        try:
            # Before it is executed, because that changes running statistics.
            key = _key_of((block, [name for name, _ in block.named_parameters()], _shape_of(stream)))
        except TypeError:
            key = None
        if key is not None and key in self._results:
            return self._results[key]
        state = torch.get_rng_state()
        lines, after = _execute(block, stream, modes)
        # A block that draws random numbers has others in every layer.
        if key is not None and torch.equal(torch.get_rng_state(), state):
            self._results[key] = lines, after
        return lines, after


def _execute(block: nn.Module, stream: Any, modes: Sequence[str]) -> tuple[list[str], Any]:
    """Execute a block in each mode at each scale of its input; return its lines and the stream after it."""
    lines: list[str] = []
    after = stream
    for mode, scale in product(modes, SCALES):
        getattr(block, mode)()
        # Not the stream itself, so that equal blocks have equal results (`_KnownBlocks`).
        inputs = [
            (hashed_numbers(f"stream {i}", *y.shape) * scale).requires_grad_() for i, y in enumerate(_numbers(stream))
        ]
        after = block(_with_numbers(stream, iter(inputs)))
        outputs = _numbers(after)
        loss = sum((y * hashed_numbers(f"cotangent {i}", *y.shape)).sum() for i, y in enumerate(outputs))
        assert isinstance(loss, Tensor)
        names, parameters = zip(*block.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, [*inputs, *parameters], allow_unused=True)
        for i, y in enumerate(outputs):
            lines.append(f"{mode} {scale} output {i} {_digest(y)}\n")
        names = [*(f"input {i}" for i in range(len(inputs))), *names]
        for name, grad in zip(names, grads, strict=True):
            lines.append(f"{mode} {scale} {name} {_digest(torch.zeros(1) if grad is None else grad)}\n")
    for name, buffer in block.named_buffers():
        lines.append(f"{name} {_digest(buffer)}\n")
    return lines, _with_numbers(after, (y.detach() for y in _numbers(after)))


def _key_of(value: Any) -> Any:
    """Return a hashable value that is equal for two modules only if both compute the same.

    Raises:
        TypeError: The value, or an attribute of a module, is of a kind that may hide more than can be compared.
    """
    if value is None or isinstance(value, bool | int | float | str | type | FunctionType | BuiltinFunctionType):
        return type(value), value
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.requires_grad, value.detach().numpy().tobytes()
    if isinstance(value, nn.Module):
        return type(value), _key_of(vars(value))
    if isinstance(value, dict):
        return type(value), tuple((name, _key_of(part)) for name, part in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(_key_of(part) for part in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(value)
    raise TypeError(f"{type(value).__name__} is not compared")


def _shape_of(stream: Any) -> Any:
    """Return a stream with the shape of each tensor in place of its numbers, which every block replaces."""
    if isinstance(stream, Tensor) and stream.is_floating_point():
        return tuple(stream.shape)
    if isinstance(stream, dict):
        return {name: _shape_of(part) for name, part in stream.items()}
    if isinstance(stream, tuple | list):
        return tuple(_shape_of(part) for part in stream)
    return stream


def _numbers(stream: Any) -> list[Tensor]:
    """Return the tensors in a stream, a tensor or tuples and dicts of tensors, without integers."""
    if isinstance(stream, Tensor):
        return [stream] if stream.is_floating_point() else []
    parts = stream
    if isinstance(stream, dict):
        parts = stream.values()
    numbers: list[Tensor] = []
    for part in parts:
        numbers += _numbers(part)
    return numbers


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
    if math.isnan(length):
        return "nan"
    if length <= 1e-9:  # the rounding errors of a sum that is zero
        return "0"
    cosine = float(flat @ hashed_numbers("direction", len(flat)) / length)
    return f"{length:.{DIGITS - 1}e} {round(cosine * 10**DIGITS)}"
