"""What `auto` means on this machine, and bringing torch into that state."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from normlab.config import RunConfig
from normlab.errors import ConfigError
from normlab.openmp import wait_policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """The choices that depend on the machine, as they were made."""

    device: str
    """cpu or cuda. Part of a run's identity, like precision and compile."""
    precision: str
    compile: str
    deterministic: bool
    init: str
    """The init rule."""
    device_name: str
    threads: int
    """Threads of torch's CPU kernels: 1 and 2 give other bits."""
    wait_policy: str
    """How those threads wait for each other: changes speed beside a busy process, never bits."""
    instructions: str
    """Widest vector instructions that torch uses on this CPU: AVX2 and AVX-512 give other bits."""

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @property
    def torch_device(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    def autocast(self) -> Callable[[], AbstractContextManager]:
        """Makes the context that a forward runs in."""
        if self.precision == "fp32":
            return nullcontext
        device = self.device
        return lambda: torch.autocast(device, dtype=torch.bfloat16)


def resolve(config: RunConfig, has_gpu: bool | None = None) -> Resolved:
    """Decide device, precision, compile and determinism for a config on this machine, or on another.

    Args:
        config: The run's.
        has_gpu: Whether the machine that is to train has a GPU; None asks this one.

    Raises:
        ConfigError: A GPU or a compiler was asked for that is not there; or another machine's GPU would have to be
            asked.
    """
    is_here = torch.cuda.is_available()
    has_gpu = is_here if has_gpu is None else has_gpu
    device = ("cuda" if has_gpu else "cpu") if config.device == "auto" else config.device
    if device == "cuda" and not has_gpu:
        raise ConfigError(
            "device=cuda: torch sees no GPU here; use device=cpu or auto, or install a torch build with CUDA"
        )
    on_gpu = device == "cuda"
    precision, compiled = config.precision, config.compile
    if precision == "auto":
        if on_gpu and not is_here:
            raise ConfigError(
                "precision=auto: is for the GPU to say, and there is none here to be asked; give precision=bf16, or "
                "fp32 where it is older than Ampere"
            )
        precision = "bf16" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    if compiled == "auto":
        compiled = "on" if on_gpu else "off"
    elif compiled == "on" and not on_gpu and not shutil.which(compiler := cpp_compiler()):
        raise ConfigError(
            f"compile=on: the C++ compiler {compiler!r} was not found; install g++, set CXX to a compiler, "
            "or use compile=off"
        )
    return Resolved(
        device=device,
        precision=precision,
        compile=compiled,
        deterministic=(not on_gpu) if config.deterministic is None else config.deterministic,
        init=config.init_rule,
        device_name=torch.cuda.get_device_name() if on_gpu and is_here else device,
        threads=torch.get_num_threads(),
        wait_policy=wait_policy(),
        instructions=torch.backends.cpu.get_cpu_capability(),
    )


def cpp_compiler() -> str:
    """The one program that torch compiles with on a CPU: it takes $CXX as it stands, and looks for no other."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def apply(resolved: Resolved) -> None:
    """Bring torch's global switches into the state that a run asks for."""
    if resolved.deterministic and resolved.device == "cuda":
        # cuBLAS reads it when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if resolved.compile == "on":
        torch.use_deterministic_algorithms(resolved.deterministic)  # tells the compiler too, and loads it for that
    else:
        torch.set_deterministic_debug_mode("error" if resolved.deterministic else "default")
    # It would fill every fresh tensor with NaN: a check on kernels, not a need of ours, and it costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if resolved.compile == "on":
        # Graphs are cached by code, not by model: another width would count towards the recompile limit.
        torch.compiler.reset()
