"""CUDA graphs of training steps: a step's hundreds of kernels are started by one call.

A graph repeats the operations that it captured, on the same memory and with the same numbers as arguments. So a step
can be replayed if it reads everything that changes from tensors that stay in place, and changes its state in place.
`tests/gpu/` holds each step to this.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from normlab.base.errors import one_line
from normlab.training.step import StepOutput

WARM_UP = 2
"""Steps of each kind that run before one is captured. They load kernels and compile, which a capture does not allow."""

ComputeStep = Callable[[bool], StepOutput]
"""Computes a step, measured or not, whose inputs are in place."""
Replay = Callable[[], None]


def capture(compute: Callable[[], StepOutput], pool: Any) -> tuple[Replay, StepOutput]:
    """Return a function that replays a step, and the tensors into which each replay writes its output.

    The capture itself computes nothing.
    """
    graph = torch.cuda.CUDAGraph()
    # A failed capture leaves its own stream current. Another thread of this process may use the GPU meanwhile.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        output = compute()
    return graph.replay, output


@dataclass(slots=True)
class ReplayedSteps:
    """Computes steps by replaying them: the plain and the measured ones are a CUDA graph each."""

    compute: ComputeStep
    """Computes a step without a graph."""
    on_failure: Callable[[str], None]
    """Called once with the reason if a step cannot be captured; all later steps are computed without a graph."""
    _warm_ups: Counter[bool] = field(default_factory=Counter, init=False)
    """The plain and the measured steps computed without a graph."""
    _graphs: dict[bool, tuple[Replay, StepOutput]] = field(default_factory=dict, init=False)
    _pool: Any = field(default=None, init=False)
    """The memory that the graphs share, since they are never replayed at once."""
    _failed: bool = field(default=False, init=False)

    def __call__(self, measured: bool) -> StepOutput:
        """Compute a step; the output is a copy that later steps do not overwrite."""
        if self._failed or self._warm_ups[measured] < WARM_UP:
            self._warm_ups[measured] += 1
            return self.compute(measured)
        if measured not in self._graphs:
            problem = self._capture(measured)
            if problem:
                # A failed capture changes no state, and its memory is free.
                self.on_failure(problem[:200])
                return self.compute(measured)
        replay, output = self._graphs[measured]
        replay()
        measurement = output.measured
        if measurement is not None:
            measurement = measurement._replace(values=measurement.values.clone())
        return StepOutput(output.scalars.clone(), measurement)

    def _capture(self, measured: bool) -> str:
        """Capture a step; return the problem if that fails."""
        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
        try:
            self._graphs[measured] = capture(lambda: self.compute(measured), self._pool)
            return ""
        except RuntimeError as error:
            problem = one_line(error.__context__ or error)  # `error` may be that of the end of a failed capture
        self._failed, self._pool = True, None
        self._graphs.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return problem
