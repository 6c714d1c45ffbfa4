"""The rules of `auto`: compile, train.graph, sweep.pack and sweep.jobs, as one table whose first matching row decides.

A rule depends on the config, the device and the precision, never on timing or on the card; the memory and the cores of
the machine may then make packs smaller and fewer. A row that was measured names its page of `results/`. The other rows
for a GPU are estimates, from the counted launches and bytes of a step and the data sheet of an H100.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import starmap
from typing import NamedTuple

from normlab.config import memory
from normlab.config.devices import micro_batches
from normlab.config.schema import RunConfig

PROCESS_BYTES = 2**30
"""Assumed memory of a process beside its runs: torch, the compiler and the corpus."""
LARGEST_PACK = 64
"""Most runs in a pack of auto."""
COMPILE_S = 60
"""Seconds of a cold compilation: 34 to 43 on a CPU (results/bench_sweep.md), 25 to 58 with an H200
(results/gpu_h200.md)."""
LAUNCH_S = 2.5e-6
"""Assumed least seconds of an operation on a GPU, for its start by the host or the shortest kernel."""
BYTES_PER_S = 3.35e12
"""Memory bandwidth of an H100 SXM (data sheet)."""
FLOPS_PER_S = {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12}
"""FLOPs per second of an H100 SXM (data sheet, dense)."""
SHARE = 0.5
"""Assumed share of the peak bandwidth and of the peak FLOPs that kernels reach."""
WEIGHT_PASSES, VALUE_PASSES = 45, 17
"""Reads and writes of each weight and of each saved value in a step of a pack, from the bytes that
`scripts/bench/gpu_estimate.py` counts for 2x32, 4x128 and 6x384."""
LAUNCH_SHARE = 0.2
"""Packs grow until their launches take this share of the time of their computation."""


def launches(depth: int, runs: int = 1) -> int:
    """Return the operations of a plain step on a GPU, as counted on the pretended GPU of the tests."""
    return 80 + 89 * depth if runs == 1 else 92 + 96 * depth


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What the rules know of a run."""

    device: str
    precision: str
    width: int
    devices: int
    plugins: int
    """Files with code of the user."""
    tokens: int
    """Tokens of a micro-batch on each device."""
    steps: int
    launch_s: float
    """Estimated seconds of the launches of a plain step on a GPU, of a pack of any size."""
    work_s: float
    """Estimated seconds that an H100 computes for one run in a plain step."""

    @property
    def estimated_seconds(self) -> float:
        """Seconds of the run on an H100 without compilation and graphs."""
        return self.steps * max(self.launch_s, self.work_s)


def workload(config: RunConfig, device: str, precision: str, vocab_size: int = memory.VOCAB_SIZE) -> Workload:
    """Return what the rules know of a run that trains on a device in a precision."""
    model, parts = config.model, micro_batches(config)
    tokens = config.train.batch_size // config.devices // parts * model.context
    weights = memory.num_weights(config, vocab_size)
    estimated = memory.estimate(config, device="cuda", precision=precision, vocab_size=vocab_size)
    num_bytes = WEIGHT_PASSES * 4 * weights + VALUE_PASSES * parts * estimated.batch
    flops = 6 * parts * tokens * (weights + 2 * model.depth * model.context * model.width)
    return Workload(
        device=device, precision=precision, width=model.width, devices=config.devices, plugins=len(config.plugins),
        tokens=tokens, steps=config.train.steps, launch_s=parts * launches(model.depth, 2) * LAUNCH_S,
        work_s=(num_bytes / BYTES_PER_S + flops / FLOPS_PER_S.get(precision, FLOPS_PER_S["bf16"])) / SHARE,
    )  # fmt: skip


class Rule(NamedTuple):
    """A row of the table: the value of an option, and for which runs."""

    option: str
    device: str
    condition: str
    """Comparisons of fields of `Workload`, and precisions, with commas between them; all must hold."""
    value: str
    why: str
    """The measurement, or that the row is estimated."""
    number: Callable[[Workload], int] | None = None
    """Computes a value that `value` only describes."""

    def matches(self, work: Workload) -> bool:
        """Return whether the row is for a run."""
        names = asdict(work) | {"estimated_seconds": work.estimated_seconds}
        names |= {precision: precision == work.precision for precision in FLOPS_PER_S}
        return self.device == work.device and bool(eval(f"all([{self.condition}])", names))  # noqa: S307


def _launch_bound(work: Workload) -> int:
    """Return the largest pack whose launches take at least `LAUNCH_SHARE` of the time of its computation."""
    return max(1, min(LARGEST_PACK, int(work.launch_s / (LAUNCH_SHARE * work.work_s))))


BENCH, GPU = "results/bench_sweep.md", "results/gpu_h200.md"
RULES: tuple[Rule, ...] = tuple(starmap(Rule, (
    ("compile", "cpu", "", "off", f"{BENCH}: one run compiled is as fast as eager, 4x128"),
    ("compile", "cuda", f"estimated_seconds >= {2 * COMPILE_S}", "on",
     f"{GPU}: compilation takes up to {COMPILE_S} s and halves the time of a step"),
    ("compile", "cuda", "", "off", "estimated: compilation would take longer than it saves"),
    ("train.graph", "cpu", "", "off", "a CPU has no CUDA graphs"),
    ("train.graph", "cuda", "devices <= 1, plugins <= 0, steps >= 100", "on",
     f"{GPU}: a step takes 0.11 of its eager time at 4x128; a capture takes as long as a few steps"),
    ("train.graph", "cuda", "", "off",
     "several devices, too few steps to repay a capture, or a plugin, whose Python code no replay runs"),
    ("sweep.pack", "cpu", "fp32, width <= 32, tokens <= 256", "16",
     f"{BENCH}: 0.64 of the processor time of a single run, 2x32"),
    ("sweep.pack", "cpu", "bf16, width <= 128, tokens <= 1024", "16",
     f"{BENCH}: 1.26 times the speed of a single run, 4x128"),
    ("sweep.pack", "cpu", "", "1", f"{BENCH}: no faster in fp32 at 4x64 and 4x128"),
    ("sweep.pack", "cuda", "fp16", "1", "each run has a loss scale of its own"),
    ("sweep.pack", "cuda", "devices <= 1", f"2 to {LARGEST_PACK}; more for a smaller model",
     f"estimated: launches take {LAUNCH_SHARE:.0%} of the computation, and a larger pack would gain little",
     _launch_bound),
    ("sweep.pack", "cuda", "", "1", "several devices share the batch of one run"),
    ("sweep.jobs", "cpu", "width <= 128, tokens <= 1024", "one for each core",
     f"{BENCH}: 1.4 (4x128) to 2.1 times (2x32) the speed of one process with two threads", lambda work: 0),
    ("sweep.jobs", "cpu", "", "1", "not measured for larger models"),
    ("sweep.jobs", "cuda", "fp16", "1", "estimated: not packed, but several processes at once are not measured"),
    ("sweep.jobs", "cuda", "", "1", "estimated: packs fill the GPU"),
)))  # fmt: skip
"""The rows, in the order in which they are tried."""
LEGEND = (
    "tokens: of a micro-batch on each device; estimated_seconds: of the run on an H100, without compilation and graphs"
)
"""The meaning of the fields of `Workload` that are no options."""


def value_of(option: str, work: Workload) -> str:
    """Return the value that the table gives an option of a run."""
    rule = next(rule for rule in RULES if rule.option == option and rule.matches(work))
    return str(rule.number(work)) if rule.number else rule.value


def pack_size(work: Workload, peak_of: Callable[[int], int], memory_bytes: int) -> int:
    """Return the largest pack size of `sweep.pack=auto`: that of the table, or less if the memory is smaller.

    Args:
        work: The runs of the pack.
        peak_of: The memory estimate of a pack, in bytes, by its size.
        memory_bytes: Memory of the process that trains a pack, in bytes.
    """
    largest = int(value_of("sweep.pack", work))
    fitting = (runs for runs in range(largest, 1, -1) if memory.PEAK_FACTOR * peak_of(runs) <= memory_bytes)
    return next(fitting, 1)


def parallel_packs(work: Workload, peak: int, cores: int, memory_bytes: int) -> int:
    """Return the packs that train at once without `sweep.jobs`: that of the table, or less if the memory is smaller.

    Args:
        work: The runs of the packs.
        peak: The memory estimate of a run, in bytes.
        cores: Cores for one device of each run.
        memory_bytes: Memory of this machine, in bytes.
    """
    jobs = int(value_of("sweep.jobs", work)) or cores
    return max(1, min(jobs, memory_bytes // (memory.PEAK_FACTOR * peak + PROCESS_BYTES)))


def rows() -> list[dict[str, str]]:
    """Return the table as rows of texts."""
    return [
        {"option": rule.option, "device": rule.device, "if": rule.condition or "else", "auto": rule.value}
        | {"why": rule.why}
        for rule in RULES
    ]
