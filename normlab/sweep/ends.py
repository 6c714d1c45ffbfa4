"""Why a pack's process ended: from its exit code, its last words, and what its runs say of themselves."""

from __future__ import annotations

import signal
import time

from normlab.errors import one_line
from normlab.store.plans import EXITED, FINISHED, HUNG, INTERRUPTED, KILLED, MEMORY, RAISED, End
from normlab.sweep.process import Worker
from normlab.sweep.worker import ERROR, OUT_OF_MEMORY

_STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM))
"""Exit codes of a run that was asked to stop."""
_REFUSED = ("std::bad_alloc", "Cannot allocate memory", "CUDA out of memory")
"""What a library says that ends the process because it was given no memory."""


def end_of(worker: Worker, *, all_ended: bool) -> End:
    """How a process that has ended came to it.

    Args:
        worker: Its own.
        all_ended: Whether each of its runs has finished or diverged.
    """
    code = worker.process.returncode
    words = worker.last_words()
    cause, detail = _cause(worker, code, words, all_ended)
    return End(worker.pack.number, cause, one_line(detail), code, round(worker.seconds, 3), time.time())


def _cause(worker: Worker, code: int, words: list[str], all_ended: bool) -> tuple[str, str]:
    last = words[-1] if words else ""
    error = last.removeprefix(ERROR) if last.startswith(ERROR) else ""
    if code == 0 and all_ended:
        return FINISHED, ""
    if worker.told == HUNG:
        return HUNG, worker.why
    if worker.told == INTERRUPTED or code in _STOPPED or -code in (signal.SIGINT, signal.SIGTERM):
        return INTERRUPTED, "stopped; the same command goes on"
    if code == OUT_OF_MEMORY:
        return MEMORY, error or "the memory ran out"
    if code < 0:
        name = _name_of(-code)
        if -code == signal.SIGKILL and worker.system_was_short_of_memory():
            return MEMORY, "the system ended it for want of memory (SIGKILL)"
        if said := next((line for line in words if any(text in line for text in _REFUSED)), ""):
            return MEMORY, f"{said} ({name})"
        return KILLED, f"by {name}"
    if error:
        return RAISED, error
    return EXITED, f"with code {code}" + (f": {last}" if code and last else ", before its runs had ended")


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
