"""From a config to a run's end: which folder it is, whether it goes on, who listens, how it ended."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normlab.config import RunConfig
from normlab.data.corpus import open_corpus
from normlab.errors import ConfigError, NormlabError, StoreError
from normlab.stats.spikes import count
from normlab.stats.statistic import CORE, EXTENDED
from normlab.store.arrays import FOLDER as STATS_FOLDER
from normlab.store.files import refusal, write_atomic
from normlab.store.runs import RunFolder
from normlab.store.schema import DIVERGED, FINISHED, METRICS_FILE, RUN_FILE, RUNNING, RUNS_FOLDER, STATUS_FILE, to_json
from normlab.store.series import series
from normlab.tracking.background import Background
from normlab.tracking.base import Sink
from normlab.tracking.console import Console
from normlab.train import checkpoint
from normlab.train.identity import describe
from normlab.train.loop import Loop, Progress, copied_rows
from normlab.train.resolve import apply, resolve
from normlab.train.signals import StopRequest
from normlab.train.trunk import longest_trunk
from normlab.verify.fingerprint import fingerprint

PLUGINS = "plugins"
TOKENIZER_FILE = "tokenizer.json"
UNFINISHED = "unfinished"
"""Stands in a folder while it is filled, so that what a kill left there is known from a run's remains."""
ENDED = (FINISHED, DIVERGED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call of `train` ended."""

    folder: RunFolder
    state: str
    """finished, diverged, interrupted."""
    status: dict[str, Any]
    signal: int | None = None
    """The signal that interrupted it."""
    already: bool = False
    """Whether the run had ended before, and nothing was done."""


def train(config: RunConfig, sinks: Sequence[Sink] | None = None, *, ends_process: bool = False) -> Outcome:
    """Train the run of a validated config, or go on with it, or find that it has ended.

    Args:
        config: What to train.
        sinks: Who listens besides the local record; the console and W&B, as configured, unless given.
        ends_process: Whether the second SIGINT or SIGTERM may end the whole process, in the middle of what it does.

    Raises:
        ConfigError, DataError, StoreError: Each says what to do.
    """
    resolved = resolve(config)
    for doubt in config.doubts():
        _say(doubt)
    # A signal ends this at once: what it makes appears whole or not at all.
    corpus = open_corpus(config.data)
    apply(resolved)  # after the corpus: it loads half a compiler, and a text that is not there is said sooner
    with StopRequest(ends_process=ends_process) as stop:
        now = describe(config, resolved, corpus)
        folder = RunFolder(_place(config, now))
        if folder.exists():
            run = folder.run()
            if (status := folder.status())["state"] in ENDED:
                if config.run.name not in (None, run["name"]):
                    _say(f"run.name={config.run.name}: has no effect, the run has ended and is called {run['name']}")
                if differing := _other_statistics(run, now):
                    _say(
                        f"{', '.join(differing)}: no effect, the run has ended; `normlab inspect RUN --probe` looks "
                        "into its checkpoints now, and run.fresh=true trains another run that measures so"
                    )
                return Outcome(folder, status["state"], status, already=True)
        now["fingerprint"] = fingerprint(config)
        # What can be wrong with a new run is wrong here, before its folder is made.
        with _torchs_words():
            loop = Loop(config, resolved, corpus, folder, [])
        with folder.lock():
            with _torchs_words():  # of a checkpoint that is read, this run's or its trunk's
                if folder.exists():
                    run = folder.run()
                else:
                    _create(folder, run := now, config)
                (folder.path / UNFINISHED).unlink(missing_ok=True)
                write_atomic(folder.path / TOKENIZER_FILE, to_json(corpus.tokenizer.state()))
                _go_to_checkpoint(loop)
            _note_what_differs(loop, run, now)
            every = {CORE: config.stats.every, EXTENDED: config.stats.extended_every}
            folder.arrays.begin(loop.progress.step, every)
            loop.sinks = make_sinks(config, folder) if sinks is None else sinks
            return _run(loop, run, stop)


def _place(config: RunConfig, run: dict[str, Any]) -> Path:
    """The run's folder; with run.fresh, one beside it that has not ended. The run takes the folder's name."""
    runs = Path(config.results_dir) / RUNS_FOLDER
    run_id, number = run["run_id"], 1
    while config.run.fresh and (runs / run["run_id"]).exists():
        if _stopped(RunFolder(runs / run["run_id"])):
            break  # started by these very words, and stopped: they go on with it
        number += 1
        run["run_id"] = f"{run_id}.{number}"
    if config.run.name is None:
        run["name"] = run["run_id"]
    return runs / run["run_id"]


def _stopped(folder: RunFolder) -> bool:
    """Whether a run that was started with run.fresh is neither ended nor active."""
    try:
        return bool(folder.run()["config"]["run"]["fresh"]) and folder.state() not in (*ENDED, RUNNING)
    except (StoreError, KeyError, TypeError):  # damaged, or another's
        return False


def _create(folder: RunFolder, run: dict[str, Any], config: RunConfig) -> None:
    """Fill a new folder; run.json comes last, so that a kill in between leaves a folder that is no run yet."""
    marker = folder.path / UNFINISHED
    if not marker.exists() and (remains := _remains(folder)):
        raise StoreError(
            f"{folder.path / RUN_FILE}: is missing, and there is {' and '.join(remains)} of a run; put back a copy, or "
            "start another run beside it with run.fresh=true"
        )
    write_atomic(marker, b"")
    try:
        for name in (checkpoint.FOLDER, PLUGINS, STATS_FOLDER, METRICS_FILE, STATUS_FILE):
            path = folder.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if config.plugins:
            (folder.path / PLUGINS).mkdir()
    except OSError as error:
        raise refusal(Path(error.filename or folder.path), "written", error) from error
    for number, path in enumerate(config.plugins):
        kept = folder.path / PLUGINS / f"{number:02d}_{Path(path).name}"
        write_atomic(kept, Path(path).expanduser().read_bytes())
    trunk = None if config.run.fresh else longest_trunk(folder.path.parent, run, config)
    if trunk is not None:
        trunk.graft(folder)
        run["continued_from"] = {"run_id": trunk.folder.run_id, "step": trunk.checkpoint.step}
    RunFolder.create(folder.path, run)


def _remains(folder: RunFolder) -> list[str]:
    """What a run left in a folder that does not say which run it was."""
    found = {
        checkpoint.FOLDER: checkpoint.steps(folder.path / checkpoint.FOLDER),
        METRICS_FILE: folder.size(),
        STATUS_FILE: (folder.path / STATUS_FILE).exists(),
    }
    return [name for name, is_there in found.items() if is_there]


def _go_to_checkpoint(loop: Loop) -> None:
    """Put the loop at the run's newest whole checkpoint, or at its beginning, and the record with it."""
    saved, problems = checkpoint.newest(loop.folder.path / checkpoint.FOLDER)
    for problem in problems:
        _say(f"{problem}; going on from the checkpoint before it")
    last = loop.folder.status().get("checkpoint")
    if last is not None and not problems and (saved is None or saved.step < last):
        missing = f"{loop.folder.path / checkpoint.FOLDER}: the checkpoint of step {last} is missing"
        if saved is None:
            raise StoreError(
                f"{missing} and there is no other; put it back, or start another run beside it with run.fresh=true"
            )
        _say(f"{missing}; going on from that of step {saved.step}")
    if saved is None:
        if not (loop.folder.path / STATUS_FILE).exists() and loop.folder.rows("train").rows:
            raise StoreError(
                f"{loop.folder.path}: the run took steps, and has neither {STATUS_FILE} nor a checkpoint; put back "
                "what there was of them, or start another run beside it with run.fresh=true"
            )
        if loop.folder.size():
            _say("this run has no checkpoint yet: it starts again from step 0")
        loop.progress = Progress()
        loop.folder.cut(0)
        loop.folder.arrays.cut(0)
        return
    loop.restore(saved)
    loop.folder.cut(saved.meta["record_bytes"])
    # What is measured after the last step is all of it that has that step's number.
    loop.folder.arrays.cut(saved.step + (saved.step == loop.config.train.steps))
    for lost in loop.folder.arrays.told_missing(saved.step):
        _say(lost)
    if damaged := loop.folder.rows().damaged:
        _say(f"{loop.folder.metrics_path}: damaged rows: {damaged}; the run itself goes on from a whole checkpoint")


def make_sinks(config: RunConfig, folder: RunFolder) -> list[Sink]:
    """Who listens besides the local record, as the config asks."""
    sinks: list[Sink] = [Console()]
    if config.tracking.wandb != "off":
        from normlab.tracking.wandb import WandbSink

        sinks.append(Background(WandbSink(config.tracking, folder.path), "W&B"))
    return sinks


def _run(loop: Loop, run: dict[str, Any], stop: StopRequest) -> Outcome:
    first = loop.progress.step
    try:
        for sink in loop.sinks:
            sink.start(run, first)
            if run.get("continued_from", {}).get("step") == first and first > 0:
                sink.log(copied_rows(loop.folder))
        with _torchs_words():
            state = loop.run(stop)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):  # the second Ctrl-C: no checkpoint, and nobody's failure
            stop.end()
            _finish(loop, loop.status("interrupted"), stop, at_once=True)
        else:
            reason = str(error) if isinstance(error, NormlabError) else f"{type(error).__name__}: {error}"
            _finish(loop, {**loop.status("failed"), "error": reason}, stop)
        raise
    status = _finish(loop, loop.status(state), stop)
    return Outcome(loop.folder, state, status, stop.received if state == "interrupted" else None)


@contextlib.contextmanager
def _torchs_words() -> Iterator[None]:
    """What torch says of memory that ran out, and of a compiler that fails, in ours."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # It has a class of error for a GPU's memory only.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise ConfigError(
                "the memory ran out; lower train.batch_size or model.context, or raise train.accumulation, which "
                "splits a batch into parts that go through the model one after the other"
            ) from error
        if type(error).__module__.startswith(("torch._inductor", "torch._dynamo")):
            reason = " ".join(str(error).partition("\n\n")[0].split())
            raise ConfigError(
                f"compile=on: torch's compiler failed ({reason:.200}); see what `normlab doctor` says of it, or train "
                "with compile=off"
            ) from error
        raise


def _spikes(folder: RunFolder) -> dict[str, Any]:
    """What each rule finds in a run, if it has taken a step and its record can be read: spikes, of so many steps."""
    with contextlib.suppress(StoreError):
        found = count(series(folder))
        return {"spikes": {each.rule.name: {"spikes": len(each.spikes), "of_steps": each.scored} for each in found}}
    return {}


def _finish(loop: Loop, status: dict[str, Any], stop: StopRequest, *, at_once: bool = False) -> dict[str, Any]:
    """Write the last status, tell who listens, and return what they were told."""
    mirrors = [sink for sink in loop.sinks if isinstance(sink, Background)]
    try:
        loop.folder.write_status(status)
    finally:
        stop.end()  # no step is left to stop at: from here Ctrl-C is for what is waited for
        try:
            for mirror in mirrors if at_once else ():
                mirror.abandon()
            told = status if at_once else status | _spikes(loop.folder)
            if told["state"] in ENDED and "spikes" in told:
                with contextlib.suppress(StoreError):  # the run has ended as it is; they can be counted again
                    loop.folder.write_status(told)
            for sink in loop.sinks:
                sink.finish(told)
        except KeyboardInterrupt:
            for mirror in mirrors:
                mirror.abandon()
            raise
    return told


def _note_what_differs(loop: Loop, begun: dict[str, Any], now: dict[str, Any]) -> None:
    """A resume with other code, or on other threads, instructions or hardware, gives other bits: say and record it."""
    was, has = (_told_of(run) for run in (begun, now))
    told = [name for name in was if was[name] is not None]  # a record of before may not hold it
    differing = [f"{name} was {was[name]} and is {has[name]}" for name in told if was[name] != has[name]]
    if differing:
        what = "; ".join(differing)
        loop.progress.elsewhere.append(f"from step {loop.progress.step}: {what}")
        _say(f"this run goes on where {what}: its numbers will not be bit for bit the same")


def _other_statistics(begun: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The words after `stats.` that are not those that a run was begun with."""
    was, has = (run["config"].get("stats", {}) for run in (begun, now))
    return [f"stats.{word}" for word in has if word != "preset" and word in was and was[word] != has[word]]


def _told_of(run: dict[str, Any]) -> dict[str, Any]:
    """What a run's bits depend on beside its identity."""
    git = run["git"] or {}
    code = f"{git['commit'][:10]}{' with changes ' + git['diff'][:10] if git['diff'] else ''}" if git else "unknown"
    resolved = ("threads", "instructions", "device_name", "deterministic")
    return {
        **{name: run["resolved"].get(name) for name in resolved},
        "the block's fingerprint": run.get("fingerprint"),
        "torch": run["versions"].get("torch"),
        "normlab": run["versions"].get("normlab"),
        "normlab's commit": code,
    }


def _say(line: str) -> None:
    print(f"normlab: {line}", file=sys.stderr)
