"""Options of a sweep, `sweep.*`: where it runs and how its runs are packed. None of them changes a run id."""

import re
from dataclasses import dataclass, field

from normlab.base.errors import ConfigError, no_effect
from normlab.base.options import check, option
from normlab.base.parsing import is_whole_number
from normlab.config.memory import available_bytes

_RESERVED = (
    *("account", "array", "cpus-per-task", "error", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node"),
    *("open-mode", "output", "partition", "signal", "time"),
)
"""Options of sbatch that normlab sets, so that sweep.slurm.extra may not."""

MOST_PACKED = 10**9
"""The largest sweep.pack, above the runs of any sweep."""
NODE_GPU_BYTES = 16 * 2**30
"""Assumed memory of a Slurm node's GPU: the smallest in common use."""


@dataclass(kw_only=True, slots=True)
class SlurmOptions:
    """Slurm resources of each pack."""

    partition: str | None = option(None, "Partition, or several separated by commas; default: Slurm's.", longest=200)
    account: str | None = option(None, "Account to charge; default: Slurm's.", longest=200)
    time_minutes: int = option(
        240, at_least=5, at_most=525_600,
        help="Time limit of a task; two minutes earlier, the pack writes a checkpoint, is queued again and resumes.",
    )  # fmt: skip
    gpus: int = option(1, "GPUs of a task: as `devices`, or 0 to train on CPUs.", at_least=0, at_most=64)
    gpu_type: str | None = option(None, "Type of GPU, as the cluster names it; default: any.", longest=200)
    cpus: int = option(4, "Cores, and threads, of a task.", at_least=1, at_most=1024)
    memory_gb: float = option(16.0, "Memory of a task, in GiB.", above=0, at_most=100_000)
    extra: list[str] = option([], "Further long options of sbatch: ['qos=high',exclusive].", longest=1000)

    def validate(self) -> None:
        """Check which options have an effect, and `extra`; `check` has checked the limits."""
        if self.gpu_type is not None and not self.gpus:
            raise no_effect(f"sweep.slurm.gpu_type={self.gpu_type}", "sweep.slurm.gpus=0")
        for text in self.extra:
            if text.startswith("-") or text.partition("=")[0] in _RESERVED:
                raise ConfigError(
                    f"sweep.slurm.extra={text}: has leading dashes, or is set by normlab; leave it out, or write "
                    "['qos=high',exclusive]"
                )


@dataclass(kw_only=True, slots=True)
class SweepOptions:
    """Name, packing and execution of a sweep."""

    name: str | None = option(
        None, "Name, and folder in results/sweeps; default: the varied options and a hash.", longest=100
    )
    trials: int = option(
        12, "Trials for each cell, if an option is searched: 'optim.lr=search(1e-4,1e-1)'.", at_least=1, at_most=1000
    )
    pack: str = option("auto", "Most runs that train stacked: a number, off, or auto (`normlab list auto`).")
    on: str = option("local", "This machine, or an array job with a task per pack.", choices=("local", "slurm"))
    jobs: int | None = option(
        None, at_least=1, at_most=1024,
        help="Packs that train at once, on each GPU if they train on GPUs; they share the cores evenly. Default: by "
        "the table of `normlab list auto`; no limit in Slurm.",
    )  # fmt: skip
    timeout_minutes: float = option(
        30.0, "Minutes without any output after which a pack is stopped as hung.", above=0, at_most=525_600
    )
    slurm: SlurmOptions = field(default_factory=SlurmOptions)

    def validate(self) -> None:
        check(self, "sweep.")
        self.slurm.validate()
        if self.name is not None and not re.fullmatch(r"\w[\w.+=-]*", self.name):
            raise ConfigError(f"sweep.name={self.name}: is not a folder name; use only letters, digits and . _ + = -")
        if self.pack not in ("auto", "off"):
            if not is_whole_number(self.pack) or not 1 <= int(self.pack) <= MOST_PACKED:
                raise ConfigError(f"sweep.pack={self.pack}: choose auto, off, or a number from 1 to {MOST_PACKED}")
            # 08 and 8 are one size, so that a plan has one text for it.
            self.pack = str(int(self.pack))

    @property
    def largest_pack(self) -> int | None:
        """Maximum number of runs in a pack; None with sweep.pack=auto."""
        if self.pack == "auto":
            return None
        return 1 if self.pack == "off" else int(self.pack)

    def pack_memory(self, device: str, gpu_bytes: int, jobs: int) -> int:
        """Return the memory that the process of one pack may use, in bytes.

        On this machine, each process has an equal share of the memory of its GPU or of the machine. In Slurm, a CPU
        task has `slurm.memory_gb`, and a GPU task `NODE_GPU_BYTES`, since a login node cannot query the nodes' GPUs.

        Args:
            device: The device of the packs, cpu or cuda.
            gpu_bytes: Memory of the smallest GPU that may train a pack on this machine; ignored on a CPU.
            jobs: Packs that train at once on this machine, on each GPU.
        """
        if self.on == "slurm" and device == "cuda":
            return NODE_GPU_BYTES
        if self.on == "slurm":
            return int(self.slurm.memory_gb * 2**30)
        total = gpu_bytes if device == "cuda" else available_bytes()
        return total // jobs

    @property
    def has_gpu(self) -> bool | None:
        """Whether the tasks in Slurm have a GPU; None for a sweep on this machine."""
        if self.on != "slurm":
            return None
        return self.slurm.gpus > 0
