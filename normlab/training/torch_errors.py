"""Converts errors of torch to errors that say what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from normlab.errors import ConfigError, NormlabError, OutOfMemoryError, is_out_of_memory
from normlab.ranks import Ranks
from normlab.training.launch import LOST, RESUMES

TOO_MANY_GRAPHS = (
    "the blocks do not share their compiled code, since a Python number in the norm or the placement differs from "
    "block to block; make it a buffer (self.register_buffer)"
)


@contextlib.contextmanager
def convert_torch_errors() -> Iterator[None]:
    """Convert torch's out-of-memory and compiler errors to NormlabError."""
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
            if type(error).__name__ == "FailOnRecompileLimitHit":
                raise ConfigError(f"compile=on: {TOO_MANY_GRAPHS}, or train with compile=off") from error
            reason = " ".join(str(error).partition("\n\n")[0].split())
            raise ConfigError(
                f"compile=on: torch's compiler failed ({reason:.200}); check it with `normlab doctor`, or train with "
                "compile=off"
            ) from error
        raise
