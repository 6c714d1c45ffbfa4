"""How a sweep is run: what the words after `sweep.` set. None of it changes what a run is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from normlab.errors import ConfigError, did_you_mean
from normlab.memory import available_bytes
from normlab.options import check, option

_OURS = (
    *("array", "cpus-per-task", "error", "gpus-per-node", "job-name", "mem", "nodes", "ntasks-per-node", "open-mode"),
    *("account", "output", "partition", "signal", "time"),
)
"""What is asked of Slurm by words of their own, and what the sweep needs as it is."""


NODE_GPU_BYTES = 16 * 2**30
"""Memory that a GPU of a Slurm node is taken to have: that of the smallest in common use."""


@dataclass(kw_only=True, slots=True)
class SlurmOptions:
    """What is asked of Slurm for each pack."""

    cluster: str = option("slurm", choices=("slurm", "local"))
    """Whose tasks they are: Slurm's; or local, submitit's own on this machine, all at once, to try it without Slurm."""
    partition: str | None = option(None, longest=200)
    """The partition, or several with commas between them; Slurm's default unless set."""
    account: str | None = option(None, longest=200)
    """The account that pays; Slurm's default unless set."""
    time_minutes: int = option(240, at_least=5, at_most=525_600)
    """Time limit of a task; two minutes before it a pack writes a checkpoint, is queued again and goes on."""
    gpus: int = option(1, at_least=0, at_most=1)
    """GPUs of a task; a pack uses one, or none with device=cpu. device=auto is what this says."""
    gpu_type: str | None = option(None, longest=200)
    """The kind of GPU, as the cluster calls it; any unless set."""
    cpus: int = option(4, at_least=1, at_most=1024)
    """Cores of a task, and its threads unless OMP_NUM_THREADS is set."""
    memory_gb: float = option(16.0, above=0, at_most=100_000)
    """Memory of a task, in gigabytes; where it runs out the pack goes on in halves."""
    extra: list[str] = option([], longest=1000)
    """What else sbatch is to be told, as it calls it: [qos=high,constraint=a100,exclusive]."""

    def validate(self) -> None:
        """Hold against its limits what is more than a number or a choice.

        Raises:
            ConfigError: Naming the word, what was seen, and what to do.
        """
        if self.gpu_type is not None and not self.gpus:
            raise ConfigError(
                f"sweep.slurm.gpu_type={self.gpu_type}: has no effect with sweep.slurm.gpus=0; leave it out"
            )
        for word in self.extra:
            if not re.fullmatch(r"[a-z][a-z-]*(=.+)?", word):
                raise ConfigError(
                    f"sweep.slurm.extra={word}: is no option of sbatch's; write its name without dashes before it, and "
                    "its value if it has one, as in [qos=high,exclusive]"
                )
            if (name := word.partition("=")[0]) in _OURS:
                raise ConfigError(
                    f"sweep.slurm.extra={word}: {name} is set by the sweep; its words are partition, account, "
                    "time_minutes, gpus, gpu_type, cpus and memory_gb, each after sweep.slurm., and sweep.jobs"
                )


@dataclass(kw_only=True, slots=True)
class SweepOptions:
    """This sweep among others, and how it goes about its runs."""

    name: str | None = option(None, longest=100)
    """What it is called, and its folder in results/sweeps; made of what is swept and a hash of the runs unless set."""
    pack: str = "auto"
    """Most runs that train as one stacked computation: a number, off, or auto, a rule (`packs.auto_pack_size`)."""
    on: str = option("local", choices=("local", "slurm"))
    """Where it runs: local, processes on this machine; slurm, an array job with a task for each pack."""
    jobs: int | None = option(None, at_least=1, at_most=1024)
    """Packs at once; unless set, one here (more share the cores evenly), and in Slurm as many as it has room for."""
    timeout_minutes: float = option(30.0, above=0, at_most=525_600)
    """A pack that for so long writes nothing, neither to a run's record nor to its log, is taken to hang and ended."""
    slurm: SlurmOptions = field(default_factory=SlurmOptions)

    def validate(self) -> None:
        """Hold everything against its limits.

        Raises:
            ConfigError: Naming the word, what was seen, and what to do.
        """
        check(self, "sweep.")
        self.slurm.validate()
        if self.on == "slurm" and self.slurm.cluster == "local" and self.jobs is not None:
            raise ConfigError(
                f"sweep.jobs={self.jobs}: has no effect with sweep.slurm.cluster=local, which starts all at once; "
                "leave it out, or use sweep.on=local"
            )
        if self.name is not None and not re.fullmatch(r"\w[\w.+=-]*", self.name):
            raise ConfigError(f"sweep.name={self.name}: is to name a folder; use letters, digits and . _ + = - only")
        if self.pack in ("auto", "off"):
            return
        if not self.pack.isdecimal() or int(self.pack) < 1:
            close = did_you_mean({"false": "off", "none": "off"}.get(self.pack.lower(), self.pack), ("auto", "off"))
            raise ConfigError(f"sweep.pack={self.pack}: choose auto, off, or a number of runs from 1 on{close}")
        self.pack = str(int(self.pack))

    @property
    def largest_pack(self) -> int | None:
        """Most runs in a pack; None where the rule of `sweep.pack=auto` says."""
        return None if self.pack == "auto" else int(self.pack) if self.pack.isdecimal() else 1

    def pack_memory(self, device: str) -> int:
        """Return the memory that the process of one pack may use, in bytes.

        In Slurm a task's memory or, since a login node cannot ask the nodes' GPU, `NODE_GPU_BYTES`. Here that of the
        GPU or of the machine, which the packs that train at once share evenly.
        """
        if self.on == "slurm":
            return NODE_GPU_BYTES if device == "cuda" else int(self.slurm.memory_gb * 2**30)
        if device == "cuda":
            import torch

            total = torch.cuda.mem_get_info()[1]
        else:
            total = available_bytes()
        return total // (self.jobs or 1)

    @property
    def has_gpu(self) -> bool | None:
        """Whether there is a GPU where it runs; None where that is for this machine to say."""
        return self.slurm.gpus > 0 if self.on == "slurm" else None
