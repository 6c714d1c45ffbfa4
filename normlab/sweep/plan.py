"""From the overrides of a sweep to its plan: its runs, those that exist already, and the packs that train."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from normlab import memory
from normlab.config import RunConfig, canonical_hash
from normlab.data.corpus import Corpus, open_corpus
from normlab.errors import ConfigError, StoreError
from normlab.options import plain_tree
from normlab.store.plans import Job, Pack, Plan, has_plan, read_plan, run_of, sweep_folder
from normlab.store.runs import RunFolder, pack_members
from normlab.store.schema import ENDED
from normlab.sweep.options import SweepOptions
from normlab.sweep.packs import alike, auto_pack_size, split
from normlab.train.identity import identity, run_id_of
from normlab.train.resolve import resolve

Asked = tuple[list[str], RunConfig]
"""What `launch.compose_sweep` gives of a job: the words that tell it from the others, and its config."""

_LONGEST_KEYS = 60
"""Most characters of a made name before its hash."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, where it is kept, and what is to be said of it."""

    plan: Plan
    folder: Path
    doubts: list[str]
    """What is known to be wrong with a choice of words, and which jobs are one and the same."""


class Identities:
    """The run ids of configs; each distinct corpus is opened once.

    Args:
        has_gpu: As `resolve` takes it.
    """

    def __init__(self, has_gpu: bool | None = None) -> None:
        self._has_gpu = has_gpu
        self._corpora: dict[str, Corpus] = {}

    def run_id(self, config: RunConfig) -> str:
        """The id that `train` would give to a config's run.

        Raises:
            ConfigError, DataError: The machine or the corpus is not there.
        """
        text = {word: value for word, value in plain_tree(config.data).items() if word != "seed"}
        key = canonical_hash(text)
        if key not in self._corpora:
            self._corpora[key] = open_corpus(config.data)
        return run_id_of(config, identity(config, resolve(config, self._has_gpu), self._corpora[key]))


def make_plan(
    options: SweepOptions,
    asked: Sequence[Asked],
    tell: Callable[[str], None] = lambda _: None,
) -> Planned:
    """The plan that the jobs of a sweep make, or the one that they made before. Writes nothing.

    Args:
        options: How it is run.
        asked: The jobs.
        tell: Is told how far it is.

    Raises:
        ConfigError: There is no job, they have several results folders or want fresh runs, or the sweep's name is
            another's.
        DataError, StoreError: A corpus is not there; a run or a plan that is there cannot be read.
    """
    _refuse_what_no_sweep_has([config for _, config in asked])
    identities, doubts = Identities(options.has_gpu), dict[str, None]()
    jobs: dict[str, Job] = {}
    configs: list[RunConfig] = []
    for number, (words, config) in enumerate(asked, 1):
        tell(f"planning: {number} of {len(asked)} runs")
        run_id = identities.run_id(config)
        if run_id in jobs:
            twin = " ".join(jobs[run_id].words) or "the one before"
            doubts[f"{' '.join(words) or 'a job'}: is the same run as {twin}, and trained once"] = None
            continue
        jobs[run_id] = Job(run_id, list(words), plain_tree(config))
        configs.append(config)
        doubts |= dict.fromkeys(config.warnings())
    tell("")
    name = options.name or _made_name(options, list(jobs.values()))
    folder = sweep_folder(configs[0].results_dir, name)
    plan = Plan(name, options.pack, list(jobs.values()), [])
    if has_plan(folder):
        return Planned(plan_there(folder, plan), folder, list(doubts))
    runs = [run_of(folder, job) for job in plan.jobs]
    for run in runs:
        _refuse_one_of_anothers_pack(run, name)
    size, memory_bytes = _pack_size(options, configs)
    left = [index for index, run in enumerate(runs) if not has_ended(run)]
    packs = _split(configs, left, {index for index in left if runs[index].exists()}, size)
    notes = [*_note_on_sizes(packs), *_note_on_existing(runs, _split(configs, range(len(runs)), (), size))]
    numbered = [Pack(number, pack) for number, pack in enumerate(sorted(packs), 1)]
    return Planned(replace(plan, packs=numbered, notes=notes, memory_bytes=memory_bytes), folder, list(doubts))


def _pack_size(options: SweepOptions, configs: Sequence[RunConfig]) -> tuple[int, int | None]:
    """Return the most runs in a pack, one number for the whole sweep, and the memory in bytes that it rests on.

    Of the sizes that `sweep.pack=auto` gives the configs it is the smallest.
    """
    if options.largest_pack is not None:
        return options.largest_pack, None
    resolved = [resolve(config, options.has_gpu) for config in configs]
    there = min(options.pack_memory(one.device) for one in resolved)
    sizes = {
        auto_pack_size(
            one.device,
            one.precision,
            config.model.width,
            memory.estimate(config, 4 if one.precision == "fp32" else 2).total,
            there,
        )
        for config, one in zip(configs, resolved, strict=True)
    }
    return min(sizes), there


def _split(configs: Sequence[RunConfig], indices: Sequence[int], alone: Collection[int], size: int) -> list[list[int]]:
    """Split jobs, given by their indices, into packs of at most `size` runs; those in `alone` train alone."""
    groups = alike([configs[index] for index in indices], [index in alone for index in indices])
    return [[indices[place] for place in pack] for group in groups for pack in split(group, size)]


def _note_on_sizes(packs: Sequence[Sequence[int]]) -> list[str]:
    counts = Counter(len(pack) for pack in packs)
    if len(counts) < 2:
        return []
    sizes = ", ".join(f"{count} of {size}" for size, count in sorted(counts.items(), reverse=True))
    return [f"packs of several sizes ({sizes} runs): the size of its pack changes the rounding of a run"]


def _note_on_existing(runs: Sequence[RunFolder], packs: Sequence[Sequence[int]]) -> list[str]:
    """Report the runs that exist and were trained in other packs than the plan of all runs would train them in.

    Args:
        runs: All runs of the sweep.
        packs: The packs, as indices, that they would make if none of them existed.

    Raises:
        StoreError: The record of one cannot be read.
    """
    kinds = Counter[str]()
    all_alone = True
    for pack in packs:
        planned = {runs[index].run_id for index in pack}
        for run in (runs[index] for index in pack if runs[index].exists()):
            trained = set(run.trained_with())
            if trained == planned:
                continue
            all_alone = all_alone and len(trained) == 1
            same = len(trained) == len(planned)
            kinds[f"{_how(len(trained))} {'with other runs' if same else f'instead of {_how(len(planned))}'}"] += 1
    if not kinds:
        return []
    return [
        f"{kinds.total()} of {len(runs)} runs exist already and were trained differently "
        f"({', '.join(f'{count} {kind}' for kind, count in kinds.items())}): they are used as they are, with other "
        f"rounding than here; {'sweep.pack=off trains all alone, ' if all_alone else ''}"
        "another results_dir trains all of them anew"
    ]


def _how(runs: int) -> str:
    return "alone" if runs == 1 else f"in a pack of {runs}"


def plan_there(folder: Path, made: Plan) -> Plan:
    """Return the packs that a sweep was begun with, of the jobs that this command makes.

    A plan is data, as a run's folder is: the runs' configs, and with them the plugins that are executed, are those that
    the command names, and only how they are packed is read.

    A run that had ended when the plan was made is in no pack; where it is gone since, it gets one of its own. So does
    one that is gone from a pack of which others have ended: they are not taken back to the start for it.

    Raises:
        ConfigError: It is a plan of other jobs, or other packs.
        StoreError: It cannot be read.
    """
    plan = read_plan(folder)
    _refuse_another(plan, made)
    ours = {job.run_id: job for job in made.jobs}
    plan = replace(plan, jobs=[ours[job.run_id] for job in plan.jobs])
    runs = [run_of(folder, job) for job in plan.jobs]
    packed = {index for pack in plan.packs for index in pack.jobs}
    lost = {index for index, run in enumerate(runs) if index not in packed and not has_ended(run)}
    for pack in plan.packs:
        gone = {index for index in pack.jobs if not runs[index].exists()}
        if gone and any(has_ended(runs[index]) for index in pack.jobs):
            lost |= gone
    if not lost:
        return plan
    packs = [replace(pack, jobs=[index for index in pack.jobs if index not in lost]) for pack in plan.packs]
    after = max((pack.number for pack in plan.packs), default=0) + 1
    packs += [Pack(number, [index]) for number, index in enumerate(sorted(lost), after)]
    note = f"{len(lost)} of {len(runs)} runs are gone since the sweep started: each is trained again, alone"
    return replace(plan, packs=packs, notes=[*plan.notes, note])


def has_ended(run: RunFolder) -> bool:
    """Whether nothing is left to train of a run: it finished, or diverged.

    Raises:
        StoreError: Its status cannot be read.
    """
    return run.exists() and run.status()["state"] in ENDED


def is_done(folder: Path, jobs: Sequence[Job]) -> bool:
    """Whether nothing is left to train of a pack's runs, as far as their records can be read."""
    try:
        return all(has_ended(run_of(folder, job)) for job in jobs)
    except StoreError:
        return False  # a damaged record is named by the process that is to go on with it


def tokens_of(job: Job) -> int:
    """The tokens that a run trains on, whole."""
    train = job.config["train"]
    return train["steps"] * train["batch_size"] * job.config["model"]["context"]


def _refuse_what_no_sweep_has(configs: Sequence[RunConfig]) -> None:
    if not configs:
        raise ConfigError("a sweep over no value at all has no runs; give each word at least one value")
    if any(config.run.fresh for config in configs):
        raise ConfigError("run.fresh=true: a sweep uses the runs that have finished; leave it out, or change the seed")
    if len(places := {config.results_dir for config in configs}) > 1:
        raise ConfigError(f"results_dir={','.join(sorted(places))}: a sweep has one place for its runs; give one")


def _made_name(options: SweepOptions, jobs: Sequence[Job]) -> str:
    """What is swept, and a hash of what it makes: the same words find the same sweep."""
    keys = dict.fromkeys(word.partition("=")[0].lstrip("+").rpartition(".")[2] for job in jobs for word in job.words)
    what = json.dumps([sorted(job.run_id for job in jobs), options.pack])
    told = ".".join(keys)[:_LONGEST_KEYS].rstrip(".") or "sweep"
    return f"{told}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


def _refuse_one_of_anothers_pack(run: RunFolder, name: str) -> None:
    if not run.exists() or has_ended(run):
        return
    record = run.run()
    together = len(pack_members(record))
    if together > 1 and record["pack"].get("sweep") != name:
        raise ConfigError(
            f"run {run.run_id}: is one of {together} that train together in sweep {record['pack'].get('sweep')}, and "
            "has not ended; see that sweep to its end first, which makes the run one that is used, or leave it out"
        )


def _refuse_another(there: Plan, made: Plan) -> None:
    runs, ours = ({job.run_id for job in plan.jobs} for plan in (there, made))
    if runs != ours:
        raise ConfigError(
            f"sweep.name={there.name}: is the name of a sweep of {len(runs)} runs, and these words make {len(ours)}, "
            f"of which it has {len(runs & ours)}; choose another name, or leave it out"
        )
    if there.pack != made.pack:
        raise ConfigError(
            f"sweep.pack={made.pack}: sweep {there.name} was begun with sweep.pack={there.pack}, and packing anew "
            f"would change its numbers; say sweep.pack={there.pack}, or choose another sweep.name"
        )
