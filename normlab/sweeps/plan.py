"""Plan a sweep: the runs of its grid, and the packs of those runs that are not completed yet."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from normlab.base.errors import ConfigError, counted
from normlab.base.options import plain_tree
from normlab.base.parsing import canonical_hash
from normlab.config import memory, rules
from normlab.config.arms import NO_DESIGN, SweepDesign
from normlab.config.override_errors import naming_run
from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SweepOptions
from normlab.data.corpus import Corpus, open_corpus
from normlab.store.format import RUNS_FOLDER
from normlab.store.plans import Pack, Plan, PlannedRun, has_plan, read_plan, run_of, sweep_folder
from normlab.store.run_json import Identity, Run
from normlab.store.runs import RunFolder
from normlab.sweeps.equal_functions import equal_functions, other_init_rules
from normlab.sweeps.packs import make_packs, reason_to_train_alone
from normlab.sweeps.stored_plan import all_completed, is_completed, is_intact_and_completed, reconcile
from normlab.system.cgroup import allowed_cores
from normlab.training.changed_plugins import change_warnings, check_same_code
from normlab.training.identity import identity, run_id_of
from normlab.training.machine import (
    Gpu,
    RuntimeSettings,
    check_run,
    gpu_of,
    num_threads,
    resolve,
    resolve_device,
)
from normlab.training.start_from import check_start, resolve_start

_LONGEST_KEYS = 60
"""Most characters of a generated name before its hash."""


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    planned: PlannedRun
    config: RunConfig
    machine: RuntimeSettings
    vocab_size: int

    @property
    def work(self) -> rules.Workload:
        """What the rules of `auto` know of the run."""
        return rules.workload(self.config, self.machine.device, self.machine.precision)

    def peak_of(self, runs: int) -> int:
        """Return a lower bound on the memory of a pack of such runs, in bytes."""
        # All processes of a run share the memory of a CPU; each GPU has a memory of its own.
        processes = self.config.devices if self.machine.device == "cpu" else 1
        return processes * self.machine.memory_of(self.config, self.vocab_size, runs).peak


@dataclass(frozen=True, slots=True)
class PlannedSweep:
    plan: Plan
    folder: Path
    warnings: list[str]
    """Warnings of the configs, and a warning for each repeated run."""
    gpus: list[Gpu]
    """The GPUs of the packs; empty if all train on a CPU or in Slurm."""
    options: SweepOptions
    """Those with which it was planned."""
    resolved: dict[str, ResolvedRun]
    """The runs with their settings on this machine, by run id."""
    extended: Plan | None = None
    """The stored plan, if this one adds runs to it."""

    @property
    def results_dir(self) -> Path:
        return self.folder.parent.parent

    @property
    def jobs(self) -> int:
        """The packs that train at once, on each GPU if they train on GPUs."""
        return self.options.jobs or self.plan.parallel_packs

    @property
    def threads(self) -> int:
        """The threads of each process on this machine."""
        # The processes inherit the variable, which takes precedence over the plan.
        if self.plan.threads is None or "OMP_NUM_THREADS" in os.environ:
            return threads_of(self.jobs * max(1, len(self.gpus)))
        return self.plan.threads

    def is_completed(self) -> bool:
        """Return whether the sweep has a stored plan with all its runs, and each has finished or diverged."""
        is_stored = self.extended is None and has_plan(self.folder)
        return is_stored and all_completed(self.folder, self.plan.runs)


def make_plan(
    options: SweepOptions,
    composed: Sequence[tuple[list[str], RunConfig]],
    show_progress: Callable[[str], None] = lambda _: None,
    *,
    extend: bool = False,
    design: SweepDesign = NO_DESIGN,
) -> PlannedSweep:
    """Return the plan of runs from `compose_sweep`, with the packs of the stored plan, if any; write no file.

    With `extend`, runs that the stored plan lacks are added to it, in packs of their own. `design` is that of the
    command, `arms.design_of`.

    Raises:
        ConfigError: There is no run, the runs have several results folders or run.fresh=true, another sweep has the
            same name, or there is no sweep to extend.
        DataError: A corpus does not exist.
        StoreError: An existing run or plan cannot be read.
    """
    configs = [config for _, config in composed]
    check_configs(configs)
    gpus = _gpus_of(options, configs)
    # Packs are planned before they are placed, so each must fit on the smallest GPU.
    gpu = min(gpus, key=lambda gpu: gpu.memory_bytes, default=None)
    slurm = options.slurm if options.on == "slurm" else None
    for varied, config in composed:
        with naming_run(varied):
            check_run(config, slurm, gpu)
    runs, warnings = _resolve_runs(options, composed, gpu, show_progress)
    planned = [run.planned for run in runs]
    resolved = {run.planned.run_id: run for run in runs}
    name = options.name or _default_name(options, planned)
    folder = sweep_folder(runs[0].config.results_dir, name)
    plan = Plan(name, options.pack, planned, [], design=design)
    if not has_plan(folder):
        if extend:
            raise no_sweep_to_extend(name)
        plan = _grouped(options, replace(plan, runs=[]), folder, runs, gpus)
        return PlannedSweep(plan, folder, warnings, gpus, options, resolved)
    stored = read_plan(folder)
    check_same_code(stored, [(run.planned, run.config) for run in runs], folder)
    if not extend:
        return PlannedSweep(reconcile(stored, plan, folder), folder, warnings, gpus, options, resolved)
    stored_runs, added = _split_runs(runs, stored)
    plan = reconcile(stored, replace(plan, runs=stored_runs), folder)
    if not added:
        return PlannedSweep(plan, folder, warnings, gpus, options, resolved)
    plan = _grouped(options, plan, folder, added, gpus)
    plan = replace(plan, design=stored.design.extended_by(design))
    return PlannedSweep(plan, folder, warnings, gpus, options, resolved, extended=stored)


def _split_runs(runs: Sequence[ResolvedRun], stored: Plan) -> tuple[list[PlannedRun], list[ResolvedRun]]:
    """Return the runs that a stored plan has, and those that extend it.

    Raises:
        ConfigError: The stored plan has other runs, too.
    """
    stored_ids = {run.run_id for run in stored.runs}
    stored_runs: list[PlannedRun] = []
    added: list[ResolvedRun] = []
    for run in runs:
        if run.planned.run_id in stored_ids:
            stored_runs.append(run.planned)
        else:
            added.append(run)
    left_out = len(stored_ids) - len(stored_runs)
    if left_out:
        raise ConfigError(
            f"sweep {stored.name}: these overrides leave out {left_out} of its {counted(len(stored_ids), 'run')}; give "
            "the old values too, beside the new ones, or choose another sweep.name"
        )
    return stored_runs, added


def no_sweep_to_extend(name: str) -> ConfigError:
    return ConfigError(f"--extend: there is no sweep {name}; give sweep.name=... of the sweep, or leave out --extend")


def _resolve_runs(
    options: SweepOptions,
    composed: Sequence[tuple[list[str], RunConfig]],
    gpu: Gpu | None,
    show_progress: Callable[[str], None],
) -> tuple[list[ResolvedRun], list[str]]:
    """Return the different runs, and the warnings about them; `gpu` has the least memory."""
    corpora, warnings, runs = dict[str, Corpus](), dict[str, None](), dict[str, ResolvedRun]()
    new_runs: list[tuple[RunConfig, Identity]] = []
    """The config and the identity of each run that has not started."""
    for number, (overrides, unresolved) in enumerate(composed, 1):
        show_progress(f"planning: {number} of {counted(len(composed), 'run')}")
        config = resolve_start(unresolved)
        # The corpus does not depend on data.seed.
        key = canonical_hash(plain_tree(replace(config.data, seed=0)))
        if key not in corpora:
            corpora[key] = open_corpus(config.data)
        tokenizer = corpora[key].tokenizer
        machine = resolve(config, options.has_gpu, gpu)
        run_identity = identity(config, machine, corpora[key])
        run_id = run_id_of(config, run_identity)
        if run_id in runs:
            first = " ".join(runs[run_id].planned.overrides) or "an earlier run"
            same = " ".join(overrides) or "a run"
            reason = "is given twice" if same == first else f"is the same run as {first}"
            warnings[f"{same}: {reason}, and is trained once"] = None
            continue
        if not RunFolder(Path(config.results_dir) / RUNS_FOLDER / run_id).exists():
            new_runs.append((config, run_identity))
            warnings |= dict.fromkeys(check_start(config, run_identity, tokenizer))
        planned = PlannedRun(run_id, list(overrides), config.recorded())
        runs[run_id] = ResolvedRun(planned, config, machine, tokenizer.vocab_size)
        warnings |= dict.fromkeys(config.warnings())
    show_progress("")
    warnings |= dict.fromkeys(change_warnings(new_runs, Path(composed[0][1].results_dir) / RUNS_FOLDER))
    planned_runs = [(run.planned, run.config) for run in runs.values()]
    return list(runs.values()), [*warnings, *other_init_rules(planned_runs), *equal_functions(planned_runs)]


def _grouped(options: SweepOptions, plan: Plan, folder: Path, runs: Sequence[ResolvedRun], gpus: Sequence[Gpu]) -> Plan:
    """Return the plan with more runs, and packs of those that are not completed."""
    first = len(plan.runs)
    configs = [run.config for run in runs]
    jobs = _jobs(options, runs)
    size, memory_bytes = _pack_size(options, runs, gpus, jobs)
    incomplete_runs: list[int] = []
    alone: set[int] = set()
    for index, run in enumerate(runs):
        run_folder = run_of(folder, run.planned)
        _check_not_in_another_pack(run_folder, plan.name)
        if not is_intact_and_completed(run_folder):
            incomplete_runs.append(index)
            # It has a record already, and the runs of a pack start together.
            if run_folder.exists():
                alone.add(index)
    trained_packs = plan.packs
    number = max((pack.number for pack in trained_packs), default=0)
    packs = list(trained_packs)
    for indices in sorted(make_packs(configs, incomplete_runs, alone, size)):
        number += 1
        packs.append(Pack(number, [first + index for index in indices]))
    notes = list(plan.notes)
    if (options.largest_pack or 1) > 1:
        for reason in dict.fromkeys(map(reason_to_train_alone, configs)):
            if reason:
                notes.append(f"sweep.pack={options.pack} does not apply to all runs: {reason}")
    if first:
        notes.append(f"extended from {first} to {first + len(runs)} runs")
    plan = replace(plan, runs=[*plan.runs, *(run.planned for run in runs)], packs=packs, notes=notes)
    # With other threads, the new runs would differ from the old ones by more than their options. A plan whose runs had
    # all been trained before has trained none with its own.
    if trained_packs:
        return plan
    if not gpus:
        jobs = max(1, min(jobs, len(packs)))
    threads = None
    if options.on != "slurm":
        threads = threads_of((options.jobs or jobs) * max(1, len(gpus)))
    return replace(plan, memory_bytes=memory_bytes, parallel_packs=jobs, threads=threads)


def packs_at_once(jobs: int, gpus: int, devices: int) -> int:
    """Return the packs that train at once on this machine.

    Args:
        jobs: Packs on each GPU, or on the CPU.
        gpus: GPUs of the sweep; 0 on a CPU.
        devices: GPUs of each run.
    """
    return max(1, jobs * gpus // devices) if gpus else jobs


def threads_of(processes: int) -> int:
    """Return the threads of each of several processes on this machine: an equal share, or OMP_NUM_THREADS if set."""
    if processes == 1 or "OMP_NUM_THREADS" in os.environ:
        return num_threads()
    return max(1, allowed_cores() // processes)


def _gpus_of(options: SweepOptions, configs: Sequence[RunConfig]) -> list[Gpu]:
    """Return the GPUs of a sweep; none if it runs in Slurm, or on a CPU only."""
    if options.on == "slurm" or "cuda" not in map(resolve_device, configs):
        return []
    gpus = visible_gpus()
    older = [gpu for gpu in gpus if not gpu.has_bf16]
    if 0 < len(older) < len(gpus) and any(config.precision == "auto" for config in configs):
        raise ConfigError(
            f"precision=auto: depends on the GPU, and GPU {older[0]} has no bf16; set precision=fp32 or fp16, or "
            "choose GPUs of one kind with CUDA_VISIBLE_DEVICES"
        )
    return gpus


def visible_gpus() -> list[Gpu]:
    """Return all GPUs that CUDA_VISIBLE_DEVICES leaves visible."""
    return [gpu_of(index) for index in range(torch.cuda.device_count())]


def _jobs(options: SweepOptions, runs: Sequence[ResolvedRun]) -> int:
    """Return the number of packs that train at once, on each GPU: the smallest of the numbers for each run."""
    if options.jobs is not None or options.on == "slurm":
        return options.jobs or 1
    cores, free_bytes = allowed_cores(), memory.available_bytes()
    return min(rules.parallel_packs(run.work, run.peak_of(1), cores // run.config.devices, free_bytes) for run in runs)


def _pack_size(
    options: SweepOptions, runs: Sequence[ResolvedRun], gpus: Sequence[Gpu], jobs: int
) -> tuple[int, int | None]:
    """Return the largest pack size and, with sweep.pack=auto, the bytes that limit it.

    That of auto is the smallest of the sizes for each run, and leaves runs for every job on this machine.
    """
    if options.largest_pack is not None:
        return options.largest_pack, None
    gpu_bytes = min((gpu.memory_bytes for gpu in gpus), default=0)
    devices = {run.machine.device for run in runs}
    memory_bytes = min(options.pack_memory(device, gpu_bytes, jobs) for device in devices)
    # Runs of one shape have one size; a large sweep has many of them.
    shapes: dict[tuple[rules.Workload, int], ResolvedRun] = {}
    for run in runs:
        shapes[run.work, run.peak_of(1)] = run
    size = min(rules.pack_size(run.work, run.peak_of, memory_bytes) for run in shapes.values())
    if options.on == "local":
        size = min(size, max(1, len(runs) // (jobs * max(1, len(gpus)))))
    return size, memory_bytes


def tokens_of(run: PlannedRun) -> int:
    train = run.config["train"]
    return train["steps"] * train["batch_size"] * run.config["model"]["context"]


def check_configs(configs: Sequence[RunConfig]) -> None:
    """Check what all runs of a sweep have in common.

    Raises:
        ConfigError: There is no run, the runs have several results folders, or run.fresh=true.
    """
    if not configs:
        raise ConfigError("the sweep has no runs, because an override has no value; give each override a value")
    for config in configs:
        if config.run.fresh:
            raise ConfigError(
                "run.fresh=true: has no effect in a sweep, which never repeats a run; leave it out, or change the seed"
            )
    folders = {config.results_dir for config in configs}
    if len(folders) > 1:
        raise ConfigError(f"results_dir={','.join(sorted(folders))}: a sweep has one results folder; choose one")


def _default_name(options: SweepOptions, runs: Sequence[PlannedRun]) -> str:
    """Return a name of varied options and a hash of the runs, equal for equal overrides."""
    keys: dict[str, None] = {}
    for run in runs:
        for override in run.overrides:
            option = override.partition("=")[0].lstrip("+")
            keys[option.rpartition(".")[2]] = None
    content = json.dumps([sorted(run.run_id for run in runs), options.pack])
    prefix = ".".join(keys)[:_LONGEST_KEYS].rstrip(".") or "sweep"
    return f"{prefix}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _check_not_in_another_pack(run: RunFolder, name: str) -> None:
    if not run.exists() or is_completed(run):
        return
    pack = run.run(Run).pack
    if len(pack.runs) > 1 and pack.sweep != name:
        raise ConfigError(
            f"run {run.run_id}: is not completed, and trains in a pack of {len(pack.runs)} runs of sweep "
            f"{pack.sweep}; complete that sweep first, or leave the run out"
        )
