"""A model bound to the tensors it runs on: its own, for a lone run, or a stack of several runs' for a pack.

A lone run has no axis of runs and calls its modules directly, at the price of a plain loop. A pack calls the
same modules under `vmap(functional_call)`, segment by segment, with a leading axis R on every tensor.

Shapes: R runs, B batch, T time, V vocabulary; `...R` marks an axis that only a pack has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from normlab.model.attention import Attention
from normlab.model.gpt import GPT
from normlab.stats.stream import tap

Tensors = dict[str, Tensor]


def _call(segment: nn.Module, tensors: Tensors | None, *args: Any) -> tuple[Any, Tensors]:
    """The segment's output; in a pack also its buffers, for it may have reassigned them."""
    if tensors is None:
        return segment(*args), {}
    buffers = {name for name, _ in segment.named_buffers()}

    def one(tensors: Tensors, *args: Any) -> tuple[Any, Tensors]:
        own = dict(tensors)  # functional_call writes reassigned buffers back into the dict that it is given
        output = functional_call(segment, own, args)
        return output, {name: own[name] for name in buffers}

    return vmap(one)(tensors, *args)


def _embed(segment: nn.Module, tensors: Tensors | None, tokens: Tensor) -> tuple[Any, Tensors]:
    return _call(segment, tensors, tokens)


def _block(
    segment: nn.Module, tensors: Tensors | None, stream: Any, slot: Tensor | None
) -> tuple[Any, Tensors, Tensor | None]:
    seen = None
    if slot is not None:
        stream, seen = tap(stream, slot)
    return (*_call(segment, tensors, stream), seen)


def _head(
    segment: nn.Module, tensors: Tensors | None, stream: Any, targets: Tensor, slot: Tensor | None
) -> tuple[Tensor, Tensors, Tensor | None]:
    seen = None
    if slot is not None:
        stream, seen = tap(stream, slot)
    logits, buffers = _call(segment, tensors, stream)
    loss = _cross_entropy if tensors is None else vmap(_cross_entropy)
    return loss(logits, targets), buffers, seen


def _cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean negative log-likelihood, nats per token, in float32 or better."""
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    return F.cross_entropy(logits_BTV.flatten(0, -2), targets_BT.flatten())


class Bound:
    """A model and the tensors that it runs on. `params` is what is trained, by name."""

    def __init__(self, model: GPT, params: Tensors, *, compiled: bool):
        self.model = model
        self.params = params
        # Off-steps and measured steps are two specialisations of the same three functions.
        wrap = (lambda f: torch.compile(f, fullgraph=True, dynamic=False)) if compiled else (lambda f: f)
        self._embed, self._block, self._head = wrap(_embed), wrap(_block), wrap(_head)

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes of every tensor: () for a lone run, (R,) for a pack."""
        raise NotImplementedError

    @property
    def buffers(self) -> Tensors:
        """Running statistics and constants, by name."""
        raise NotImplementedError

    def set_buffers(self, values: Tensors) -> None:
        """Replace some of the buffers."""
        raise NotImplementedError

    def _tensors(self, prefix: str, segment: nn.Module) -> Tensors | None:
        """The tensors that a segment is called with; None where it has its own."""
        raise NotImplementedError

    def train(self, mode: bool) -> None:
        """Training mode, or evaluation."""
        if self.model.training != mode:  # it walks over every module
            self.model.train(mode)

    def loss(
        self, tokens: Tensor, targets: Tensor, slots: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss, shape (...R), of tokens and targets, shape (...R, B, T), in nats per token.

        With `slots`, one for each block and one for the head, also the mean square of the stream that enters
        each; the slots' gradients are those of the stream's gradient.
        """
        seen: list[Tensor] = []
        stream: Any = tokens
        for index, (prefix, segment) in enumerate(self.model.segments()):
            tensors = self._tensors(prefix, segment)
            slot = slots[index - 1] if slots is not None and index > 0 else None
            if segment is self.model.embed:
                stream, buffers = self._embed(segment, tensors, stream)
                value = None
            elif segment is self.model.head:
                stream, buffers, value = self._head(segment, tensors, stream, targets, slot)
            else:
                stream, buffers, value = self._block(segment, tensors, stream, slot)
            if buffers:
                self.set_buffers({prefix + name: tensor for name, tensor in buffers.items()})
            if value is not None:
                seen.append(value)
        return stream, seen


class Alone(Bound):
    """One run: the model's own parameters and buffers."""

    def __init__(self, model: GPT, *, compiled: bool):
        super().__init__(model, dict(model.named_parameters()), compiled=compiled)
        # Where each buffer lives: they are reassigned, so the owner is kept and not the tensor.
        self._owners = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in model.named_buffers()
        }

    @property
    def lead(self) -> tuple[int, ...]:
        """No axis of runs."""
        return ()

    @property
    def buffers(self) -> Tensors:
        """The model's buffers as they are now."""
        return {name: getattr(module, leaf) for name, (module, leaf) in self._owners.items()}

    def set_buffers(self, values: Tensors) -> None:
        """Replace some of the model's buffers."""
        for name, tensor in values.items():
            module, leaf = self._owners[name]
            setattr(module, leaf, tensor)

    def _tensors(self, prefix: str, segment: nn.Module) -> Tensors | None:
        return None


class Pack(Bound):
    """Several runs of one architecture: their tensors stacked, the first model's modules as the template."""

    def __init__(self, models: Sequence[GPT], *, compiled: bool):
        named = [dict(model.named_parameters()) for model in models]
        params = {
            name: torch.stack([tensors[name].detach() for tensors in named]).requires_grad_() for name in named[0]
        }
        super().__init__(models[0], params, compiled=compiled)
        self.size = len(models)
        owned = [dict(model.named_buffers()) for model in models]
        self._buffers = {name: torch.stack([tensors[name] for tensors in owned]) for name in owned[0]}
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.fused = False
        # A tied matrix has one name in the state and another in the segment that also uses it.
        by_identity = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._names = {
            prefix: {name: by_identity[id(p)] for name, p in segment.named_parameters()}
            | {name: prefix + name for name, _ in segment.named_buffers()}
            for prefix, segment in self.model.segments()
        }

    @property
    def lead(self) -> tuple[int, ...]:
        """The axis of runs."""
        return (self.size,)

    @property
    def buffers(self) -> Tensors:
        """The stacked buffers as they are now."""
        return dict(self._buffers)

    def set_buffers(self, values: Tensors) -> None:
        """Replace some of the stacked buffers."""
        self._buffers.update(values)

    def _tensors(self, prefix: str, segment: nn.Module) -> Tensors | None:
        own = self._names[prefix].items()
        return {name: self.params[full] if full in self.params else self._buffers[full] for name, full in own}
