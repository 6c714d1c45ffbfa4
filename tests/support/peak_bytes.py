"""Counts the bytes of the tensors that are alive at once while operations run."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Notes the most bytes of live storages after any operation; what a kernel frees before it ends is not seen.

    Args:
        device: The type of the device whose tensors count.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.add(*tree_leaves((args, kwargs, result)))
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result

    def add(self, *values: Any) -> None:
        """Count tensors that no operation has used yet."""
        for value in values:
            if isinstance(value, torch.Tensor) and value.device.type == self._device:
                storage = value.untyped_storage()
                reference = StorageWeakRef(storage)
                self._live[reference.cdata] = (reference, storage.nbytes())
