"""The time of a plan on a GPU that is not at hand, estimated from steps that were measured on one.

A step of a pack takes what a measured step with as many FLOPs took: its logarithm is interpolated linearly in that of
the FLOPs. Above the largest measured step, FLOP/s are those of that step. A GPU waits for the launch of kernels, so
that a step takes at least some time for each block. This ignores kernels that one norm or placement has and another has
not, and evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from normlab.base.errors import ConfigError, unknown
from normlab.model.flops import flops_per_token
from normlab.sweeps.cost import Cost, PackCost
from normlab.tracking.console import format_duration


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """Steps that were measured on a GPU: compiled, captured in a CUDA graph, in bf16."""

    title: str
    source: str
    """The page with the measurements."""
    steps: Sequence[tuple[float, float]]
    """FLOPs of a step, of all runs of the pack, and its time in seconds, the smallest first."""
    seconds_per_block: float
    """The least time of a step for each block of the model, in seconds."""
    start_seconds: float
    """The time until the first step of a process, which compiles."""

    def seconds_of_step(self, flops: float, depth: int) -> float:
        """Return the estimated time of a step of a pack with these FLOPs."""
        flops_K, seconds_K = np.log(self.steps).T
        seconds = float(np.exp(np.interp(np.log(flops), flops_K, seconds_K)))
        largest, _ = self.steps[-1]
        return max(seconds * max(1.0, flops / largest), self.seconds_per_block * depth)


NAMED_DEVICES = {
    "h200": NamedDevice(
        "H200",
        "results/gpu_h200.md",
        # 4x128 alone and in packs of 8, 16 and 32 (batches of 8x128), 6x384 (64x256) and 124M (16x1024).
        (
            (5.85e9, 0.798e-3), (4.68e10, 1.5e-3), (9.35e10, 2.34e-3), (1.87e11, 4.11e-3), (1.17e12, 5.34e-3),
            (1.4e13, 37e-3),
        ),
        seconds_per_block=0.2e-3,
        start_seconds=60,
    ),
}  # fmt: skip
"""The GPUs of which steps were measured, by their name on the command line."""


def named_device(name: str) -> NamedDevice:
    """Return a GPU by its name.

    Raises:
        ConfigError: No steps of such a GPU were measured.
    """
    if name not in NAMED_DEVICES:
        raise ConfigError(f"--on {name}: " + unknown("measured GPU", name, NAMED_DEVICES))
    return NAMED_DEVICES[name]


def device_line(cost: Cost, name: str) -> str:
    """Return the line of a plan that estimates its time on a GPU: the packs one after the other."""
    device = named_device(name)
    seconds = sum(_seconds_of(pack, device) for pack in cost.packs)
    return (
        f"{name:<8}about {format_duration(seconds)} on one {device.title} ({seconds / 3600:.2g} GPU hours), a rough "
        f"estimate from steps that were measured there ({device.source}), one pack after the other"
    )


def _seconds_of(pack: PackCost, device: NamedDevice) -> float:
    flops = 0.0
    for run in pack.runs:
        config = run.config
        flops += flops_per_token(config, run.vocab_size) * config.train.batch_size * config.model.context
    return device.start_seconds + pack.steps * device.seconds_of_step(flops, pack.config.model.depth)
