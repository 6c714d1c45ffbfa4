"""Train a run on several devices: start a process for each (a rank) by torch's elastic agent, and wait for their end.

The process that composed the config starts the ranks and trains nothing itself. Rank 0 opens the folder, resumes and
writes the record, as the process of a run on one device does; see `rank.py`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from normlab.config.schema import RunConfig
from normlab.errors import OUT_OF_MEMORY, NormlabError, OutOfMemoryError
from normlab.options import plain_tree
from normlab.training.machine import LOST, RESUMES
from normlab.training.signals import SIGNALS

GRACE_S = 20
"""Seconds that the ranks have for their checkpoint after a signal; the supervisor of a sweep waits longer."""
JOIN_S = 600
"""Seconds that the ranks have to meet."""


def train_on_devices(config: RunConfig, pack: Mapping[str, Any] | None) -> int | None:
    """Train a run with one rank per device; return the signal that stopped it, or None.

    Args:
        config: The run's config.
        pack: As for `train_pack`.

    Raises:
        NormlabError: A rank ended with an error, or was killed; the message is that of the first one.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in logging.root.manager.loggerDict:  # the agent reports each signal and each process that it stops
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    content = json.dumps({"config": plain_tree(config), "pack": pack, "command": sys.argv})
    with _handlers_restored(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as errors:
        launch = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=config.devices,
            run_id="normlab", max_restarts=0, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", rdzv_configs={"rank": 0, "timeout": JOIN_S},
            local_addr="localhost", shutdown_timeout=GRACE_S,
            logs_specs=DefaultLogsSpecs(errors), signals_to_handle="SIGTERM,SIGINT",
        )  # fmt: skip
        try:
            elastic_launch(launch, sys.executable)("-P", "-m", "normlab.training.rank", content)
        except SignalException as stopped:
            return int(stopped.sigval)
        except ChildFailedError as error:
            # All ranks wrote a checkpoint and stopped after a signal, or one failed.
            if (code := min(failure.exitcode for failure in error.failures.values())) > 128:
                return code - 128
            raise _error_of(error) from None
        except DistError as error:
            raise NormlabError(
                f"the processes of the run could not connect within {JOIN_S // 60} minutes "
                f"({error!s:.200}); see the logs; {RESUMES}"
            ) from error
    return None


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces in the main thread."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _error_of(failed: Any) -> NormlabError:
    """Return the error of the rank that failed first; the others end because it is gone."""
    has_message = {rank: os.path.exists(failure.error_file) for rank, failure in failed.failures.items()}
    rank, failure = min(
        failed.failures.items(),
        # A killed rank, then one with a message, then one that another rank has left.
        key=lambda item: (item[1].exitcode >= 0, LOST in item[1].message, not has_message[item[0]], item[1].timestamp),
    )
    if failure.exitcode < 0:
        return NormlabError(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}; {RESUMES}")
    if failure.exitcode == OUT_OF_MEMORY:
        return OutOfMemoryError(failure.message)
    if failure.exitcode == 2:
        return NormlabError(failure.message)
    reason = failure.message if has_message[rank] else f"exit code {failure.exitcode}"
    return NormlabError(f"rank {rank} failed: {reason}; {RESUMES}")
