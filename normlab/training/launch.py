"""Train a run on several devices: start a process for each (a rank) by torch's elastic agent, and wait for their end.

The process that composed the config starts the ranks and trains nothing itself. Rank 0 opens the folder, resumes and
writes the record, as the process of a run on one device does; see `rank.py`. On several nodes of a Slurm task, a
process on each node starts the ranks of its node, and torch's static rendezvous connects them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from normlab.config.schema import RunConfig
from normlab.errors import OUT_OF_MEMORY, NormlabError, OutOfMemoryError
from normlab.options import plain_tree

GRACE_S = 20
"""Seconds that the ranks have for their checkpoint after a signal; the supervisor of a sweep waits longer."""
JOIN_S = 600
"""Seconds that the processes of all nodes have to meet."""
RESUMES = "the same command resumes the run, and so does another devices=N"

LOST = "another rank of this run has ended"
"""Message of a rank whose peer is gone."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a Slurm task of a sweep; a single node outside of such a task."""

    count: int = 1
    index: int = 0
    """Index of this node."""
    endpoint: str = "localhost:0"
    """HOST:PORT at which the processes of all nodes meet."""

    @classmethod
    def current(cls) -> Nodes:
        """Return the nodes of the task that this process belongs to."""
        if os.environ.get("SUBMITIT_EXECUTOR") != "slurm":
            return cls()
        from submitit import JobEnvironment

        environment = JobEnvironment()
        if environment.num_nodes == 1:
            return cls()
        # All nodes derive the same port from the job, below those that the system gives to other connections.
        port = 20_000 + int(os.environ["SLURM_JOB_ID"]) % 10_000
        return cls(environment.num_nodes, environment.node, f"{environment.hostnames[0]}:{port}")


def train_on_devices(config: RunConfig, pack: Mapping[str, Any] | None) -> int | None:
    """Train a run with one rank per device; return the signal that stopped it, or None.

    Args:
        config: The run's config.
        pack: As for `train_pack`.

    Raises:
        NormlabError: A rank ended with an error, or was killed; the message is that of the first one.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    class ErrorFiles(DefaultLogsSpecs):
        """Gives each rank a file in memory for its error, so that nothing stays if all processes are killed."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            logs = super().reify(envs)
            for rank, environment in envs.items():
                file = os.memfd_create("normlab-error")
                error_files.callback(os.close, file)
                # The agent rejects the empty file of a killed rank; with this time, a rank with a message comes first.
                os.write(file, b'{"message": "", "timestamp": "9999999999"}')
                logs.error_files[rank] = f"/proc/{os.getpid()}/fd/{file}"
                environment["TORCHELASTIC_ERROR_FILE"] = logs.error_files[rank]
            return logs

    for name in logging.root.manager.loggerDict:  # the agent reports each signal and each process that it stops
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    content = json.dumps({"config": plain_tree(config), "pack": pack, "command": sys.argv})
    arguments = ["-P", "-m", "normlab.training.rank", content]
    nodes = Nodes.current()
    with contextlib.ExitStack() as error_files, _handlers_restored():
        launch = LaunchConfig(
            min_nodes=nodes.count, max_nodes=nodes.count, nproc_per_node=config.devices // nodes.count,
            run_id="normlab", max_restarts=0, rdzv_backend="c10d" if nodes.count == 1 else "static",
            rdzv_endpoint=nodes.endpoint, rdzv_configs={"rank": nodes.index, "timeout": JOIN_S},
            local_addr="localhost" if nodes.count == 1 else None, shutdown_timeout=GRACE_S,
            logs_specs=ErrorFiles(os.devnull), signals_to_handle=",".join(_handled_signals()),
        )  # fmt: skip
        try:
            elastic_launch(launch, sys.executable)(*arguments)
        except SignalException as stopped:
            return int(stopped.sigval)
        except ChildFailedError as error:
            if received := _signal_of(error):
                return received
            raise _error_of(error, nodes) from None
        except DistError as error:
            raise NormlabError(
                f"the processes of the run could not connect at {nodes.endpoint} within {JOIN_S // 60} minutes "
                f"({error!s:.200}); see the logs; {RESUMES}"
            ) from error
    return None


def _handled_signals() -> list[str]:
    """Return the names of the signals that end the run; nohup ignores SIGHUP, and the agent must not undo that."""
    names = ["SIGTERM", "SIGINT"]
    return names if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*names, "SIGHUP"]


def _signal_of(failed: Any) -> int | None:
    """Return the signal after which all ranks wrote a checkpoint and stopped, or None."""
    codes = {failure.exitcode for failure in failed.failures.values()}
    return min(codes) - 128 if min(codes) > 128 else None


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not None}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # not the main thread, in which the agent replaces none
            for number, handler in before.items():
                signal.signal(number, handler)


def _error_of(failed: Any, nodes: Nodes) -> NormlabError:
    """Return the error of the rank that failed first; the others end because it is gone."""
    rank, failure = min(
        failed.failures.items(), key=lambda item: (item[1].exitcode >= 0, LOST in item[1].message, item[1].timestamp)
    )
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return NormlabError(f"rank {rank} was killed by {name}; {RESUMES}")
    if failure.exitcode == OUT_OF_MEMORY:
        return OutOfMemoryError(failure.message)
    if failure.exitcode == 2:
        where = "; see the logs of the other nodes" if nodes.count > 1 and LOST in failure.message else ""
        return NormlabError(failure.message + where)
    reason = failure.message if failure.error_file_data["message"] else f"exit code {failure.exitcode}"
    return NormlabError(f"rank {rank} failed: {reason}; {RESUMES}")
