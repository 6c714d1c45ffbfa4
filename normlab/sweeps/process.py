"""A worker process (`worker.py`) and the packs that it trains: start, watch, stop, and the cause of the end.

A worker trains packs one after another, so that torch, the context of a GPU and compiled code are loaded once. It leads
a session, so that a signal reaches all its child processes.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from normlab.base.errors import is_out_of_memory, one_line
from normlab.store.files import io_error
from normlab.store.format import FAILED, FINISHED, INTERRUPTED
from normlab.store.plans import Pack, Plan, run_of
from normlab.sweeps.files import MEMORY, Answer, PackOutcome, log_of, open_log
from normlab.sweeps.measured_packs import kind_beside
from normlab.sweeps.worker import GRACE_S, STOPPED
from normlab.system.cgroup import limits
from normlab.system.processes import STOP_SIGNALS, children_of, kill_sessions, start_module
from normlab.training.machine import Gpu

POLL_EVERY_S = 0.1
"""Seconds between two checks of a process."""
REAP_S = 30.0
"""Longest wait for the end of a killed process, which may hang in a driver of the kernel."""
_PROCESS_OPTIONS = ("device", "devices", "precision", "compile", "deterministic", "plugins")
"""Options that set global switches of torch, or run code of the user: packs that differ in them share no process."""


def process_options(plan: Plan, pack: Pack) -> dict[str, Any]:
    config = plan.runs_of(pack)[0].config
    return {name: config[name] for name in _PROCESS_OPTIONS}


class WorkerProcess:
    """A process that trains packs with equal `process_options` one after another.

    It has `threads` unless OMP_NUM_THREADS is set, and sees only the GPUs `gpus`; without any, torch chooses.

    Raises:
        StoreError: The log cannot be written, or the system has no memory for another process.
    """

    def __init__(self, folder: Path, options: dict[str, Any], threads: int, gpus: Sequence[Gpu], log: Path) -> None:
        self.options, self.gpus = options, list(gpus)
        self.is_new = True
        """Whether the process has not trained a pack yet."""
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
        # No other process inherits the ends of the connection, so that of the worker closes when the supervisor dies.
        self.connection, end = Pipe()
        arguments = [str(end.fileno()), str(folder.absolute())]
        if gpus:
            arguments.insert(0, "--gpu")
        try:
            log.parent.mkdir(exist_ok=True)
            with end, open_log(log) as output:
                files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "pass_fds": [end.fileno()]}
                self._process = start_module("normlab.sweeps.worker", *arguments, env=environment, **files)
        except OSError as error:
            raise io_error(log, "written", error) from error

    def train(self, number: int) -> None:
        # If the process has ended, `exit_code` reports it.
        with contextlib.suppress(OSError):
            self.connection.send(number)

    def answer(self) -> Answer | None:
        """Return the answer of the process at the end of the pack; None before it."""
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError):
            # At its end, a connection is always ready, so that `wait` would return at once.
            self.connection.close()
        return None

    def exit_code(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended the process; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Let the process write a checkpoint and exit."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process, its children, and the ranks of a run on several devices, each of which leads a session."""
        leaders = [self._process.pid]
        if self.options["devices"] > 1:
            leaders += children_of(self._process.pid)
        kill_sessions(*leaders)

    def end(self) -> None:
        self.kill()
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)


class RunningPack:
    """The training of a pack by a worker, which counts as hung if it writes nothing for `timeout_minutes`."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        pack: Pack,
        worker: WorkerProcess,
        timeout_minutes: float,
        packs_at_once: int = 1,
    ) -> None:
        self.pack, self.worker = pack, worker
        self._packs_at_once = packs_at_once
        self.is_idle = False
        """Whether the pack has ended and the worker can train another."""
        self._runs = [run_of(folder, run) for run in plan.runs_of(pack)]
        self._timeout_minutes = timeout_minutes
        self._ended: PackOutcome | None = None
        self._stopped: tuple[str, str] | None = None
        """Cause and detail of the outcome if the supervisor stopped the worker."""
        self._kill_at = float("inf")
        self._last_change, self._last_signs = time.monotonic(), list[tuple[int, int]]()
        self._memory_kills_before = _memory_kills()
        self._log = log_of(folder, pack.number)
        self._log_start = _size_and_time(self._log)[0]
        self._started = time.monotonic()
        worker.train(pack.number)

    def poll(self) -> PackOutcome | None:
        """Return the outcome of the pack, or None while it trains.

        Stop a worker that has written nothing for `timeout_minutes`, and kill one that has not stopped within the grace
        period.
        """
        # A signal may come while the outcome is written; then the pack is polled again.
        if self._ended is not None:
            return self._ended
        # The exit code first: an answer may come just before the end.
        code = self.worker.exit_code()
        answer = self.worker.answer()
        if answer is None and code is None:
            self._check_time()
            return None
        if answer is None:
            memory_kill = _memory_kills() > self._memory_kills_before
            answer = Answer(*cause_of_death(code or 0, self._log_tail(), memory_kill=memory_kill), can_continue=False)
        cause, detail = answer.cause, answer.detail
        if self._stopped is not None and cause != FINISHED:
            cause, detail = self._stopped
        # The signal may arrive after the answer, and the worker would stop in the next pack.
        self.is_idle = answer.can_continue and self._stopped is None
        if not self.is_idle:
            self.worker.end()
        measured = answer.measured
        if measured is not None:
            measured = replace(measured, kind=kind_beside(measured.kind, self._packs_at_once))
            if self.worker.is_new:
                start_seconds = time.monotonic() - self._started - measured.seconds
                measured = replace(measured, start_seconds=max(0.0, start_seconds))
        self.worker.is_new = False
        gpus = ",".join(gpu.uuid for gpu in self.worker.gpus)
        self._ended = PackOutcome(self.pack.number, cause, one_line(detail), gpus, measured)
        return self._ended

    def _check_time(self) -> None:
        silent = self._seconds_silent()
        if silent > 60 * self._timeout_minutes:
            detail = f"wrote nothing for {silent:.0f} s (sweep.timeout_minutes={self._timeout_minutes:.3g})"
            self.stop(FAILED, detail)
        if time.monotonic() > self._kill_at:
            self.worker.kill()

    def stop(self, cause: str = INTERRUPTED, detail: str = STOPPED) -> None:
        """Stop the worker with a checkpoint (SIGTERM); `poll` kills it after `GRACE_S`."""
        if self._stopped is None:
            self._stopped, self._kill_at = (cause, detail), time.monotonic() + GRACE_S
            self.worker.stop()

    def _log_tail(self, lines: int = 20) -> list[str]:
        """Return the last lines that the worker wrote to the log of the pack, without blank ones."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 16_384))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def _seconds_silent(self) -> float:
        """Return the seconds since the last write to the log or to the record of a run."""
        signs = [_size_and_time(self._log)]
        for run in self._runs:
            # A new status or checkpoint replaces a file, which changes the folder.
            signs += [_size_and_time(run.path), _size_and_time(run.metrics_path)]
        if signs != self._last_signs:
            self._last_signs, self._last_change = signs, time.monotonic()
        return time.monotonic() - self._last_change


def cause_of_death(code: int, log: Sequence[str], *, memory_kill: bool = False) -> tuple[str, str]:
    """Return cause and detail of the outcome of a pack whose process has ended without an answer.

    `code` is the exit code, or minus the number of the signal; `log` has the last lines of the pack's log; with
    `memory_kill`, the system has killed a process for lack of memory since the pack started.
    """
    # A process that has started handles these signals, and exits with a code of its own.
    if -code in STOP_SIGNALS:
        return INTERRUPTED, STOPPED
    name = f"signal {-code}"
    if -code in set(signal.Signals):
        name = signal.Signals(-code).name
    if -code == signal.SIGKILL and memory_kill:
        return MEMORY, f"the system ran out of memory and killed the process ({name})"
    # A library may print that memory ran out, and end the process itself.
    for line in log:
        if is_out_of_memory(line):
            return MEMORY, f"{line} ({name})"
    if code < 0:
        return FAILED, f"killed by {name}"
    if log:
        return FAILED, f"exited with code {code}: {log[-1]}"
    return FAILED, f"exited with code {code}"


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _memory_kills() -> int:
    # Empty if the group has no memory limit.
    lines = next(limits("memory", "memory.events"), "").splitlines()
    for line in lines:
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0
