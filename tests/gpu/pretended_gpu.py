"""Take training steps on a pretended GPU: fake tensors, whose devices and waits of the host are checked.

    python pretended_gpu.py GUARD      # GUARD: guard.cpp, compiled

Each line of stdin is a case, and each line of stdout its result: {"error": ...}, or what each part does.

    {"overrides": ["norm=rmsnorm"], "runs": 1, "steps": [0], "plant": null, "between": true}     # steps and others
    {"overrides": ["norm=rmsnorm"], "runs": 1, "steps": [0], "restored": true}     # from a checkpoint
    {"overrides": ["norm=rmsnorm"], "runs": 1, "steps": [0], "peak": true}    # bytes of live tensors: {"peak": 1000}
    {"step 0": {"waits": [], "launches": 500, "copies": [40], "differ": []}, "evaluation": {"waits":
    ["aten::_local_scalar_dense at training/evaluate.py:57"], "launches": 120, "copies": [], "differ": []}}

    {"folder": "results/runs/..."}    # a run that is loaded: {"devices": ["cuda"], "launches": {"evaluate": 100, ...}}

With train.graph=on, `differ` has the operations in which a replayed step differs from the captured one.

The guard must be loaded before torch, so this is a process of its own.
"""

import ctypes
import sys
from pathlib import Path

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
if (tests := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(tests)

import contextlib
import dataclasses
import functools
import gc
import json
import traceback
from collections.abc import Callable, Iterator
from itertools import count, zip_longest
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import normlab
from normlab.catalogue.statistics.statistic import EXTENDED, PROBE
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.data.corpus import Corpus, open_corpus
from normlab.store.runs import RunFolder
from normlab.training import checkpoint, graph
from normlab.training.build import build_parts
from normlab.training.checkpoint import Checkpoint
from normlab.training.graph import Replay
from normlab.training.loop import Loop
from normlab.training.machine import apply, resolve
from normlab.training.measure.extended import ExtendedPass
from normlab.training.measure.probe import Probe, adam_preconditioner
from normlab.training.step import Step, StepOutput
from normlab.training.training_run import TrainingRun
from support.peak_bytes import PeakBytes

GIB = 2**30
NO_KERNEL = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.detach.default,
    torch.ops.prim.device.default,
}
"""Operations that start no kernel, besides views."""
PACKAGE = Path(normlab.__file__).parent


class Device(FakeTensorMode):
    """Fake tensors, which raise on a mix of devices, and where the host waits for the device.

    The host waits for numbers and shapes that depend on data, and for blocking copies. A number that it reads is 1.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.waits: list[str] = []
        self.launches = 0
        """Operations with a tensor on the device that would start a kernel."""
        self.copies: list[int] = []
        """The bytes of each copy from the host to the device."""
        self._depth = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._depth += 1
        try:
            result: Any = super().__torch_dispatch__(function, types, args, kwargs)
        except DataDependentOutputException:
            self._add_wait(function)
            if function is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1
        finally:
            self._depth -= 1
        # An operation without a fake kernel is taken apart; its parts are not counted again.
        if not self._depth and not function.is_view and function not in NO_KERNEL:
            tensors = [each for each in tree_leaves((result, args, kwargs)) if isinstance(each, torch.Tensor)]
            self.launches += any(each.is_cuda for each in tensors)
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[function is torch.ops.aten.copy_.default]
            asynchronous = kwargs.get("non_blocking", len(args) > 2 and args[2]) and result.device.type == "cuda"
            # vmap copies numbers too.
            if isinstance(source, torch.Tensor) and source.device.type != result.device.type:
                if result.device.type == "cuda":
                    self.copies.append(source.nbytes)
                if not asynchronous:
                    self._add_wait(function)
        return result

    def _add_wait(self, function: Any) -> None:
        frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)]
        where = f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "the test"
        self.waits.append(f"{function.name()} at {where}")


def move(model: torch.nn.Module, device: torch.device | str) -> torch.nn.Module:
    """Do what `Module.to` does, which cannot move fake tensors; tied parameters stay tied."""
    moved: dict[torch.Tensor, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if parameter not in moved:
                moved[parameter] = torch.nn.Parameter(parameter.detach().to(device))
            setattr(module, name, moved[parameter])
        for name, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, name, buffer.to(device))
    return model


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float
) -> torch.Tensor:
    """Return what a GPU computes by one kernel; a CPU build of torch would take it apart."""
    if q.dtype in (torch.bfloat16, torch.float16):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)[0]


@torch.library.custom_op("pretended::rms_norm", mutates_args=())
def fused_rms_norm(x: torch.Tensor, gain: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a GPU computes by one kernel, and the numbers that its backward pass needs."""
    raise NotImplementedError("only its shapes are needed")


@torch.library.custom_op("pretended::rms_norm_backward", mutates_args=())
def fused_rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, gain: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the input and the gain, which a GPU computes by one operation."""
    raise NotImplementedError("only its shapes are needed")


fused_rms_norm.register_fake(lambda x, gain, eps: (torch.empty_like(x), x.new_empty((*x.shape[:-1], 1))))
fused_rms_norm_backward.register_fake(lambda grad, x, scale, gain: (torch.empty_like(x), x.new_empty(x.shape[-1])))


def keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, gain, _ = inputs
    ctx.save_for_backward(x, gain, output[1])


def fused_rms_norm_gradients(ctx: Any, grad: torch.Tensor, grad_scale: Any) -> tuple[Any, ...]:
    x, gain, scale = ctx.saved_tensors
    of_x, of_gain = fused_rms_norm_backward(grad, x, scale, gain)
    return of_x, None if gain is None else of_gain, None


def keep_backward_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad, x, _, gain = inputs
    ctx.save_for_backward(grad, x, gain)


def fused_rms_norm_second_gradients(ctx: Any, of_x: torch.Tensor, of_gain: torch.Tensor) -> tuple[Any, ...]:
    """Differentiate the formula twice, as torch does."""
    saved: list[Any] = [None if tensor is None else tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
    grad, x, gain = saved
    seeds = [of_x] if gain is None else [of_x, of_gain]
    with torch.enable_grad():
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
        inputs = [each for each in (x, gain) if each is not None]
        first = torch.autograd.grad(y if gain is None else y * gain, inputs, grad, create_graph=True)
        of_grad, *others = torch.autograd.grad(first, [grad, *inputs], seeds)
    return of_grad, others[0], None, None if gain is None else others[1]


fused_rms_norm.register_autograd(fused_rms_norm_gradients, setup_context=keep_inputs)
fused_rms_norm_backward.register_autograd(fused_rms_norm_second_gradients, setup_context=keep_backward_inputs)


def rms_norm(x: torch.Tensor, shape: tuple[int], weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return what `torch.nn.functional.rms_norm` returns, by one operation, as on a GPU."""
    return fused_rms_norm(x, weight, eps)[0]


KERNELS = torch.library.Library("aten", "IMPL", "Meta")
"""The fake kernels that torch lacks; these operations return nothing."""
for missing in ("_fused_adamw_.tensor_lr", "_fused_sgd_", "_fused_sgd_.tensor_lr"):
    KERNELS.impl(missing, lambda *args, **options: None)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[Device]:
    """Make torch see an H100 whose tensors are fake."""
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid="0", total_memory=80 * GIB, major=9, minor=0)
    queries: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda index=None: properties,
        "reset_peak_memory_stats": lambda: None,
        "mem_get_info": lambda device=None: (80 * GIB, 80 * GIB),
        "is_bf16_supported": lambda: True,
        "graph_pool_handle": lambda: None,
    }
    real_tensor = torch.tensor

    def tensor(data: Any, *, device: Any = "cpu", **options: Any) -> torch.Tensor:
        made: Any = real_tensor(data, **options)
        made.constant = None  # a fake tensor would compute with the values of a small one
        return made.to(device)

    with contextlib.ExitStack() as stack:
        for name, answer in queries.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", move))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor))
        stack.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", fused_attention))
        stack.enter_context(mock.patch.object(torch.nn.functional, "rms_norm", rms_norm))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # the modes hold for this thread
        yield stack.enter_context(Device())


COUNTER = count()
Plant = contextlib.AbstractContextManager[object]


def in_step(fault: Callable[[Step, torch.Tensor], object]) -> Plant:
    """Return a patch that calls a function with each step and its loss."""
    real = Step.__call__

    def planted(self: Step, *args: Any, **options: Any) -> StepOutput:
        output = real(self, *args, **options)
        fault(self, output.scalars[0])
        return output

    return mock.patch.object(Step, "__call__", planted)


PLANTS: dict[str | None, Callable[[], Plant]] = {
    None: contextlib.nullcontext,
    "number": lambda: in_step(lambda step, loss: loss.sum().item()),
    "copy to the device": lambda: in_step(lambda step, loss: torch.ones(3).to(loss.device)),
    "mix of devices": lambda: in_step(lambda step, loss: torch.ones(3) * torch.ones(3, device=loss.device)),
    "number of the host": lambda: in_step(lambda step, loss: loss * next(COUNTER)),
    "new state": lambda: in_step(lambda step, loss: setattr(step, "alive", step.alive.clone())),
}
"""Faults that a step may get, to test that they are found."""


@functools.cache
def compose(*overrides: str) -> RunConfig:
    """Compose a run once for all cases that have its overrides."""
    return compose_run(overrides)


class Operations(TorchDispatchMode):
    """Notes the operations of a step with their arguments; a tensor is noted by the memory that it is in.

    Args:
        memories: The names of the memories that outlive a step, by key. An argument that no operation of this step
            returned is added.
    """

    def __init__(self, memories: dict[int, str]) -> None:
        super().__init__()
        self._memories, self._results = memories, dict[int, str]()
        self._alive: list[Any] = []
        """Every tensor of the step, so that no other one gets its memory."""
        self.noted: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = tree_map(self._name, (args, kwargs))
        result = function(*args, **(kwargs or {}))
        self._alive.append(result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and memory_of(tensor) not in self._memories:
                self._results.setdefault(memory_of(tensor), f"result {len(self._results)}")
        if function is not torch.ops.prim.device.default:
            self.noted.append(f"{function} {arguments} {tree_map(self._name, result)}")
        return result

    def _name(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = memory_of(value)
        self._alive.append(value)
        name = self._results.get(key) or self._memories.setdefault(key, f"constant {len(self._memories)}")
        return name, (*value.shape,), value.stride(), value.storage_offset()


def memory_of(tensor: torch.Tensor) -> int:
    """Return a key of the memory that a tensor is in."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


class Graphs:
    """Stands in for CUDA graphs: notes the operations of each capture, and how those of a replay would differ.

    A replay on a GPU is one launch of the host, so its operations are not counted.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.differ: list[str] = []
        self.captured = list[int]()
        """The launches of each captured step."""

    def capture(self, take: Callable[[], StepOutput], pool: object) -> tuple[Replay, StepOutput]:
        memories, noted = dict[int, str](), list[Operations]()

        def repeat() -> StepOutput:
            launches, self._device.launches = self._device.launches, 0
            noted.append(Operations(memories))  # keeps its tensors, so that no later one gets their memory
            with noted[-1]:
                output = take()
            self.captured.append(self._device.launches)
            self._device.launches = launches
            return output

        def replay() -> None:
            repeat()
            self._device.launches += 1
            pairs = zip_longest(noted[0].noted, noted[-1].noted, fillvalue="")
            self.differ += [f"{first:.300} | {second:.300}" for first, second in pairs if first != second]

        return replay, repeat()


def result_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return what each part of a case does, or its error."""
    parts: dict[str, Any] = {}
    try:
        if "folder" in case:
            return use_loaded_run(case["folder"])
        config = compose(*case["overrides"], "device=cuda", "compile=off")
        configs = [
            dataclasses.replace(config, seed=seed, data=dataclasses.replace(config.data, seed=seed))
            for seed in range(case["runs"])
        ]
        corpus = open_corpus(configs[0].data)
        with pretended_gpu() as device, PLANTS[case["plant"]]():
            if case["peak"]:
                with PeakBytes("cuda") as peak:
                    for _, call in parts_of(configs, corpus, case["steps"], between=False):
                        call()
                return {"peak": peak.peak}
            graphs = Graphs(device)
            with mock.patch.object(graph, "capture", graphs.capture):
                for part, call in parts_of(
                    configs, corpus, case["steps"], between=case["between"], restored=case["restored"]
                ):
                    device.waits, device.launches, device.copies, graphs.differ = [], 0, [], []
                    call()
                    parts[part] = {
                        "waits": device.waits, "launches": device.launches, "copies": device.copies,
                        "differ": graphs.differ,
                    }  # fmt: skip
    except Exception:
        return {"error": traceback.format_exc()}
    return parts


def use_loaded_run(folder: str) -> dict[str, Any]:
    """Return where the model of a run is, and how often operations of an evaluation and of a sample use the device."""
    saved = checkpoint.read_newest(Path(folder) / checkpoint.FOLDER)  # fake tensors cannot be read from a file
    launches = {}
    with pretended_gpu() as device, mock.patch.object(checkpoint, "read_newest", return_value=saved):
        run = normlab.load(folder)
        devices = {values.device.type for values in run.model.state_dict().values()}
        for name, call in (("evaluate", lambda: run.evaluate("text")), ("sample", lambda: run.sample("t", tokens=2))):
            device.launches = 0
            call()
            launches[name] = device.launches
    return {"devices": sorted(devices), "launches": launches}


def loop_of(configs: list[RunConfig], corpus: Corpus) -> Loop:
    """Return the loop of some runs, as training starts."""
    settings = resolve(configs[0])
    apply(settings)
    runs = [TrainingRun(config, RunFolder("nowhere")) for config in configs]
    return Loop(runs, settings, build_parts(runs, settings, corpus))


def restore(loop: Loop) -> None:
    """Restore each run from a checkpoint, whose tensors are on the host."""
    checkpoints: list[Checkpoint] = []
    for index, run in enumerate(loop.runs):
        on_host = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in loop.state.of_run(index).items()}
        checkpoints.append(Checkpoint(0, on_host, run.meta()))
    loop.state.restore(checkpoints)


def parts_of(
    configs: list[RunConfig], corpus: Corpus, steps: list[int], *, between: bool, restored: bool = False
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the parts of a training run with their names: steps, and what happens between steps."""
    loops: list[Loop] = []
    yield "start", lambda: loops.append(loop_of(configs, corpus))
    (loop,) = loops
    if restored:
        yield "restore", lambda: restore(loop)
    for step in steps:
        yield f"step {step}", lambda step=step: loop.take_step(step)
    if not between:
        return
    schedule, config = loop.parts.schedule, loop.config
    runner, optimizer, validation = schedule.runner, schedule.optimizer, schedule.validation
    yield "evaluation", lambda: validation(runner)
    tokens, targets = validation.tokens_NT[:2], validation.targets_NT[:2]
    independent = not config.norm.batch_statistics
    extended = ExtendedPass(
        runner, config.stats.names(EXTENDED), tokens, targets, optimizer, schedule.options, independent,
        validation.autocast,
    )  # fmt: skip
    yield "extended statistics", lambda: extended(loop.state.step_count + 1)
    if len(configs) > 1:
        return  # packs are not probed

    def probe() -> None:
        squares = adam_preconditioner(config.optim, optimizer.moments.get("square", {}), optimizer.count)
        Probe(runner.model, config.stats.names(PROBE), tokens, targets, squares)()

    yield "probe", probe


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # a collection would visit all of torch, and fake tensors start many
    for line in sys.stdin:
        print(json.dumps(result_of(json.loads(line))), flush=True)
