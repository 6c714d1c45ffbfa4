"""Estimate the time of steps on an H100 from counts on a pretended one; nothing is measured.

    python scripts/bench/gpu_estimate.py                 # 4x128: single runs and packs
    python scripts/bench/gpu_estimate.py --nanogpt DIR         # also train.py's step of a clone of karpathy/nanoGPT

`tests/gpu/pretended_gpu.py` takes the steps with fake tensors; it needs g++. The table starts with its assumptions.
"""

from __future__ import annotations

import sys

from guard import TESTS, load_guard

if __name__ == "__main__":
    load_guard()

sys.path.insert(0, str(TESTS))

import argparse
import contextlib
import dataclasses
import importlib
import io
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import nanogpt
import torch
from pretended_gpu import NO_KERNEL, fused_attention, loop_of, pretended_gpu
from sides import MODELS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from turns import table

from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.data.corpus import open_corpus
from normlab.store.throughput import PEAK_TFLOPS

LAUNCH_US = 2.5
KERNEL_US = 1.5
BYTES_PER_S = 3.35e12
FLOPS_PER_S = dict(zip((torch.float32, torch.bfloat16), PEAK_TFLOPS["NVIDIA H100 80GB HBM3"], strict=True))
ASSUMPTIONS = f"""\
- Eager: the host needs {LAUNCH_US} us for each launch, Python and autograd included. That is the bare launch of a
  kernel by the CUDA runtime; frameworks need more, so the estimate favours whatever is eager, such as nanoGPT.
- Captured: the host launches one graph, and the device needs at least {KERNEL_US} us for each kernel: an assumption.
  For kernels of 2.9 us in a graph, https://developer.nvidia.com/blog/cuda-graphs/ reports 3.4 us per kernel.
- Each kernel takes the largest of that, its bytes at {BYTES_PER_S / 1e12} TB/s (H100 SXM), and its FLOPs at the peak:
  {FLOPS_PER_S[torch.float32]} TFLOP/s in float32, {FLOPS_PER_S[torch.bfloat16]} in bfloat16. Kernels of an
  eager step have no least time. A step takes the longer of host and device.
- A launch is an aten operation that is no view. Its bytes are those of its arguments and results, each read or written
  once in HBM, none in a cache. Its FLOPs are those of torch.utils.flop_counter.
- A step of normlab in a run is plain in 9 of 10 steps, and measured in one. Evaluations, checkpoints, records, starts
  and compilation are left out, on all sides."""
ATEN = torch.ops.aten
READ_ROWS = {ATEN.embedding.default, ATEN.index.Tensor, ATEN.index_select.default, ATEN.gather.default}
"""Operations that read as many values as they return, and their indices, instead of their whole first argument."""


@dataclass(slots=True)
class Counts:
    """The launches of a step, and what they take on the device."""

    launches: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    work_s: float = 0.0
    """Time of the kernels without a least time."""
    captured_s: float = 0.0
    """Time of the kernels, each with the least time."""

    def add(self, read_and_written: float, flops: float, flops_per_s: float) -> None:
        seconds = max(read_and_written / BYTES_PER_S, flops / flops_per_s)
        self.launches += 1
        self.bytes += read_and_written
        self.flops += flops
        self.work_s += seconds
        self.captured_s += max(seconds, KERNEL_US * 1e-6)

    def __add__(self, other: Counts) -> Counts:
        return self.map(lambda name: getattr(self, name) + getattr(other, name))

    def __mul__(self, factor: float) -> Counts:
        return self.map(lambda name: getattr(self, name) * factor)

    def map(self, value: Callable[[str], Any]) -> Counts:
        return Counts(**{field.name: value(field.name) for field in dataclasses.fields(self)})

    @property
    def eager_s(self) -> float:
        """Time of a step whose kernels the host launches."""
        return max(self.launches * LAUNCH_US * 1e-6, self.work_s)


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        read, written = tensors_of((args, kwargs)), tensors_of(result)
        if function.is_view or function in NO_KERNEL or not any(each.is_cuda for each in (*read, *written)):
            return result
        if function in READ_ROWS:
            read = [*written, *read[1:]]
        named = zip(function._schema.arguments, args, strict=False)
        changed = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
        if changed:
            written = tensors_of(changed)  # the results are the same tensors
        flops = 0.0
        if function.overloadpacket in flop_registry:
            flops = flop_registry[function.overloadpacket](*args, **kwargs, out_val=result)
        dtype = next((each.dtype for each in read if each.dtype in FLOPS_PER_S), torch.float32)
        self.counts.add(sum(each.nbytes for each in (*read, *written)), flops, 1e12 * FLOPS_PER_S[dtype])
        return result


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def count(call: Callable[[], object]) -> Counts:
    with Counter() as counter:
        call()
    return counter.counts


# normlab.


def compose(overrides: Sequence[str]) -> RunConfig:
    return compose_run([*overrides, "device=cuda", "compile=off", "train.graph=off"])


def steps_of(config: RunConfig, runs: int) -> tuple[Counts, Counts]:
    """Return the counts of a plain and of a measured step of a single run or a pack."""
    configs = [dataclasses.replace(config, seed=seed) for seed in range(runs)]
    corpus = open_corpus(config.data)
    with pretended_gpu():
        loop = loop_of(configs, corpus)
        loop.take_step(0)
        return count(lambda: loop.take_step(1)), count(lambda: loop.take_step(10))


# nanoGPT.


def model_of(clone: Path, config: RunConfig) -> Any:
    """Return nanoGPT's model with the shapes of a config."""
    sys.path.insert(0, str(clone))
    try:
        module = importlib.import_module("model")
    finally:
        sys.path.remove(str(clone))
    model = config.model
    with contextlib.redirect_stdout(io.StringIO()):
        return module.GPT(
            module.GPTConfig(
                block_size=model.context, vocab_size=open_corpus(config.data).tokenizer.vocab_size, dropout=0.0,
                n_layer=model.depth, n_head=model.heads, n_embd=model.width, bias=model.bias,
            )
        )  # fmt: skip


def attention(q: Any, k: Any, v: Any, attn_mask: None, dropout_p: float, is_causal: bool) -> Any:
    """Return what a GPU computes by one kernel, called as nanoGPT calls it."""
    return fused_attention(q, k, v, is_causal=is_causal, scale=1 / math.sqrt(q.shape[-1]))


def nanogpt_step(clone: Path, config: RunConfig) -> Counts:
    """Return the counts of train.py's step, eager."""
    with pretended_gpu(), mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", attention):
        model = model_of(clone, config).to("cuda")
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cuda")
        shape = (config.train.batch_size, config.model.context)

        def step() -> None:
            inputs = [torch.zeros(shape, dtype=torch.int64).to("cuda", non_blocking=True) for _ in range(2)]
            with torch.autocast("cuda", dtype=torch.bfloat16):
                _, loss = model(*inputs)
            (loss / 1).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        step()
        return count(step)


# The table.


def row(name: str, counts: Counts, seconds: float, runs: int, steps: int) -> dict[str, str]:
    return {
        "side": name,
        "launches": f"{counts.launches:.0f}",
        "GB": f"{counts.bytes / 1e9:.3f}",
        "GFLOP": f"{counts.flops / 1e9:.1f}",
        "estimated ms/step": f"{1e3 * seconds:.3f}",
        "estimated ms/step per run": f"{1e3 * seconds / runs:.3f}",
        f"estimated s per run of {steps} steps": f"{seconds / runs * steps:.3f}",
    }


def estimate(model: str, clone: Path | None, sizes: Sequence[int], steps: int) -> Iterator[str]:
    """Yield the lines of the page of a model."""
    config = compose(MODELS[model])
    rows: list[dict[str, str]] = []
    per_run: dict[str, float] = {}
    for runs in (1, *sizes):
        plain, measured = steps_of(config, runs)
        name = "normlab" if runs == 1 else f"normlab, pack of {runs}"
        if runs == 1:
            rows += [
                row(f"{name}, plain step, eager", plain, plain.eager_s, 1, steps),
                row(f"{name}, measured step, eager", measured, measured.eager_s, 1, steps),
                row(f"{name}, plain step, captured", plain, plain.captured_s, 1, steps),
                row(f"{name}, measured step, captured", measured, measured.captured_s, 1, steps),
            ]
        mean = plain * 0.9 + measured * 0.1
        rows.append(row(f"{name}, mean step, captured", mean, mean.captured_s, runs, steps))
        per_run[name] = mean.captured_s / runs
    batch = f"{config.train.batch_size}x{config.model.context}"
    if clone is not None:
        theirs = nanogpt_step(clone, config)
        rows.append(row("nanoGPT, eager", theirs, theirs.eager_s, 1, steps))
    yield f"## Estimate for {model}, batch {batch}, bfloat16 on an H100 (not measured)\n"
    yield table(rows)
    if clone is not None:
        for name, seconds in per_run.items():
            yield f"\nEstimated ratio of the time per run, nanoGPT, eager / {name}: {theirs.eager_s / seconds:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=["4x128"], help="models (default: 4x128)")
    parser.add_argument("--packs", nargs="*", type=int, default=[8, 16, 32], help="sizes of packs (default: 8 16 32)")
    parser.add_argument("--steps", type=int, default=500, help="steps of a run (default: 500)")
    nanogpt.add_option(parser, "")
    options = parser.parse_args()
    clone = options.nanogpt
    print(f"# Estimate for an H100 from counted operations (not measured)\n\nAssumptions:\n{ASSUMPTIONS}\n")
    if clone is not None:
        print(f"nanoGPT at commit {nanogpt.commit_of(clone)}; torch {torch.__version__}\n")
    if min(options.packs, default=1) < 1 or options.steps < 1:
        parser.error("--packs, --steps: must be at least 1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for model in options.models:
        for line in estimate(model, clone, options.packs, options.steps):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
