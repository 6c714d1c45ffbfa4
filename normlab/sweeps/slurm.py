"""Run the packs of a sweep in Slurm: array jobs with a task per pack, submitted by submitit.

No process needs to watch the tasks: `slurm/queue.json` lists the submitted packs, and each task writes its outcome. A
supervisor that is stopped does not stop the tasks, and the next supervisor watches them again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from normlab.config.sweep_options import SweepOptions
from normlab.errors import ConfigError, one_line
from normlab.store import plans
from normlab.store.files import io_error
from normlab.store.plans import Pack, PackOutcome, Plan, SubmittedPack
from normlab.sweeps.plan import all_completed
from normlab.sweeps.squeue import CAUSES, GONE_FOR_S, Squeue
from normlab.sweeps.task import Task

POLL_EVERY_S = 2.0
"""Seconds between two checks of the tasks' files; each check is a few requests to a shared disk per pack."""
MOST_IN_AN_ARRAY = 1000
"""Tasks of one array job: Slurm's default limit."""
MOST_REQUEUES = 1000
"""Most times that a pack may reach its time limit."""
NOTICE_S = 120
"""Seconds before the time limit at which Slurm sends a signal."""


class SlurmExecutor:
    """Submits packs to Slurm, and reads their outcomes; has the methods of `LocalExecutor`.

    Args:
        folder: The folder of the sweep.
        options: Resources of a task, number of tasks at once, and timeout.
        on_start: Called with the number of each pack whose task has started.

    Raises:
        ConfigError: submitit or Slurm is not installed.
    """

    def __init__(self, folder: Path, options: SweepOptions, on_start: Callable[[int], None]) -> None:
        try:
            from submitit.core.utils import JobPaths
        except ModuleNotFoundError:
            raise ConfigError(
                "sweep.on=slurm: needs submitit, which is not installed; pip install submitit, or use sweep.on=local"
            ) from None
        self._folder, self._options, self._on_start = folder, options, on_start
        self._slurm_folder = plans.slurm_folder(folder).absolute()
        self._paths = lambda number: JobPaths(self._slurm_folder, self._queue[number].job)
        self._queue: dict[int, SubmittedPack] = {}
        self._not_started: set[int] = set()
        self._squeue = Squeue()
        self._polled = -POLL_EVERY_S
        if options.on == "slurm":
            _require_slurm(options.slurm.cluster)

    def load_queue(self) -> None:
        """Watch the packs that were submitted before; the caller must hold the lock of the sweep.

        Raises:
            ConfigError: A pack was submitted to Slurm, which is not installed on this machine.
            StoreError: The queue cannot be read.
        """
        self._queue = plans.read_queue(self._folder)
        for submitted in self._queue.values():
            _require_slurm(submitted.cluster)
        self._not_started = set(self._queue)

    @property
    def active(self) -> set[int]:
        """The numbers of the packs that are queued or running; empty after `stop`."""
        return set(self._queue)

    @property
    def cancel_command(self) -> str:
        """The command that ends all tasks."""
        jobs = {submitted.job.partition("_")[0]: submitted.cluster for submitted in self._queue.values()}
        return " ".join(["scancel" if "slurm" in jobs.values() else "kill", *sorted(jobs)])

    def submit(self, plan: Plan, waiting: Sequence[Pack]) -> list[Pack]:
        """Submit all waiting packs.

        Raises:
            ConfigError: Slurm rejects the job.
        """
        for first in range(0, len(waiting), MOST_IN_AN_ARRAY):
            self._submit_array(plan, waiting[first : first + MOST_IN_AN_ARRAY])
        return []

    def outcomes(self, plan: Plan) -> Iterator[PackOutcome]:
        """Yield the outcome of each pack whose task has ended; report tasks that have started."""
        if time.monotonic() - self._polled >= POLL_EVERY_S:
            self._polled = time.monotonic()
            for number in sorted(self._not_started & {pack.number for pack in plan.packs}):
                if self._paths(number).stdout.exists():
                    self._not_started.remove(number)
                    self._on_start(number)
            yield from self.tasks_over(plan)

    def tasks_over(self, plan: Plan, *, at_once: bool = False) -> Iterator[PackOutcome]:
        """Yield the outcome of each pack whose task has ended, with or without a result.

        Args:
            plan: The plan of the sweep.
            at_once: Whether a task counts as ended as soon as it is out of Slurm's queue, not after `GONE_FOR_S`.
        """
        packs = {pack.number: pack for pack in plan.packs}
        for number, state in self._ended(0.0 if at_once else GONE_FOR_S).items():
            if number in packs:  # otherwise the pack was halved already
                completed = all_completed(self._folder, plan.runs_of(packs[number]))
                written = plans.read_task_outcome(self._folder, number)
                yield written or _outcome_of_state(number, state, completed=completed)
            del self._queue[number]
            self._not_started.discard(number)
            plans.write_queue(self._folder, self._queue)

    def stop(self, *, again: bool) -> str:
        """Stop watching; the tasks continue, because a shell on a login node dies easily."""
        del again
        packs = "1 pack continues" if len(self._queue) == 1 else f"{len(self._queue)} packs continue"
        command, self._queue, self._not_started = self.cancel_command, {}, set()
        return f"stopped watching: {packs} in Slurm; use the same command to watch again, or `{command}` to cancel"

    def close(self) -> None:
        """Do nothing, because the tasks need no supervisor."""

    def _submit_array(self, plan: Plan, packs: Sequence[Pack]) -> None:
        from submitit import AutoExecutor
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        options = self._options.slurm
        try:
            self._slurm_folder.mkdir(exist_ok=True)
            for pack in packs:
                plans.delete_task_outcome(self._folder, pack.number)
        except OSError as error:
            raise io_error(self._slurm_folder, "written", error) from error
        parts = (option.partition("=") for option in options.extra)
        extra = {name: value if equals else True for name, equals, value in parts}  # the value of a flag is True
        executor = AutoExecutor(self._slurm_folder, cluster=options.cluster, slurm_max_num_timeout=MOST_REQUEUES)
        executor.update_parameters(
            name=plan.name,
            timeout_min=options.time_minutes,
            gpus_per_node=options.gpus or None,
            cpus_per_task=options.cpus,
            mem_gb=options.memory_gb,
            nodes=1,
            tasks_per_node=1,
            stderr_to_stdout=True,
            slurm_gpus_per_node=f"{options.gpu_type}:{options.gpus}" if options.gpu_type else None,
            slurm_partition=options.partition,
            slurm_account=options.account,
            slurm_signal_delay_s=NOTICE_S,
            slurm_array_parallelism=self._options.jobs or MOST_IN_AN_ARRAY,
            slurm_additional_parameters=extra or None,
        )
        folder = str(self._folder.absolute())
        try:
            with executor.batch():
                tasks = [Task(folder, pack.number, options.cpus, self._options.timeout_minutes) for pack in packs]
                jobs = [executor.submit(task) for task in tasks]
        except (FailedJobError, FailedSubmissionError) as error:
            raise ConfigError(
                f"sweep.on=slurm: Slurm rejected the job ({one_line(error)}); change the sweep.slurm options"
            ) from error
        for pack, job in zip(packs, jobs, strict=True):
            self._queue[pack.number] = SubmittedPack(options.cluster, job.job_id)
            self._not_started.add(pack.number)
        plans.write_queue(self._folder, self._queue)

    def _ended(self, gone_for_s: float) -> dict[int, str]:
        """Return the final state ("" if unknown) of each pack whose task has ended, by number."""
        ended: dict[int, str] = {}
        in_slurm: dict[str, int] = {}
        for number, submitted in self._queue.items():
            if self._paths(number).result_pickle.exists():
                ended[number] = "COMPLETED"
            elif submitted.cluster == "slurm":
                in_slurm[submitted.job] = number
            elif not _is_alive(int(submitted.job)):
                ended[number] = ""
        gone = self._squeue.gone(in_slurm, min_seconds=gone_for_s)
        return ended | {in_slurm[task]: state for task, state in gone.items()}


def _require_slurm(cluster: str) -> None:
    if cluster == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
        raise ConfigError(
            "sweep.on=slurm: Slurm is not installed on this machine (no sbatch or srun); start the sweep on a login "
            "node, or use sweep.on=local"
        )


def _outcome_of_state(number: int, state: str, *, completed: bool) -> PackOutcome:
    """Return the outcome of a task that wrote no outcome, by its final state in Slurm."""
    cause = plans.FINISHED if completed else CAUSES.get(state, plans.UNREPORTED)
    detail = {
        plans.FINISHED: "",
        plans.UNREPORTED: "its task was cancelled or killed: squeue no longer lists it",
        plans.EXITED: "the task exited without reporting an outcome; the error is in its log in slurm/",
        plans.MEMORY: f"Slurm state {state}; raise sweep.slurm.memory_gb",
        plans.INTERRUPTED: f"Slurm state {state}; the same command resumes it",
    }.get(cause, f"Slurm state {state}")
    return PackOutcome(number, cause, detail, None, 0.0, time.time())


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie process does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
