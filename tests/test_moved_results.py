"""A results folder prints the same after it was moved, copied, or shared and opened."""

import shutil
from pathlib import Path

import pytest

import normlab
from normlab.analysis.table import summarize_by
from normlab.config.compose import compose_sweep
from normlab.report.compare.data import page_data
from normlab.report.figure_data import make_figure
from normlab.store.query import select_runs
from normlab.sweeps.files import write_plan
from normlab.sweeps.plan import make_plan
from normlab.training.start import train_pack
from normlab.verify.runs import load_runs, verify_runs
from support.run_folders import Command
from support.small_run import small_run

COMMANDS = [
    "summarize first", "summarize first --format json", "summarize first --runs", "summarize first --against arm=rms",
    "summarize first --test interaction --over arm,depth", "summarize first --test trend", "inspect first {}",
    "inspect first {} resid_rms --json", "inspect first {} spikes",
]  # fmt: skip
RUN = "arm=rms,depth=1,seed=0"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `results` of a sweep of two norms, two depths and two seeds, given by absolute paths."""
    home = tmp_path_factory.mktemp("home")
    arms = "arm=[rms: norm=rmsnorm, layer: norm=layernorm]"
    overrides = [
        *small_run(home / "results"), "model.width=8", "model.heads=1", "model.context=8", "train.steps=3",
        "optim.warmup_steps=1", "train.batch_size=2", "stats.every=1", "compile=off", "sweep.name=first",
        arms, "model.depth=1,2", "seed=0,1",
    ]  # fmt: skip
    options, composed = compose_sweep(overrides)
    planned = make_plan(options, composed)
    planned.folder.mkdir(parents=True)
    write_plan(planned.folder, planned.plan)
    for _, config in composed:
        train_pack([config], [[]], keep_compiled=True)
    return home


def outputs(results: str, run_command: Command) -> list[object]:
    printed = [run_command(*each.format(RUN).split(" "), "--results-dir", results) for each in COMMANDS]
    assert [text for text in printed if text[0]] == []
    selection = select_runs("first", results)
    table = summarize_by(selection)
    runs, problems = load_runs([record.folder for record in selection.started], trust=False)
    assert problems == []
    return [
        printed,
        rows_of_folder(results, run_command),
        [make_figure(kind, table) for kind in ("loss", "lr", "factor", "layers")],
        page_data(selection, None, ()),
        str(next(verify_runs(runs))),
        normlab.runs("first", results_dir=results).drop(columns="folder").to_csv(),
        normlab.load("first", results, where=RUN).sample("def", tokens=4),
    ]


def rows_of_folder(results: str, run_command: Command) -> str:
    """Return the table of the runs when the results folder itself is the name."""
    code, out, err = run_command("summarize", results)
    assert (code, err) == (0, "")
    return out.replace(results, "results")


def test_they_print_the_same(home: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    before = outputs("results", run_command)
    shutil.copytree("results", "copy")
    assert run_command("share", "first", "-o", "shared.zip", "--checkpoints")[0] == 0
    Path("results").rename("away")
    Path("deep", "er").mkdir(parents=True)
    Path("copy").rename("deep/er/copy")
    assert run_command("open", "shared.zip")[0] == 0
    for results in ("away", "deep/er/copy", "shared"):
        assert outputs(results, run_command) == before, results
