"""From the words of a sweep to its plan: which runs they are, which are there already, which train together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normlab.config import RunConfig, canonical_hash, config_of_record
from normlab.data.corpus import Corpus, open_corpus
from normlab.errors import ConfigError, StoreError
from normlab.options import plain_tree
from normlab.store.plans import Job, Pack, Plan, has_plan, read_plan, run_of, sweep_folder
from normlab.store.runs import RunFolder
from normlab.store.schema import ENDED
from normlab.sweep.auto import Decision
from normlab.sweep.options import SweepOptions
from normlab.sweep.packs import alike, split
from normlab.train.identity import describe
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
        return describe(config, resolve(config, self._has_gpu), self._corpora[key])["run_id"]


def make_plan(
    options: SweepOptions,
    asked: Sequence[Asked],
    tell: Callable[[str], None] = lambda _: None,
) -> Planned:
    """The plan that the jobs of a sweep make, or the one that they made before. Writes nothing.

    With `sweep.pack=auto` each run is a pack of its own, until `with_packs_tried`.

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
        doubts |= dict.fromkeys(config.doubts())
    tell("")
    name = options.name or _made_name(options, list(jobs.values()))
    folder = sweep_folder(configs[0].results_dir, name)
    plan = Plan(name, options.pack, list(jobs.values()), [])
    if has_plan(folder):
        return Planned(plan_there(folder, plan), folder, list(doubts))
    for job in plan.jobs:
        _refuse_one_of_anothers_pack(run_of(folder, job), name)
    packs = [pack for group in _groups(plan, folder, configs) for pack in split(group, options.largest_pack)]
    return Planned(replace(plan, packs=_numbered(packs)), folder, list(doubts))


def with_packs_tried(
    plan: Plan,
    folder: Path,
    decide: Callable[[Sequence[RunConfig]], Decision],
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:
    """A plan that was just made, with the packs that prove fastest and what was measured of them.

    Args:
        plan: The plan; the plugins of its runs are loaded.
        folder: The sweep's.
        decide: How many of some runs that may train together are to.
        tell: Is told how far it is.
    """
    configs = [config_of_record(job.config) for job in plan.jobs]
    packs: list[list[int]] = []
    tried: list[dict[str, Any]] = []
    for group in _groups(plan, folder, configs):
        most = 1
        if len(group) > 1:
            tell(f"trying how many of {len(group)} runs to train together")
            decision = decide([configs[index] for index in group])
            tried.append({"runs": [plan.jobs[index].run_id for index in group], **decision.row()})
            most = decision.most
        packs += split(group, most)
    tell("")
    return replace(plan, packs=_numbered(packs), tried=tried)


def _groups(plan: Plan, folder: Path, configs: Sequence[RunConfig]) -> list[list[int]]:
    """The runs that have not ended, as indices of jobs, in groups that may train together."""
    left = [index for index, job in enumerate(plan.jobs) if not has_ended(run_of(folder, job))]
    alone = [run_of(folder, plan.jobs[index]).exists() for index in left]
    return [[left[index] for index in group] for group in alike([configs[index] for index in left], alone)]


def _numbered(packs: Sequence[list[int]]) -> list[Pack]:
    return [Pack(number, pack) for number, pack in enumerate(sorted(packs), 1)]


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
    return replace(plan, packs=[*packs, *(Pack(number, [index]) for number, index in enumerate(sorted(lost), after))])


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
    pack = run.run().get("pack")
    if pack is not None and pack.get("sweep") != name:
        raise ConfigError(
            f"run {run.run_id}: is one of {len(pack['runs'])} that train together in sweep {pack.get('sweep')}, and "
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
