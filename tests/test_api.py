"""`import normlab`: it is fast, and its functions return what the commands of the same names print."""

import copy
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.torch import load_file
from synthetic_runs import Record, write_sweep

import normlab
from normlab.base.errors import ConfigError, StatisticsError, StoreError
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.catalogue.statistics.statistic import CORE, EXTENDED
from normlab.config.arms import SweepDesign
from normlab.report.compare.data import page_data
from normlab.store.arrays import StatisticsFiles
from normlab.store.plans import Plan, PlannedRun, read_plan
from normlab.store.query import select_runs
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.studies.base import STUDIES, load_studies
from normlab.studies.measures import Statistic
from normlab.sweeps.files import write_plan
from support.small_run import small_run

Command = Callable[..., tuple[int, str, str]]

EXTENDED_ONE = next(each.name for each in STATISTICS.values() if each.tier == EXTENDED and not each.needs)

FUNCTIONS = {"load", "train", "sweep", "runs", "statistics", "summarize", "figure"}


# Names


def test_public_names() -> None:
    assert set(normlab.__all__) == {*FUNCTIONS, "LoadedRun", "__version__"}
    assert set(normlab.__all__) <= set(dir(normlab))
    with pytest.raises(AttributeError, match="module 'normlab' has no attribute 'trian'"):
        normlab.trian  # noqa: B018


def test_import_is_light() -> None:
    """Only the first access to a function imports torch and pandas; the drawing library waits for a figure."""
    script = (
        "import sys, normlab; heavy = ('torch', 'pandas', 'matplotlib', 'numpy', 'scipy', 'wandb', 'hydra'); "
        "dir(normlab); normlab.__version__; print([name for name in heavy if name in sys.modules]); "
        "from normlab import *; print(figure is normlab.figure, 'torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "True True False"]


# Tables and figures of runs


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep `made` of norm, depth and seed, in which one run diverged and one failed."""
    folder = tmp_path_factory.mktemp("api")
    small = {"context": 32, "width": 32, "steps": 40, "batch_size": 4}
    outcomes = {("rmsnorm", 4, 1): {"outcome": "diverged", "at": 20}, ("dyt", 4, 2): {"outcome": "failed", "at": 20}}
    records = [
        Record(**{**small, "norm": norm, "depth": depth, "seed": seed, **outcomes.get((norm, depth, seed), {})})
        for norm in ("rmsnorm", "dyt")
        for depth in (2, 4)
        for seed in range(3)
    ]
    write_sweep(folder, "made", records)
    return folder


def as_json(value: Any) -> Any:
    """Return a value of a data frame as `--format json` prints it."""
    if isinstance(value, Mapping):
        return {key: as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, float | np.floating):
        return None if math.isnan(value) else float(value) if math.isfinite(value) else str(float(value))
    return value.item() if isinstance(value, np.generic) else value


def assert_equal(frame: pd.DataFrame, out: str) -> None:
    """Assert that a data frame has the rows and the columns of the JSON that a command printed."""
    rows = json.loads(out)
    assert len(rows) > 1
    assert list(frame.columns) == list(rows[0])
    assert [as_json(row) for row in frame.to_dict("records")] == rows


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, []),
        ({"where": ["norm=rmsnorm", "depth>2"]}, ["--where", "norm=rmsnorm,depth>2"]),
    ],
)
def test_runs_are_those_of_the_command(
    results: Path, run_command: Command, options: dict[str, Any], arguments: list[str]
) -> None:
    code, out, _ = run_command("summarize", "made", "--runs", "--format=json", f"--results-dir={results}", *arguments)
    assert code == 0
    frame = normlab.runs("made", results_dir=results, **options)
    assert_equal(frame, out)
    assert [normlab.load(folder).folder.run_id for folder in frame.folder] == list(frame.id)


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, []),
        ({"by": ["norm", "depth"], "against": "norm=dyt"}, ["--by", "norm,depth", "--against", "norm=dyt"]),
        ({"where": "depth=2,lr=0.001"}, ["--where", "depth=2,lr=0.001"]),
        ({"test": "trend", "over": "depth"}, ["--test", "trend", "--over", "depth"]),
    ],
)
def test_summarize_is_that_of_the_command(
    results: Path, run_command: Command, options: dict[str, Any], arguments: list[str]
) -> None:
    code, out, _ = run_command("summarize", "made", *arguments, "--format=json", f"--results-dir={results}")
    assert code == 0
    frame = normlab.summarize("made", results_dir=results, **options)
    assert_equal(frame, out)


def test_sweeps_are_listed(results: Path, run_command: Command) -> None:
    code, out, _ = run_command("list", "sweeps", "--json", f"--results-dir={results}")
    (row,) = json.loads(out)
    assert (code, row["sweep"], row["runs"]) == (0, "made", 12)
    assert row["states"] == "1 diverged, 1 failed, 10 finished"
    assert "norm=rmsnorm,dyt" in row["varies"]
    assert row["bytes"] == sum(path.stat().st_size for path in results.rglob("*") if path.is_file())
    assert "1 diverged, 1 failed, 10 finished" in run_command("list", "sweeps", f"--results-dir={results}")[1]
    code, _, err = run_command("list", "sweeps", "--results-dir=nowhere")
    assert (code, err.count("\n"), "no sweeps in nowhere" in err) == (2, 1, True)


def test_sweeps_are_listed_with_their_overrides_arms_and_question(
    results: Path, tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm's value replaces the shared one; a recipe has no value in a plan."""
    monkeypatch.setenv("COLUMNS", "100")
    whole = read_plan(results / "sweeps" / "made")
    runs = []
    for run, arm in zip(whole.runs[:3], ("plain", "other", "other"), strict=True):
        config = copy.deepcopy(run.config)
        config["optim"]["lr"] = {"plain": 0.001, "other": 0.003}[arm]
        config["data"]["path"] = ["a.txt", "b.txt"]
        runs.append(PlannedRun(run.run_id, [f"arm={arm}", f"seed={config['seed']}"], config))
    shared = ["recipe", "norm", "model.width", "data.path", "optim.lr", "eval.ema", "seed", "results_dir"]
    design = SweepDesign(shared, {"plain": ["placement"], "other": ["placement", "optim.lr"]})
    for name, notes in (("F", []), ("G", ["study depth, criterion 0123456789ab"])):
        (tmp_path / "sweeps" / name).mkdir(parents=True)
        plan = Plan(name, "auto", runs, [], notes=notes, design=design)
        write_plan(tmp_path / "sweeps" / name, plan)
    code, out, _ = run_command("list", "sweeps", "--json", f"--results-dir={tmp_path}")
    first, second = json.loads(out)
    assert (code, first["study"], first["question"]) == (0, "", "")
    load_studies()
    question = STUDIES["depth"].question
    assert (second["study"], second["question"]) == ("depth", question)
    fixed = "recipe norm=rmsnorm model.width=32 data.path=[a.txt,b.txt] optim.lr=0.001 eval.ema=null"
    arms = {"plain": "placement=pre", "other": "placement=pre optim.lr=0.003"}
    assert (second["fixed"], second["arms"]) == (fixed, arms)
    code, out, _ = run_command("list", "sweeps", f"--results-dir={tmp_path}")
    assert max(map(len, out.splitlines())) <= 100
    *_, note = " ".join(out.split()).partition("G: ")
    named = "; ".join(f"arm {arm}: {overrides}" for arm, overrides in arms.items())
    assert note == f"fixed: {fixed}; {named}; study depth: {question}"


def test_figure_is_that_of_the_command(results: Path, tmp_path: Path, run_command: Command) -> None:
    arguments = ["factor", "made", "--x", "depth", "--color", "norm", "--where", "depth<8"]
    files = [tmp_path / "command.pdf", tmp_path / "function.pdf"]
    assert run_command("figure", *arguments, "-o", str(files[0]), f"--results-dir={results}")[0] == 0
    canvas = normlab.figure("factor", "made", files[1], x="depth", color="norm", where="depth<8", results_dir=results)
    assert files[0].read_bytes() == files[1].read_bytes()
    (axis,) = canvas.get_axes()
    cells = normlab.summarize("made", by="norm,depth", results_dir=results).set_index(["norm", "model.depth"]).val_loss
    drawn = [np.asarray(line.get_ydata()).tolist() for line in axis.get_lines()]
    assert [cells["dyt", 2], cells["dyt", 4]] in drawn
    assert [cells["rmsnorm", 2]] in drawn  # a seed of depth 4 diverged


# Runs that are trained


def test_train_returns_the_run(tmp_path: Path, run_command: Command) -> None:
    """The function and the command have the same overrides and train the same run."""
    tiny = [*small_run(tmp_path / "results"), "train.steps=2", "model.context=16"]
    run = normlab.train(*tiny, "norm=dyt", "seed=3")
    assert (run.status.state, run.status.step, run.config.norm.name, run.config.seed) == ("finished", 2, "dyt", 3)
    assert (run.config.init, run.folder.run()["config"]["init"]) == ("gpt2_scaled", "auto")
    assert run.metrics.query("kind == 'train'").step.tolist() == [0, 1]
    before = run.folder.rows().rows
    code, out, _ = run_command("train", *tiny, "norm=dyt", "seed=3")
    assert (code, "finished" in out) == (0, True)
    assert normlab.load("dyt", tmp_path / "results").folder.rows().rows == before
    with pytest.raises(ConfigError, match="did you mean 'dyt'"):
        normlab.train(*tiny, "norm=dty")


@pytest.mark.process
@pytest.mark.parametrize("function", [normlab.train, normlab.sweep])
def test_overrides_are_texts(function: Callable[..., object]) -> None:
    with pytest.raises(ConfigError, match=r"^\['norm=rmsnorm'\]: is not a text; write one for each override"):
        function(["norm=rmsnorm"])


def test_sweep_returns_its_runs(tmp_path: Path, run_command: Command) -> None:
    results = tmp_path / "results"
    tiny = [*small_run(results), "train.steps=2", "model.context=16", "sweep.name=tiny"]
    runs = normlab.sweep(*tiny, "norm=rmsnorm,dyt", "seed=range(2)")
    assert sorted(zip(runs.norm, runs.seed, strict=True)) == [("dyt", 0), ("dyt", 1), ("rmsnorm", 0), ("rmsnorm", 1)]
    assert set(runs.state) == {"finished"}
    _, out, _ = run_command("summarize", "tiny", "--runs", "--format=json", f"--results-dir={results}")
    assert_equal(runs, out)


# A loaded run


def test_statistics_have_labelled_axes(results: Path) -> None:
    folder = next(path for path in sorted((results / "runs").iterdir()) if path.name.startswith("rmsnorm-pre-d2"))
    [stored], damaged = RunFolder(folder).statistics.read(CORE)
    frame = normlab.load(folder).stats("resid_rms")
    assert (damaged, frame.index.name, frame.columns.name) == (0, "step", "layer")
    assert frame.index.tolist() == stored.steps.tolist() == [0, 10, 20, 30]
    values = stored.single_site("resid_rms")
    layers = np.flatnonzero(np.isfinite(values).all(0))
    assert frame.columns.tolist() == layers.tolist() == [1, 2, 3]
    assert np.array_equal(frame.to_numpy(), values[:, layers])


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("resid_rms", ["site", "step", "layer"]),
        ("norm_in_rms", ["site", "step", "layer"]),
        ("resid_growth", ["site", "step"]),
    ],
)
def test_a_statistic_of_a_sweep_is_that_of_each_run(results: Path, name: str, columns: list[str]) -> None:
    frame = normlab.statistics("made", name, where="norm=rmsnorm", results_dir=results)
    assert list(frame.columns) == ["id", "model.depth", "seed", *columns, name]
    runs = normlab.runs("made", where="norm=rmsnorm", results_dir=results).set_index("id")
    assert set(frame.id) == set(runs.index)
    for run_id, rows in frame.groupby("id"):
        assert set(rows["model.depth"]) == {runs.depth[run_id]}
        assert set(rows["seed"]) == {runs.seed[run_id]}
        single = normlab.load(runs.folder[run_id]).stats(name)
        if name == "norm_in_rms":
            expected = np.concatenate([single[site].to_numpy().ravel() for site in dict.fromkeys(rows.site)])
        else:
            expected = single.to_numpy().ravel()
        assert np.array_equal(rows[name], expected)
        assert set(rows.step) == set(single.index)


def test_a_statistic_of_several_sweeps_has_the_options_that_no_arm_names(results: Path, tmp_path: Path) -> None:
    """The depth differs between the sweeps only; each arm sets its norm."""
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    whole = read_plan(results / "sweeps" / "made")
    for name, depth in (("F", 2), ("G", 4)):
        planned = [run for run in whole.runs if run.config["model"]["depth"] == depth]
        arms = [f"{run.config['norm']['name']}{depth}" for run in planned]
        runs = [replace(run, overrides=[f"arm={arm}"]) for run, arm in zip(planned, arms, strict=True)]
        (tmp_path / "sweeps" / name).mkdir()
        design = SweepDesign(["model.depth"], {arm: ["norm"] for arm in arms})
        write_plan(tmp_path / "sweeps" / name, replace(whole, name=name, runs=runs, packs=[], design=design))
    frame = normlab.statistics(["F", "G"], "resid_rms", results_dir=tmp_path)
    assert list(frame.columns) == ["id", "arm", "model.depth", "seed", "site", "step", "layer", "resid_rms"]
    depths = normlab.runs(["F", "G"], results_dir=tmp_path).set_index("id").depth
    assert list(frame["model.depth"]) == list(depths[frame.id])
    page = page_data(select_runs(["F", "G"], tmp_path), None, ())
    assert page["run_table"]["columns"][:4] == ["run", "arm", "model.depth", "seed"]


def test_the_measure_of_a_study_reads_only_the_files_of_its_statistic(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of other statistics that cannot be read leaves the measure as it is."""
    original = next(iter(sorted((results / "runs").glob("rmsnorm-pre-d2*"))))
    folder = shutil.copytree(original, tmp_path / original.name)
    run, measure = RunRecord.load(RunFolder(folder)), Statistic("resid_rms")
    expected = measure.value(run)
    assert math.isfinite(expected)
    for file in list(run.folder.statistics.path.glob(f"{CORE}.*")):
        shutil.copy(file, file.with_name(EXTENDED + file.suffix))
    read = StatisticsFiles.read

    def read_core(files: StatisticsFiles, tier: str) -> Any:
        if tier != CORE:
            raise StoreError("cannot be read")
        return read(files, tier)

    monkeypatch.setattr(StatisticsFiles, "read", read_core)
    assert measure.value(run) == expected


def test_a_statistic_reads_only_the_files_that_may_hold_it(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(files: object, tier: str) -> None:
        raise AssertionError(f"reads {tier}")

    monkeypatch.setattr(StatisticsFiles, "read", read)
    with pytest.raises(AssertionError, match="reads core"):
        normlab.statistics("made", "resid_rms", results_dir=results)
    with pytest.raises(StatisticsError, match="was not measured"):
        normlab.statistics("made", EXTENDED_ONE, results_dir=results)


def test_statistics_of_several_sites(results: Path) -> None:
    run = normlab.load(next(iter(sorted((results / "runs").glob("rmsnorm-pre-d2*")))))
    every = run.stats("norm_in_rms")
    assert every.columns.names == ["site", "layer"]
    sites = every.columns.get_level_values("site").unique()
    assert {"attn.in", "mlp.in"} <= set(sites)
    for site in sites:
        of_site = every[site]
        assert isinstance(of_site, pd.DataFrame)
        pd.testing.assert_frame_equal(of_site, run.stats("norm_in_rms", site))
    with pytest.raises(ConfigError, match=r"unknown site of norm_in_rms 'attn.inn'.*did you mean 'attn.in'"):
        run.stats("norm_in_rms", "attn.inn")


def test_the_model_of_an_earlier_checkpoint(reference: Path) -> None:
    """Each model has the bits of its checkpoint's file."""
    run = normlab.load(reference)
    files = {int(path.name.removeprefix("step_")): path for path in (reference / "checkpoints").iterdir()}
    first, last = min(files), max(files)
    assert first < last == run.status.step
    for loaded, step in ((run.at(first), first), (run.at(last), last), (run, last)):
        saved = load_file(files[step] / "state.safetensors")
        weights = dict(loaded.model.named_parameters())
        assert len(weights) > 10
        for name, tensor in weights.items():
            assert tensor.equal(saved[f"param/{name}"]), name
        assert not loaded.model.training
    earlier = dict(run.at(first).model.named_parameters())
    assert not all(tensor.equal(earlier[name]) for name, tensor in weights.items())
    with pytest.raises(StoreError, match=f"has no weights of step 3, only of these: .*{last}"):
        run.at(3)
