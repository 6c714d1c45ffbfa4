"""The outcome of a pack's process, from its exit code, its log, and the states of its runs."""

from __future__ import annotations

import signal
import time

from normlab.errors import one_line
from normlab.store.plans import EXITED, FINISHED, HUNG, INTERRUPTED, KILLED, MEMORY, RAISED, PackOutcome
from normlab.sweep.process import PackProcess
from normlab.sweep.worker import ERROR_PREFIX, OUT_OF_MEMORY

_STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM))
"""Exit codes of a run that was asked to stop."""
_MEMORY_MESSAGES = ("std::bad_alloc", "Cannot allocate memory", "CUDA out of memory")
"""Messages of libraries that abort the process when an allocation fails."""


def outcome_of_process(process: PackProcess, *, completed: bool) -> PackOutcome:
    """Return the outcome of a process that has exited.

    Args:
        process: The process.
        completed: Whether each of its runs has finished or diverged.
    """
    cause, detail = _cause(process, process.exit_code, process.log_tail(), completed)
    seconds = round(process.seconds, 3)
    return PackOutcome(process.pack.number, cause, one_line(detail), process.exit_code, seconds, time.time())


def _cause(process: PackProcess, code: int, log: list[str], completed: bool) -> tuple[str, str]:
    last = log[-1] if log else ""
    error = last.removeprefix(ERROR_PREFIX) if last.startswith(ERROR_PREFIX) else ""
    if code == 0 and completed:
        return FINISHED, ""
    if process.stop_cause == HUNG:
        return HUNG, process.stop_reason
    if process.stop_cause == INTERRUPTED or code in _STOPPED or -code in (signal.SIGINT, signal.SIGTERM):
        return INTERRUPTED, "stopped; the same command resumes it"
    if code == OUT_OF_MEMORY:
        return MEMORY, error or "out of memory"
    if code < 0:
        name = _signal_name(-code)
        if -code == signal.SIGKILL and process.system_ran_out_of_memory():
            return MEMORY, "the system ran out of memory and killed it (SIGKILL)"
        if message := next((line for line in log if any(text in line for text in _MEMORY_MESSAGES)), ""):
            return MEMORY, f"{message} ({name})"
        return KILLED, f"by {name}"
    if error:
        return RAISED, error
    return EXITED, f"with code {code}" + (f": {last}" if code and last else ", before its runs were completed")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
