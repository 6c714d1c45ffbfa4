"""A worker process of this machine, and the packs that it trains: start, watch, stop, and the cause of the end.

A worker (`worker.py`) trains packs one after another, so that torch, the context of a GPU and compiled code are loaded
once. It leads a session, so that a signal reaches all its child processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

from normlab.errors import OUT_OF_MEMORY, is_out_of_memory, one_line
from normlab.store import plans
from normlab.store.files import io_error
from normlab.store.plans import Pack, PackOutcome, Plan
from normlab.sweeps.gpus import fault_of
from normlab.sweeps.plan import all_completed
from normlab.sweeps.worker import ERROR_PREFIX, GRACE_S, answer_of
from normlab.training.machine import Gpu

POLL_EVERY_S = 0.1
"""Seconds between two checks of a process."""
UNKILLABLE_S = 30.0
"""Seconds after SIGKILL at which a process counts as lost: it hangs in a driver of the kernel."""
_STOPPED = plans.INTERRUPTED, "stopped; the same command resumes it"
_STOP_CODES = tuple(code for number in (signal.SIGINT, signal.SIGTERM) for code in (128 + number, -number))
"""Exit codes of a process that a signal has stopped."""
_PROCESS_OPTIONS = ("device", "precision", "compile", "deterministic", "plugins")
"""Options that set global switches of torch, or run code of the user: packs that differ in them share no process."""


def process_options(plan: Plan, pack: Pack) -> dict[str, object]:
    """Return the options that all packs of a process share."""
    config = plan.runs_of(pack)[0].config
    return {name: config[name] for name in _PROCESS_OPTIONS}


class WorkerProcess:
    """A process that trains packs one after another (`worker.py`).

    Args:
        folder: The folder of the sweep.
        options: The `process_options` of its packs.
        threads: Threads of the process unless OMP_NUM_THREADS is set.
        gpus: The only GPUs that the process sees; without any, torch chooses.
        log: Receives what the process prints before its first pack.

    Raises:
        OSError: The system has no memory for another process.
    """

    def __init__(
        self, folder: Path, options: Mapping[str, object], threads: int, gpus: Sequence[Gpu], log: IO[bytes]
    ) -> None:
        self.options, self.gpus = options, gpus
        # -P: a file in the current folder must not replace a module.
        command = [sys.executable, "-P", "-m", "normlab.sweeps.worker", *(["--gpu"] if gpus else [])]
        environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
        # No other process inherits the ends of the pipes, so standard input closes when the supervisor dies.
        self._process = subprocess.Popen(
            [*command, str(folder.absolute())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        self._number = 0
        """The number of the latest pack."""
        self._earlier_children: list[int] = []
        """Children of earlier packs: followers, which still send the runs of those packs to W&B."""

    @property
    def pid(self) -> int:
        """The id of the process, which is also that of its session."""
        return self._process.pid

    def start(self, number: int, node: int) -> None:
        """Let the process train a pack."""
        assert self._process.stdin is not None
        self._number, self._earlier_children = number, _children_of(self.pid)
        with contextlib.suppress(OSError):  # the process has ended, as `exit_code` reports
            self._process.stdin.write(f"{number} {node}\n".encode())
            self._process.stdin.flush()

    @property
    def answers(self) -> int | None:
        """The file descriptor of the pipe on which the process answers; None once the process has closed it."""
        pipe = self._process.stdout
        return None if pipe is None or pipe.closed else pipe.fileno()

    def is_ready(self) -> bool:
        """Return whether the process has answered that its pack has ended and that it can train another."""
        if self.answers is None or not wait([self.answers], 0):
            return False
        if text := os.read(self.answers, 4096):
            return text.endswith(answer_of(self._number))  # code that Python runs at its start may print too
        assert self._process.stdout is not None
        self._process.stdout.close()  # at its end, a pipe is always readable
        return False

    def exit_code(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended the process; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Let the process write a checkpoint and exit."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        self.signal_all(signal.SIGCONT)  # a process that SIGSTOP suspends handles no SIGTERM

    def signal_all(self, number: int) -> None:
        """Send a signal to the process and the child processes of its pack."""
        # The process and each rank of a run on several devices lead a session: the id of a process group is its pid.
        for pid in (self.pid, *_children_of(self.pid)):
            if pid not in self._earlier_children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)

    def close_pipes(self) -> None:
        """Close the pipes to the process, which stops the process if it still runs."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def end(self) -> None:
        """End an idle process: it has written everything."""
        self._process.kill()
        self.close_pipes()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(UNKILLABLE_S)


class RunningPack:
    """The training of a pack by a worker.

    Args:
        folder: The folder of the sweep.
        plan: The plan of the sweep, as stored in the folder.
        pack: The pack to train.
        threads: Threads of a new worker unless OMP_NUM_THREADS is set.
        timeout_minutes: Minutes after which a worker that writes nothing counts as hung.
        gpus: The only GPUs that the worker sees; without any, torch chooses.
        worker: An idle worker with these GPUs and the pack's `process_options`; None starts one.
        node: Index of this node among those of the pack.

    Raises:
        StoreError: The log of the pack cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        pack: Pack,
        threads: int,
        timeout_minutes: float,
        gpus: Sequence[Gpu] = (),
        worker: WorkerProcess | None = None,
        node: int = 0,
    ) -> None:
        self.pack, self.gpus = pack, gpus
        self.idle_worker: WorkerProcess | None = None
        """The worker after the pack, if it can train another."""
        self.is_lost = False
        """Whether the worker did not end after SIGKILL."""
        self._folder, self._runs = folder, plan.runs_of(pack)
        self._timeout_minutes = timeout_minutes
        self._ended: PackOutcome | None = None
        self._stopped: tuple[str, str] | None = None
        """Cause and detail of the outcome if the supervisor stopped the worker."""
        self._kill_at = self._lost_at = float("inf")
        self._started = self._last_change = time.monotonic()
        self._last_signs: list[tuple[int, int]] = []
        self._memory_kills_before = _memory_kills()
        self._log = plans.log_of(folder, pack.number, node)
        try:
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("ab") as log:
                self._log_start = log.seek(0, os.SEEK_END)
                self._worker = worker or WorkerProcess(folder, process_options(plan, pack), threads, gpus, log)
        except OSError as error:
            raise io_error(self._log, "written", error) from error
        self._worker.start(pack.number, node)

    @property
    def answers(self) -> int | None:
        """The file descriptor of the pipe that becomes readable when the pack ends; None once it is closed."""
        return self._worker.answers

    def poll(self) -> PackOutcome | None:
        """Return the outcome of the pack, or None while it trains.

        Stop a worker that has written nothing for `timeout_minutes`, kill one that has not stopped within the grace
        period, and report one that survives the kill as lost. After a failure, kill the other processes of its session.
        """
        if self._ended is not None:  # a signal may come while the outcome is written
            return self._ended
        is_ready = self._worker.is_ready()
        code = 0 if is_ready else self._worker.exit_code()
        if code is None:
            if self._stopped is None and (silent := self.seconds_silent()) > 60 * self._timeout_minutes:
                detail = f"wrote nothing for {silent:.0f} s (sweep.timeout_minutes={self._timeout_minutes:.3g})"
                self.stop(plans.HUNG, detail)
            if time.monotonic() > self._kill_at:
                self.kill()
            if time.monotonic() > self._lost_at:
                self.is_lost = True
                self.close()
                # The process still holds the locks of its runs, so no other GPU can train them.
                detail = f"process {self._worker.pid} cannot be killed; reset its device, or restart the machine"
                return self._outcome(plans.HUNG, detail, None)
            return None
        if code:
            self.kill()
        if is_ready and self._stopped is None:
            self.idle_worker = self._worker
        else:  # the signal may arrive after the answer
            self._worker.end()
        cause, detail = cause_of_exit(
            code,
            self._log_tail(),
            completed=all_completed(self._folder, self._runs),
            stopped=self._stopped,
            memory_kill=_memory_kills() > self._memory_kills_before,
            on_gpu=bool(self.gpus),
        )
        return self._outcome(cause, detail, code)

    def _outcome(self, cause: str, detail: str, code: int | None) -> PackOutcome:
        seconds, gpus = round(time.monotonic() - self._started, 3), ",".join(gpu.uuid for gpu in self.gpus)
        self._ended = PackOutcome(self.pack.number, cause, one_line(detail), code, seconds, time.time(), gpus)
        return self._ended

    def stop(self, cause: str = _STOPPED[0], detail: str = _STOPPED[1]) -> None:
        """Stop the worker with a checkpoint (SIGTERM); `poll` kills it after `GRACE_S`."""
        if self._stopped is None:
            self._stopped, self._kill_at = (cause, detail), time.monotonic() + GRACE_S
            self._worker.stop()

    def kill(self) -> None:
        """Kill the worker and the child processes of its pack."""
        self._lost_at = min(self._lost_at, time.monotonic() + UNKILLABLE_S)
        self._worker.signal_all(signal.SIGKILL)

    def close(self) -> None:
        """End the worker if it is idle; else close the pipes to it, which stops it if it still runs."""
        if self.idle_worker is None:
            self._worker.close_pipes()
        else:
            self.idle_worker.end()

    def _log_tail(self, lines: int = 20) -> list[str]:
        """Return the last lines that the worker wrote to the log of the pack, without blank ones."""
        try:
            with self._log.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 16_384))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def seconds_silent(self) -> float:
        """Return the seconds since the last write to the log or to the record of a run."""
        runs = [plans.run_of(self._folder, run) for run in self._runs]
        # A new status or checkpoint replaces a file, which changes the folder.
        paths = [path for run in runs for path in (run.path, run.metrics_path)]
        signs = [_size_and_time(path) for path in (*paths, self._log)]
        if signs != self._last_signs:
            self._last_signs, self._last_change = signs, time.monotonic()
        return time.monotonic() - self._last_change


def cause_of_exit(
    code: int,
    log: Sequence[str],
    *,
    completed: bool,
    stopped: tuple[str, str] | None,
    memory_kill: bool,
    on_gpu: bool = False,
) -> tuple[str, str]:
    """Return the cause of a pack's outcome, and a detail as text.

    Args:
        code: Exit code of the process, or minus the number of the signal that ended it.
        log: The last lines of the pack's log.
        completed: Whether each run of the pack has finished or diverged.
        stopped: The cause and the detail if the supervisor stopped the process.
        memory_kill: Whether the system has killed any process for lack of memory since this process started.
        on_gpu: Whether the supervisor gave a GPU to the process.
    """
    last = log[-1] if log else ""
    error = last.removeprefix(ERROR_PREFIX) if last.startswith(ERROR_PREFIX) else ""
    if code == 0 and completed:
        return plans.FINISHED, ""
    if stopped or code in _STOP_CODES:
        return stopped or _STOPPED
    if code == OUT_OF_MEMORY:
        return plans.MEMORY, error or "out of memory"
    # A library that aborts the process writes its message without the prefix.
    if on_gpu and (fault := fault_of([error] if error else log)):
        return plans.GPU_FAULT, fault
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if -code == signal.SIGKILL and memory_kill:
            return plans.MEMORY, f"the system ran out of memory and killed the process ({name})"
        if message := next(filter(is_out_of_memory, log), ""):
            return plans.MEMORY, f"{message} ({name})"
        return plans.KILLED, f"by {name}"
    if error:
        return plans.RAISED, error
    return plans.EXITED, f"with code {code}" + (f": {last}" if code and last else ", before its runs were completed")


def _children_of(pid: int) -> list[int]:
    """Return the child processes that the main thread of a process has started; empty if it is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _memory_kills() -> int:
    """Return the number of processes in this cgroup that were killed for lack of memory."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        lines = Path("/sys/fs/cgroup", group.lstrip("/"), "memory.events").read_text().splitlines()
    except OSError:  # the group has no memory limit
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
