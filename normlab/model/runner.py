"""Model runners: a model with its tensors, for a single run or for stacked runs.

A single run has no axis of runs and calls its modules directly, at the cost of a plain training loop. Stacked runs (a
pack) call the same modules under `vmap(functional_call)`, segment by segment, with a leading axis R on every tensor.

Shapes: R runs, B batch, T time, V vocabulary, K statistics; `...R` marks an axis that only stacked runs have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from normlab.model.attention import Attention
from normlab.model.chunked_loss import chunked_cross_entropy, cross_entropy, has_large_logits
from normlab.model.gpt import GPT
from normlab.model.stack import Stack
from normlab.stats.instrument import Collector, Selection, main_stream, tap

Tensors = dict[str, Tensor]


class SegmentStatistics(NamedTuple):
    """The statistics collected in one segment (embeddings, a block or the head)."""

    names: tuple[tuple[str, str], ...]
    """Statistic and site of each value."""
    values: Tensor
    """(K, ...R)."""


class ForwardOutput(NamedTuple):
    """The results of a forward pass."""

    loss: Tensor
    """Nats per token, (...R)."""
    statistics: list[SegmentStatistics]
    """One for each segment in a measured pass, else empty."""
    taps: list[Tensor]
    """The stream that enters each block and the head, for its gradient; empty unless requested."""


SegmentOutput = tuple[Any, Tensors, SegmentStatistics | None]
"""A segment's output, its buffers (stacked runs only: the forward may have reassigned them), and its statistics."""


def _run_segment(
    segment: nn.Module, tensors: Tensors | None, selection: Selection | None, *args: Any, **options: Any
) -> SegmentOutput:
    if tensors is None:
        if selection is None:
            return segment(*args, **options), {}, None
        with Collector(selection) as collector:
            output = segment(*args, **options)
        return output, {}, SegmentStatistics(*collector.results(main_stream(output).device))

    buffer_names = {name for name, _ in segment.named_buffers()}
    names: list[tuple[str, str]] = []

    def run(tensors: Tensors, *args: Any) -> tuple[Any, Tensors, Tensor]:
        state = dict(tensors)  # functional_call writes reassigned buffers back into this dict
        with Collector(selection or {}) as collector:
            output = functional_call(segment, state, args, options)
        collected, values = collector.results(main_stream(output).device)
        names.extend(collected)
        return output, {name: state[name] for name in buffer_names}, values

    output, buffers, values = vmap(run)(tensors, *args)
    return output, buffers, None if selection is None else SegmentStatistics(tuple(names), values.transpose(0, 1))


# Embeddings, blocks and head are three functions so that each has a compile cache of its own.


def _embed(segment: nn.Module, tensors: Tensors | None, selection: Selection | None, tokens: Tensor) -> SegmentOutput:
    return _run_segment(segment, tensors, selection, tokens)


def _block(segment: nn.Module, tensors: Tensors | None, selection: Selection | None, stream: Any) -> SegmentOutput:
    return _run_segment(segment, tensors, selection, stream)


def _head(
    segment: nn.Module, tensors: Tensors | None, selection: Selection | None, stream: Any, targets: Tensor,
    scale: Tensor | None,
) -> SegmentOutput:  # fmt: skip
    if has_large_logits(segment, targets):
        return _chunked_head(segment, tensors, selection, stream, targets, scale)
    logits, buffers, statistics = _run_segment(segment, tensors, selection, stream)
    if tensors is None:
        return cross_entropy(logits, targets), buffers, statistics
    # Outside of vmap, which would decompose the loss into a dozen operations.
    return cross_entropy(logits, targets, "none").view(len(targets), -1).mean(1), buffers, statistics


def _chunked_head(
    segment: nn.Module, tensors: Tensors | None, selection: Selection | None, stream: Any, targets: Tensor,
    scale: Tensor | None,
) -> SegmentOutput:  # fmt: skip
    x, buffers, statistics = _run_segment(segment, tensors, selection, stream, part="read")
    own = {name: p for name, p in segment.named_parameters() if not name.startswith("close.")}
    params = own if tensors is None else {name: tensors[name] for name in own}
    loss, names, values = chunked_cross_entropy(segment, params, selection or {}, x, targets, scale)
    if statistics is not None and names:
        statistics = SegmentStatistics((*statistics.names, *names), torch.cat([statistics.values, values]))
    return loss, buffers, statistics


class ModelRunner:
    """A model and the parameters and buffers that it computes with."""

    def __init__(
        self, model: GPT, params: Tensors, run_shape: tuple[int, ...], *, compiled: bool, backend: Any = "inductor"
    ):
        self.model = model
        self.params = params
        """The trained tensors, by name."""
        self.run_shape = run_shape
        """The leading axes of every tensor: () for a single run, (R,) for stacked runs."""
        # Plain and measured steps are two specialisations of the same three functions.
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend}
        wrap = (lambda f: torch.compile(f, **options)) if compiled else (lambda f: f)
        self._embed, self._block, self._head = wrap(_embed), wrap(_block), wrap(_head)

    @property
    def buffers(self) -> Tensors:
        """The current running statistics and constants, by name."""
        raise NotImplementedError

    def set_buffers(self, values: Tensors) -> None:
        """Replace some of the buffers."""
        raise NotImplementedError

    def params_by_segment(self) -> list[Tensors]:
        """Return the parameters of each segment, by name; a tied matrix belongs to the first segment that uses it."""
        return [
            {name: p for name, p in self.params.items() if name.startswith(prefix)}
            for prefix, _ in self.model.segments()
        ]

    def name_gradients(self, gradients: list[Tensor]) -> Tensors:
        """Return the gradients of all parameters, in their order, by name and with the parameters' memory layout."""
        raise NotImplementedError

    def _tensors(self, prefix: str, segment: nn.Module) -> Tensors | None:
        """Return the tensors to call a segment with; None if the segment uses its own."""
        raise NotImplementedError

    def train(self, mode: bool) -> None:
        """Set training or evaluation mode."""
        if self.model.training != mode:  # setting it visits every module
            self.model.train(mode)

    def loss(
        self, tokens: Tensor, targets: Tensor, selection: Selection | None = None, *, taps: bool = False,
        scale: Tensor | None = None,
    ) -> ForwardOutput:  # fmt: skip
        """Compute the loss of tokens and targets, shape (...R, B, T).

        Args:
            tokens: The inputs.
            targets: The next tokens.
            selection: The statistics to collect; None for a plain pass.
            taps: Whether to tap the stream for its gradient.
            scale: The factor by which the caller multiplies the loss before the backward pass.
        """
        statistics: list[SegmentStatistics] = []
        tapped: list[Tensor] = []
        stream: Any = tokens
        for prefix, segment in self.model.segments():
            tensors = self._tensors(prefix, segment)
            if taps and segment is not self.model.embed:
                stream, tensor = tap(stream)
                tapped.append(tensor)
            if segment is self.model.embed:
                stream, buffers, collected = self._embed(segment, tensors, selection, stream)
            elif segment is self.model.head:
                stream, buffers, collected = self._head(segment, tensors, selection, stream, targets, scale)
            else:
                stream, buffers, collected = self._block(segment, tensors, selection, stream)
            if buffers:
                self.set_buffers({prefix + name: tensor for name, tensor in buffers.items()})
            if collected is not None:
                statistics.append(collected)
        return ForwardOutput(stream, statistics, tapped)


class SingleRun(ModelRunner):
    """Runs a model with its own parameters and buffers."""

    def __init__(self, model: GPT, *, compiled: bool, backend: Any = "inductor"):
        super().__init__(model, dict(model.named_parameters()), (), compiled=compiled, backend=backend)
        # Forward passes reassign buffers, so the owning module is stored and not the tensor.
        self._owners = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in model.named_buffers()
        }

    @property
    def buffers(self) -> Tensors:
        """The model's current buffers."""
        return {name: getattr(module, attribute) for name, (module, attribute) in self._owners.items()}

    def set_buffers(self, values: Tensors) -> None:
        """Replace some of the model's buffers."""
        for name, tensor in values.items():
            module, attribute = self._owners[name]
            setattr(module, attribute, tensor)

    def name_gradients(self, gradients: list[Tensor]) -> Tensors:
        """Return the gradients by name; the list is emptied."""
        for index, parameter in enumerate(self.params.values()):
            # One at a time, so that memory never holds two copies of all gradients.
            gradients[index] = _with_strides_of(parameter, gradients[index])
        named = dict(zip(self.params, gradients, strict=True))
        gradients.clear()
        return named

    def _tensors(self, prefix: str, segment: nn.Module) -> Tensors | None:
        return None


class StackedRuns(ModelRunner):
    """Runs several models of one architecture: stacked tensors, the first model's modules."""

    def __init__(self, models: Sequence[GPT], *, compiled: bool):
        parameters = [dict(model.named_parameters()) for model in models]
        linear = {id(module.weight) for module in models[0].modules() if type(module) is nn.Linear}
        params = Stack(
            {name: torch.stack([tensors[name].detach() for tensors in parameters]) for name in parameters[0]},
            transposed=[name for name, parameter in parameters[0].items() if id(parameter) in linear],
        )
        for tensor in params.values():
            tensor.requires_grad_()
        super().__init__(models[0], params, (len(models),), compiled=compiled)
        self._stack = params
        buffers = [dict(model.named_buffers()) for model in models]
        self._buffers = {name: torch.stack([tensors[name] for tensors in buffers]) for name in buffers[0]}
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.fused = params.buffer.device.type != "cpu"
            elif type(module) is nn.Linear:  # a plugin's subclass has a forward pass of its own
                module.forward = partial(_linear_of_stacked_runs, module)
        # A tied matrix has one name in the state and another one in the second segment that uses it.
        state_name = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._names = {
            prefix: {name: state_name[id(p)] for name, p in segment.named_parameters()}
            | {name: prefix + name for name, _ in segment.named_buffers()}
            for prefix, segment in self.model.segments()
        }

    @property
    def buffers(self) -> Tensors:
        """The current stacked buffers."""
        return dict(self._buffers)

    def set_buffers(self, values: Tensors) -> None:
        """Replace some of the stacked buffers."""
        self._buffers.update(values)

    def name_gradients(self, gradients: list[Tensor]) -> Stack:
        """Return the gradients by name, in one buffer."""
        return self._stack.gather(gradients)

    def _tensors(self, prefix: str, segment: nn.Module) -> Tensors | None:
        names = self._names[prefix].items()
        return {name: self.params[full] if full in self.params else self._buffers[full] for name, full in names}


def _linear_of_stacked_runs(module: nn.Linear, input: Tensor) -> Tensor:
    """Return x W^T + b of an input x.

    Under vmap, `nn.Linear` runs two more operations (products with 1), and its result is not in autocast's dtype.
    """
    y = input @ module.weight.T
    return y if module.bias is None else y + module.bias.to(y.dtype)


def _with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with the parameter's memory layout, which the fused kernels require.

    A transposed use of a parameter gives a transposed gradient: `backward` corrects it, `autograd.grad` does not.
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
