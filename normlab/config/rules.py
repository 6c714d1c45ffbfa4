"""The rules of `auto`: compile, train.graph, sweep.pack and sweep.jobs, as one table whose first matching row decides.

A rule depends on the config, the device and the precision, never on timing or on the card; the memory and the cores of
the machine may then make packs smaller and fewer. A row names its measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from normlab.config import memory
from normlab.config.schema import RunConfig

PROCESS_BYTES = 2**30
"""Assumed memory of a process beside its runs: torch, the compiler and the corpus."""


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


class WorkloadCondition(NamedTuple):
    """A condition on a workload, and its text in the table."""

    text: str
    holds: Callable[[Workload], bool]


def at_least(field: str, limit: int) -> WorkloadCondition:
    """Return the condition that a field of `Workload` is at least a limit."""
    return WorkloadCondition(f"{field} >= {_number(limit)}", lambda work: getattr(work, field) >= limit)


def at_most(field: str, limit: int) -> WorkloadCondition:
    """Return the condition that a field of `Workload` is at most a limit."""
    return WorkloadCondition(f"{field} <= {_number(limit)}", lambda work: getattr(work, field) <= limit)


def in_precision(precision: str) -> WorkloadCondition:
    return WorkloadCondition(precision, lambda work: work.precision == precision)


def _number(number: int) -> str:
    # Thousands of steps have a separator, and powers of two are known without one.
    return f"{number:_}" if number % 1000 == 0 else str(number)


class Rule(NamedTuple):
    """A row of the table: the value of an option, and for which runs."""

    option: str
    device: str
    conditions: tuple[WorkloadCondition, ...]
    """All must hold."""
    value: str
    why: str
    """The measurement."""

    def matches(self, work: Workload) -> bool:
        return self.device == work.device and all(condition.holds(work) for condition in self.conditions)

    @property
    def condition(self) -> str:
        """The conditions as in the table; empty for the row of all other runs."""
        return ", ".join(condition.text for condition in self.conditions)


CPU, GPU = "results/bench_sweep.md", "results/gpu_h200.md"
CORES = "one for each core"
"""The value of `sweep.jobs` that depends on the machine."""
ONE_DEVICE, ALWAYS = at_most("devices", 1), ()
RULES = (
    Rule("compile", "cpu", ALWAYS, "off", f"{CPU}: one run compiled is as fast as eager, 4x128"),
    Rule("compile", "cuda", (at_least("width", 512), at_least("steps", 2_000)), "on",
         f"{GPU}: 48 s save 30 ms a step, 124M"),
    Rule("compile", "cuda", (at_least("width", 256), at_least("steps", 5_000)), "on",
         f"{GPU}: 25 s save 6 ms a step, 6x384"),
    Rule("compile", "cuda", (at_least("steps", 50_000),), "on", f"{GPU}: 29 s save 0.6 ms a step, 4x128 with a graph"),
    Rule("compile", "cuda", ALWAYS, "off", "compilation would take longer than it saves"),
    Rule("train.graph", "cpu", ALWAYS, "off", "a CPU has no CUDA graphs"),
    Rule("train.graph", "cuda", (ONE_DEVICE, at_most("plugins", 0), at_least("steps", 100)), "on",
         f"{GPU}: a step takes 0.11 of its eager time at 4x128; a capture takes as long as a few steps"),
    Rule("train.graph", "cuda", ALWAYS, "off",
         "several devices, too few steps to repay a capture, or a plugin, whose Python code no replay runs"),
    Rule("sweep.pack", "cpu", (in_precision("fp32"), at_most("width", 32), at_most("tokens", 256)), "16",
         f"{CPU}: 0.64 of the processor time of a single run, 2x32"),
    Rule("sweep.pack", "cpu", (in_precision("bf16"), at_most("width", 128), at_most("tokens", 1024)), "16",
         f"{CPU}: 1.26 times the speed of a single run, 4x128"),
    Rule("sweep.pack", "cpu", ALWAYS, "1", f"{CPU}: no faster in fp32 at 4x64 and 4x128"),
    Rule("sweep.pack", "cuda", (in_precision("fp16"),), "1", "each run has a loss scale of its own"),
    Rule("sweep.pack", "cuda", (ONE_DEVICE, at_most("width", 128), at_most("tokens", 1024)), "32",
         f"{GPU}: 6 times the speed of a single run, 4x128"),
    Rule("sweep.pack", "cuda", (ONE_DEVICE, at_most("width", 256), at_most("tokens", 4096)), "8",
         "between the rows that are measured"),
    Rule("sweep.pack", "cuda", ALWAYS, "1", f"{GPU}: a single run of 6x384 fills a fifth of the GPU, one of 124M 38 %"),
    Rule("sweep.jobs", "cpu", (at_most("width", 128), at_most("tokens", 1024)), CORES,
         f"{CPU}: 1.4 (4x128) to 2.1 times (2x32) the speed of one process with two threads"),
    Rule("sweep.jobs", "cpu", ALWAYS, "1", "not measured for larger models"),
    Rule("sweep.jobs", "cuda", ALWAYS, "1", "packs fill the GPU"),
)  # fmt: skip
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
