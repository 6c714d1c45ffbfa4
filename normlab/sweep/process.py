"""A pack's process as its supervisor has it: started in a session of its own, watched for signs of life, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from normlab.store.files import refusal
from normlab.store.plans import HUNG, INTERRUPTED, Pack, Plan, log_of, run_of
from normlab.store.schema import METRICS_FILE

LOOK_EVERY_S = 0.1
"""Seconds between two looks at a process."""
PATIENCE_S = 30.0
"""How long a run that is asked to stop may take to its checkpoint."""
PATIENCE_WITH_HUNG_S = 5.0
"""As much for one that has shown no sign of life."""


class Worker:
    """A running pack.

    Args:
        folder: The sweep's.
        plan: Its plan, which is on the disk already.
        pack: What to train.
        threads: Threads for each process where the environment does not say; None to leave it to torch.

    Raises:
        StoreError: Its log cannot be written.
    """

    def __init__(self, folder: Path, plan: Plan, pack: Pack, threads: int | None) -> None:
        self.pack = pack
        self.members = plan.members(pack)
        self.started = time.monotonic()
        self.told: str | None = None
        """Why the supervisor ended it, if it did: one of the causes of an end."""
        self.why = ""
        """The same in words."""
        self._runs = [run_of(folder, job) for job in self.members]
        self._log = log_of(folder, pack.number)
        self._kills_before = _out_of_memory_kills()
        self._insist_at = float("inf")
        self._seen: list[tuple[int, int]] = []
        self._seen_at = self.started
        # -P: a file of the current folder is never imported in place of a module.
        command = [sys.executable, "-P", "-m", "normlab.sweep.worker", str(folder.absolute()), str(pack.number)]
        try:
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("ab") as log:
                self._log_from = log.seek(0, os.SEEK_END)
                # What others hold of the pipe they would hold open; this end is inherited by nobody.
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment(threads),
                    start_new_session=True,
                )
        except OSError as error:
            raise refusal(self._log, "written", error) from error

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return time.monotonic() - self.started

    def ended(self) -> bool:
        """Whether the process has ended; what it may have left of its own session is ended too, unless all was well."""
        if self.process.poll() is None:
            return False
        if self.process.returncode:
            self._signal_all(signal.SIGKILL)
        self.let_go()
        return True

    def silent_for(self) -> float:
        """Seconds since a byte was written to its log or to the record of one of its runs."""
        seen = list(self._signs())
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at

    def mind(self, timeout_minutes: float) -> None:
        """Look after what runs: it is ended where it has been silent for too long, or asked to stop and did not."""
        self.insist()
        if self.told is None and (silent := self.silent_for()) > 60 * timeout_minutes:
            allowed = f"{timeout_minutes:.3g} minutes"
            why = f"no sign of life for {silent:.0f} s, of {allowed} that it may take"
            self.stop(HUNG, PATIENCE_WITH_HUNG_S, why)

    def stop(self, cause: str = INTERRUPTED, patience: float = PATIENCE_S, why: str = "") -> None:
        """Ask it to write a checkpoint and stop; once `patience` seconds are over `insist` kills it."""
        if self.told is None:
            self.told, self.why = cause, why
            self._insist_at = time.monotonic() + patience
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def insist(self) -> None:
        """Kill what was asked to stop and has had its time."""
        if time.monotonic() > self._insist_at:
            self._signal_all(signal.SIGKILL)

    def kill(self, cause: str) -> None:
        """End it and all that it has started at once."""
        self.told = self.told or cause
        self._signal_all(signal.SIGKILL)

    def let_go(self) -> None:
        """Close the pipe: where it still runs, it stops by itself."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def system_was_short_of_memory(self) -> bool:
        """Whether the system has ended a process for want of memory since this one began."""
        return _out_of_memory_kills() > self._kills_before

    def last_words(self, lines: int = 20) -> list[str]:
        """The last lines that it wrote to its log, blank ones left out."""
        try:
            with self._log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_from, size - 16_384))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def _signal_all(self, number: int) -> None:
        # It leads a session and so a group, whose number is its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _signs(self) -> Iterator[tuple[int, int]]:
        for run in self._runs:
            # Whatever is replaced whole, a status or a checkpoint, leaves its mark on the folder.
            yield _size_and_time(run.path)
            yield _size_and_time(run.path / METRICS_FILE)
        yield _size_and_time(self._log)


def threads_each(at_once: int) -> int | None:
    """Threads of each of so many processes, which share the cores evenly; None leaves one alone to torch."""
    return None if at_once == 1 else max(1, (os.cpu_count() or 1) // at_once)


def environment(threads: int | None) -> dict[str, str]:
    """Of a pack's process: ours, with so many threads where it does not say; None leaves them to torch."""
    return ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}) | os.environ


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _out_of_memory_kills() -> int:
    """How many processes the system has ended for want of memory so far, of those that share a limit with us."""
    try:
        ours = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        lines = Path("/sys/fs/cgroup", ours.lstrip("/"), "memory.events").read_text().splitlines()
    except OSError:  # no such limit here
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
