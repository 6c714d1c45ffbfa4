"""Trains a run, or the runs of a pack, from their configs to their last status."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from normlab.config.schema import RunConfig
from normlab.data.corpus import open_corpus
from normlab.errors import ConfigError, NormlabError, OutOfMemoryError, StoreError, is_out_of_memory, notify, warn
from normlab.model.fingerprint import fingerprint
from normlab.ranks import Ranks, local_statistics
from normlab.stats.spikes import count_spikes
from normlab.stats.statistic import CORE, EXTENDED
from normlab.store.format import COMPLETED_STATES, INTERRUPTED
from normlab.store.parts import part_to_json
from normlab.store.runs import RunFolder
from normlab.store.series import series
from normlab.store.status import Status
from normlab.tracking.background import follow_training
from normlab.tracking.console import Console
from normlab.tracking.tracker import Tracker
from normlab.training.launch import LOST, RESUMES, train_on_devices
from normlab.training.loop import Loop
from normlab.training.machine import apply, resolve
from normlab.training.optim import decayed_kinds
from normlab.training.prepare import check_pack, open_runs, prepare_folders, status_if_completed
from normlab.training.resume import report_changes, resume_from_checkpoint
from normlab.training.signals import StopRequest
from normlab.training.training_run import TrainingRun

MANY_BLOCKS = 500
"""Number of blocks that takes seconds to build."""
TOO_MANY_GRAPHS = (
    "the blocks do not share their compiled code, since a Python number in the norm or the placement differs from "
    "block to block; make it a buffer (self.register_buffer)"
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call of `train`."""

    folder: RunFolder
    state: str
    """finished, diverged or interrupted."""
    status: Status
    signal: int | None = None
    """The signal that interrupted the run."""
    already_ended: bool = False
    """Whether the run had ended before the call."""


def train(config: RunConfig, trackers: Sequence[Tracker] | None = None, *, ends_process: bool = False) -> Outcome:
    """Train the run of a validated config, or resume it, or return the outcome that it has already.

    Args:
        config: The run's config.
        trackers: Receivers of the record besides the run's folder; by default the console, and W&B as configured.
        ends_process: Whether the second SIGINT or SIGTERM may end the whole process in the middle of a step.

    Raises:
        ConfigError, DataError, StoreError: The message says what to do.
    """
    return train_pack([config], None if trackers is None else [trackers], ends_process=ends_process)[0]


def train_pack(
    configs: Sequence[RunConfig],
    trackers: Sequence[Sequence[Tracker]] | None = None,
    *,
    pack: Mapping[str, Any] | None = None,
    ends_process: bool = False,
    only_first_signal: bool = False,
    keep_compiled: bool = False,
) -> list[Outcome]:
    """Train runs as one stacked computation, or resume them, or return the outcomes that all have already.

    Each run has its own folder, status and trackers. They resume together, from the newest step of which each has an
    intact checkpoint; a run that has diverged stays frozen in the stack.

    Args:
        configs: Validated configs that differ in numbers only: seeds, learning rates and the like (`sweep.packs`).
        trackers: The trackers of each run.
        pack: The pack's `sweep`, `number` and, if they are planned, the ids of its `runs`.
        ends_process: As for `train`.
        only_first_signal: Whether the process ignores SIGINT and SIGTERM after the first one.
        keep_compiled: Whether the runs use the code that the last call in this process compiled, for equal blocks.

    Raises:
        ConfigError, DataError, StoreError: The message says what to do.
    """
    settings = resolve(configs[0])
    corpus = open_corpus(configs[0].data)
    # After the corpus: it may import a compiler, and a missing text is reported sooner.
    apply(settings, keep_compiled=keep_compiled)
    stop = StopRequest(ends_process=ends_process, only_first=only_first_signal)
    with contextlib.ExitStack() as handlers:
        if only_first_signal:
            handlers.enter_context(stop)
        runs = open_runs(configs, settings, corpus, pack)
        completed = [status_if_completed(run) for run in runs]
        # The other ranks wait for this value: another command may have completed the run since they were started.
        if Ranks.current().broadcast(all(completed)):
            # A W&B agent expects the numbers of a completed run under the agent's own run id.
            if trackers is None and Ranks.current().rank == 0 and os.environ.get("WANDB_SWEEP_ID"):
                follow_training([run.folder.path for run in runs], configs[0].tracking)
            return [
                Outcome(run.folder, status.state or "", status, already_ended=True)
                for run, status in zip(runs, completed, strict=True)
                if status
            ]
        if configs[0].devices > 1 and Ranks.current().count == 1:
            stop.end()  # the ranks handle signals
            if stop.received is not None:
                raise KeyboardInterrupt
            received = train_on_devices(configs[0], pack)
            status = runs[0].recorded_status()
            return [Outcome(runs[0].folder, status.state or "", status, received)]
        if (blocks := configs[0].model.depth * len(configs)) >= MANY_BLOCKS:
            notify(f"building {blocks:,} blocks takes a while; nothing is written yet, and Ctrl-C ends it at once")
        with local_statistics():  # rank 0 computes it alone
            block = fingerprint(configs[0])
        for run in runs:
            check_pack(run)
            run.new_run_json["fingerprint"] = block
        # The loop comes before the folders: a config that cannot be trained leaves nothing behind.
        with convert_torch_errors():
            loop = Loop(runs, settings, corpus)
        for run in runs:
            run.new_run_json["resolved"]["decayed"] = decayed_kinds(run.config.optim, loop.runner.model)
        # Only now: until here, nothing is written but the files of a corpus, atomically, and a signal ends it at once.
        if not only_first_signal:
            handlers.enter_context(stop)
        with contextlib.ExitStack() as locks:
            for run in runs:
                locks.enter_context(run.folder.lock())
            with convert_torch_errors():  # reading a checkpoint can exhaust the memory
                prepare_folders(runs, corpus)
                resume_from_checkpoint(loop)
                loop.share_state()
            for index, run in enumerate(runs):
                report_changes(run)
                run.recorded = replace(run.progress), run.diverged
                stats = run.config.stats
                run.folder.statistics.set_cadence(
                    run.progress.step, {CORE: stats.every, EXTENDED: stats.extended_every}
                )
                if trackers is not None:
                    run.trackers = trackers[index]
                elif loop.is_single:  # the runs of a pack have no console
                    run.trackers = [Console()]
            if trackers is None:
                follow_training([run.folder.path for run in runs], configs[0].tracking)
            # After all errors, which stay a single line.
            for warning in dict.fromkeys(warning for config in configs for warning in config.warnings()):
                warn(warning)
            return _run(loop, stop)


def train_replica(config: RunConfig) -> int | None:
    """Train the run of a config on a rank other than 0, from the state that rank 0 has; return the received signal.

    Raises:
        ConfigError, DataError: The message says what to do.
    """
    settings = resolve(config)
    corpus = open_corpus(config.data)
    apply(settings)
    with StopRequest(only_first=True) as stop, convert_torch_errors():
        if Ranks.current().broadcast(False):
            return None
        loop = Loop([TrainingRun(config, RunFolder(os.devnull))], settings, corpus)  # only rank 0 writes
        loop.share_state()
        loop.run(stop)
        return stop.received


def _run(loop: Loop, stop: StopRequest) -> list[Outcome]:
    try:
        for run in loop.runs:
            first = run.progress.step
            for tracker in run.trackers:
                # The header and the MFU are of this machine, not of that of the first start.
                tracker.start(run.run_json | {"resolved": run.new_run_json["resolved"]}, first)
                if run.run_json.get("continued_from", {}).get("step") == first and first > 0:
                    tracker.log(run.folder.rows().rows)  # those of the parent run
        with convert_torch_errors():
            state = loop.run(stop)
            loop.writer.wait()
    except BaseException as error:
        # What the loop has recorded, it keeps. The second Ctrl-C ends the process if the disk takes too long for that.
        loop.writer.end()
        if isinstance(error, KeyboardInterrupt):  # the second Ctrl-C: stop without a checkpoint
            stop.end()
        _finish(loop, stop, [loop.status_after_error(run, error) for run in loop.runs])
        raise
    loop.writer.end()
    statuses = _finish(loop, stop, [loop.final_status(run, state) for run in loop.runs])
    return [
        Outcome(run.folder, status.state or "", status, stop.received if status.state == INTERRUPTED else None)
        for run, status in zip(loop.runs, statuses, strict=True)
    ]


@contextlib.contextmanager
def convert_torch_errors() -> Iterator[None]:
    """Convert torch's out-of-memory and compiler errors to NormlabError."""
    try:
        yield
    except NormlabError:
        raise
    except Exception as error:  # not every error of the compiler is a RuntimeError
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                "the memory ran out; lower train.batch_size or model.context, or raise train.accumulation, which "
                "splits a batch into micro-batches"
            ) from error
        if isinstance(error, OSError):
            raise
        if Ranks.current().count > 1 and (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            raise NormlabError(f"{LOST}; {RESUMES}") from error
        if type(error).__module__.startswith(("torch._inductor", "torch._dynamo", "triton.")):
            if type(error).__name__ == "FailOnRecompileLimitHit":
                raise ConfigError(f"compile=on: {TOO_MANY_GRAPHS}, or train with compile=off") from error
            reason = " ".join(str(error).partition("\n\n")[0].split())
            raise ConfigError(
                f"compile=on: torch's compiler failed ({reason:.200}); check it with `normlab doctor`, or train with "
                "compile=off"
            ) from error
        raise


def _finish(loop: Loop, stop: StopRequest, statuses: Sequence[Status]) -> list[Status]:
    """Write the last statuses and finish the trackers; return the statuses that the trackers received."""
    final = list(statuses)
    errors: list[StoreError] = []
    try:
        for run, status in zip(loop.runs, statuses, strict=True):
            try:
                run.write_status(status)
            except StoreError as error:  # the other runs of a pack have their own folders
                errors.append(error)
        if errors:
            raise errors[0]
    finally:
        stop.end()  # no step is left to stop at
        for index, run in enumerate(loop.runs):
            final[index] = _with_spikes(run.folder, final[index])
            for tracker in run.trackers:
                tracker.finish(final[index])
    return final


def _with_spikes(folder: RunFolder, status: Status) -> Status:
    """Return the status with the number of spikes by each rule, and write it if the run has ended."""
    with contextlib.suppress(StoreError):  # the outcome stands without them
        spikes = {
            each.rule.name: {"spikes": len(each.spikes), "of_steps": each.scored}
            for each in count_spikes(series(folder))
        }
        status = replace(status, spikes=spikes)
        if status.state in COMPLETED_STATES:
            folder.write_status(part_to_json(status))
    return status
