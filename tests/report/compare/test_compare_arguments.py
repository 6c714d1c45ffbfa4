"""Arguments of `normlab compare`: the selected runs, the path of the page, errors and warnings."""

import json
import re
from pathlib import Path

import pytest

from normlab.store.plans import Plan, PlannedRun, sweep_folder
from normlab.sweeps.files import write_plan


def page_data(page: Path):
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture
def sweeps(trained):
    """Three runs and three sweeps in `results`, the default folder of names."""
    made = [trained(f"abc{number}", seed=number, run={"name": f"name{number}"}) for number in range(3)]
    Path("results").mkdir()
    Path("runs").rename("results/runs")
    config = json.loads(Path("results/runs/abc0/run.json").read_bytes())["config"]
    for name, ids in (("first", ["abc0", "abc1"]), ("second", ["abc1", "abc2"]), ("later", ["xyz0"])):
        sweep_folder("results", name).mkdir(parents=True)
        write_plan(sweep_folder("results", name), Plan(name, "1", [PlannedRun(one, [], config) for one in ids], []))
    return made


def ids(page: str) -> list[str]:
    return sorted(run["id"] for run in page_data(Path(page))["run_table"]["rows"])


@pytest.mark.parametrize(
    ("names", "page", "runs", "title"),
    [
        ([], "results/compare.html", ["abc0", "abc1", "abc2"], "3 runs"),
        (["results/runs"], "results/compare.html", ["abc0", "abc1", "abc2"], "3 runs"),
        (["first"], "results/sweeps/first/compare.html", ["abc0", "abc1"], "first"),
        (["results/sweeps/second"], "results/sweeps/second/compare.html", ["abc1", "abc2"], "second"),
        (["first", "second"], "results/compare.html", ["abc0", "abc1", "abc2"], "first + second"),
        (["abc0", "results/runs/abc2"], "results/compare.html", ["abc0", "abc2"], "2 runs"),
        (["first", "later"], "results/compare.html", ["abc0", "abc1", "xyz0"], "first + later"),
    ],
)
def test_names_select_runs(sweeps, run_command, names, page, runs, title):
    code, out, _ = run_command("compare", *names)
    assert code == 0
    assert out.splitlines()[-1] == page
    data = page_data(Path(page))
    assert sorted(run["id"] for run in data["run_table"]["rows"]) == runs
    assert data["title"] == title
    assert data["command"] == " ".join(["normlab", "compare", *names])
    assert out.splitlines()[:-1] == data["summary"]


def test_another_results_folder(sweeps, run_command, tmp_path):
    Path("results").rename("o ther")
    code, out, _ = run_command("compare", "first", "--results-dir", "o ther", "--by", "seed", "-o", "deep/in/page.htm")
    assert code == 0
    assert out.splitlines()[-1] == "deep/in/page.htm"
    assert ids("deep/in/page.htm") == ["abc0", "abc1"]
    command = "normlab compare first --by seed --results-dir 'o ther' -o deep/in/page.htm"
    assert command in Path("deep/in/page.htm").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["abc"], "run 'abc' could be abc0 (name0), abc1 (name1), abc2 (name2); give"),
        (["/no/such", "--results-dir", "nowhere"], "no run '/no/such', and no runs in nowhere"),
        (["nane0"], "no run or sweep 'nane0' in results (did you mean 'name0'?): give the name of a sweep ("),
        (["frist"], "no run or sweep 'frist' in results (did you mean 'first'?): give the name of a sweep ("),
        (["later"], "later: none of the sweep's 1 run has started"),
        (["deserted"], "no runs in deserted: train one"),
        (["results", "--results-dir", "nowhere", "-o", "x.pdf"], "-o x.pdf: a page is HTML"),
        (["-o", "results"], "-o results: is a folder"),
        (["--x", "depth", "first"], "--x model.depth: is not one of the factors of these runs"),
        (["--where", "norm=dyt"], "--where norm=dyt: no run matches"),
        (["--results-dir", "nowhere"], "no runs in nowhere: train one"),
    ],
)
def test_errors_are_one_line_and_leave_no_file(sweeps, run_command, arguments, message):
    Path("deserted").mkdir()
    Path("Makefile").write_text("all:")
    before = sorted(Path().rglob("*"))
    code, out, err = run_command("compare", *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"error: {message}")
    assert sorted(Path().rglob("*")) == before


def test_where_reports_damaged_runs(sweeps, run_command):
    """A damaged record meets no condition, so the command reports it instead."""
    Path("results/runs/abc2/run.json").write_text("{")
    code, _, _ = run_command("compare", "--where", "seed>=1")
    assert code == 0
    assert ids("results/compare.html") == ["abc1"]
    [warning] = page_data(Path("results/compare.html"))["warnings"]
    assert warning.startswith("run abc2 is damaged and is left out: ")


def test_warnings_on_stderr_equal_those_of_summarize(trained, run_command, tmp_path):
    trained("a", norm="rmsnorm", steps=20)
    trained("b", norm="layernorm", lr=2e-3)
    folder = ["--results-dir", str(tmp_path)]
    code, _, err = run_command("compare", "--by", "norm", *folder)
    assert code == 0
    assert err.splitlines()[0].startswith("warning: each cell has one learning rate, not the same one")
    assert err == run_command("summarize", str(tmp_path), "--by", "norm")[2]


def test_runs_not_started_are_reported_once(sweeps, run_command):
    _, _, err = run_command("compare", "first", "later")
    assert [line for line in err.splitlines() if "started" in line] == ["warning: runs that have not started: 1 of 3"]
