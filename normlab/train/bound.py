"""A model bound to the tensors it runs on: its own, for a lone run, or a stack of several runs' for a pack.

A lone run has no axis of runs and calls its modules directly, at the price of a plain loop. A pack calls the
same modules under `vmap(functional_call)`, segment by segment, with a leading axis R on every tensor.

Shapes: R runs, B batch, T time, V vocabulary, K numbers of statistics; `...R` marks an axis that only a pack has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from normlab.model.attention import Attention
from normlab.model.gpt import GPT
from normlab.stats.show import Wanted, looking
from normlab.stats.tap import tap

Tensors = dict[str, Tensor]


class Report(NamedTuple):
    """What was seen of a segment."""

    names: tuple[tuple[str, str], ...]
    """Statistic and site, in the order in which they were shown."""
    values: Tensor
    """(K, ...R)."""


class Forward(NamedTuple):
    """What a forward pass gave."""

    loss: Tensor
    """Nats per token, (...R)."""
    reports: list[Report]
    """What was seen of each segment, if anything."""
    taps: list[Tensor]
    """The stream that enters each block and the head, for its gradient."""


def _call(
    segment: nn.Module, tensors: Tensors | None, wanted: Wanted | None, *args: Any
) -> tuple[Any, Tensors, Report | None]:
    """The segment's output; in a pack also its buffers, for it may have reassigned them; what was seen, if anything."""
    if tensors is None and wanted is None:
        return segment(*args), {}, None
    if tensors is None:
        with looking(wanted or {}) as seen:
            output = segment(*args)
        return output, {}, Report(*seen.taken())
    buffers = {name for name, _ in segment.named_buffers()}
    names: list[tuple[str, str]] = []

    def one(tensors: Tensors, *args: Any) -> tuple[Any, Tensors, Tensor]:
        own = dict(tensors)  # functional_call writes reassigned buffers back into the dict that it is given
        with looking(wanted or {}) as seen:
            output = functional_call(segment, own, args)
        shown, values = seen.taken()
        names.extend(shown)
        return output, {name: own[name] for name in buffers}, values

    output, kept, values = vmap(one)(tensors, *args)
    return output, kept, None if wanted is None else Report(tuple(names), values.transpose(0, 1))


def _embed(
    segment: nn.Module, tensors: Tensors | None, wanted: Wanted | None, tokens: Tensor
) -> tuple[Any, Tensors, Report | None]:
    return _call(segment, tensors, wanted, tokens)


def _block(
    segment: nn.Module, tensors: Tensors | None, wanted: Wanted | None, stream: Any
) -> tuple[Any, Tensors, Report | None]:
    return _call(segment, tensors, wanted, stream)


def _head(
    segment: nn.Module, tensors: Tensors | None, wanted: Wanted | None, stream: Any, targets: Tensor
) -> tuple[Tensor, Tensors, Report | None]:
    logits, buffers, report = _call(segment, tensors, wanted, stream)
    loss = _cross_entropy if tensors is None else vmap(_cross_entropy)
    return loss(logits, targets), buffers, report


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

    def loss(self, tokens: Tensor, targets: Tensor, wanted: Wanted | None = None, *, taps: bool = False) -> Forward:
        """The loss of tokens and targets, shape (...R, B, T); with `wanted`, what was seen; with `taps`, those."""
        reports: list[Report] = []
        tapped: list[Tensor] = []
        stream: Any = tokens
        for prefix, segment in self.model.segments():
            tensors = self._tensors(prefix, segment)
            if taps and segment is not self.model.embed:
                stream, own = tap(stream)
                tapped.append(own)
            if segment is self.model.embed:
                stream, buffers, report = self._embed(segment, tensors, wanted, stream)
            elif segment is self.model.head:
                stream, buffers, report = self._head(segment, tensors, wanted, stream, targets)
            else:
                stream, buffers, report = self._block(segment, tensors, wanted, stream)
            if buffers:
                self.set_buffers({prefix + name: tensor for name, tensor in buffers.items()})
            if report is not None:
                reports.append(report)
        return Forward(stream, reports, tapped)


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
