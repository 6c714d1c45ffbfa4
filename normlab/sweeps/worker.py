"""The process that trains packs one after another: `python -m normlab.sweeps.worker [--gpu] FOLDER`.

The supervisor writes a line `NUMBER NODE` to standard input for each pack, with the index of this node among those of
the pack. If a pack ends without an error and the process can train another, the process writes `answer_of(NUMBER)` to
standard output and waits. Else it exits with the pack's exit code. During a pack, both outputs go to the pack's log.

Standard input closes when the supervisor dies; the process then sends itself SIGTERM, so that it writes a checkpoint
and stops, and kills itself after a grace period.

A pack has the bits that it has in a new process: the generator of torch is seeded as in a new process, the supervisor
starts another process for other global switches of torch, and a process that has run a plugin trains no other pack.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normlab.openmp import limit_spinning

if TYPE_CHECKING:
    from normlab.config.schema import RunConfig
    from normlab.store.runs import RunFolder

GRACE_S = 30.0
"""Seconds that a process may take to write its checkpoint after SIGTERM."""
ERROR_PREFIX = "error: "
"""Start of the last line of the log after an error."""
LEAK_BYTES = 2**28
"""A process whose memory has grown by more than this since its first pack trains no other pack."""


def answer_of(number: int) -> bytes:
    """Return the line that tells the supervisor that a pack has ended."""
    return b"pack %d has ended\n" % number


class Worker:
    """Trains packs of a sweep's plan one after another.

    Args:
        folder: The folder of the sweep.
        on_gpu: Whether the supervisor gave a GPU to the process, so that device=auto must not choose the CPU.
    """

    def __init__(self, folder: Path, *, on_gpu: bool) -> None:
        self._folder, self._on_gpu = folder, on_gpu
        self._configs: list[RunConfig] = []
        """Those of the latest pack."""
        self._seed: int | None = None
        """The seed of torch's generators in a new process."""
        self._bytes_after_first: int | None = None

    def train(self, number: int) -> int:
        """Train a pack, and return the exit code; report an error on standard error."""
        from normlab.errors import OUT_OF_MEMORY, NormlabError, OutOfMemoryError, is_out_of_memory, one_line

        try:
            return self._train(number)
        except NormlabError as error:
            code, message = OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else 2, str(error)
        except Exception as error:
            traceback.print_exc()
            code, message = OUT_OF_MEMORY if is_out_of_memory(error) else 1, f"{type(error).__name__}: {error}"
            if "vmap" in message:  # it draws random numbers, or reads a value on the host
                message = f"the norm or the placement cannot train in a pack; use sweep.pack=off ({message})"
        print(f"{ERROR_PREFIX}{one_line(message)}", file=sys.stderr, flush=True)
        return code

    def _train(self, number: int) -> int:
        import torch

        from normlab.config.schema import load_config
        from normlab.errors import ConfigError
        from normlab.store.plans import read_plan, run_of
        from normlab.sweeps.packs import pack_key
        from normlab.tracking.background import wait_for_followers
        from normlab.training import start as training
        from normlab.training.machine import NO_GPU, resolve_device

        self._seed = torch.initial_seed() if self._seed is None else self._seed
        torch.manual_seed(self._seed)
        plan = read_plan(self._folder)
        runs = plan.runs_of(plan.pack_of(number))
        results, before, self._configs = self._folder.parent.parent, self._configs, []
        for run in runs:
            config = load_config(run.config)
            if os.path.realpath(config.results_dir) != os.path.realpath(results):  # the results folder was moved
                config.results_dir = str(results)
            if self._on_gpu and config.device == "auto" and resolve_device(config) == "cpu":
                raise ConfigError(
                    f"device=auto: {NO_GPU}, and the sweep was planned for a GPU; check it with nvidia-smi"
                )
            self._configs.append(config)
        wait_until_inactive([run_of(self._folder, run) for run in runs])
        outcomes = training.train_pack(
            self._configs,
            pack={"sweep": plan.name, "number": number, "runs": [run.run_id for run in runs]},
            # Slurm sends SIGTERM to every process of a task, and the parent sends another. SIGKILL ends the process.
            only_first_signal=True,
            keep_compiled=len(before) == len(runs) and pack_key(before[0]) == pack_key(self._configs[0]),
        )
        if "SLURM_JOB_ID" in os.environ:  # Slurm ends all processes of a task with the task
            wait_for_followers()
        stopped = next((outcome.signal for outcome in outcomes if outcome.signal), None)
        return 128 + stopped if stopped else 0

    def is_reusable(self) -> bool:
        """Return whether the process can train another pack after one without an error; free the memory of that one.

        A process is not reusable after user code or several ranks, whose state is unknown, nor after a leak of memory
        or a signal.
        """
        if any(config.plugins or config.devices > 1 for config in self._configs):
            return False
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:  # after a signal, `only_first_signal` ignores all others
            return False
        try:
            size = _free_memory()
        except RuntimeError:  # the GPU has failed since
            return False
        if self._bytes_after_first is None:
            self._bytes_after_first = size
            gc.freeze()  # later collections need not visit the libraries, which takes as long as twenty steps
        return size - self._bytes_after_first <= LEAK_BYTES


def _free_memory() -> int:
    """Free the memory of a pack, restart the measurement of the peak, and return the bytes that are still in use."""
    import torch

    from normlab.training.machine import release_freed_memory

    gc.collect()
    release_freed_memory()
    size = 0
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # for the other packs on the GPU
        torch.cuda.reset_peak_memory_stats()
        size = torch.cuda.memory_allocated()
    with contextlib.suppress(OSError):  # a system without /proc
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
        size += (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
        Path("/proc/self/clear_refs").write_text("5")
    return size


def wait_until_inactive(runs: Sequence[RunFolder]) -> None:
    """Wait until the processes of a killed supervisor have written their checkpoints."""
    deadline = time.monotonic() + GRACE_S + 5
    while any(run.is_active() for run in runs) and time.monotonic() < deadline:
        time.sleep(0.1)


def _read_requests(requests: queue.SimpleQueue[str]) -> None:
    """Queue the supervisor's lines; when its end closes, stop this process, and kill its session after `GRACE_S`."""
    with contextlib.suppress(OSError), os.fdopen(0, closefd=False) as lines:
        for line in lines:
            requests.put(line)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def main(folder: Path, *, on_gpu: bool) -> int:
    """Train the packs that the supervisor requests, and return the exit code of the last one."""
    from normlab.store.plans import log_of

    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), name="normlab parent", daemon=True).start()
    answers = os.dup(1)
    worker = Worker(folder, on_gpu=on_gpu)
    while True:
        number, node = map(int, requests.get().split())
        with log_of(folder, number, node).open("ab") as log:
            for output in (1, 2):
                os.dup2(log.fileno(), output)
        code = worker.train(number)
        sys.stdout.flush()
        if code or not worker.is_reusable():
            return code
        with contextlib.suppress(BrokenPipeError):  # the supervisor has died, so the thread stops the process
            os.write(answers, answer_of(number))


if __name__ == "__main__":
    limit_spinning()
    # Slurm may send its notices to every process of a task; only the parent must handle them.
    for notice in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(notice, signal.SIG_IGN)
    # When memory runs out, the system then kills this process and not the supervisor.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    *flags, sweep = sys.argv[1:]
    sys.exit(main(Path(sweep), on_gpu="--gpu" in flags))
