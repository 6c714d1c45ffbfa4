"""Take the training steps of one rank of several on a pretended GPU, with a process group that only records.

    python pretended_ranks.py GUARD      # GUARD: guard.cpp, compiled

Each line of stdin is a case, and each line of stdout its result: {"error": ...}, or what each step does.

    {"overrides": ["norm=rmsnorm"], "devices": 2, "rank": 0, "steps": [0, 1], "small_vocab": 1024}
    {"step 1": {"waits": [], "copies": 1, "launches": 300, "collectives": [["c10d::allreduce_", 64]],
    "backward": [["aten::mm"]]}}

The guard must be loaded before torch, so this is a process of its own.
"""

import ctypes
import sys

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import contextlib
import gc
import json
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # the fake kernels of the collectives
from pretended_gpu import compose, loop_of, pretended_gpu
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normlab.data.corpus import open_corpus
from normlab.model import gpt


class Recorder(TorchDispatchMode):
    """Records the collectives of a step with their sizes, and the operations of its backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[str, int]] = []
        self.backward: list[list[str]] = []
        """One list for each backward pass."""
        self._in_backward = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if function.namespace == "c10d":
            tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            self.collectives.append((name, sum(tensor.numel() for tensor in tensors)))
            assert all(tensor.is_cuda for tensor in tensors), f"{name} of tensors on the host"
        if self._in_backward:
            self.backward[-1].append(name)
        return function(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations in this context."""
        real = torch.autograd.grad

        def grad(*args: Any, **options: Any) -> Any:
            self._in_backward = True
            self.backward.append([])
            try:
                return real(*args, **options)
            finally:
                self._in_backward = False

        with mock.patch.object(torch.autograd, "grad", grad), self:
            yield


def result_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return what each step of a case does, or its error."""
    steps: dict[str, Any] = {}
    try:
        config = compose(*case["overrides"], "device=cuda", "compile=off", f"devices={case['devices']}")
        corpus = open_corpus(config.data)
        dist.init_process_group("fake", rank=case["rank"], world_size=case["devices"], store=FakeStore())
        with pretended_gpu() as device, mock.patch.object(gpt, "SMALL_VOCAB", case["small_vocab"]):
            loop = loop_of([config], corpus)
            for step in case["steps"]:
                device.waits, device.copies, device.launches, recorder = [], [], 0, Recorder()
                with recorder.recording():
                    loop.take_step(step)
                steps[f"step {step}"] = {
                    "waits": device.waits, "copies": len(device.copies), "launches": device.launches,
                    "collectives": recorder.collectives, "backward": recorder.backward,
                }  # fmt: skip
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # a collection would visit all of torch, and fake tensors start many
    for line in sys.stdin:
        print(json.dumps(result_of(json.loads(line))), flush=True)
