"""Run the packs of a sweep in Slurm: array jobs with a task per pack (`task.py`), submitted by submitit.

No process needs to watch the tasks: `slurm/queue.json` lists the submitted packs, and each task writes its outcome. A
supervisor that is stopped does not stop the tasks, and the next supervisor watches them again.

squeue lists every pending or running task and, for some minutes (`MinJobAge`), the final state of a task. submitit asks
only sacct, which works only if accounting is set up. The failure of a command is no evidence that a task has ended.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from normlab.base.errors import ConfigError, counted, one_line
from normlab.config.sweep_options import SweepOptions
from normlab.store.files import io_error
from normlab.store.format import FAILED, FINISHED, INTERRUPTED
from normlab.store.plans import Pack, Plan
from normlab.sweeps import files
from normlab.sweeps.files import MEMORY, PackOutcome
from normlab.sweeps.stored_plan import all_completed
from normlab.sweeps.task import Task, ask
from normlab.training.machine import Gpu

POLL_EVERY_S = 15.0
"""Shortest time, in seconds, between two calls of squeue; one call asks for all tasks of a sweep."""
GONE_FOR_S = 60.0
"""Seconds after which a task outside the queue counts as ended if its outcome is missing, because files may be late."""
MOST_IN_AN_ARRAY = 1000
"""Tasks of one array job: Slurm's default limit."""
MOST_REQUEUES = 1000
"""Most times that a pack may reach its time limit."""
NOTICE_S = 120
"""Seconds before the time limit at which Slurm sends a signal."""
CAUSES = {
    **dict.fromkeys(("CANCELLED", "DEADLINE", "PREEMPTED", "REVOKED", "TIMEOUT"), INTERRUPTED),
    **dict.fromkeys(("BOOT_FAIL", "NODE_FAIL", "COMPLETED", "FAILED"), FAILED),
    "OUT_OF_MEMORY": MEMORY,
}
"""The final states in Slurm, and the cause of the outcome of a task that wrote no outcome.

In every other state a task is queued, running or about to be requeued.
"""


class SlurmExecutor:
    """Submits packs to Slurm, and reads their outcomes; an `Executor`.

    Raises:
        ConfigError: submitit or Slurm is not installed.
    """

    def __init__(self, folder: Path, options: SweepOptions, report: Callable[[str], None] = lambda _: None) -> None:
        self._folder, self._options, self._report = folder, options, report
        self._slurm_folder = files.slurm_folder(folder).absolute()
        self._queue: dict[int, str] = {}
        """The task of each submitted pack, by the number of the pack."""
        self._gone: dict[int, tuple[float, str]] = {}
        """By pack whose task is out of the queue: the time at which it left, and its final state ("" if unknown)."""
        self._polled = -float("inf")
        self._states = ""
        _require_slurm()

    def load_queue(self) -> None:
        """Watch the packs that were submitted before; the caller must hold the lock of the sweep.

        Raises:
            StoreError: The queue cannot be read.
        """
        self._queue = files.read_queue(self._folder)

    def take_over(self, plan: Plan) -> Iterator[PackOutcome]:
        """Watch the tasks of an earlier supervisor, and yield the outcomes of those that ended without one."""
        self.load_queue()
        yield from self.outcomes(plan)

    @property
    def active(self) -> set[int]:
        """The numbers of the packs that are queued or running; empty after `stop`."""
        return set(self._queue)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def submit(self, plan: Plan, waiting: Sequence[Pack]) -> list[Pack]:
        """Submit all waiting packs.

        Raises:
            ConfigError: Slurm rejects the job.
        """
        for first in range(0, len(waiting), MOST_IN_AN_ARRAY):
            self._submit_array(plan, waiting[first : first + MOST_IN_AN_ARRAY])
        return []

    def outcomes(self, plan: Plan) -> Iterator[PackOutcome]:
        """Yield the outcome of each pack whose task has ended, with or without writing an outcome."""
        if not self._queue or time.monotonic() - self._polled < POLL_EVERY_S:
            return
        self._polled = time.monotonic()
        self._ask_slurm()
        now, numbers_in_plan = time.monotonic(), {pack.number for pack in plan.packs}
        for number, (since, state) in sorted(self._gone.items()):
            outcome = files.read_task_outcome(self._folder, number)
            # Files may be late: without an outcome, only the time outside of the queue is evidence that there is none.
            has_ended = state == "CANCELLED" or (outcome is not None and state != "")
            if not has_ended and now - since < GONE_FOR_S:
                continue
            # A pack outside of the plan was halved already.
            if number in numbers_in_plan:
                yield outcome or self._outcome_of_state(plan, number, state)
            del self._gone[number], self._queue[number]
            files.write_queue(self._folder, self._queue)

    def _ask_slurm(self) -> None:
        """Note which tasks are out of the queue, and report new states of the others."""
        listed = ask(self._queue.values())
        if listed is None:
            return
        counts = Counter[str]()
        for number, task in self._queue.items():
            state, reason = listed.get(task, ("", ""))
            if state == "" or state in CAUSES:
                since, known_state = self._gone.get(number, (time.monotonic(), ""))
                # squeue lists a final state for some minutes only, so the known one stays.
                self._gone[number] = since, state or known_state
                continue
            # Only a task that waits has a reason.
            if state == "PENDING":
                counts[f"PENDING ({reason})"] += 1
            else:
                counts[state] += 1
            # A task that was queued again is back.
            self._gone.pop(number, None)
        states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        if states and states != self._states:
            self._report(f"tasks in Slurm: {states}")
            self._states = states

    def _outcome_of_state(self, plan: Plan, number: int, state: str) -> PackOutcome:
        """Return the outcome of a task that wrote no outcome, by its final state in Slurm and the log of the task."""
        from submitit.core.utils import JobPaths

        log = JobPaths(self._slurm_folder, self._queue[number]).stdout
        cause = CAUSES.get(state, FAILED)
        if all_completed(self._folder, plan.runs_of(plan.pack_of(number))):
            return PackOutcome(number, FINISHED)
        detail = f"Slurm state {state}" if state else "its task ended without an outcome"
        if cause == MEMORY:
            remedy = "raise sweep.slurm.memory_gb"
        elif cause == INTERRUPTED:
            remedy = "the same command resumes it"
        else:
            remedy = f"the log of the task is {os.path.relpath(log)}"
        return PackOutcome(number, cause, f"{detail}; {remedy}")

    def stop(self, *, again: bool) -> str:
        """Stop watching; the tasks continue, because a shell on a login node dies easily."""
        del again
        count = counted(len(self._queue), "pack")
        jobs = {task.partition("_")[0] for task in self._queue.values()}
        command = " ".join(["scancel", *sorted(jobs)])
        self._queue, self._gone = {}, {}
        return f"stopped watching {count} in Slurm; use the same command to watch again, or `{command}` to cancel"

    def close(self) -> None:
        """Do nothing, because the tasks need no supervisor."""

    def _submit_array(self, plan: Plan, packs: Sequence[Pack]) -> None:
        from submitit import AutoExecutor, Job
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        options = self._options.slurm
        try:
            self._slurm_folder.mkdir(exist_ok=True)
            for pack in packs:
                files.task_outcome_file(self._folder, pack.number).unlink(missing_ok=True)
        except OSError as error:
            raise io_error(self._slurm_folder, "written", error) from error
        extra: dict[str, str | bool] = {}
        for option in options.extra:
            name, equals, value = option.partition("=")
            # In submitit, the value of a flag is True.
            extra[name] = value if equals else True
        executor = AutoExecutor(self._slurm_folder, cluster="slurm", slurm_max_num_timeout=MOST_REQUEUES)
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
            # The user's default: submitit would set a key of its own, which a cluster may reject.
            slurm_wckey="",
            slurm_additional_parameters=extra or None,
            # Since Slurm 22.05, srun does not inherit the cores of sbatch, and may bind the task to one core.
            slurm_srun_args=[f"--cpus-per-task={options.cpus}"],
        )
        folder = str(self._folder.absolute())
        try:
            jobs: list[Job[str]] = []
            with executor.batch():
                for pack in packs:
                    task = Task(folder, pack.number, options.cpus, self._options.timeout_minutes)
                    jobs.append(executor.submit(task))
        except (FailedJobError, FailedSubmissionError) as error:
            raise ConfigError(
                f"sweep.on=slurm: Slurm rejected the job ({one_line(error)}); change the sweep.slurm options"
            ) from error
        # Only after the `with` block has submitted the array do its jobs have ids.
        for pack, job in zip(packs, jobs, strict=True):
            self._queue[pack.number] = job.job_id
        files.write_queue(self._folder, self._queue)


def _require_slurm() -> None:
    try:
        import submitit  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError(
            "sweep.on=slurm: needs submitit, which is not installed; pip install submitit, or use sweep.on=local"
        ) from None
    if not (shutil.which("sbatch") and shutil.which("srun")):
        raise ConfigError(
            "sweep.on=slurm: Slurm is not installed on this machine (no sbatch or srun); start the sweep on a login "
            "node, or use sweep.on=local"
        )


def make_executor(
    folder: Path, options: SweepOptions, gpus: Sequence[Gpu], report: Callable[[str], None]
) -> SlurmExecutor:
    """Return the executor of `sweep.on=slurm`.

    Raises:
        ConfigError: submitit or Slurm is not installed.
    """
    del gpus  # Slurm chooses those of each task
    return SlurmExecutor(folder, options, report)
