"""The process that trains packs one after another: `python -m normlab.sweeps.worker [--gpu] DESCRIPTOR FOLDER`.

For each pack, the supervisor sends its number through the connection DESCRIPTOR. The process answers with an `Answer`,
and exits if it cannot train another pack. Both of its outputs go to the log of the pack.

The connection closes when the supervisor dies; the process then sends itself SIGTERM, so that it writes a checkpoint
and stops, and kills itself after a grace period.

A pack has the bits that it has in a new process: the generator of torch is seeded as in a new process, the supervisor
starts another process for other global switches of torch, and a process that has run a plugin trains no other pack.
"""

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from normlab.base.errors import (
    ConfigError,
    DiskError,
    NormlabError,
    OutOfMemoryError,
    is_out_of_memory,
    one_line,
)
from normlab.config.recorded import load_config
from normlab.config.schema import RunConfig
from normlab.store.format import FAILED, FINISHED, INTERRUPTED
from normlab.store.plans import read_plan, run_of
from normlab.store.runs import RunFolder
from normlab.sweeps.files import MEMORY, Answer, log_of, open_log
from normlab.sweeps.measured_packs import PackMeasurement, measure
from normlab.system.openmp import limit_spinning
from normlab.system.processes import kill_sessions

GRACE_S = 30.0
"""Seconds that a process may take to write its checkpoint after SIGTERM."""
STOPPED = "stopped; the same command resumes it"


class Worker:
    """Trains packs of a sweep's plan one after another; if `on_gpu`, device=auto must not choose the CPU."""

    def __init__(self, folder: Path, *, on_gpu: bool) -> None:
        self._folder, self._on_gpu = folder, on_gpu
        self._configs: list[RunConfig] = []
        """Those of the latest pack."""
        self.measured: PackMeasurement | None = None
        """What the latest pack has cost, if this process trained all of it."""
        self._seed: int | None = None
        """The seed of torch's generators in a new process."""

    def train(self, number: int) -> tuple[str, str]:
        """Train a pack, and return the cause and the detail of its outcome; report an error on standard error."""
        try:
            stop_signal = self._train(number)
            return (INTERRUPTED, STOPPED) if stop_signal else (FINISHED, "")
        except DiskError as error:
            # It counts as interrupted, so that the same command trains the pack again.
            message = one_line(error)
            print(f"error: {message}", file=sys.stderr, flush=True)
            return INTERRUPTED, message
        except NormlabError as error:
            message, no_memory = str(error), isinstance(error, OutOfMemoryError)
        except Exception as error:
            traceback.print_exc()
            message, no_memory = f"{type(error).__name__}: {error}", is_out_of_memory(error)
            # torch's message for code that draws random numbers, or reads a value on the host.
            if "vmap" in message:
                message = f"the norm or the placement cannot train in a pack; use sweep.pack=off ({message})"
        message = one_line(message)
        print(f"error: {message}", file=sys.stderr, flush=True)
        return MEMORY if no_memory else FAILED, message

    def _train(self, number: int) -> int | None:
        import torch

        from normlab.sweeps.packs import pack_key
        from normlab.system.process_memory import freeze_imported
        from normlab.tracking.background import wait_for_followers
        from normlab.training import start as training
        from normlab.training.machine import NO_GPU, resolve_device

        start, self.measured = time.perf_counter(), None
        # A pack must have the bits that it has in a new process.
        if self._seed is None:
            self._seed = torch.initial_seed()
            freeze_imported()
        torch.manual_seed(self._seed)
        plan = read_plan(self._folder)
        runs = plan.runs_of(plan.pack_of(number))
        earlier_configs, self._configs = self._configs, []
        results_folder = self._folder.parent.parent
        for run in runs:
            config = load_config(run.config)
            config.results_dir = str(results_folder)
            if self._on_gpu and config.device == "auto" and resolve_device(config) == "cpu":
                raise ConfigError(
                    f"device=auto: {NO_GPU}, and the sweep was planned for a GPU; check it with nvidia-smi"
                )
            self._configs.append(config)
        folders = [run_of(self._folder, run) for run in runs]
        wait_until_inactive(folders)
        is_new = not any(folder.exists() for folder in folders)
        # Blocks of an equal pack are equal, and so is their compiled code.
        is_equal = len(earlier_configs) == len(runs) and pack_key(earlier_configs[0]) == pack_key(self._configs[0])
        results = training.train_pack(
            self._configs,
            pack={"sweep": plan.name, "number": number, "runs": [run.run_id for run in runs]},
            # Slurm sends SIGTERM to every process of a task, and the parent sends another. SIGKILL ends the process.
            only_first_signal=True,
            keep_compiled=is_equal,
        )
        # Slurm ends all processes of a task with the task, also those that still send runs to W&B.
        if "SLURM_JOB_ID" in os.environ:
            wait_for_followers()
        for result in results:
            if result.signal:
                return result.signal
        if is_new:
            seconds = time.perf_counter() - start
            # The runs are completed, whether or not their cost is known.
            try:
                self.measured = measure(self._configs[0], folders, seconds)
            except Exception:
                traceback.print_exc()
        return None

    def is_reusable(self) -> bool:
        """Return whether the process can train another pack after a finished one; free the memory of that one.

        It cannot after user code or several ranks, whose state is unknown, nor after a signal.
        """
        if any(config.plugins or config.devices > 1 for config in self._configs):
            return False
        # After a signal, `only_first_signal` ignores all others, so nobody could stop the next pack.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            return False
        import torch

        from normlab.system.process_memory import release_freed_memory

        gc.collect()
        try:
            release_freed_memory()
            # Other packs on the GPU may need the memory that torch keeps.
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        except RuntimeError:
            # The GPU has failed since.
            return False
        return True


def wait_until_inactive(runs: Sequence[RunFolder]) -> None:
    """Wait until the processes of a killed supervisor have written their checkpoints."""
    deadline = time.monotonic() + GRACE_S + 5
    while any(run.is_active() for run in runs) and time.monotonic() < deadline:
        time.sleep(0.1)


def _receive(connection: Connection, requests: queue.SimpleQueue[Any]) -> None:
    """Queue the supervisor's requests; when its end closes, stop this process, and kill its session after `GRACE_S`."""
    with contextlib.suppress(OSError, EOFError):
        while True:
            requests.put(connection.recv())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    if os.getpgid(0) == os.getpid():
        kill_sessions(os.getpid())
    os._exit(128 + signal.SIGTERM)


def main(folder: Path, connection: Connection, *, on_gpu: bool) -> None:
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), name="normlab parent", daemon=True).start()
    worker, can_continue = Worker(folder, on_gpu=on_gpu), True
    while can_continue:
        number = requests.get()
        with open_log(log_of(folder, number)) as log:
            for output in (1, 2):
                os.dup2(log.fileno(), output)
        cause, detail = worker.train(number)
        can_continue = cause == FINISHED and worker.is_reusable()
        sys.stdout.flush()
        # If the supervisor has died, the thread stops the process.
        with contextlib.suppress(OSError):
            connection.send(Answer(cause, detail, can_continue, worker.measured))


if __name__ == "__main__":
    limit_spinning()
    # Slurm may send its notices to every process of a task; only the parent must handle them.
    for notice in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(notice, signal.SIG_IGN)
    # When memory runs out, the system then kills this process and not the supervisor.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    *flags, descriptor, sweep = sys.argv[1:]
    os.set_inheritable(int(descriptor), False)
    main(Path(sweep), Connection(int(descriptor)), on_gpu="--gpu" in flags)
