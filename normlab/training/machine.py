"""What a run takes from this machine: the values of `auto`, torch's switches, and errors of torch."""

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from normlab.base.errors import ConfigError, NormlabError, OutOfMemoryError, is_out_of_memory
from normlab.catalogue.corpora import FilesData
from normlab.config import memory, rules
from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SlurmOptions
from normlab.data.files import find_sources
from normlab.model.attention import attention_backend
from normlab.model.groups import check_parameters
from normlab.system.cgroup import allowed_cores
from normlab.system.compilers import missing_compiler
from normlab.system.openmp import wait_policy
from normlab.system.process_memory import keep_freed_memory
from normlab.system.ranks import Ranks

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of autocast by precision; the other precisions have none."""
NO_GPU = "torch sees no GPU here"
DEVICES = Path("/dev")
LOST = "another rank of this run has ended"
"""Message of a rank whose peer is gone."""
RESUMES = "the same command resumes the run, and so does another devices=N"
TOO_MANY_GRAPHS = (
    "the blocks do not share their compiled code, since a Python number in the norm or the placement differs from "
    "block to block; make it a buffer (self.register_buffer)"
)
KINDS_OF_BLOCKS = 4
"""Most kinds of blocks of a model: a placement may wire some layers in another way, and some layers have an embedding
for the values."""
MOST_GRAPHS = 6 * KINDS_OF_BLOCKS
"""Most compiled graphs of the blocks. Each kind is compiled for plain and measured steps, and for evaluation in either
mode, whose last batch may be smaller."""


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    """Its number in CUDA among the visible GPUs."""
    uuid: str
    """`GPU-...`, or `MIG-...` for a MIG device: an entry of CUDA_VISIBLE_DEVICES.

    Unlike an index, an entry that names the GPU stays valid when another GPU fails.
    """
    name: str
    memory_bytes: int
    has_bf16: bool
    """Whether its tensor cores compute in bf16 and TF32: Ampere or newer, as for `torch.cuda.is_bf16_supported`."""

    def __str__(self) -> str:
        return f"{self.index} ({self.name}, {self.uuid})"


def gpu_of(index: int | None = None) -> Gpu:
    """Return a visible GPU, by default torch's current one, without creating a context on it."""
    properties = torch.cuda.get_device_properties(index)
    kind = "MIG" if " MIG " in properties.name else "GPU"
    return Gpu(index or 0, f"{kind}-{properties.uuid}", properties.name, properties.total_memory, properties.major >= 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """The machine-dependent settings of a run, with each `auto` resolved."""

    device: str
    """cpu or cuda; part of a run's identity, as are precision and compile."""
    precision: str
    compile: str
    graph: str
    """Whether steps are replayed as CUDA graphs: on or off."""
    deterministic: bool
    init: str
    """The init rule."""
    device_name: str
    devices: int
    """Number of devices, with a process each; it changes bits."""
    device_uuid: str | None
    """UUID of the GPU; None on a CPU."""
    threads: int
    """Threads of torch's CPU kernels; the number of threads changes bits."""
    wait_policy: str
    """How the threads wait for each other; changes the speed on a busy machine, never bits."""
    instructions: str
    """Widest vector instructions that torch uses on this CPU; AVX2 and AVX-512 give different bits."""
    attention: str | None = None
    """The backend of attention (`attention_backend`); None before the process that trains the run sets it."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def memory_of(self, config: RunConfig, vocab_size: int = memory.VOCAB_SIZE, runs: int = 1) -> memory.MemoryEstimate:
        """Return lower bounds on the memory of a run, or of a pack of such runs, with these settings."""
        return memory.estimate(
            config, device=self.device, precision=self.precision, compiled=self.compile == "on",
            vocab_size=vocab_size, runs=runs,
        )  # fmt: skip

    def with_attention(self, config: RunConfig, runs: int) -> "RuntimeSettings":
        """Return these settings with the attention backend of a run, or of a pack of `runs`, on this machine.

        Call it after `apply`: the backend depends on whether the run is deterministic.
        """
        backend = attention_backend(
            config.model, config.train.batch_size // config.devices // config.micro_batches, device=self.torch_device,
            dtype=AUTOCAST_DTYPES.get(self.precision, torch.float32), is_stacked=runs > 1,
        )  # fmt: skip
        return replace(self, attention=backend)

    def warnings(self, config: RunConfig, *, resumed: bool) -> list[str]:
        """Return what a run does not have on this machine, although no option says so.

        Args:
            resumed: Whether the run resumes from a checkpoint.
        """
        texts: list[str] = []
        alone = replace(rules.workload(config, self.device, self.precision), devices=1)
        would_have_graphs = config.train.graph == "auto" and rules.value_of("train.graph", alone) == "on"
        if self.devices > 1 and would_have_graphs:
            texts.append(
                f"devices={self.devices}: CUDA graphs are off, because they need a single GPU; on a single GPU a "
                "step of 4 blocks of width 128 takes 0.11 of its time without graphs (results/gpu_h200.md)"
            )
        if self.device == "cuda" and resumed and not self.deterministic:
            texts.append(
                "resuming on a GPU with deterministic=false: results will not be bit-identical; if they must be, "
                "start the run with deterministic=true (its cost was not measured)"
            )
        return texts

    def autocast(self) -> Callable[[], AbstractContextManager]:
        if self.precision not in AUTOCAST_DTYPES:
            return nullcontext
        device, dtype = self.device, AUTOCAST_DTYPES[self.precision]
        return lambda: torch.autocast(device, dtype=dtype)


def resolve(config: RunConfig, has_gpu: bool | None = None, gpu: Gpu | None = None) -> RuntimeSettings:
    """Resolve device, precision, compile and determinism of a config.

    Args:
        has_gpu: Whether the training machine has a GPU; None checks this machine.
        gpu: The GPU of this machine that trains the run, if it trains on a GPU; None for torch's current GPU.

    Raises:
        ConfigError: A GPU or a compiler is missing, or `precision=auto` depends on the GPU of another machine.
    """
    device = resolve_device(config, has_gpu)
    on_gpu = device == "cuda"
    # The GPU is that of this machine. A run for another one, in Slurm, may be planned on a machine that has none.
    if not on_gpu or not torch.cuda.is_available():
        gpu = None
    elif gpu is None:
        gpu = gpu_of()
    precision = _resolve_precision(config, gpu, on_gpu=on_gpu)
    work = rules.workload(config, device, precision)
    compiled = config.compile
    if compiled == "auto":
        compiled = rules.value_of("compile", work)
    if compiled == "on" and (gpu is not None or not on_gpu):
        missing = missing_compiler(device)
        if missing:
            raise ConfigError(f"compile={config.compile}: {missing}, or use compile=off")
    deterministic = config.deterministic
    if deterministic is None:
        deterministic = not on_gpu
    device_name, device_uuid = device, None
    if gpu is not None:
        device_name, device_uuid = gpu.name, gpu.uuid
    return RuntimeSettings(
        device=device,
        precision=precision,
        compile=compiled,
        graph=resolve_graph(config, work),
        deterministic=deterministic,
        init=config.init_rule,
        device_name=device_name,
        device_uuid=device_uuid,
        devices=config.devices,
        threads=num_threads(),
        wait_policy=wait_policy(),
        instructions=torch.backends.cpu.get_cpu_capability(),
    )


def _resolve_precision(config: RunConfig, gpu: Gpu | None, *, on_gpu: bool) -> str:
    """Return the precision of a run, on a GPU of this machine or, without one, on that of another."""
    has_bf16 = gpu is not None and gpu.has_bf16
    if config.precision == "auto":
        if on_gpu and gpu is None:
            raise ConfigError(
                "precision=auto: depends on the GPU, and this machine has none; set precision=bf16, or fp32 or fp16 "
                "for a GPU older than Ampere"
            )
        return "bf16" if has_bf16 else "fp32"
    # TF32 came with the same GPUs as bf16.
    is_unknown = on_gpu and gpu is None
    if config.precision == "tf32" and not has_bf16 and not is_unknown:
        raise ConfigError(f"precision=tf32: {gpu or 'a CPU'} has no TF32; use precision=fp32")
    return config.precision


def resolve_graph(config: RunConfig, work: rules.Workload) -> str:
    """Return whether the steps of a run are replayed as CUDA graphs, on or off.

    Raises:
        ConfigError: The config requires graphs, which need a GPU, and a single one.
    """
    graph = config.train.graph
    if graph == "auto":
        return rules.value_of("train.graph", work)
    reason = ""
    if work.device == "cpu":
        reason = "a CPU has no CUDA graphs"
    elif config.devices > 1:
        reason = f"devices={config.devices}: needs a single GPU"
    if graph == "on" and reason:
        raise ConfigError(f"train.graph=on: {reason}; use train.graph=auto")
    return graph


def resolve_device(config: RunConfig, has_gpu: bool | None = None) -> str:
    """Return the device of a run, cpu or cuda.

    Args:
        has_gpu: Whether the training machine has a GPU; None checks this machine.

    Raises:
        ConfigError: The config requires a GPU that is missing, or torch cannot use the GPUs of this machine.
    """
    if has_gpu is None:
        has_gpu = torch.cuda.is_available()
        if not has_gpu and config.device != "cpu" and may_use_gpu():
            raise ConfigError(
                f"device={config.device}: {NO_GPU}, but this process has access to an NVIDIA GPU; check nvidia-smi, "
                f"the driver and the build of torch ({torch.__version__}), or train on the CPU with device=cpu"
            )
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(f"device=cuda: {NO_GPU}; use device=cpu or auto, or install a torch build with CUDA")
    if config.device != "auto":
        return config.device
    return "cuda" if has_gpu else "cpu"


def check_run(config: RunConfig, slurm: SlurmOptions | None = None, gpu: Gpu | None = None) -> RuntimeSettings:
    """Check that this machine, or a Slurm task, can train a validated config: the device, the memory, the corpus files.

    Also that the model has the groups of parameters with options of their own. Returns the settings of the run there.

    Args:
        slurm: The resources of the task in Slurm; None for a run on this machine.
        gpu: The GPU that trains the run, if it trains on a GPU of this machine; None for torch's current GPU.

    Raises:
        ConfigError: The device, the memory, a corpus file or a group is missing.
    """
    check_parameters(config)
    has_gpu = None
    if slurm is not None:
        has_gpu = slurm.gpus > 0
        other_device = "cpu" if has_gpu else "cuda"
        if config.device == other_device or slurm.gpus not in (0, config.devices):
            raise ConfigError(
                f"sweep.slurm.gpus={slurm.gpus}: does not fit devices={config.devices} and device={config.device}; set "
                "it to the number of devices, or to 0 for CPUs"
            )
    resolved = resolve(config, has_gpu, gpu)

    # The memory: of a task in Slurm, of the GPU, or of this machine, which all processes of a run share.
    needed = resolved.memory_of(config)
    if slurm is not None:
        if resolved.device == "cpu":
            share = int(slurm.memory_gb * 2**30) // config.devices
            owner = "a task" if config.devices == 1 else "each process of a task"
            memory.check_fits(config, needed, share, f"{owner} (sweep.slurm.memory_gb)")
    elif resolved.device == "cuda":
        count = torch.cuda.device_count()
        if config.devices > count:
            raise ConfigError(f"devices={config.devices}: more than the GPUs of this machine; choose at most {count}")
        memory.check_fits(config, needed, (gpu or gpu_of()).memory_bytes, "the GPU")
    else:
        share = memory.available_bytes() // config.devices
        owner = "this machine" if config.devices == 1 else "each of the processes"
        memory.check_fits(config, needed, share, owner)

    # The text.
    if isinstance(config.data, FilesData):
        find_sources(config.data)
    return resolved


def may_use_gpu() -> bool:
    """Return whether this process may open an NVIDIA GPU that the user does not hide by CUDA_VISIBLE_DEVICES."""
    is_visible = re.match(r"\s*(\d|GPU-|MIG-)", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    return bool(is_visible) and any(os.access(file, os.R_OK | os.W_OK) for file in DEVICES.glob("nvidia[0-9]*"))


def num_threads() -> int:
    """Return the threads of torch's CPU kernels in a run: one per allowed core, unless OMP_NUM_THREADS is set.

    torch's default depends on the affinity of the process, but not on the quota of a cgroup.
    """
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return threads
    return min(threads, allowed_cores())


def limit_threads() -> None:
    """Give torch's CPU kernels the threads of a run, in a command that trains nothing."""
    torch.set_num_threads(num_threads())


def apply(settings: RuntimeSettings, *, keep_compiled: bool = False) -> None:
    """Set torch's threads and global switches for a run.

    Args:
        keep_compiled: Whether to keep the compiled code of the last run in this process, whose blocks are equal.
    """
    # The memory and the threads of a CPU.
    if settings.device == "cpu":
        keep_freed_memory()
    if settings.threads < torch.get_num_threads():
        torch.set_num_threads(settings.threads)

    # Kernels of a GPU take these from the environment and from flags of torch.
    if settings.deterministic and settings.device == "cuda":
        # cuBLAS reads this when it creates its first handle.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if settings.device == "cuda":
        # torch warns of this old name. The new one leaves the old one unchanged, and torch's compiler reads both.
        with warnings.catch_warnings(action="ignore"):
            torch.backends.cuda.matmul.allow_tf32 = settings.precision == "tf32"

    # Determinism. Without the compiler by a function that does not import it.
    if settings.compile == "on":
        torch.use_deterministic_algorithms(settings.deterministic)  # imports and configures the compiler
    else:
        torch.set_deterministic_debug_mode("error" if settings.deterministic else "default")
    # The default fills every new tensor with NaN, a debugging aid that costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]

    # The compiler.
    if settings.compile == "on":
        if not keep_compiled:
            # torch caches graphs by code, so the graphs of an earlier model count towards the recompile limit.
            torch.compiler.reset()
        torch._dynamo.config.recompile_limit = MOST_GRAPHS
        torch._logging.set_logs(dynamo=logging.ERROR)  # at the limit, torch prints six lines before the error


@contextlib.contextmanager
def convert_torch_errors() -> Iterator[None]:
    try:
        yield
    except NormlabError:
        raise
    except Exception as error:  # not every error of the compiler is a RuntimeError
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                "the memory ran out; lower train.batch_size or model.context, or raise train.accumulation, which "
                "splits a batch into micro-batches"
            ) from error
        if isinstance(error, OSError):
            raise
        if Ranks.current().count > 1 and (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            raise NormlabError(f"{LOST}; {RESUMES}") from error
        if type(error).__module__.startswith(("torch._inductor", "torch._dynamo", "triton.")):
            reason = " ".join(str(error).partition("\n\n")[0].split())
            problem = f"torch's compiler failed ({reason:.200}); check it with `normlab doctor`"
            if type(error).__name__ == "FailOnRecompileLimitHit":
                problem = TOO_MANY_GRAPHS
            raise ConfigError(f"compile=on: {problem}, or train with compile=off") from error
        raise
