"""Arms are a factor of tables, which explains the options that follow from it."""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import normlab
from normlab.analysis.cell_differences import table_warnings
from normlab.analysis.comparability import intact_runs
from normlab.analysis.factors import distinguishing_options, factors_of
from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError
from normlab.store.plans import Plan, PlannedRun
from normlab.store.query import select_runs
from normlab.sweeps.files import write_plan


def plan_runs(results: Path, name: str, runs: Sequence[PlannedRun]) -> str:
    folder = results / "sweeps" / name
    folder.mkdir(parents=True)
    write_plan(folder, Plan(name, "auto", list(runs), []))
    return str(folder)


@pytest.fixture
def sweep(tmp_path: Path, make_run: Callable[..., object]) -> str:
    """Write a sweep of three arms and two depths."""
    arms = {"b": ("pre", "off"), "a": ("pre", "head"), "c": ("peri", "off")}
    runs = []
    for arm, (placement, qk_norm) in arms.items():
        for depth in (2, 4):
            config = {"placement": {"name": placement}, "model": {"qk_norm": qk_norm, "depth": depth}}
            make_run(f"{arm}{depth}", run={"config": config})
            runs.append(PlannedRun(f"{arm}{depth}", [f"arm={arm}", f"model.depth={depth}"], {}))
    return plan_runs(tmp_path, "arms", runs)


def test_arms_are_a_factor(sweep: str, run_command: Callable[..., tuple[int, str, str]]) -> None:
    """Without arms, the same runs differ in the options that follow from them."""
    records, _ = intact_runs(select_runs([sweep], "results").records)
    assert [record.arm for record in records] == ["b", "b", "a", "a", "c", "c"]
    table = summarize_by(sweep)
    assert list(table.by) == ["arm", "model.depth"]
    assert [cell.label for cell in table.cells][:2] == ["b, depth 2", "b, depth 4"]
    assert not table_warnings(table.cells, table.by)
    assert [factor.levels for factor in factors_of(records)] == [("b", "a", "c"), (2, 4)]
    bare, _ = intact_runs(select_runs([str(Path(sweep).parent.parent / "runs")], "results").records)
    assert distinguishing_options(bare) == ["placement", "model.depth", "model.qk_norm"]
    code, out, err = run_command("summarize", sweep, "--where", "arm=c", "--format", "json")
    assert code == 0, err
    assert [row["run_ids"] for row in json.loads(out)] == [["c2"], ["c4"]]
    code, _, err = run_command("summarize", sweep, "--where", "arm=d")
    assert (code, err.count("\n")) == (2, 1)
    assert "arm is a, b, c" in err


def test_several_sweeps_are_one_table(
    sweep: str, make_run: Callable[..., object], run_command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Runs that two sweeps share count once."""
    make_run("d2", run={"config": {"placement": {"name": "post"}, "model": {"depth": 2}}})
    shared, new = PlannedRun("a2", ["arm=a"], {}), PlannedRun("d2", ["arm=d"], {})
    second = plan_runs(tmp_path, "second", [shared, new])
    assert select_runs([sweep, second], tmp_path).name == "arms + second"
    cells = ["b 2", "b 4", "a 2", "a 4", "c 2", "c 4", "d 2"]
    assert [cell.name for cell in summarize_by([sweep, second]).cells] == cells
    assert [cell.name for cell in summarize_by(["arms", "second"], results_dir=tmp_path).cells] == cells
    code, out, err = run_command("summarize", sweep, second, "--format", "json")
    assert code == 0, err
    assert [row["cell"] for row in json.loads(out)] == cells
    assert len(normlab.runs([sweep, second])) == len(cells)
    for arguments in (["figure", "factor", sweep, second, "-o", str(tmp_path / "f.svg")], ["compare", sweep, second]):
        code, _, err = run_command(*arguments, "--results-dir", str(tmp_path))
        assert code == 0, err
    assert (tmp_path / "f.svg").exists()
    assert (tmp_path / "compare.html").exists()


@pytest.fixture
def two_arms(sweep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write two sweeps that call the arm of a shared run differently, and return their names; enter their folder."""
    monkeypatch.chdir(tmp_path)
    plan_runs(tmp_path, "renamed", [PlannedRun("a2", ["arm=other"], {}), PlannedRun("c2", ["arm=c"], {})])
    return ["arms", "renamed"]


BY_OPTION = ["--by", "placement"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["summarize"], ["figure", "factor", "-o", "f.svg"], ["compare", "-o", "c.html"],
        ["summarize", "--where", "arm=a", *BY_OPTION], ["summarize", "--by", "arm"],
    ],
)  # fmt: skip
def test_a_run_of_two_arms_is_in_no_group_of_arms(
    arguments: list[str], two_arms: list[str], run_command: Callable[..., tuple[int, str, str]]
) -> None:
    command, *options = arguments
    code, out, err = run_command(command, *options, *two_arms, "--results-dir", ".")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "run a2 is in arm a of the sweep arms and in arm other of the sweep renamed; " in err


def test_the_message_about_two_arms_has_a_command_that_works(
    two_arms: list[str], run_command: Callable[..., tuple[int, str, str]]
) -> None:
    _, _, err = run_command("summarize", *two_arms, "--results-dir", ".")
    program, *arguments = shlex.split(err.split("`")[1])
    assert (program, arguments[:3]) == ("normlab", ["summarize", *two_arms])
    code, out, err = run_command(*arguments, "--format", "json")
    assert (code, len(json.loads(out))) == (0, 6), err


@pytest.mark.parametrize(
    "arguments",
    [
        ["summarize", *BY_OPTION], ["summarize", *BY_OPTION, "--test", "counts"], ["summarize", "--runs"],
        ["figure", "factor", "-o", "f.svg", *BY_OPTION], ["compare", "-o", "c.html", *BY_OPTION],
    ],
)  # fmt: skip
def test_a_run_of_two_arms_is_grouped_by_options(
    arguments: list[str], two_arms: list[str], run_command: Callable[..., tuple[int, str, str]]
) -> None:
    command, *options = arguments
    code, _, err = run_command(command, *options, *two_arms, "--results-dir", ".")
    assert code == 0, err


def test_functions_group_a_run_of_two_arms_by_options(two_arms: list[str]) -> None:
    """A third sweep, which agrees with one of them, changes nothing."""
    plan_runs(Path(), "third", [PlannedRun("a2", ["arm=other"], {}), PlannedRun("a4", ["arm=a"], {})])
    names = [*two_arms, "third"]
    frame = normlab.summarize(names, by="placement", results_dir=".")
    assert dict(zip(frame["cell"], frame["runs"], strict=True)) == {"peri": 2, "pre": 4}
    runs = normlab.runs(names, results_dir=".")
    assert (len(runs), "arm" in runs, {"placement", "depth", "model.qk_norm"} <= set(runs)) == (6, False, True)
    without_the_run = normlab.summarize(names, where="depth=4", results_dir=".")
    assert list(without_the_run["arm"]) == ["b", "a", "c"]
    with pytest.raises(ConfigError, match="run a2 is in arm a of the sweep arms and in arm other of the sweep renamed"):
        normlab.summarize(names, results_dir=".")
