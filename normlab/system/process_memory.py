"""The memory of this process: its size, its peak in a run, and what its allocator and its collector do with it."""

import contextlib
import ctypes
import gc
import os
import re
from pathlib import Path

PROCESS = Path("/proc/self")


def resident_bytes() -> int:
    """Return the bytes of memory that this process has; 0 on a system that does not tell."""
    try:
        pages = (PROCESS / "statm").read_text().split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next step.

    Otherwise glibc gives large blocks back to the system, and each step faults their pages in again: 300 faults and 2
    to 5 % of a step at depth 4, width 128.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**30)  # M_TRIM_THRESHOLD


def release_freed_memory() -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def freeze_imported() -> None:
    """Exclude everything that this process has imported from garbage collection.

    The imports make 200,000 objects that live as long as the process, and each full collection visits all of them. It
    takes 0.1 s, as long as twenty steps of a small model, and a start at depth 64 has three. Only for a process of our
    own: another program's objects may become garbage later.
    """
    gc.freeze()


class PeakMemory:
    """Measures the peak from the moment at which it is made: on a GPU of what torch allocates, else of the process."""

    def __init__(self, device: str) -> None:
        # Not at the top of the file: a tokenizer's memory is measured without torch.
        import torch

        self._on_gpu, self._is_reset = device == "cuda", False
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            return
        # What the C library keeps of an earlier run in this process would count as memory of this run.
        release_freed_memory()
        with contextlib.suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")  # resets the peak, since Linux 4.0; see proc(5)
            self._is_reset = True

    def num_bytes(self) -> int | None:
        """Return the peak in bytes; None if it may be that of an earlier run in this process."""
        if self._on_gpu:
            import torch

            return torch.cuda.max_memory_allocated()
        if not self._is_reset:
            return None
        # Not `ru_maxrss`, which starts with the resident size of the process that started this one.
        peak = re.search(r"^VmHWM:\s*(\d+) kB$", (PROCESS / "status").read_text(), re.MULTILINE)
        if peak is None:
            return None
        return 1024 * int(peak[1])
