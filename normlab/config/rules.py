"""The rules of `auto`: compile, train.graph, sweep.pack and sweep.jobs, as one table whose first matching row decides.

A rule depends on the config, the device and the precision, never on timing or on the card; the memory and the cores of
the machine may then make packs smaller and fewer. A row names its measurement.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import starmap
from typing import NamedTuple

from normlab.config import memory
from normlab.config.schema import RunConfig

PROCESS_BYTES = 2**30
"""Assumed memory of a process beside its runs: torch, the compiler and the corpus."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


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


def workload(config: RunConfig, device: str, precision: str) -> Workload:
    """Return what the rules know of a run that trains on a device in a precision."""
    tokens = config.train.batch_size // config.devices // config.micro_batches * config.model.context
    return Workload(
        device=device, precision=precision, width=config.model.width, devices=config.devices,
        plugins=len(config.plugins), tokens=tokens, steps=config.train.steps,
    )  # fmt: skip


class Rule(NamedTuple):
    """A row of the table: the value of an option, and for which runs."""

    option: str
    device: str
    condition: str
    """Comparisons of fields of `Workload`, and precisions, with commas between them; all must hold."""
    value: str
    why: str
    """The measurement."""

    def matches(self, work: Workload) -> bool:
        names = asdict(work) | {precision: precision == work.precision for precision in PRECISIONS}
        return self.device == work.device and bool(eval(f"all([{self.condition}])", names))  # noqa: S307


CPU, GPU = "results/bench_sweep.md", "results/gpu_h200.md"
CORES = "one for each core"
"""The value of `sweep.jobs` that depends on the machine."""
RULES: tuple[Rule, ...] = tuple(starmap(Rule, (
    ("compile", "cpu", "", "off", f"{CPU}: one run compiled is as fast as eager, 4x128"),
    ("compile", "cuda", "width >= 512, steps >= 2_000", "on", f"{GPU}: 48 s save 30 ms a step, 124M"),
    ("compile", "cuda", "width >= 256, steps >= 5_000", "on", f"{GPU}: 25 s save 6 ms a step, 6x384"),
    ("compile", "cuda", "steps >= 50_000", "on", f"{GPU}: 29 s save 0.6 ms a step, 4x128 with a graph"),
    ("compile", "cuda", "", "off", "compilation would take longer than it saves"),
    ("train.graph", "cpu", "", "off", "a CPU has no CUDA graphs"),
    ("train.graph", "cuda", "devices <= 1, plugins <= 0, steps >= 100", "on",
     f"{GPU}: a step takes 0.11 of its eager time at 4x128; a capture takes as long as a few steps"),
    ("train.graph", "cuda", "", "off",
     "several devices, too few steps to repay a capture, or a plugin, whose Python code no replay runs"),
    ("sweep.pack", "cpu", "fp32, width <= 32, tokens <= 256", "16",
     f"{CPU}: 0.64 of the processor time of a single run, 2x32"),
    ("sweep.pack", "cpu", "bf16, width <= 128, tokens <= 1024", "16",
     f"{CPU}: 1.26 times the speed of a single run, 4x128"),
    ("sweep.pack", "cpu", "", "1", f"{CPU}: no faster in fp32 at 4x64 and 4x128"),
    ("sweep.pack", "cuda", "fp16", "1", "each run has a loss scale of its own"),
    ("sweep.pack", "cuda", "devices <= 1, width <= 128, tokens <= 1024", "32",
     f"{GPU}: 6 times the speed of a single run, 4x128"),
    ("sweep.pack", "cuda", "devices <= 1, width <= 256, tokens <= 4096", "8", "between the rows that are measured"),
    ("sweep.pack", "cuda", "", "1", f"{GPU}: a single run of 6x384 fills a fifth of the GPU, one of 124M 38 %"),
    ("sweep.jobs", "cpu", "width <= 128, tokens <= 1024", CORES,
     f"{CPU}: 1.4 (4x128) to 2.1 times (2x32) the speed of one process with two threads"),
    ("sweep.jobs", "cpu", "", "1", "not measured for larger models"),
    ("sweep.jobs", "cuda", "", "1", "packs fill the GPU"),
)))  # fmt: skip
"""The rows, in the order in which they are tried."""
LEGEND = """tokens: of a micro-batch on each device
sweep.pack: the runs of a pack may have another attention backend than single runs, and other last bits. A single run
uses the backend that torch chooses. On a CPU a pack uses eager; on a GPU it uses flash_attention in bf16 and fp16, and
efficient_attention in fp32 and tf32, or eager if the width of a head is above 256 or not a multiple of 8. run.json
records the backend."""
"""The meaning of the field of `Workload` that is no option, and what a pack changes."""


def value_of(option: str, work: Workload) -> str:
    return next(rule.value for rule in RULES if rule.option == option and rule.matches(work))


def pack_size(work: Workload, peak_of: Callable[[int], int], memory_bytes: int) -> int:
    """Return the largest pack size of `sweep.pack=auto`: that of the table, or less if the memory is smaller.

    Args:
        peak_of: The memory estimate of a pack, in bytes, by its size.
        memory_bytes: Memory of the process that trains a pack, in bytes.
    """
    largest = int(value_of("sweep.pack", work))
    fitting = (runs for runs in range(largest, 1, -1) if memory.PEAK_FACTOR * peak_of(runs) <= memory_bytes)
    return next(fitting, 1)


def parallel_packs(work: Workload, peak: int, cores: int, memory_bytes: int) -> int:
    """Return the packs that train at once without `sweep.jobs`: that of the table, or less if the memory is smaller.

    Args:
        cores: Cores for one device of each run.
    """
    value = value_of("sweep.jobs", work)
    jobs = cores if value == CORES else int(value)
    return max(1, min(jobs, memory_bytes // (memory.PEAK_FACTOR * peak + PROCESS_BYTES)))


def rows() -> list[dict[str, str]]:
    return [
        {"option": rule.option, "device": rule.device, "if": rule.condition or "else", "auto": rule.value}
        | {"why": rule.why}
        for rule in RULES
    ]
