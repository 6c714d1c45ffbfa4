"""What a plan will cost, against what its runs have cost."""

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normlab.base.errors import NormlabError
from normlab.cli import doctor
from normlab.config.compose import compose_run, compose_sweep
from normlab.store.files import size_of
from normlab.store.format import OUTCOMES_FILE
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.store.series import evaluations as recorded_evaluations
from normlab.sweeps import rehearsal, supervisor
from normlab.sweeps.cost import (
    Cost,
    EqualPacks,
    cost_of,
    count_checkpoints,
    count_kept,
    recorded_errors,
    recorded_packs,
)
from normlab.sweeps.files import PackOutcome, append_outcome, read_outcomes
from normlab.sweeps.measured_packs import PackMeasurement, evaluations, kind_of, measure
from normlab.sweeps.plan import PlannedSweep, make_plan, packs_at_once
from normlab.sweeps.supervisor import supervise
from normlab.training import checkpoint
from normlab.training.start import train
from support.fake_workers import FakeSweeps

Command = Callable[..., tuple[int, str, str]]

MEASUREMENT = PackMeasurement(
    kind="0" * 16, seconds=12.0, fixed_seconds=2.0, seconds_per_step=0.5, memory_bytes=2**20, checkpoint_bytes=100.0,
    fixed_bytes=10.0, bytes_per_step=3.0, start_seconds=4.0,
)  # fmt: skip


def planned(overrides: list[str], *more: str) -> PlannedSweep:
    return make_plan(*compose_sweep([*overrides, *more]))


def without_steps(overrides: list[str]) -> list[str]:
    return [override for override in overrides if not override.startswith("train.steps=")]


def cost_with(sweep: PlannedSweep, measured: PackMeasurement) -> Cost:
    """Return the cost of a plan all of whose packs have cost as much."""
    return cost_of(sweep, {pack.kind: EqualPacks.of([measured]) for pack in cost_of(sweep, {}).packs})


# Counts, against the records of runs.


@pytest.mark.parametrize(
    "options",
    [
        ["train.checkpoint_every=0"],
        ["train.checkpoint_every=3"],
        ["train.checkpoint_every=4", "eval.every=5"],
        ["train.checkpoint_every=20", "eval.every=0", "train.keep=log"],
        ["train.checkpoint_every=5", "eval.every=1", "train.keep=[0,7]"],
        ["train.checkpoint_every=3", "optim.schedule=wsd", "optim.decay_fraction=0.5"],
        ["train.checkpoint_every=0", "optim.schedule=wsd", "optim.decay_fraction=0.25"],
        ["train.checkpoint_every=1", "train.steps=1"],
        ["train.steps=0", "train.keep=log"],
    ],
    ids=" ".join,
)
def test_counts_are_those_of_a_trained_run(overrides: list[str], options: list[str]) -> None:
    replaced = {option.partition("=")[0] for option in options}
    kept = [override for override in overrides if override.partition("=")[0] not in replaced]
    config = compose_run([*kept, "stats=off", *options])
    folder = train(config, trackers=[]).folder
    assert count_checkpoints(config) == len(checkpoint.steps(folder.path / checkpoint.FOLDER))
    assert count_kept(config) == len(checkpoint.steps(folder.path / checkpoint.WEIGHTS_FOLDER))
    assert evaluations(config.train.steps, config.eval.every) == len(list(recorded_evaluations(folder)))


# Kinds of packs.


def test_kind_depends_on_the_computation_only(overrides: list[str]) -> None:
    def kind(*more: str) -> str:
        sweep = planned(overrides, "seed=0,1", "sweep.pack=2", *more)
        (pack,) = cost_of(sweep, {}).packs
        return pack.kind

    numbers = ("optim.lr=1e-5", "train.log_every=3", "eval.every=7", "train.checkpoint_every=2", "train.keep=[1]")
    assert {kind(option) for option in numbers} == {kind()}
    (pack,) = cost_of(
        planned(without_steps(overrides), "seed=0,1", "sweep.pack=2", "train.tokens_per_parameter=1"), {}
    ).packs
    assert pack.kind == kind()
    shapes = ("model.width=16", "norm=dyt", "train.batch_size=2", "stats=off", "optim=lion", "eval.sequences=4")
    assert len({kind(), *map(kind, shapes)}) == 1 + len(shapes)


def test_kind_depends_on_runs_threads_and_settings(overrides: list[str]) -> None:
    (run,) = planned(overrides, "seed=0").resolved.values()

    def kind(threads: int, runs: int, **settings: str) -> str:
        return kind_of(run.config, dataclasses.replace(run.machine, **settings), threads, runs)

    kinds = [kind(1, 1), kind(2, 1), kind(1, 2), kind(1, 1, precision="bf16"), kind(1, 1, compile="on")]
    assert len(set(kinds)) == len(kinds)


# The sum over packs.


def test_packs_share_the_jobs(overrides: list[str]) -> None:
    """Two jobs: of three equal packs two train one after the other."""
    sweep = planned(overrides, "seed=0,1,2", "sweep.pack=off", "sweep.jobs=2", "train.batch_size=4", "eval.sequences=6")
    # 12 steps and two evaluations of 6 sequences, each at the time of half a step: 13 steps of 0.5 s, and 2 s more.
    cost = cost_with(sweep, MEASUREMENT)
    assert [pack.seconds for pack in cost.packs] == pytest.approx([8.5, 8.5, 8.5])
    assert cost.seconds == pytest.approx(4 + 2 * 8.5)
    assert "time    about 21 s, by 1 equal pack on record" in list(cost.lines())
    # 10 bytes, 3 for each step, and a checkpoint of 100.
    assert [pack.disk_bytes for pack in cost.packs] == [146] * 3


def test_median_of_several_measurements(overrides: list[str]) -> None:
    sweep = planned(overrides, "seed=0", "sweep.pack=off", "eval.sequences=6")
    (pack,) = cost_of(sweep, {}).packs
    slow = [dataclasses.replace(MEASUREMENT, seconds_per_step=value, start_seconds=0.0) for value in (90.0, 1.0)]
    cost = cost_of(sweep, {pack.kind: EqualPacks.of([MEASUREMENT, *slow])})
    assert cost.seconds == pytest.approx(4 + 2 + 13 * 1.0)


def test_without_a_record_the_time_is_not_known(overrides: list[str]) -> None:
    sweep = planned(overrides, "seed=0,1", "sweep.pack=off")
    first, _ = cost_of(sweep, {}).packs
    lines = list(cost_of(sweep, {}).lines())
    expected = "no equal pack on record for 2 packs; `normlab sweep` with --measure times a few steps"
    assert lines[-1] == f"time    not known: {expected}"
    assert re.match(r"memory  at least .* for the tensors of the largest process; each may have ", lines[3])
    assert lines[4].startswith("disk    at least ")
    # Others at once share the machine in another way.
    kind, _, at_once = first.kind.partition(".")
    other = {f"{kind}.{int(at_once) + 1}": EqualPacks.of([MEASUREMENT])}
    assert cost_of(sweep, other).seconds is None


def test_ranges_of_a_sweep_over_sizes(overrides: list[str]) -> None:
    """A step has 4 sequences of 32 tokens: 6,144 weights make 48 steps, and 24,576 make 192."""
    sweep = planned(without_steps(overrides), "model.width=16,32", "model.context=32", "train.tokens_per_parameter=1")
    lines = list(cost_of(sweep, {}).lines())
    assert lines[0] == "tokens  30,720 to train on, in 48 to 192 steps of each run"
    assert lines[1] == "weights 6,144 to 24,576 in attention and MLPs of each model"


def test_a_resumed_run_costs_its_last_steps(overrides: list[str]) -> None:
    options = ["seed=0", "sweep.pack=off", "train.checkpoint_every=5", "eval.every=0", "eval.sequences=6"]
    sweep = planned(overrides, *options)
    (run,) = sweep.resolved.values()
    folder = train(run.config, trackers=[]).folder
    status = json.loads((folder.path / "status.json").read_text())
    del status["sha256"]
    folder.write_status(status | {"state": "interrupted", "outcome": None, "checkpoint": 10, "step": 10})
    cost = cost_with(planned(overrides, *options), MEASUREMENT)
    # Two steps and the last evaluation.
    assert cost.seconds == pytest.approx(4 + 2 + 0.5 * (2 + 0.5))
    assert f"tokens  {2 * 4 * run.config.model.context} to train on, in 2 steps of each run" in list(cost.lines())


# A stranger's files.


@pytest.mark.parametrize("value", [-1.0, 1e300, "nan", None, "a", {}])
@pytest.mark.parametrize("field", ["seconds_per_step", "measured", "forecast_seconds"])
def test_an_impossible_cost_is_left_out(overrides: list[str], field: str, value: object) -> None:
    """The outcome stays: a pack that has failed is not trained again."""
    sweep = planned(overrides, "seed=0", "sweep.name=x")
    sweep.folder.mkdir(parents=True)
    append_outcome(sweep.folder, PackOutcome(1, "failed", "ValueError: no", measured=MEASUREMENT, time=1.0))
    path = sweep.folder / OUTCOMES_FILE
    line = json.loads(path.read_text())
    (line["measured"] if field == "seconds_per_step" else line)[field] = value
    path.write_text(json.dumps(line) + "\n")
    (outcome,) = read_outcomes(sweep.folder)
    assert (outcome.cause, outcome.detail) == ("failed", "ValueError: no")
    if value is not None or field == "seconds_per_step":
        assert outcome == PackOutcome(1, "failed", "ValueError: no", time=1.0)


def test_a_forecast_that_no_file_can_hold_is_left_out(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stranger's measurement of 10^15 s for a step."""
    fake = FakeSweeps(overrides, monkeypatch)
    huge = dataclasses.replace(MEASUREMENT, seconds_per_step=1e15)
    monkeypatch.setattr(supervisor, "recorded_packs", lambda results: AnyKind(EqualPacks.of([huge])))
    result, _, folder = fake("seed=0,1", ways={1: "raise"})
    assert result.code == 1
    assert [outcome.forecast_seconds for outcome in read_outcomes(folder)] == [None, None]


class AnyKind(dict[Any, EqualPacks]):
    """Equal packs on record for every kind."""

    def __init__(self, packs: EqualPacks) -> None:
        self.packs = packs

    def get(self, kind: Any, default: Any = None) -> EqualPacks:
        return self.packs


# What is not measured.


def test_a_run_that_starts_from_another_is_not_measured(overrides: list[str]) -> None:
    """Its record begins with that of the other run, and it has fewer steps to make."""
    first = compose_run([*overrides, "train.checkpoint_every=8", "train.log_every=2"])
    folder = train(first, trackers=[]).folder
    assert measure(first, [folder], 1.0) is not None
    branch = [*overrides, "seed=0", "sweep.pack=off", "train.log_every=2", f"train.start_from={folder.run_id}@8"]
    branch = [override for override in branch if not override.startswith("train.steps")] + ["train.steps=20"]
    (pack,) = cost_of(planned(branch), {}).packs
    assert pack.steps == 12
    other = train(pack.config, trackers=[]).folder
    assert len(other.rows("pace").rows) > 2
    assert measure(pack.config, [other], 1.0) is None


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_too_few_steps_are_not_measured(overrides: list[str], steps: int) -> None:
    kept = [override for override in overrides if not override.startswith("train.steps")]
    config = compose_run([*kept, f"train.steps={steps}", "stats=off", "train.log_every=4"])
    assert measure(config, [train(config, trackers=[]).folder], 1.0) is None


@pytest.mark.process
def test_a_diverged_pack_is_finished_and_not_measured(overrides: list[str]) -> None:
    sweep = planned(overrides, "seed=0,1", "sweep.pack=2", "optim.lr=1e30", "optim.clip=null", "train.log_every=1")
    assert supervise(sweep, sweep.options).code == 0
    (outcome,) = read_outcomes(sweep.folder)
    assert (outcome.cause, outcome.measured) == ("finished", None)
    states = {RunRecord.load(_folder(sweep, run.run_id)).state for run in sweep.plan.runs}
    assert states == {"diverged"}


# The steps of a rehearsal.


def test_first_steps_have_the_kind_of_the_run(overrides: list[str]) -> None:
    """What `auto` is may depend on the number of steps, so that a rehearsal sets it."""
    (run,) = planned(
        overrides, "seed=0", "stats.every=3", "optim.schedule=wsd", "optim.decay_fraction=0.5"
    ).resolved.values()
    on_gpu = dataclasses.replace(run.machine, compile="on", graph="on")
    config = rehearsal.first_steps(dataclasses.replace(run, machine=on_gpu), "folder", 1e-9)
    assert (config.compile, config.train.graph) == ("on", "on")
    config.validate()
    config = rehearsal.first_steps(run, "folder", 1e-9)
    assert kind_of(config, run.machine, 1, 1) == kind_of(run.config, run.machine, 1, 1)
    # Two measured steps of six, as one of three.
    assert config.train.steps == 2 * config.train.log_every == 12


@pytest.mark.parametrize(
    ("jobs", "gpus", "devices", "expected"), [(2, 0, 1, 2), (2, 0, 4, 2), (1, 4, 1, 4), (1, 4, 2, 2), (1, 2, 4, 1)]
)
def test_packs_at_once(jobs: int, gpus: int, devices: int, expected: int) -> None:
    assert packs_at_once(jobs, gpus, devices) == expected


# Whole sweeps.


@pytest.mark.process
def test_forecast_of_a_longer_sweep(overrides: list[str], run_command: Command, tmp_path: Path) -> None:
    """After a sweep of 40 steps, one of 120 has a forecast of the disk and the memory within a tenth."""
    kept = [override for override in overrides if not override.startswith("train.steps")]
    options = [*kept, "norm=rmsnorm,layernorm", "seed=0,1", "sweep.pack=2", "sweep.jobs=1", "stats.every=10"]
    options += ["train.checkpoint_every=20"]
    short, long = ([*options, f"train.steps={steps}", f"sweep.name=s{steps}"] for steps in (40, 120))
    first = make_plan(*compose_sweep(short))
    assert supervise(first, first.options).code == 0
    sweep = make_plan(*compose_sweep(long))
    cost = cost_of(sweep, recorded_packs(sweep.results_dir))
    assert cost.seconds is not None
    assert all(pack.equal is not None and pack.equal.count == 1 for pack in cost.packs)
    result = supervise(sweep, sweep.options)
    assert result.code == 0
    records = [RunRecord.load(folder) for run in sweep.plan.runs for folder in [_folder(sweep, run.run_id)]]
    disk = sum(size_of(record.folder.path) for record in records)
    assert sum(pack.disk_bytes for pack in cost.packs) == pytest.approx(disk, rel=0.1)
    memory = max(record.status.peak_memory_bytes or 0 for record in records)
    assert max(pack.memory_bytes for pack in cost.packs) == pytest.approx(memory, rel=0.1)
    # The forecast of each pack is on record, and `doctor` prints the errors.
    outcomes = read_outcomes(sweep.folder)
    assert [outcome.forecast_seconds for outcome in outcomes] == [pack.seconds for pack in cost.packs]
    assert len(recorded_errors(sweep.results_dir)) == 2
    (check,) = [row for row in doctor.checks(str(sweep.results_dir)) if row["check"] == "forecast"]
    assert re.search(r"2 packs took [\d.]+ times the forecast", check["finding"])
    # A completed sweep costs nothing.
    _, out, _ = run_command("sweep", *long, "--dry-run")
    assert "nothing is left to train" in out


def _folder(sweep: PlannedSweep, run_id: str) -> RunFolder:
    return RunFolder(sweep.results_dir / "runs" / run_id)


@pytest.mark.process
def test_measured_plan_touches_no_results(
    overrides: list[str], run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    options = [*without_steps(overrides), "norm=rmsnorm,layernorm", "seed=0,1,2", "sweep.pack=3"]
    options += ["train.tokens_per_parameter=1", "optim.warmup_steps=8"]
    code, out, err = run_command("sweep", *options, "--measure")
    assert (code, err) == (0, "normlab: measuring: the first steps of 2 packs\n")
    assert re.search(r"^time    about \d+ s, by the first steps of 2 packs$", out, re.M)
    assert "disk    about" in out
    assert not (tmp_path / "results").exists()
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.process
def test_failed_rehearsal_is_one_line(
    overrides: list[str], run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "LEARNING_RATE", -1.0)
    with pytest.raises(NormlabError, match=r"^--measure: failed: optim.lr=-1.0: [^\n]*$"):
        rehearsal.rehearse(planned(overrides, "seed=0,1", "sweep.pack=2"), {})
