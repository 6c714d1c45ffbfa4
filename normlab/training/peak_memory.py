"""The peak memory of a run, also in a process that has trained other runs before."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

import torch

from normlab.training.machine import release_freed_memory

_NUMBERS = count()


class PeakMemory:
    """Measures the peak from the moment at which it is made: on a GPU of what torch allocates, else of the process.

    Args:
        device: cpu or cuda.
        root: The folder of `proc`.
    """

    def __init__(self, device: str, root: Path = Path("/")) -> None:
        self._on_gpu, self._process = device == "cuda", root / "proc/self"
        is_first = next(_NUMBERS) == 0
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            return
        release_freed_memory()  # of an earlier run
        try:
            (self._process / "clear_refs").write_text("5")  # resets the peak, since Linux 4.0; see proc(5)
            self._is_reset = True
        except OSError:
            self._is_reset = is_first

    def num_bytes(self) -> int | None:
        """Return the peak in bytes: of torch's tensors on a GPU, or the resident size of the process.

        None if the system does not report it, or cannot tell it from the peak of an earlier run in this process.
        """
        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        try:
            # Not `ru_maxrss`, which starts with the resident size of the process that started this one.
            peak = re.search(r"^VmHWM:\s*(\d+) kB$", (self._process / "status").read_text(), re.MULTILINE)
        except OSError:
            return None
        return 1024 * int(peak[1]) if peak and self._is_reset else None
