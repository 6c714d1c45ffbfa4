"""An ended run stores a digest of its metrics: every reader reports lost, added and changed rows."""

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.analysis.table import summarize_by
from normlab.base.errors import StoreError
from normlab.config.compose import compose_run
from normlab.loaded.run import load
from normlab.report.cells_table import json_rows
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.studies.measures import StepsTo, TokenTime
from normlab.training.start import train, train_pack
from support.run_folders import OVERRIDES, Command

CONSTANT = ("optim.schedule=constant", "optim.warmup_steps=2")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results folder of a finished run."""
    results = tmp_path_factory.mktemp("changed") / "results"
    train(compose_run([*OVERRIDES, *CONSTANT, f"results_dir={results}"]), trackers=[])
    return results


@pytest.fixture
def run(ended: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(ended, tmp_path / "results")
    (folder,) = (tmp_path / "results" / "runs").iterdir()
    return RunFolder(folder)


def drop_rows(lines: list[bytes]) -> list[bytes]:
    return lines[:4] + lines[6:]


def add_a_row(lines: list[bytes]) -> list[bytes]:
    return [*lines, lines[-2]]


def change_a_digit(lines: list[bytes]) -> list[bytes]:
    return [*lines[:1], lines[1].replace(b'"loss":5', b'"loss":4'), *lines[2:]]


def rewrite(run: RunFolder, change: Callable[[list[bytes]], list[bytes]]) -> None:
    lines = run.metrics_path.read_bytes().splitlines(keepends=True)
    assert change(lines) != lines
    run.metrics_path.write_bytes(b"".join(change(lines)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (drop_rows, r"have \d+ rows where \d+ were written"),
        (add_a_row, r"have \d+ rows where \d+ were written"),
        (change_a_digit, "are not those that were written"),
    ],
)
def test_lost_added_or_changed_rows_are_a_problem(
    change: Callable[[list[bytes]], list[bytes]], problem: str, run: RunFolder
) -> None:
    rewrite(run, change)
    assert re.fullmatch(f"the metrics of run {run.run_id} {problem}; restore a copy", run.metrics_problem())


def test_every_reader_reports_the_problem(
    run: RunFolder, run_command: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    rewrite(run, change_a_digit)
    results, problem = str(run.path.parents[1]), "are not those that were written; restore a copy"
    for command, expected in (
        (("inspect", run.run_id, "spikes", "--results-dir", results), 2),
        (("compare", results, "-o", f"{results}/page.html"), 0),
        (("figure", "loss", results, "-o", f"{results}/loss.svg"), 2),
        (("train", *OVERRIDES, *CONSTANT, f"results_dir={results}"), 0),
    ):
        code, _, err = run_command(*command)
        assert (code, problem in err) == (expected, True), command
    assert problem in (Path(results) / "page.html").read_text()
    with pytest.raises(StoreError, match=problem):
        load(run.path).metrics  # noqa: B018
    for measure in (StepsTo(9.0), TokenTime()):
        with pytest.raises(StoreError, match=problem):
            measure.value(RunRecord.load(run))
    (row,) = json_rows(summarize_by(results, ["norm"], target=99.0))
    assert (row["target_runs"], row["target_reached"]) == (0, 0)
    assert [warning for warning in row["warnings"] if problem in warning]


def test_started_and_running_runs_are_not_reported(run: RunFolder) -> None:
    results = str(run.path.parents[1])
    assert run.metrics_problem() == ""
    assert run.status()["metrics"]["rows"] == 1 + len(run.rows().rows)  # the first line has the run's id
    assert "spikes" in run.status()
    start = ("train.steps=20", f"train.start_from={run.run_id}")
    longer = train(compose_run([*OVERRIDES, *CONSTANT, *start, f"results_dir={results}"]), trackers=[]).folder
    assert longer.metrics_problem() == ""
    run.write_status({**run.status(), "state": "running"})
    rewrite(run, drop_rows)
    assert run.metrics_problem() == ""


def test_each_run_of_a_pack_stores_the_digest_of_its_rows(tmp_path: Path) -> None:
    configs = [compose_run([*OVERRIDES, f"results_dir={tmp_path}", f"seed={seed}", f"optim.lr={lr}", "optim.clip=1e9"])
               for seed, lr in ((0, 1e-3), (1, 1e6))]  # fmt: skip
    outcomes = train_pack(configs, [[], []], pack={"sweep": "some", "number": 0})
    assert [outcome.state for outcome in outcomes] == ["finished", "diverged"]
    for outcome in outcomes:
        digests = outcome.folder.digests()
        for status in (outcome.status, outcome.folder.read_status()):
            assert (status.metrics, status.statistics) == digests
    assert math.isfinite(outcomes[0].status.val_loss or math.nan)
