"""Compare what a step costs with several residual streams and with pre-norm.

    python scripts/bench/bench_streams.py                  # some minutes on two CPU cores
    python scripts/bench/bench_streams.py --models 4x128 --rounds 5 --placements mhc

- time: all placements train the same shapes on the same text, in turn, 10 steps at a time. The ratio is the median over
  the rounds of the step time of a placement over that of pre-norm: 1 is equal, more is slower.
- kernels, MB: of one compiled block, forward and backward, on one sequence: inductor's count of the kernels that it
  generates or calls, and of the bytes that they read and write.

Launches of eager steps: `LAUNCHES` in tests/gpu/test_pretended_gpu.py.
"""

import argparse
import logging
import os
import statistics
import sys
from typing import Any
from unittest import mock

import torch
from sides import AS_NORMLAB, MODELS, MODELS_ON_GPU, Normlab
from torch._functorch import config as functorch_config
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from turns import Side, table, take_turns

from normlab.catalogue.placements.base import load_all
from normlab.config.compose import compose_run
from normlab.model.init import build_model
from normlab.model.runner import SingleRun
from normlab.training.machine import resolve

STREAMS = ("hyper_connections", "identity_hc", "mhc", "gated_residual", "attn_res")
SHAPES = {
    "4x128": MODELS["4x128"],
    "24x32": [*MODELS["2x32"], "model.depth=24"],
    "gpt2_124m": MODELS_ON_GPU["gpt2_124m"],
}
NOT_TRAINED = ("gpt2_124m",)
"""Models that are too large to be trained on a CPU here."""
COLUMNS = {
    "placement": "placement", "ms": "ms/step", "time": "/ pre", "kernels": "kernels", "kernel_ratio": "/ pre",
    "megabytes": "MB", "byte_ratio": "/ pre",
}  # fmt: skip
DEPTH = 3
"""Blocks of the model whose second block is counted: the first may make room for states, as no other does."""


def step_seconds(model: str, placements: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step in each round, by placement."""
    works = {name: Normlab((*SHAPES[model], "device=cpu", f"placement={name}", "init=gpt2")) for name in placements}
    sides = [Side(name, work, AS_NORMLAB) for name, work in works.items()]
    try:
        for side in sides:
            side.set_up()
        take_turns(sides, rounds)
    finally:
        for side in sides:
            side.stop()
    return {side.name: [turn.seconds / 10 for turn in side.turns] for side in sides}


def compiled_block(model: str, placement: str) -> tuple[int, float]:
    """Return the kernels and the megabytes of the second block of a compiled model, forward and backward."""
    torch.compiler.reset()
    counts: list[tuple[int, int]] = []
    count_bytes = GraphLowering.count_bytes

    def counted(graph: GraphLowering) -> Any:
        result = count_bytes(graph)
        counts.append((len(graph.scheduler.nodes), result[0]))
        return result

    config = compose_run([*SHAPES[model], "device=cpu", f"placement={placement}", "init=gpt2", f"model.depth={DEPTH}"])
    net = build_model(config, vocab_size=256).train()
    tokens_BT = torch.randint(256, (1, config.model.context))
    log = compile_fx.inductor_metrics_log  # inductor counts bytes if it logs them
    with (
        mock.patch.object(GraphLowering, "count_bytes", counted),
        mock.patch.object(log, "isEnabledFor", return_value=True),
        mock.patch.object(log, "info"),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        runner = SingleRun(net, compiled=True)
        runner.loss(tokens_BT, tokens_BT).loss.backward()
    # The graphs of the forward pass, of which the last two are the block and the head; then those of the backward pass,
    # of which the first two are the head and the block.
    half = len(counts) // 2
    forward, backward = counts[half - 2], counts[half + 1]
    return forward[0] + backward[0], (forward[1] + backward[1]) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10, help="turns of each placement (default: 10)")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=[*SHAPES], help="models (default: all)")
    parser.add_argument(
        "--placements", nargs="+", choices=load_all(), default=[*STREAMS], help="placements (default: those of streams)"
    )
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    here = resolve(compose_run(["device=cpu"]))
    print(f"torch {torch.__version__}, {here.threads} threads; load before: {os.getloadavg()[0]:.1f}", flush=True)
    placements = ["pre", *options.placements]
    for model in options.models:
        seconds = step_seconds(model, placements, options.rounds) if model not in NOT_TRAINED else {}
        blocks = {name: compiled_block(model, name) for name in placements}
        rows = []
        for name, (kernels, megabytes) in blocks.items():
            row: dict[str, Any] = {
                "placement": name, "kernels": kernels, "kernel_ratio": kernels / blocks["pre"][0],
                "megabytes": megabytes, "byte_ratio": megabytes / blocks["pre"][1],
            }  # fmt: skip
            if seconds:
                row["ms"] = 1e3 * statistics.median(seconds[name])
                row["time"] = statistics.median(a / b for a, b in zip(seconds[name], seconds["pre"], strict=True))
            rows.append(row)
        columns = {key: title for key, title in COLUMNS.items() if key in rows[0]}
        print(f"\n{model}\n\n{table(rows, columns)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
