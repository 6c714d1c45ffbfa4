"""Options of a sweep, `sweep.*`: where it runs and how its runs are packed. None of them changes a run id."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from normlab.config.memory import available_bytes
from normlab.errors import ConfigError, did_you_mean, no_effect
from normlab.options import check, option

_RESERVED = (
    *("array", "cpus-per-task", "error", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node", "open-mode"),
    *("account", "output", "partition", "signal", "time"),
)
"""Options of sbatch that normlab sets, so that sweep.slurm.extra may not."""

NODE_GPU_BYTES = 16 * 2**30
"""Assumed memory of a Slurm node's GPU: the smallest in common use."""


@dataclass(kw_only=True, slots=True)
class SlurmOptions:
    """Slurm resources of each pack."""

    cluster: str = option(
        "slurm", choices=("slurm", "local"),
        help="slurm; or local, to try submitit without Slurm: all tasks start at once on this machine.",
    )  # fmt: skip
    partition: str | None = option(None, "Partition, or several separated by commas; default: Slurm's.", longest=200)
    account: str | None = option(None, "Account to charge; default: Slurm's.", longest=200)
    time_minutes: int = option(
        240, at_least=5, at_most=525_600,
        help="Time limit of a task; two minutes earlier, the pack writes a checkpoint, is queued again and resumes.",
    )  # fmt: skip
    nodes: int = option(1, "Nodes of a task; `devices` must be a multiple.", at_least=1, at_most=1024)
    gpus: int = option(
        1, at_least=0, at_most=64,
        help="GPUs of a task on each node: `devices` / `nodes`, or 0 to train on CPUs, also with device=auto.",
    )  # fmt: skip
    gpu_type: str | None = option(None, "Type of GPU, as the cluster names it; default: any.", longest=200)
    cpus: int = option(
        4, "Cores of a task on each node, and its threads unless OMP_NUM_THREADS is set.", at_least=1, at_most=1024
    )
    memory_gb: float = option(
        16.0, above=0, at_most=100_000,
        help="Memory of a task on each node, in GiB; a pack that exceeds it is split into two packs.",
    )  # fmt: skip
    extra: list[str] = option(
        [], "Further options of sbatch, by their long names: ['qos=high',exclusive].", longest=1000
    )

    def validate(self) -> None:
        """Check which options have an effect, and the form of `extra`; `check` has checked the limits.

        Raises:
            ConfigError: An option has an invalid value or no effect.
        """
        if self.gpu_type is not None and not self.gpus:
            raise no_effect(f"sweep.slurm.gpu_type={self.gpu_type}", "sweep.slurm.gpus=0")
        if self.nodes > 1 and self.cluster == "local":
            raise no_effect(f"sweep.slurm.nodes={self.nodes}", "sweep.slurm.cluster=local")
        for text in self.extra:
            if not re.fullmatch(r"[a-z][a-z-]*(=.+)?", text):
                raise ConfigError(
                    f"sweep.slurm.extra={text}: is not an option of sbatch; write name=value, or the name of a flag, "
                    "without leading dashes: ['qos=high',exclusive]"
                )
            if (name := text.partition("=")[0]) in _RESERVED:
                raise ConfigError(
                    f"sweep.slurm.extra={text}: normlab sets {name}; use sweep.jobs, or partition, account, "
                    "time_minutes, nodes, gpus, gpu_type, cpus or memory_gb of sweep.slurm"
                )


@dataclass(kw_only=True, slots=True)
class SweepOptions:
    """Name, packing and execution of a sweep."""

    name: str | None = option(
        None, longest=100,
        help="Name of the sweep and of its folder in results/sweeps; default: the varied options and a hash of the "
        "runs.",
    )  # fmt: skip
    pack: str = option(
        "auto",
        help="Maximum number of runs that train stacked: a number, off, or auto (by the table of `normlab list "
        "auto`). On this machine, auto limits the size so that each of the `jobs` gets a pack.",
    )  # fmt: skip
    on: str = option(
        "local", choices=("local", "slurm"),
        help="local: processes on this machine; slurm: an array job with a task per pack.",
    )  # fmt: skip
    jobs: int | None = option(
        None, at_least=1, at_most=1024,
        help="Packs that train at once, on each GPU if they train on GPUs; they share the cores evenly. Default: by "
        "the table of `normlab list auto`; no limit in Slurm.",
    )  # fmt: skip
    gpus: str = option(
        "all", longest=10_000,
        help="GPUs of the packs, one for each: all that are visible, or some by index, UUID or MIG name (0,2,5).",
    )  # fmt: skip
    timeout_minutes: float = option(
        30.0, above=0, at_most=525_600,
        help="Minutes after which a pack is stopped as hung if it writes neither to a run's record nor to its log.",
    )  # fmt: skip
    slurm: SlurmOptions = field(default_factory=SlurmOptions)

    def validate(self) -> None:
        """Check all options.

        Raises:
            ConfigError: An option has an invalid value or no effect.
        """
        check(self, "sweep.")
        self.slurm.validate()
        self._validate_gpus()
        if self.on == "slurm" and self.slurm.cluster == "local" and self.jobs is not None:
            raise no_effect(f"sweep.jobs={self.jobs}", "sweep.slurm.cluster=local")
        if self.name is not None and not re.fullmatch(r"\w[\w.+=-]*", self.name):
            raise ConfigError(f"sweep.name={self.name}: is not a folder name; use only letters, digits and . _ + = -")
        if self.pack in ("auto", "off"):
            return
        if not self.pack.isdecimal() or int(self.pack) < 1:
            close = did_you_mean({"false": "off", "none": "off"}.get(self.pack.lower(), self.pack), ("auto", "off"))
            raise ConfigError(f"sweep.pack={self.pack}{close}: choose auto, off, or a number of at least 1")
        self.pack = str(int(self.pack))

    def _validate_gpus(self) -> None:
        names = [name.strip() for name in self.gpus.split(",")]
        if self.gpus != "all" and not all(re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name) for name in names):
            raise ConfigError(
                f"sweep.gpus={self.gpus}: choose all, or a list of indices (0,2,5), UUIDs (GPU-...) or MIG names "
                "(MIG-...)"
            )
        if self.gpus != "all" and self.on == "slurm":
            raise no_effect(f"sweep.gpus={self.gpus}", "sweep.on=slurm")
        self.gpus = ",".join(str(int(name)) if name.isdecimal() else name for name in names)

    @property
    def largest_pack(self) -> int | None:
        """Maximum number of runs in a pack; None with sweep.pack=auto."""
        return None if self.pack == "auto" else int(self.pack) if self.pack.isdecimal() else 1

    def pack_memory(self, device: str, gpu_bytes: int, jobs: int) -> int:
        """Return the memory that the process of one pack may use, in bytes.

        On this machine, each process has an equal share of the memory of its GPU or of the machine. In Slurm, a CPU
        task has `slurm.memory_gb`, and a GPU task `NODE_GPU_BYTES`, since a login node cannot query the nodes' GPUs.

        Args:
            device: The device of the packs, cpu or cuda.
            gpu_bytes: Memory of the smallest GPU that may train a pack on this machine; ignored on a CPU.
            jobs: Packs that train at once on this machine, on each GPU.
        """
        if self.on == "slurm":
            return NODE_GPU_BYTES if device == "cuda" else int(self.slurm.memory_gb * 2**30)
        return (gpu_bytes if device == "cuda" else available_bytes()) // jobs

    @property
    def has_gpu(self) -> bool | None:
        """Whether the tasks in Slurm have a GPU; None for a sweep on this machine."""
        return self.slurm.gpus > 0 if self.on == "slurm" else None
