"""From a config to a run's end: which folder it is, whether it goes on, who listens, how it ended."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from normlab.config import RunConfig, canonical_hash, config_of_record
from normlab.data.corpus import open_corpus
from normlab.errors import ConfigError, MemoryRanOut, NormlabError, StoreError
from normlab.stats.spikes import count
from normlab.stats.statistic import CORE, EXTENDED
from normlab.store.arrays import FOLDER as STATS_FOLDER
from normlab.store.evaluations import evaluations
from normlab.store.files import refusal, write_atomic
from normlab.store.outcome import conclude
from normlab.store.reading import MENDING
from normlab.store.runs import RunFolder, pack_members
from normlab.store.schema import DIVERGED, ENDED, METRICS_FILE, RUN_FILE, RUNNING, RUNS_FOLDER, STATUS_FILE, to_json
from normlab.store.series import series
from normlab.tracking.background import Background, abandon, wait_for_finish, wait_for_start
from normlab.tracking.base import Sink
from normlab.tracking.console import Console
from normlab.tracking.wandb import WandbSink
from normlab.train import checkpoint
from normlab.train.identity import describe, runs_before_versions
from normlab.train.loop import Loop, copied_rows
from normlab.train.member import Member
from normlab.train.resolve import apply, resolve
from normlab.train.resume import go_to_checkpoint, note_what_differs, say
from normlab.train.signals import StopRequest
from normlab.train.trunk import longest_trunk
from normlab.verify.fingerprint import fingerprint

PLUGINS = "plugins"
TOKENIZER_FILE = "tokenizer.json"
UNFINISHED = "unfinished"
"""Stands in a folder while it is filled, so that what a kill left there is known from a run's remains."""


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
    return train_pack([config], None if sinks is None else [sinks], ends_process=ends_process)[0]


def train_pack(
    configs: Sequence[RunConfig],
    sinks: Sequence[Sequence[Sink]] | None = None,
    *,
    pack: Mapping[str, Any] | None = None,
    ends_process: bool = False,
) -> list[Outcome]:
    """Train runs together, as one stacked computation; or go on with them, or find that all have ended.

    Each has its own folder, status and listeners. They go on together, from the newest step of which each has a whole
    checkpoint; one that has diverged stays in the stack where it was frozen.

    Args:
        configs: Validated, and alike but for numbers: seeds, learning rates and the like (`sweep.packs`).
        sinks: Who listens to each.
        pack: Which pack of which sweep they are, for their records: `sweep` and `number`.
        ends_process: As for `train`.

    Raises:
        ConfigError, DataError, StoreError: Each says what to do.
    """
    resolved = resolve(configs[0])
    # A signal ends this at once: what it makes appears whole or not at all.
    corpus = open_corpus(configs[0].data)
    apply(resolved)  # after the corpus: it may load a compiler, and a text that is not there is said sooner
    with StopRequest(ends_process=ends_process) as stop:
        # The init rule alone is each run's own.
        now = [describe(config, replace(resolved, init=config.init_rule), corpus) for config in configs]
        members = [Member(config, RunFolder(_place(config, own))) for config, own in zip(configs, now, strict=True)]
        if pack is not None or len(members) > 1:
            ids = [member.folder.run_id for member in members]
            for member, own in zip(members, now, strict=True):
                own["pack"] = member.pack = {**(pack or {}), "runs": ids}
        before = [_ended(member, own) for member, own in zip(members, now, strict=True)]
        ended = [outcome for outcome in before if outcome is not None]
        if len(ended) == len(members):
            return ended
        for member, own in zip(members, now, strict=True):
            if member.folder.exists():
                _refuse_other_company(member.folder.run(), own, pack)
        block = fingerprint(configs[0])
        for own in now:
            own["fingerprint"] = block
        # What can be wrong with a new run is wrong here, before its folder is made.
        with _torchs_words():
            loop = Loop(members, resolved, corpus)
        with contextlib.ExitStack() as locks:
            for member in members:
                locks.enter_context(member.folder.lock())
            runs = []
            with _torchs_words():  # of a checkpoint that is read, this run's or its trunk's
                for member, own in zip(members, now, strict=True):
                    if not member.folder.exists():
                        _create(member.folder, own, member.config)
                    runs.append(member.folder.run())
                    (member.folder.path / UNFINISHED).unlink(missing_ok=True)
                    write_atomic(member.folder.path / TOKENIZER_FILE, to_json(corpus.tokenizer.state()))
                go_to_checkpoint(loop)
            for number, (member, run, own) in enumerate(zip(members, runs, now, strict=True)):
                note_what_differs(member, run, own)
                stats = member.config.stats
                member.folder.arrays.begin(member.progress.step, {CORE: stats.every, EXTENDED: stats.extended_every})
                member.sinks = (
                    make_sinks(member.config, member.folder, console=loop.is_alone) if sinks is None else sinks[number]
                )
            # Only where something is trained: an error stays a line of its own.
            for doubt in dict.fromkeys(doubt for config in configs for doubt in config.doubts()):
                print(f"warning: {doubt}", file=sys.stderr)
            return _run(loop, runs, stop)


def _ended(member: Member, now: Mapping[str, Any]) -> Outcome | None:
    """How a run ended, if it has; what has no effect then is said."""
    config, folder = member.config, member.folder
    if not folder.exists():
        return None
    run, status = folder.run(), folder.status()
    if not _is_record_of(run, now):
        raise StoreError(
            f"{folder.path / RUN_FILE}: is damaged (it is not the record of run {folder.run_id}); {MENDING[RUN_FILE]}"
        )
    if status["state"] not in ENDED:
        return None
    if problem := folder.metrics_problem():
        say(problem)
    if config.run.name not in (None, run["name"]):
        say(f"run.name={config.run.name}: has no effect, the run has ended and is called {run['name']}")
    if differing := _other_statistics(run, now):
        say(
            f"{', '.join(differing)}: no effect, the run has ended; `normlab inspect RUN --probe` looks "
            "into its checkpoints now, and run.fresh=true trains another run that measures so"
        )
    return Outcome(folder, status["state"], status, already=True)


def _is_record_of(run: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a run.json, whoever wrote it, is of the run that its folder's name says, and has every part of one."""
    try:
        config, identity = config_of_record(run["config"]).identity(), run["identity"]
        same = canonical_hash([config, identity]) == canonical_hash([now["identity"]["config"], now["identity"]])
        whole = all(isinstance(run[part], type(now[part])) for part in ("run_id", "name", "resolved", "corpus"))
        git, pack = run["git"] or {"commit": "", "diff": ""}, run.get("pack")
        whole = whole and all(isinstance(git[part], str) for part in ("commit", "diff"))
        whole = whole and isinstance(run["versions"], dict) and isinstance(run["config"]["run"]["fresh"], bool)
        return same and whole and (pack is None or isinstance(pack["runs"], list))
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError):
        return False


def _refuse_other_company(run: Mapping[str, Any], now: Mapping[str, Any], pack: Mapping[str, Any] | None) -> None:
    """A pack is gone on with by its own sweep only, for a step of the others' would be lost; and none joins it.

    Raises:
        StoreError: The run is another sweep's, or of none.
    """
    together = len(pack_members(run))
    if together > 1 and run["pack"].get("sweep") != (pack or {}).get("sweep"):
        raise StoreError(
            f"run {run['run_id']} is one of a pack of {together} that trains together in sweep "
            f"{run['pack'].get('sweep')}; start that sweep again to resume it, or run.fresh=true starts another "
            "beside it"
        )
    if together < 2 <= len(pack_members(now)):
        raise StoreError(
            f"run {run['run_id']} was begun alone, and cannot join a pack; go on with it by `normlab train`, or plan "
            "the sweep with sweep.pack=off"
        )


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
    # The runs of a pack begin together.
    trunk = None if config.run.fresh or len(pack_members(run)) > 1 else longest_trunk(folder.path.parent, run, config)
    if trunk is not None:
        trunk.graft(folder)
        run["continued_from"] = {"run_id": trunk.folder.run_id, "step": trunk.checkpoint.step}
    for other in runs_before_versions(folder.path.parent, run["run_id"], run["identity"]):
        say(
            f"run {other} has these settings, but was recorded before norms and placements had versions: it cannot be "
            f"resumed, and {run['run_id']} starts from step 0"
        )
    RunFolder.create(folder.path, run)


def _remains(folder: RunFolder) -> list[str]:
    """What a run left in a folder that does not say which run it was."""
    found = {
        checkpoint.FOLDER: checkpoint.steps(folder.path / checkpoint.FOLDER),
        METRICS_FILE: folder.size(),
        STATUS_FILE: (folder.path / STATUS_FILE).exists(),
    }
    return [name for name, is_there in found.items() if is_there]


def make_sinks(config: RunConfig, folder: RunFolder, *, console: bool = True) -> list[Sink]:
    """Who listens besides the local record, as the config asks; several runs at once have no use for one console."""
    sinks: list[Sink] = [Console()] if console else []
    if config.tracking.wandb != "off":
        sinks.append(Background(WandbSink(config.tracking, folder.path)))
    return sinks


def _run(loop: Loop, runs: Sequence[dict[str, Any]], stop: StopRequest) -> list[Outcome]:
    try:
        for member, run in zip(loop.members, runs, strict=True):
            first = member.progress.step
            for sink in member.sinks:
                sink.start(run, first)
                if run.get("continued_from", {}).get("step") == first and first > 0:
                    sink.log(copied_rows(member.folder))
        wait_for_start(_mirrors(loop))
        with _torchs_words():
            state = loop.run(stop)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):  # the second Ctrl-C: no checkpoint, and nobody's failure
            stop.end()
            _finish(loop, [loop.status(member, "interrupted") for member in loop.members], stop, at_once=True)
        else:
            reason = str(error) if isinstance(error, NormlabError) else f"{type(error).__name__}: {error}"
            _finish(loop, [_failed(loop.status(member, "failed"), reason) for member in loop.members], stop)
        raise
    statuses = [
        conclude(
            run,
            loop.status(member, DIVERGED if member.diverged else state),
            _initial_val_loss(member.folder),
            member.last_finite,
        )
        for member, run in zip(loop.members, runs, strict=True)
    ]
    return [
        Outcome(member.folder, status["state"], status, stop.received if status["state"] == "interrupted" else None)
        for member, status in zip(loop.members, _finish(loop, statuses, stop), strict=True)
    ]


def _initial_val_loss(folder: RunFolder) -> float | None:
    """The validation loss before the first update, from the record."""
    return next((seen.loss for seen in evaluations(folder) if seen.step == 0), None)


def _failed(status: dict[str, Any], reason: str) -> dict[str, Any]:
    """The status of a run of a loop that failed; one that had diverged before has ended already."""
    return status if status["state"] == DIVERGED else {**status, "error": reason}


@contextlib.contextmanager
def _torchs_words() -> Iterator[None]:
    """What torch says of memory that ran out, and of a compiler that fails, in ours."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # It has a class of error for a GPU's memory only.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise MemoryRanOut(
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


def _with_spikes(folder: RunFolder, status: dict[str, Any]) -> dict[str, Any]:
    """The status with what each rule finds in a run that has taken a step: so many spikes, of so many steps."""
    with contextlib.suppress(StoreError):  # the run has ended as it is; they can be counted again
        found = {
            each.rule.name: {"spikes": len(each.spikes), "of_steps": each.scored} for each in count(series(folder))
        }
        status = {**status, "spikes": found}
        if status["state"] in ENDED:
            folder.write_status(status)
    return status


def _finish(
    loop: Loop, statuses: Sequence[dict[str, Any]], stop: StopRequest, *, at_once: bool = False
) -> list[dict[str, Any]]:
    """Write the last statuses, tell who listens, and return what they were told."""
    told = list(statuses)
    mirrors = _mirrors(loop)
    try:
        for index, (member, status) in enumerate(zip(loop.members, statuses, strict=True)):
            told[index] = status | ({"metrics": member.folder.metrics_digest()} if status["state"] in ENDED else {})
            member.folder.write_status(told[index])
    finally:
        stop.end()  # no step is left to stop at: from here Ctrl-C is for what is waited for
        try:
            if at_once:
                abandon(mirrors)
            for index, member in enumerate(loop.members):
                if not at_once:
                    told[index] = _with_spikes(member.folder, told[index])
                for sink in member.sinks:
                    sink.finish(told[index])
            wait_for_finish(mirrors)
        except KeyboardInterrupt:
            abandon(mirrors)
            raise
    return told


def _mirrors(loop: Loop) -> list[Background]:
    """Return the sinks of all runs that may have to be waited for."""
    return [sink for member in loop.members for sink in member.sinks if isinstance(sink, Background)]


def _other_statistics(begun: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The words after `stats.` that are not those that a run was begun with."""
    was, has = (run["config"].get("stats", {}) for run in (begun, now))
    return [f"stats.{word}" for word in has if word != "preset" and word in was and was[word] != has[word]]
