"""Packs in Slurm: an array job with a task for each, handed over by submitit.

The tasks need nobody who watches them: whoever asks later finds in `slurm/queue.json` what was handed over, and from
each task what it came to. So the supervisor that is stopped leaves them, and the next one takes up where it was.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from normlab.errors import ConfigError, one_line
from normlab.store.files import refusal
from normlab.store.plans import FINISHED, INTERRUPTED, KILLED, LOST, MEMORY, End, Pack, Plan
from normlab.store.queue import Handed, forget_end, handed_to, read_end, read_queue, write_queue
from normlab.sweep.options import SweepOptions
from normlab.sweep.plan import is_done
from normlab.sweep.squeue import GONE_FOR_S, Squeue
from normlab.sweep.task import NOTICE_S, Task

LOOK_EVERY_S = 2.0
"""Seconds between two looks at what the tasks have written: each is a few requests to a shared disk for every pack."""
MOST_IN_AN_ARRAY = 1000
"""Tasks of one array job: what Slurm allows unless it was told otherwise."""
MOST_REQUEUES = 1000
"""How often a pack may reach its time limit: each time it has come further."""
_STOPPED = ("CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED", "REVOKED", "INTERRUPTED")
"""Slurm's states (the last is submitit's own) of a task that was stopped from outside, and can be resumed."""


class Slurm:
    """Hands the packs of a sweep to Slurm, and hears from them.

    Args:
        folder: The sweep's.
        options: What is asked for each, how many at once, and how long they may be silent.

    Raises:
        ConfigError: submitit or Slurm is not there.
    """

    def __init__(self, folder: Path, options: SweepOptions) -> None:
        try:
            import submitit
        except ModuleNotFoundError:
            raise ConfigError(
                "sweep.on=slurm: needs submitit, which is not installed; pip install submitit, or use sweep.on=local"
            ) from None
        self._folder, self._options = folder, options
        self._place = handed_to(folder).absolute()
        self._kinds: dict[str, Any] = {"slurm": submitit.SlurmJob, "local": submitit.LocalJob}
        self._queue: dict[int, Handed] = {}
        self._jobs: dict[int, Any] = {}
        self._not_begun: set[int] = set()
        self._squeue = Squeue()
        self._looked = -LOOK_EVERY_S
        self._watched = True
        if options.on == "slurm":
            _require(options.slurm.cluster)

    def take_up(self) -> None:
        """Watch what was handed over before; whoever calls holds the sweep's lock.

        Raises:
            ConfigError: It was handed to Slurm, which is not there.
            StoreError: The note of it cannot be read.
        """
        self._queue = read_queue(self._folder)
        for number, handed in self._queue.items():
            _require(handed.cluster)
            self._jobs[number] = self._kinds[handed.cluster](self._place, handed.job)
        self._not_begun = set(self._queue)

    @property
    def under_way(self) -> set[int]:
        """The numbers of the packs that it has, queued or running; none once nobody watches them any more."""
        return set(self._queue) if self._watched else set()

    @property
    def cancel(self) -> str:
        """The command that ends all that it has."""
        jobs = {handed.job.partition("_")[0]: handed.cluster for handed in self._queue.values()}
        return " ".join(["scancel" if "slurm" in jobs.values() else "kill", *sorted(jobs)])

    def start(self, plan: Plan, waiting: Sequence[Pack]) -> list[Pack]:
        """Hand over all that waits, as one array job.

        Raises:
            ConfigError: Slurm does not take it.
        """
        for first in range(0, len(waiting), MOST_IN_AN_ARRAY):
            self._hand_over(plan, waiting[first : first + MOST_IN_AN_ARRAY])
        return []

    def begun(self) -> list[int]:
        """Those whose tasks have begun since it was last asked: each begins with a line in a log of its own."""
        begun = [number for number in self._not_begun if self._jobs[number].paths.stdout.exists()]
        self._not_begun -= set(begun)
        return sorted(begun)

    def ended(self, plan: Plan, *, patience_s: float | None = None) -> Iterator[End]:
        """Yield the end of each pack whose task is over.

        A task is over when it has left its result, or has been out of Slurm's queue for `patience_s` seconds
        (`GONE_FOR_S` unless given).
        """
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        packs = {pack.number: pack for pack in plan.packs}
        for number, state in self._over(GONE_FOR_S if patience_s is None else patience_s).items():
            if number in packs:  # else it was halved already
                done = is_done(self._folder, plan.members(packs[number]))
                yield read_end(self._folder, number) or _end_of_task(number, state, all_ended=done)
            del self._queue[number], self._jobs[number]
            self._not_begun.discard(number)
            write_queue(self._folder, self._queue)

    def stop(self, *, again: bool) -> str:
        """Leave them: a shell on a login node dies easily, and nothing here is needed by what runs there."""
        del again
        self._watched = False
        packs = "1 pack goes" if len(self._queue) == 1 else f"{len(self._queue)} packs go"
        return (
            f"no longer watching: {packs} on in Slurm; the same command watches them again, `{self.cancel}` ends them"
        )

    def close(self) -> None:
        """They go on by themselves."""

    def _hand_over(self, plan: Plan, packs: Sequence[Pack]) -> None:
        from submitit import AutoExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        asked = self._options.slurm
        try:
            self._place.mkdir(exist_ok=True)
            for pack in packs:
                forget_end(self._folder, pack.number)
        except OSError as error:
            raise refusal(self._place, "written", error) from error
        executor = AutoExecutor(self._place, cluster=asked.cluster, slurm_max_num_timeout=MOST_REQUEUES)
        executor.update_parameters(
            name=plan.name,
            timeout_min=asked.time_minutes,
            gpus_per_node=asked.gpus or None,
            cpus_per_task=asked.cpus,
            mem_gb=asked.memory_gb,
            nodes=1,
            tasks_per_node=1,
            stderr_to_stdout=True,
            slurm_gpus_per_node=f"{asked.gpu_type}:{asked.gpus}" if asked.gpu_type else None,
            slurm_partition=asked.partition,
            slurm_account=asked.account,
            slurm_signal_delay_s=NOTICE_S,
            slurm_array_parallelism=self._options.jobs or MOST_IN_AN_ARRAY,
            slurm_additional_parameters=dict(map(_said, asked.extra)) or None,
        )
        folder = str(self._folder.absolute())
        try:
            with executor.batch():
                tasks = [Task(folder, pack.number, asked.cpus, self._options.timeout_minutes) for pack in packs]
                jobs = [executor.submit(task) for task in tasks]
        except (FailedJobError, FailedSubmissionError) as error:
            raise ConfigError(
                f"sweep.on=slurm: Slurm did not take the job ({one_line(error)}); mend the words after sweep.slurm."
            ) from error
        for pack, job in zip(packs, jobs, strict=True):
            self._queue[pack.number] = Handed(asked.cluster, job.job_id)
            self._jobs[pack.number] = job
            self._not_begun.add(pack.number)
        write_queue(self._folder, self._queue)

    def _over(self, patience_s: float) -> dict[int, str]:
        """Return the packs whose tasks are over, by number, with the task's final state, "" if unknown."""
        over: dict[int, str] = {}
        in_slurm: dict[str, int] = {}
        for number, handed in self._queue.items():
            job = self._jobs[number]
            if handed.cluster == "slurm" and not job.paths.result_pickle.exists():
                in_slurm[handed.job] = number
            elif handed.cluster == "slurm":
                over[number] = "COMPLETED"
            elif job.done() if job._process is not None else not _lives(int(job.job_id)):
                over[number] = str(job.state)  # without a process: another process of ours started it
        gone = self._squeue.gone(in_slurm, patience_s=patience_s)
        return over | {in_slurm[task]: state for task, state in gone.items()}


def _require(cluster: str) -> None:
    if cluster == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
        raise ConfigError(
            "sweep.on=slurm: there is no Slurm here (neither sbatch nor srun); start it where jobs are submitted from, "
            "or use sweep.on=local"
        )


def _said(word: str) -> tuple[str, str | bool]:
    """An option of sbatch's and its value; of a switch that it is on."""
    name, equals, value = word.partition("=")
    return name, value if equals else True


def _end_of_task(number: int, state: str, *, all_ended: bool) -> End:
    """Return the end of a task that reported none, by its final state in Slurm."""
    if all_ended:
        cause, detail = FINISHED, ""
    elif not state:
        cause, detail = LOST, "no longer in squeue, and it reported no end: cancelled or killed"
    elif state == "OUT_OF_MEMORY":
        cause, detail = MEMORY, "Slurm state OUT_OF_MEMORY; raise sweep.slurm.memory_gb"
    elif state in _STOPPED:
        cause, detail = INTERRUPTED, f"Slurm state {state}; the same command resumes it"
    else:
        cause, detail = KILLED, f"Slurm state {state}"
    return End(number, cause, detail, None, 0.0, time.time())


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
