"""The process of one pack: `python -m normlab.sweeps.worker [--gpu] FOLDER NUMBER`, started by the supervisor.

Standard input is a pipe that the supervisor holds open. The pipe closes when the supervisor dies; the process then
sends itself SIGTERM, so that it writes a checkpoint and stops, and kills itself after a grace period.
"""

from __future__ import annotations

import contextlib
import os
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
    from normlab.store.runs import RunFolder

GRACE_S = 30.0
"""Seconds that a process may take to write its checkpoint after SIGTERM."""
ERROR_PREFIX = "error: "
"""Start of the last line of the log after an error."""


def main(folder: Path, number: int, *, on_gpu: bool) -> int:
    """Train a pack of a sweep's plan, and return the exit code.

    Args:
        folder: The folder of the sweep.
        number: The number of the pack.
        on_gpu: Whether the supervisor gave a GPU to the process, so that device=auto must not choose the CPU.
    """
    from normlab.errors import OUT_OF_MEMORY, NormlabError, OutOfMemoryError, is_out_of_memory, one_line

    try:
        return _train(folder, number, on_gpu)
    except NormlabError as error:
        code, message = OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else 2, str(error)
    except Exception as error:
        traceback.print_exc()
        code, message = OUT_OF_MEMORY if is_out_of_memory(error) else 1, f"{type(error).__name__}: {error}"
        if "vmap" in message:  # it draws random numbers, or reads a value on the host
            message = f"the norm or the placement cannot train in a pack; use sweep.pack=off ({message})"
    print(f"{ERROR_PREFIX}{one_line(message)}", file=sys.stderr, flush=True)
    return code


def _train(folder: Path, number: int, on_gpu: bool) -> int:
    from normlab.config.schema import load_config
    from normlab.errors import ConfigError
    from normlab.store.plans import read_plan, run_of
    from normlab.tracking.background import wait_for_followers
    from normlab.training import run as training
    from normlab.training.machine import NO_GPU, resolve_device

    plan = read_plan(folder)
    runs = plan.runs_of(plan.pack_of(number))
    results, configs = folder.parent.parent, []
    for run in runs:
        config = load_config(run.config)
        if os.path.realpath(config.results_dir) != os.path.realpath(results):  # the results folder was moved
            config.results_dir = str(results)
        if on_gpu and config.device == "auto" and resolve_device(config) == "cpu":
            raise ConfigError(f"device=auto: {NO_GPU}, and the sweep was planned for a GPU; check it with nvidia-smi")
        configs.append(config)
    wait_until_inactive([run_of(folder, run) for run in runs])
    pack = {"sweep": plan.name, "number": number, "runs": [run.run_id for run in runs]}
    # Slurm sends SIGTERM to every process of a task, and the parent sends another. SIGKILL ends the process at once.
    outcomes = training.train_pack(configs, pack=pack, only_first_signal=True)
    if "SLURM_JOB_ID" in os.environ:  # Slurm ends all processes of a task with the task
        wait_for_followers()
    stopped = next((outcome.signal for outcome in outcomes if outcome.signal), None)
    return 128 + stopped if stopped else 0


def wait_until_inactive(runs: Sequence[RunFolder]) -> None:
    """Wait until the processes of a killed supervisor have written their checkpoints."""
    deadline = time.monotonic() + GRACE_S + 5
    while any(run.is_active() for run in runs) and time.monotonic() < deadline:
        time.sleep(0.1)


def _stop_with_parent() -> None:
    """Stop this process when standard input closes; kill its session after `GRACE_S`."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    limit_spinning()
    # Slurm may send its notices to every process of a task; only the parent must handle them.
    for notice in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(notice, signal.SIG_IGN)
    threading.Thread(target=_stop_with_parent, name="normlab parent", daemon=True).start()
    # When memory runs out, the system then kills this process and not the supervisor.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    *flags, sweep, pack = sys.argv[1:]
    sys.exit(main(Path(sweep), int(pack), on_gpu="--gpu" in flags))
