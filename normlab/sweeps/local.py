"""Run packs on this machine, on its GPUs if it has any.

A worker process (`process.py`) of a sweep on GPUs has one GPU, or as many as its run has devices, by
CUDA_VISIBLE_DEVICES.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from normlab.base.errors import StoreError, counted
from normlab.config.sweep_options import SweepOptions
from normlab.store.plans import Pack, Plan
from normlab.sweeps.files import PackOutcome, log_of, queue_file, read_queue
from normlab.sweeps.plan import packs_at_once, threads_of
from normlab.sweeps.process import RunningPack, WorkerProcess, process_options
from normlab.training.machine import Gpu


class LocalExecutor:
    """Runs packs as processes of this machine, on the CPU without `gpus`; an `Executor`."""

    def __init__(self, folder: Path, options: SweepOptions, gpus: Sequence[Gpu]) -> None:
        self._folder, self._options = folder, options
        self._devices: list[Gpu | None] = list(gpus) or [None]
        """None is the CPU."""
        self._running: list[RunningPack] = []
        self._idle: list[WorkerProcess] = []

    @property
    def active(self) -> set[int]:
        """The numbers of the submitted packs whose outcome is not known yet."""
        return {running.pack.number for running in self._running}

    def take_over(self, plan: Plan) -> list[PackOutcome]:
        """Return no outcome, because a pack on this machine ends with its supervisor.

        Raises:
            StoreError: Slurm has some of the packs.
        """
        queue = read_queue(self._folder)
        # Two processes that train one run would write to one record.
        if queue:
            jobs = ", ".join(sorted({job.partition("_")[0] for job in queue.values()}))
            raise StoreError(
                f"sweep {plan.name}: job {jobs} in Slurm has {counted(len(queue), 'pack')} of it; use sweep.on=slurm "
                f"to watch them, or cancel the job and delete {queue_file(self._folder)}"
            )
        return []

    def submit(self, plan: Plan, waiting: Sequence[Pack]) -> list[Pack]:
        """Start packs up to the limit, each on the GPUs with the fewest packs; return the rest.

        A pack that needs more GPUs than are free keeps the packs behind it waiting, or it would wait for ever. If no
        pack is left to start, end the idle workers, which hold memory.
        """
        jobs = self._options.jobs or plan.parallel_packs
        threads = plan.threads or threads_of(jobs * len(self._devices))
        load = Counter[Gpu | None]()
        """Running packs by GPU, and with None those on the CPU."""
        for running in self._running:
            load.update(running.worker.gpus or [None])
        for position, pack in enumerate(waiting):
            options = process_options(plan, pack)
            count = min(options["devices"], len(self._devices))
            free = [device for device in self._devices if load[device] < jobs]
            free = sorted(free, key=load.__getitem__)[:count]
            if len(free) < count:
                return list(waiting[position:])
            gpus = [device for device in free if device is not None]
            worker = self._take_idle(gpus, options)
            if worker is None:
                # The idle ones would keep their memory while this one trains.
                self._end_idle()
                worker = WorkerProcess(self._folder, options, threads, gpus, log_of(self._folder, pack.number))
            timeout = self._options.timeout_minutes
            num_gpus = len(self._devices) if gpus else 0
            at_once = packs_at_once(jobs, num_gpus, options["devices"])
            self._running.append(RunningPack(self._folder, plan, pack, worker, timeout, at_once))
            load.update(free)
        self._end_idle()
        return []

    def _take_idle(self, gpus: Sequence[Gpu], options: dict[str, Any]) -> WorkerProcess | None:
        """Return an idle worker on these GPUs with these options, which then is not idle; None if there is none."""
        for worker in self._idle:
            if worker.gpus == gpus and worker.options == options and worker.exit_code() is None:
                self._idle.remove(worker)
                return worker
        return None

    def _end_idle(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def wait(self, seconds: float) -> None:
        """Wait until a worker answers or exits, but not longer than some seconds."""
        connections = [running.worker.connection for running in self._running]
        wait([connection for connection in connections if not connection.closed], seconds)

    def outcomes(self, plan: Plan) -> Iterator[PackOutcome]:
        """Yield new outcomes; the caller must record each outcome before it requests the next."""
        for running in list(self._running):
            outcome = running.poll()
            if outcome is None:
                continue
            self._running.remove(running)
            if running.is_idle:
                self._idle.append(running.worker)
            yield outcome

    def stop(self, *, again: bool) -> str:
        """Stop the processes after a signal, kill them after a second (`again`); return a message."""
        for running in self._running:
            running.stop()
            if again:
                running.worker.kill()
        if again:
            return ""
        return "stopping: the runs write their checkpoints (Ctrl-C again kills the runs)"

    def close(self) -> None:
        """End the idle workers, and stop those that still train after an error, by closing their connections."""
        self._end_idle()
        for running in self._running:
            running.worker.connection.close()


def make_executor(
    folder: Path, options: SweepOptions, gpus: Sequence[Gpu], report: Callable[[str], None]
) -> LocalExecutor:
    """Return the executor of `sweep.on=local`."""
    del report  # the supervisor itself prints the progress of its processes
    return LocalExecutor(folder, options, gpus)
