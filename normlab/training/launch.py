"""Train a run on several devices: start a process for each (a rank), and wait for their end.

The process that composed the config starts the ranks and trains nothing itself. Rank 0 opens the folder, resumes and
writes the record, as the process of a run on one device does; see `rank.py`.
"""

import json
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.base.errors import DISK_REFUSED, OUT_OF_MEMORY, DiskError, NormlabError, OutOfMemoryError
from normlab.base.options import plain_tree
from normlab.config.schema import RunConfig
from normlab.system.processes import collected_signals, kill_sessions, start_module
from normlab.training.machine import LOST, RESUMES

GRACE_S = 20
"""Seconds that the ranks have for their checkpoint after a signal; the supervisor of a sweep waits longer."""
POLL_S = 0.1


def train_on_devices(config: RunConfig, pack: Mapping[str, Any] | None) -> int | None:
    """Train a run with one rank per device; return the signal that stopped it, or None.

    Args:
        pack: As for `train_pack`.

    Raises:
        NormlabError: A rank ended with an error, or was killed; the message is that of the first one.
    """
    ranks: list[subprocess.Popen[Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, collected_signals() as received:
        content = {"config": plain_tree(config), "pack": pack, "folder": folder}
        try:
            for rank in range(config.devices):
                environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(config.devices)}
                ranks.append(start_module("normlab.training.rank", json.dumps(content), env=environment))
            failed = _wait(ranks, received)
        finally:
            kill_sessions(*(rank.pid for rank in ranks if rank.poll() is None))
        if received:
            return received[0]
        if not failed:
            return None
        code = min(failed.values())
        if code > 128:  # all ranks wrote a checkpoint and stopped after a signal
            return code - 128
        raise _error_of(failed, Path(folder))


def _wait(ranks: Sequence[subprocess.Popen[Any]], received: Sequence[int]) -> dict[int, int]:
    """Wait for the end of all ranks; return the exit codes of those that failed first, by rank.

    The ranks get the first signal that this process receives. The others are stopped if one fails.
    """
    failed: dict[int, int] = {}
    deadline = math.inf
    while None in [rank.poll() for rank in ranks]:
        if deadline == math.inf:
            failed = _failures(ranks)
            if received or failed:
                # The other ranks would wait in their next step for one that has ended.
                deadline = time.monotonic() + GRACE_S
                number = received[0] if received else signal.SIGTERM
                for rank in ranks:
                    rank.send_signal(number)
        elif time.monotonic() > deadline:
            kill_sessions(*(rank.pid for rank in ranks if rank.poll() is None))
        time.sleep(POLL_S)
    return failed or _failures(ranks)


def _failures(ranks: Sequence[subprocess.Popen[Any]]) -> dict[int, int]:
    return {number: rank.returncode for number, rank in enumerate(ranks) if rank.returncode}


def _error_of(failed: Mapping[int, int], folder: Path) -> NormlabError:
    """Return the error of the rank that failed first; others may have ended because it is gone."""
    messages: dict[int, str] = {}
    for rank in failed:
        path = folder / f"error_{rank}"
        if path.exists():
            messages[rank] = path.read_text()
    # A killed rank, then one with a message, then one that another rank has left.
    rank = min(failed, key=lambda rank: (failed[rank] >= 0, LOST in messages.get(rank, ""), rank not in messages))
    code, message = failed[rank], messages.get(rank)
    if code < 0:
        return NormlabError(f"rank {rank} was killed by {signal.Signals(-code).name}; {RESUMES}")
    if code == OUT_OF_MEMORY:
        return OutOfMemoryError(message or "")
    if code == DISK_REFUSED:
        return DiskError(message or "")
    if code == 2 and message is not None:
        return NormlabError(message)
    return NormlabError(f"rank {rank} failed: {message or f'exit code {code}'}; {RESUMES}")
