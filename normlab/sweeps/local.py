"""Run packs on this machine, on its GPUs if it has any.

A worker process (`process.py`) of a sweep on GPUs has one GPU, or as many as its run has devices, by
CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path

from normlab.config.sweep_options import SweepOptions
from normlab.store import plans
from normlab.store.plans import Pack, PackOutcome, Plan
from normlab.sweeps.plan import threads_of
from normlab.sweeps.process import RunningPack, WorkerProcess, process_options
from normlab.training.machine import Gpu


class LocalExecutor:
    """Runs packs as processes of this machine; has the methods of `SlurmExecutor`.

    Args:
        folder: The folder of the sweep.
        options: Number of processes at once, on each GPU if there are GPUs (they share the cores evenly), and timeout.
        on_start: Called with the number of each pack that starts, and the index of its GPU if it has one.
        gpus: The GPUs of the packs; none for packs that train on the CPU.
        report: Called with a line for the user.
    """

    def __init__(
        self,
        folder: Path,
        options: SweepOptions,
        on_start: Callable[[int, int | None], None],
        gpus: Sequence[Gpu] = (),
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder, self._on_start, self._report = folder, on_start, report
        self._devices: list[Gpu | None] = list(gpus) or [None]
        """The usable GPUs; None is the CPU."""
        self._num_devices = len(self._devices)
        self._jobs = options.jobs
        self._timeout_minutes = options.timeout_minutes
        self._processes: list[RunningPack] = []
        self._idle: list[WorkerProcess] = []
        """The workers that can train another pack; with those of `_processes`, at most one for each slot."""

    @property
    def active(self) -> set[int]:
        """The numbers of the submitted packs whose outcome is not known yet."""
        return {process.pack.number for process in self._processes}

    def submit(self, plan: Plan, waiting: Sequence[Pack]) -> list[Pack]:
        """Start packs up to the limit, each on the GPUs with the fewest packs; return the rest.

        If no pack is left to start, end the idle workers, which hold memory.

        A pack that needs more GPUs than are free keeps the packs behind it waiting, or it would wait for ever.
        """
        jobs = self._jobs or plan.parallel_packs
        threads = plan.threads or threads_of(jobs * self._num_devices)
        load = Counter(gpu for process in self._processes for gpu in process.gpus or (None,))
        rest: list[Pack] = []
        for position, pack in enumerate(waiting):
            count = int(plan.runs_of(pack)[0].config["devices"]) if self._devices != [None] else 1
            if count > len(self._devices):  # for a sweep whose other GPUs have failed
                rest.append(pack)
                continue
            free = sorted((device for device in self._devices if load[device] < jobs), key=load.__getitem__)
            if len(free) < count:
                return [*rest, *waiting[position:]]
            gpus = [device for device in free[:count] if device]
            worker = self._idle_worker(gpus, process_options(plan, pack))
            self._processes.append(RunningPack(self._folder, plan, pack, threads, self._timeout_minutes, gpus, worker))
            load.update(free[:count])
            self._on_start(pack.number, gpus[0].index if gpus else None)
        if not rest:
            self._end_idle(self._idle)
        return rest

    def _idle_worker(self, gpus: Sequence[Gpu], options: Mapping[str, object]) -> WorkerProcess | None:
        """Remove and return an idle worker that fits; if none does, end those of the same GPUs, or one on a CPU."""
        self._end_idle([worker for worker in self._idle if worker.exit_code() is not None])
        for worker in self._idle:
            if worker.gpus == gpus and worker.options == options:
                self._idle.remove(worker)
                return worker
        self._end_idle([worker for worker in self._idle if set(worker.gpus) & set(gpus)] if gpus else self._idle[:1])
        return None

    def _end_idle(self, workers: Sequence[WorkerProcess]) -> None:
        for worker in [*workers]:
            self._idle.remove(worker)
            worker.end()

    def wait(self, seconds: float) -> None:
        """Wait until a worker answers or exits, but not longer than some seconds."""
        wait({pipe for process in self._processes if (pipe := process.answers) is not None}, seconds)

    def outcomes(self, plan: Plan) -> Iterator[PackOutcome]:
        """Yield new outcomes; the caller must record each outcome before it requests the next."""
        for process in list(self._processes):
            if outcome := process.poll():
                self._processes.remove(process)
                if process.idle_worker is not None:
                    self._idle.append(process.idle_worker)
                yield outcome
                if outcome.cause == plans.GPU_FAULT or process.is_lost:
                    for gpu in process.gpus:  # which one of several failed is not known
                        if gpu in self._devices:
                            self._take_out(gpu, outcome.detail)

    def _take_out(self, gpu: Gpu, problem: str) -> None:
        """Start no more packs on a GPU, and report why."""
        self._devices.remove(gpu)
        self._end_idle([worker for worker in self._idle if gpu in worker.gpus])
        gpus = [str(device.index) for device in self._devices if device]
        consequence = f": its packs go to GPU {', '.join(gpus)}" if gpus else ""
        self._report(f"GPU {gpu} is taken out of the sweep ({problem}){consequence}")

    def stop(self, *, again: bool) -> str:
        """Stop the processes after a signal, kill them after a second (`again`); return a message."""
        for process in self._processes:
            process.stop()
            if again:
                process.kill()
        return "" if again else "stopping: the runs write their checkpoints (Ctrl-C again kills the runs)"

    def close(self) -> None:
        """End the idle workers, and stop those that still train after an error, by closing their pipes."""
        self._end_idle(self._idle)
        for process in self._processes:
            process.close()
