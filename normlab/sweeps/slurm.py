"""Run the packs of a sweep in Slurm: array jobs with a task per pack, submitted by submitit.

No process needs to watch the tasks: `slurm/queue.json` lists the submitted packs, and each task writes its outcome. A
supervisor that is stopped does not stop the tasks, and the next supervisor watches them again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
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
        on_requeue: Called with the number of each pack whose task has started and is queued again.
        on_message: Called with each message to the user.

    Raises:
        ConfigError: submitit or Slurm is not installed.
    """

    def __init__(
        self,
        folder: Path,
        options: SweepOptions,
        on_start: Callable[[int], None] = lambda _: None,
        on_requeue: Callable[[int], None] = lambda _: None,
        on_message: Callable[[str], None] = lambda _: None,
    ) -> None:
        try:
            from submitit.core.utils import JobPaths
        except ModuleNotFoundError:
            raise ConfigError(
                "sweep.on=slurm: needs submitit, which is not installed; pip install submitit, or use sweep.on=local"
            ) from None
        self._folder, self._options = folder, options
        self._on_start, self._on_requeue, self._on_message = on_start, on_requeue, on_message
        self._slurm_folder = plans.slurm_folder(folder).absolute()
        self._paths = lambda number: JobPaths(self._slurm_folder, self._queue[number].job)
        self._queue: dict[int, SubmittedPack] = {}
        self._not_started: set[int] = set()
        self._requeued: set[int] = set()
        """Those of `_not_started` that have started before."""
        self._states: dict[int, tuple[str, str]] = {}
        """State and reason to wait of each pack in the queue, until they are reported."""
        self._reasons: set[str] = set()
        """Slurm's reasons to wait that the user knows."""
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

    def wait(self, seconds: float) -> None:
        """Wait for some seconds."""
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
        """Yield the outcome of each pack whose task has ended; report tasks that have started or are queued again."""
        if time.monotonic() - self._polled >= POLL_EVERY_S:
            self._polled = time.monotonic()
            planned = {pack.number for pack in plan.packs}  # without those that were halved
            self._report_states(planned)
            for number in sorted(planned & self._not_started - self._requeued):
                if self._paths(number).stdout.exists():
                    self._report_start(number)
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
                yield written or _outcome_of_state(number, state, self._paths(number).stdout, completed=completed)
            del self._queue[number]
            self._not_started.discard(number)
            self._requeued.discard(number)
            plans.write_queue(self._folder, self._queue)

    def stop(self, *, again: bool) -> str:
        """Stop watching; the tasks continue, because a shell on a login node dies easily."""
        del again
        packs, command = _packs(len(self._queue), "continue"), self.cancel_command
        self._queue, self._not_started, self._requeued = {}, set(), set()
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
            nodes=options.nodes,
            tasks_per_node=1,
            stderr_to_stdout=True,
            slurm_gpus_per_node=f"{options.gpu_type}:{options.gpus}" if options.gpu_type else None,
            slurm_partition=options.partition,
            slurm_account=options.account,
            slurm_signal_delay_s=NOTICE_S,
            slurm_array_parallelism=self._options.jobs or MOST_IN_AN_ARRAY,
            slurm_wckey="",  # the user's default; submitit would set a key of its own, which a cluster may reject
            slurm_additional_parameters=extra or None,
            # Since Slurm 22.05, srun does not inherit the cores of sbatch, and may bind the task to one core.
            slurm_srun_args=[f"--cpus-per-task={options.cpus}"],
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
        if states := self._squeue.ask(in_slurm):
            self._states = {in_slurm[task]: state for task, state in states.items()}
        for task, (state, seconds) in self._squeue.gone(in_slurm).items():
            has_outcome = state and plans.read_task_outcome(self._folder, in_slurm[task]) is not None
            if has_outcome or state == "CANCELLED" or seconds >= gone_for_s:
                ended[in_slurm[task]] = state
        return ended

    def _report_states(self, planned: Collection[int]) -> None:
        """Report tasks that have started or are queued again, and the reasons to wait, by squeue's last answer."""
        states = {number: state for number, state in self._states.items() if number in planned}
        self._states = {}
        for number, (state, _) in states.items():
            if state == "PENDING" and number not in self._not_started:
                self._not_started.add(number)
                self._requeued.add(number)
                self._on_requeue(number)
            elif state == "RUNNING" and number in self._not_started:
                self._report_start(number)
        waiting = Counter(reason for state, reason in states.values() if state == "PENDING")
        for reason in sorted(waiting.keys() - self._reasons - {"", "None"}):
            self._on_message(f"{_packs(waiting[reason], 'wait')} in Slurm: {reason}")
        self._reasons |= waiting.keys()

    def _report_start(self, number: int) -> None:
        self._not_started.discard(number)
        self._requeued.discard(number)
        self._on_start(number)


def _packs(count: int, verb: str) -> str:
    return f"1 pack {verb}s" if count == 1 else f"{count} packs {verb}"


def _require_slurm(cluster: str) -> None:
    if cluster == "slurm" and not (shutil.which("sbatch") and shutil.which("srun")):
        raise ConfigError(
            "sweep.on=slurm: Slurm is not installed on this machine (no sbatch or srun); start the sweep on a login "
            "node, or use sweep.on=local"
        )


def _outcome_of_state(number: int, state: str, log: Path, *, completed: bool) -> PackOutcome:
    """Return the outcome of a task that wrote no outcome, by its final state in Slurm and the log of the task."""
    cause = plans.FINISHED if completed else CAUSES.get(state, plans.UNREPORTED)
    if cause == plans.EXITED and _exceeded_memory(log):  # without cgroups, Slurm reports no OUT_OF_MEMORY
        cause = plans.MEMORY
    name = os.path.relpath(log)
    detail = {
        plans.FINISHED: "",
        plans.UNREPORTED: f"squeue and sacct do not list its task, whose log is {name}",
        plans.MEMORY: f"Slurm state {state}; raise sweep.slurm.memory_gb",
        plans.INTERRUPTED: f"Slurm state {state}; the same command resumes it",
    }.get(cause, f"Slurm state {state}; the log of the task is {name}")
    return PackOutcome(number, cause, detail, None, 0.0, time.time())


def _exceeded_memory(log: Path) -> bool:
    """Return whether Slurm has written to the log of a task that it used too much memory."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return False
    # The log of a task that was queued again has all its attempts.
    return "exceeded memory limit" in text.rpartition("Starting with JobEnvironment")[2]


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie process does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
