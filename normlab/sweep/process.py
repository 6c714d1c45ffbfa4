"""A pack's process, seen from its supervisor: started in a session of its own, watched, and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from normlab.store.files import io_error
from normlab.store.plans import HUNG, INTERRUPTED, Pack, Plan, log_of, run_of
from normlab.store.schema import METRICS_FILE

POLL_EVERY_S = 0.1
"""Seconds between two checks of a process."""
GRACE_S = 30.0
"""Seconds that a run may take to write its checkpoint after it is asked to stop."""
GRACE_WHEN_HUNG_S = 5.0
"""The same for a process that hangs."""


class PackProcess:
    """A running pack.

    Args:
        folder: The sweep's.
        plan: Its plan, which is on the disk already.
        pack: The pack to train.
        threads: Threads of the process unless OMP_NUM_THREADS is set; None leaves the choice to torch.

    Raises:
        StoreError: Its log cannot be written.
    """

    def __init__(self, folder: Path, plan: Plan, pack: Pack, threads: int | None) -> None:
        self.pack = pack
        self.jobs = plan.jobs_of(pack)
        self.stop_cause: str | None = None
        """Cause of the outcome if the supervisor stopped the process."""
        self.stop_reason = ""
        """The same as text."""
        self._started = time.monotonic()
        self._runs = [run_of(folder, job) for job in self.jobs]
        self._log = log_of(folder, pack.number)
        self._memory_kills_before = _memory_kills()
        self._kill_at = float("inf")
        self._last_signs: list[tuple[int, int]] = []
        self._last_change = self._started
        # -P: a file of the current folder is never imported in place of a module.
        command = [sys.executable, "-P", "-m", "normlab.sweep.worker", str(folder.absolute()), str(pack.number)]
        try:
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("ab") as log:
                self._log_start = log.seek(0, os.SEEK_END)
                # No other process inherits this end of the pipe, so it closes when the supervisor dies.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment(threads),
                    start_new_session=True,
                )
        except OSError as error:
            raise io_error(self._log, "written", error) from error

    @property
    def exit_code(self) -> int:
        """The exit code of a process that has exited; minus the number of the signal that ended it."""
        return self._process.returncode

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def has_exited(self) -> bool:
        """Whether the process has exited; after a failure the rest of its session is killed too."""
        if self._process.poll() is None:
            return False
        if self._process.returncode:
            self._kill_session()
        self.close_pipe()
        return True

    def check_timeout(self, timeout_minutes: float) -> None:
        """Stop the process if it wrote nothing for too long; kill it if it was asked to stop and did not."""
        self.kill_if_overdue()
        if self.stop_cause is None and (silent := self._seconds_silent()) > 60 * timeout_minutes:
            reason = f"wrote nothing for {silent:.0f} s (sweep.timeout_minutes={timeout_minutes:.3g})"
            self.stop(HUNG, GRACE_WHEN_HUNG_S, reason)

    def stop(self, cause: str = INTERRUPTED, grace: float = GRACE_S, reason: str = "") -> None:
        """Ask the process to write a checkpoint and stop; after `grace` seconds `kill_if_overdue` kills it."""
        if self.stop_cause is None:
            self.stop_cause, self.stop_reason = cause, reason
            self._kill_at = time.monotonic() + grace
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill_if_overdue(self) -> None:
        """Kill a process that was asked to stop and whose grace period is over."""
        if time.monotonic() > self._kill_at:
            self._kill_session()

    def kill(self, cause: str) -> None:
        """Kill the process and everything that it started."""
        self.stop_cause = self.stop_cause or cause
        self._kill_session()

    def close_pipe(self) -> None:
        """Close the pipe to the process, which makes it stop if it still runs."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def system_ran_out_of_memory(self) -> bool:
        """Whether the system has killed a process for lack of memory since this one started."""
        return _memory_kills() > self._memory_kills_before

    def log_tail(self, lines: int = 20) -> list[str]:
        """Return the last lines that the process wrote to its log, without blank ones."""
        try:
            with self._log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - 16_384))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def _seconds_silent(self) -> float:
        """Return the seconds since a byte was written to the log or to the record of one of the runs."""
        # Replacing a file, a status or a checkpoint, changes the folder.
        paths = [path for run in self._runs for path in (run.path, run.path / METRICS_FILE)]
        signs = [_size_and_time(path) for path in (*paths, self._log)]
        if signs != self._last_signs:
            self._last_signs, self._last_change = signs, time.monotonic()
        return time.monotonic() - self._last_change

    def _kill_session(self) -> None:
        # The process leads a session and so a process group with its own pid.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def threads_per_process(processes: int) -> int | None:
    """Return the threads of each of `processes`, which share the cores evenly; None leaves one process to torch."""
    return None if processes == 1 else max(1, (os.cpu_count() or 1) // processes)


def environment(threads: int | None) -> dict[str, str]:
    """Return the environment of a pack's process: this one's, with OMP_NUM_THREADS unless it is set."""
    return ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}) | os.environ


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def _memory_kills() -> int:
    """Return how many processes of this control group the system has killed for lack of memory so far."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        lines = Path("/sys/fs/cgroup", group.lstrip("/"), "memory.events").read_text().splitlines()
    except OSError:  # there is no such limit
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
