"""Model runners: a model with its tensors, for a single run or for stacked runs.

A single run has no axis of runs and calls its modules directly, at the cost of a plain training loop. Stacked runs (a
pack) call the same modules under `vmap(functional_call)`, segment by segment, with a leading axis R on every tensor.

Shapes: R runs, B batch, T time, V vocabulary; `...R` marks an axis that only stacked runs have.
"""

from __future__ import annotations  # torch's compiler cannot trace the annotations of a nested function

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from normlab.catalogue.statistics.profiles import StatisticColumn
from normlab.model.attention import Attention, Kernel, stacked_sdpa
from normlab.model.chunked_loss import chunked_cross_entropy, cross_entropy, has_large_logits
from normlab.model.gpt import GPT, Head
from normlab.model.instrument import Collector, Observation, StatisticsSelection, tap
from normlab.model.stack import Stack, StackedLinear, stacked_linear
from normlab.model.statistics import compute, share_of_stack

Tensors = dict[str, Tensor]


class ForwardOutput(NamedTuple):
    loss: Tensor
    """Nats per token, (...R)."""
    statistics: dict[StatisticColumn, Tensor]
    """The selected statistics, (...R) each."""
    taps: list[Tensor]
    """The stream that enters each block and the head, for its gradient; empty unless requested."""


class SegmentOutput(NamedTuple):
    """The results of a segment (embeddings, a block or the head)."""

    output: Any
    buffers: Tensors
    """Stacked runs only: the forward pass may have reassigned them."""
    observations: list[Observation]
    """The tensors of the statistics. A compiled segment returns them too, because statistics that were fused with it
    would change training by rounding."""
    statistics: dict[StatisticColumn, Tensor]
    """Those of logits in chunks, without their layer: the logits do not outlive the segment."""


def _run_segment(
    segment: nn.Module, tensors: Tensors | None, selection: StatisticsSelection | None, *args: Any, **options: Any
) -> SegmentOutput:
    if tensors is None and selection is None:
        return SegmentOutput(segment(*args, **options), {}, [], {})
    if tensors is None:
        with Collector(selection or {}) as collector:
            output = segment(*args, **options)
        return SegmentOutput(output, {}, collector.observations, {})

    buffer_names = [name for name, _ in segment.named_buffers()]
    observations: list[Observation] = []

    def run(tensors: Tensors, *args: Any) -> tuple[Any, Tensors, list[Tensor]]:
        state = dict(tensors)  # functional_call writes reassigned buffers back into this dict
        with Collector(selection or {}) as collector:
            output = functional_call(segment, state, args, options)
        observations.extend(collector.observations)
        # The tensors of one run only exist inside vmap, which stacks those that the function returns.
        observed: list[Tensor] = []
        for observation in observations:
            observed += [x for x in observation.tensors if isinstance(x, Tensor)]
        return output, {name: state[name] for name in buffer_names}, observed

    output, buffers, observed = vmap(run)(tensors, *args)
    # The same observations, with the tensors of all runs in place of those of one.
    of_all_runs = iter(observed)
    stacked: list[Observation] = []
    for kind, site, of_one_run, layer in observations:
        tensors_and_numbers: list[Any] = []
        for x in of_one_run:
            tensors_and_numbers.append(next(of_all_runs) if isinstance(x, Tensor) else x)
        stacked.append(Observation(kind, site, tuple(tensors_and_numbers), layer))  # torch 2.11 compiles no `_replace`
    return SegmentOutput(output, buffers, stacked, {})


# Embeddings, blocks and head are three functions so that each has a compile cache of its own.


def _embed(
    segment: nn.Module, tensors: Tensors | None, selection: StatisticsSelection | None, tokens: Tensor
) -> SegmentOutput:
    return _run_segment(segment, tensors, selection, tokens)


def _block(
    segment: nn.Module, tensors: Tensors | None, selection: StatisticsSelection | None, stream: Any
) -> SegmentOutput:
    return _run_segment(segment, tensors, selection, stream)


def _head(
    segment: Head, tensors: Tensors | None, selection: StatisticsSelection | None, stream: Any, targets: Tensor,
    scale: Tensor | None,
) -> SegmentOutput:  # fmt: skip
    if has_large_logits(segment, targets):
        return _chunked_head(segment, tensors, selection, stream, targets, scale)
    logits, buffers, observations, statistics = _run_segment(segment, tensors, selection, stream)
    if tensors is None:
        return SegmentOutput(cross_entropy(logits, targets, z_loss=segment.z_loss), buffers, observations, statistics)
    # Outside of vmap, which would decompose the loss into a dozen operations.
    losses = cross_entropy(logits, targets, "none", segment.z_loss).view(len(targets), -1).mean(1)
    return SegmentOutput(losses, buffers, observations, statistics)


def _chunked_head(
    segment: Head, tensors: Tensors | None, selection: StatisticsSelection | None, stream: Any, targets: Tensor,
    scale: Tensor | None,
) -> SegmentOutput:  # fmt: skip
    x, buffers, observations, statistics = _run_segment(segment, tensors, selection, stream, part="read")
    # `read` has run the module `close`; its parameters get their gradients through x.
    params: Tensors = {}
    for name, parameter in segment.named_parameters():
        if not name.startswith("close."):
            params[name] = parameter if tensors is None else tensors[name]
    loss, of_logits = chunked_cross_entropy(segment, params, selection or {}, x, targets, scale)
    return SegmentOutput(loss, buffers, observations, statistics | of_logits)


class ModelRunner:
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
        self._embed: Callable[..., SegmentOutput] = _embed
        self._block: Callable[..., SegmentOutput] = _block
        self._head: Callable[..., SegmentOutput] = _head
        if compiled:
            self._embed = torch.compile(_embed, **options)
            self._block = torch.compile(_block, **options)
            self._head = torch.compile(_head, **options)

    @property
    def buffers(self) -> Tensors:
        """The current running statistics and constants, by name."""
        raise NotImplementedError

    def set_buffers(self, values: Tensors) -> None:
        """Replace some of the buffers."""
        raise NotImplementedError

    def params_by_segment(self) -> list[Tensors]:
        """Return the parameters of each segment, by name; a tied matrix belongs to the first segment that uses it."""
        by_segment: list[Tensors] = []
        for prefix, _ in self.model.segments():
            by_segment.append({name: p for name, p in self.params.items() if name.startswith(prefix)})
        return by_segment

    def name_gradients(self, gradients: list[Tensor]) -> Tensors:
        """Return the gradients of all parameters, in their order, by name and with the parameters' memory layout."""
        raise NotImplementedError

    def _tensors(self, prefix: str, segment: nn.Module) -> Tensors | None:
        """Return the tensors to call a segment with; None if the segment uses its own."""
        raise NotImplementedError

    def uncompiled(self) -> Self:
        """Return a runner of the same tensors that is not compiled, for passes that are not worth compiling."""
        runner = copy.copy(self)
        runner._embed, runner._block, runner._head = _embed, _block, _head
        return runner

    def train(self, mode: bool) -> None:
        if self.model.training != mode:  # setting it visits every module
            self.model.train(mode)

    def loss(
        self, tokens: Tensor, targets: Tensor, selection: StatisticsSelection | None = None, *, taps: bool = False,
        scale: Tensor | None = None,
    ) -> ForwardOutput:  # fmt: skip
        """Compute the loss of tokens and targets, shape (...R, B, T).

        Args:
            selection: The statistics to collect; None for a plain pass.
            taps: Whether to tap the stream for its gradient.
            scale: The factor by which the caller multiplies the loss before the backward pass.
        """
        statistics: dict[StatisticColumn, Tensor] = {}
        pending: list[Observation] = []
        pending_share = 0.0
        tapped: list[Tensor] = []
        stream: Any = tokens
        lead = len(self.run_shape)
        for layer, (prefix, segment) in enumerate(self.model.segments()):
            tensors = self._tensors(prefix, segment)
            if taps and segment is not self.model.embed:
                stream, tensor = tap(stream)
                tapped.append(tensor)
            if segment is self.model.embed:
                stream, buffers, observations, computed = self._embed(segment, tensors, selection, stream)
            elif segment is self.model.head:
                stream, buffers, observations, computed = self._head(
                    segment, tensors, selection, stream, targets, scale
                )
            else:
                stream, buffers, observations, computed = self._block(segment, tensors, selection, stream)
            if buffers:
                self.set_buffers({prefix + name: tensor for name, tensor in buffers.items()})
            # A compiled segment does not know its layer, so that one compiled block serves all.
            for column, value in computed.items():
                statistics[column._replace(layer=layer)] = value
            observed = [observation._replace(layer=layer) for observation in observations]
            # The tensors of several segments are computed together, as many as fit into one stack.
            share = share_of_stack(observed)
            if pending_share + share > 1:
                statistics |= compute(selection or {}, pending, lead, together=True)
                pending, pending_share = [], 0.0
            pending += observed
            pending_share += share
        statistics |= compute(selection or {}, pending, lead, together=True)
        return ForwardOutput(stream, statistics, tapped)


class SingleRun(ModelRunner):
    """Runs a model with its own parameters and buffers."""

    def __init__(self, model: GPT, *, compiled: bool, backend: Any = "inductor"):
        super().__init__(model, dict(model.named_parameters()), (), compiled=compiled, backend=backend)
        # Forward passes reassign buffers, so the owning module is stored and not the tensor.
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        for name, _ in model.named_buffers():
            path, _, attribute = name.rpartition(".")
            self._owners[name] = model.get_submodule(path), attribute

    @property
    def buffers(self) -> Tensors:
        return {name: getattr(module, attribute) for name, (module, attribute) in self._owners.items()}

    def set_buffers(self, values: Tensors) -> None:
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


class _StackedRunner(ModelRunner):
    """Calls the modules of one model with stacked tensors."""

    def __init__(self, model: GPT, params: Tensors, buffers: Tensors, runs: int, **options: Any):
        super().__init__(model, params, (runs,), **options)
        self._buffers = buffers
        # A tied matrix has one name in the state and another one in the second segment that uses it.
        state_names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._names: dict[str, dict[str, str]] = {}
        """For each segment, the name in the state by the name in the segment."""
        for prefix, segment in self.model.segments():
            names = {name: state_names[id(parameter)] for name, parameter in segment.named_parameters()}
            for name, _ in segment.named_buffers():
                names[name] = prefix + name
            self._names[prefix] = names

    @property
    def buffers(self) -> Tensors:
        return dict(self._buffers)

    def set_buffers(self, values: Tensors) -> None:
        self._buffers.update(values)

    def _tensors(self, prefix: str, segment: nn.Module) -> Tensors | None:
        tensors: Tensors = {}
        for name, state_name in self._names[prefix].items():
            tensors[name] = self.params[state_name] if state_name in self.params else self._buffers[state_name]
        return tensors


class StackedRuns(_StackedRunner):
    """Runs several models of one architecture: stacked tensors, the first model's modules.

    Args:
        order: The names of the parameters in the order of the stack's buffer, as `Stack` has it.
    """

    def __init__(
        self, models: Sequence[GPT], *, order: Iterable[str] | None = None, compiled: bool, backend: Any = "inductor"
    ):
        # The gradient of a linear layer's weight comes transposed, and so its memory has that order (`Stack`).
        of_linear = {id(module.weight) for module in models[0].modules() if type(module) is nn.Linear}
        transposed = [name for name, parameter in models[0].named_parameters() if id(parameter) in of_linear]
        params = Stack(_stacked([dict(model.named_parameters()) for model in models]), transposed, order)
        for tensor in params.values():
            tensor.requires_grad_()
        self._stack = params
        buffers = _stacked([dict(model.named_buffers()) for model in models])
        super().__init__(models[0], params, buffers, len(models), compiled=compiled, backend=backend)
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.kernel, module.linear = stacked_sdpa, stacked_linear
            elif type(module) is nn.Linear:  # a plugin's subclass has a forward pass of its own
                # Not a `forward` of the instance, which torch's compiler would take for other code in every block.
                module.__class__ = StackedLinear

    def name_gradients(self, gradients: list[Tensor]) -> Stack:
        """Return the gradients by name, in one buffer."""
        return self._stack.gather(gradients)


def _stacked(tensors_by_run: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Return the tensors of several runs by name, (R, *shape) each."""
    stacked: Tensors = {}
    for name in tensors_by_run[0]:
        stacked[name] = torch.stack([tensors[name].detach() for tensors in tensors_by_run])
    return stacked


class Replicas(_StackedRunner):
    """Runs each part of a batch with a copy of its run's parameters, which gets the gradient of that part alone.

    Parameters and buffers are (S, ...), S = R x C stacked copies: C adjacent ones of each run. A single run's copies
    share its memory. Buffers are copies too, so a forward pass leaves those of the runs unchanged.
    """

    def __init__(self, runner: ModelRunner, count: int):
        lead = len(runner.run_shape)

        def copies(x: Tensor) -> Tensor:
            x = x.detach().unsqueeze(lead)
            return x.expand(*x.shape[:lead], count, *x.shape[lead + 1 :]).flatten(0, lead)

        params = {name: copies(p).requires_grad_() for name, p in runner.params.items()}
        buffers = {name: copies(buffer) for name, buffer in runner.buffers.items()}
        super().__init__(runner.model, params, buffers, math.prod(runner.run_shape) * count, compiled=False)

    def gradients(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the gradient of each copy's loss, (S, *shape) for each parameter; tokens and targets are (S, B, T)."""
        with attention_by(self.model, stacked_sdpa):
            loss = self.loss(tokens, targets).loss.sum()
        return list(torch.autograd.grad(loss, list(self.params.values()), materialize_grads=True))


@contextlib.contextmanager
def attention_by(model: GPT, kernel: Kernel) -> Iterator[None]:
    """Let another function compute softmax(scale q k^T + causal mask) v."""
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    before = [module.kernel for module in modules]
    for module in modules:
        module.kernel = kernel
    try:
        yield
    finally:
        for module, kernel_before in zip(modules, before, strict=True):
            module.kernel = kernel_before


def _with_strides_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with the parameter's memory layout, which the fused kernels require.

    A transposed use of a parameter gives a transposed gradient: `backward` corrects it, `autograd.grad` does not.
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
