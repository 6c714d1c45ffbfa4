"""A CUDA graph for tests on a CPU: it notes the operations of a step, and repeats them on the same memory.

Like a CUDA graph, a replay runs no Python of the step, and uses the numbers that the capture saw. Unlike one, a capture
computes; the tape then puts back what the capture has changed in the memory that it found.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from normlab.training.graph import Replay
from normlab.training.step import StepOutput


class Tape(TorchDispatchMode):
    """Notes operations with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The memory that was there before, by address, with a copy of it."""
        self._made: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and (address := _address(tensor)) not in self._made | {*self._found}:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._found[address] = whole, whole.clone()
        result = function(*args, **kwargs)
        results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self._made |= {_address(each) for each in results} - {*self._found}
        if not function.is_view:
            # An operation in place is repeated in place; the result of another one is copied to where the first was.
            writes = function._schema.is_mutable
            self._operations.append((function, args, kwargs, [] if writes else [each.detach() for each in results]))
        return result

    def undo(self) -> None:
        """Put back what the operations have changed in memory that was there before."""
        for whole, copy in self._found.values():
            whole.copy_(copy)
        self._found.clear()

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat the operations."""
        for function, args, kwargs, targets in self._operations:
            result = function(*args, **kwargs)
            sources = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)] if targets else []
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def capture(compute: Callable[[], StepOutput], pool: Any) -> tuple[Replay, StepOutput]:
    """Do what `normlab.training.graph.capture` does, on a CPU."""
    tape = Tape()
    with tape:
        output = compute()
    tape.undo()
    return tape.replay, output
