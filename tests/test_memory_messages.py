"""Every message of a failed allocation leads to the same error, whichever library reports it."""

import errno
import os

import pytest

from normlab.base.errors import ConfigError, OutOfMemoryError, is_out_of_memory
from normlab.sweeps.process import cause_of_death
from normlab.training.machine import convert_torch_errors

MESSAGES = [
    # torch: c10/cuda/CUDACachingAllocator.cpp, class torch.OutOfMemoryError
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.5 GiB is free.",
    # torch: c10/cuda/CUDAException.cpp, with the text of cudaGetErrorString and the name of the error
    # torch: aten/src/ATen/cuda/Exceptions.h, TORCH_CUDABLAS_CHECK, TORCH_CUSOLVER_CHECK and AT_CUDNN_CHECK
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`.",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    # CUDA: cuda.h, the name of the error of the driver
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    # NCCL: src/include/checks.h, and src/include/alloc.h, after torch's text
    "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc 536870912 bytes",
    "ncclSystemError: System call (e.g. socket, malloc) failed.\nLast error:\nFailed to malloc 4096 bytes",
    # torch: c10/core/impl/alloc_cpu.cpp, on Linux and macOS, and on Windows
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8589934592 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    # libstdc++: bad_alloc::what, alone and from std::terminate
    "std::bad_alloc",
    # glibc: strerror(ENOMEM)
    os.strerror(errno.ENOMEM),
]
OTHERS = [
    # Triton: runtime/errors.py, OutOfResources: shared memory of a multiprocessor, which a smaller batch does not free
    "out of resource: shared memory, Required: 163840, Hardware limit: 101376. Reducing block sizes may help.",
    # torch: aten/src/ATen/cuda/Exceptions.h
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    # glibc: elf/dl-reloc.c
    "libgomp.so.1: cannot allocate memory in static TLS block",
    # libstdc++ and Python
]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_failed_allocation_is_recognised(message: str) -> None:
    """As an exception in the training process, and in the log of a process that a library aborts."""
    with pytest.raises(OutOfMemoryError, match=r"^the memory ran out; lower train.batch_size"), convert_torch_errors():
        raise RuntimeError(message)
    log = ["terminate called after throwing an instance of 'c10::Error'", *message.splitlines(), "frame #0: abort"]
    assert cause_of_death(-6, log)[0] == "out of memory"


@pytest.mark.parametrize("message", OTHERS)
def test_another_error_is_not_one_of_memory(message: str) -> None:
    with pytest.raises(RuntimeError, match=r".") as raised, convert_torch_errors():
        raise RuntimeError(message)
    assert str(raised.value) == message
    assert cause_of_death(-6, message.splitlines())[0] == "failed"


def test_classes_of_errors() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    with pytest.raises(OSError, match="No space left"), convert_torch_errors():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_of_triton_is_one_of_the_compiler() -> None:
    error = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    message = r"^compile=on: torch's compiler failed .out of resource: .* compile=off$"
    with pytest.raises(ConfigError, match=message), convert_torch_errors():
        raise error("out of resource: shared memory, Required: 163840, Hardware limit: 101376.")
