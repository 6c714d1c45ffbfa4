from pathlib import Path

import pytest
from synthetic_runs import Record, write_sweep

from normlab.base.errors import StoreError
from normlab.base.parsing import read_at_most
from normlab.store.plans import Plan, sweep_folder
from normlab.store.query import find_runs, find_sweep, resolve_run, select_runs
from normlab.store.runs import RunFolder
from normlab.sweeps.files import write_plan


def make(results, run_id: str, name: str | None = None) -> RunFolder:
    folder = RunFolder.create(results / "runs" / run_id, Record().run() | {"run_id": run_id, "name": name or run_id})
    folder.write_status({"state": "interrupted", "step": 7})
    return folder


@pytest.fixture
def results(tmp_path):
    make(tmp_path, "aa11", "first")
    make(tmp_path, "aa22", "second")
    make(tmp_path, "bb33")
    return tmp_path


def ids(path) -> list[str]:
    return [entry.folder.run_id for entry in find_runs(path)]


def test_runs_of_a_results_folder_and_of_one_run(results, monkeypatch):
    assert ids(results) == ids(results / "runs") == ["aa11", "aa22", "bb33"]
    assert ids(results / "runs" / "aa22") == ["aa22"]
    monkeypatch.chdir(results / "runs" / "bb33")
    assert ids(".") == ["bb33"]


def test_folder_without_runs(tmp_path):
    assert find_runs(tmp_path) == find_runs(tmp_path / "missing") == []


def test_other_folders_are_left_out(results):
    (results / "runs" / "empty").mkdir()
    with RunFolder(results / "runs" / "not yet").lock():
        assert ids(results) == ["aa11", "aa22", "bb33"]
    (results / "runs" / "notes.txt").touch()
    assert ids(results) == ["aa11", "aa22", "bb33"]


def test_damaged_runs_are_found_with_their_problem(results):
    runs = results / "runs"
    (runs / "aa11" / "run.json").write_text("garbage")
    (runs / "aa22" / "status.json").unlink()
    (runs / "aa22" / "status.json").mkdir()
    (runs / "bb33" / "run.json").unlink()
    make(results, "cc44")
    RunFolder(runs / "cc44").write_status({"state": "running"})
    (runs / "cc44" / "lock").symlink_to("lock")
    entries = find_runs(results)
    assert [entry.state for entry in entries] == ["damaged"] * 4
    for entry, problem in zip(
        entries,
        [
            "run.json: is damaged (its checksum does not match); restore a copy, or delete the run's folder and run it "
            "again",
            "status.json: cannot be read (Is a directory); check the disk and run the same command again",
            "run.json: is missing; restore a copy, or delete the run's folder and run it again",
            "lock: cannot be read (Too many levels of symbolic links); check the disk and run the same command again",
        ],
        strict=True,
    ):
        assert entry.problem == f"{entry.folder.path}/{problem}"


@pytest.mark.parametrize(
    ("query", "run_id"),
    [("aa11", "aa11"), ("aa2", "aa22"), ("b", "bb33"), ("second", "aa22"), ("bb33", "bb33")],
)
def test_resolve(results, query, run_id):
    assert resolve_run(query, results).run_id == run_id


def test_resolve_a_path(results, tmp_path, monkeypatch):
    assert resolve_run(str(results / "runs" / "aa11"), tmp_path / "elsewhere").run_id == "aa11"
    monkeypatch.chdir(results / "runs" / "aa11")
    assert resolve_run(".", results).run_id == "aa11"


@pytest.mark.parametrize(
    ("query", "files"),
    [
        ("aa22", set()),
        ("runs/aa22", set()),
        ("aa2", {"aa11/run.json", "aa22/run.json", "bb33/run.json"}),
        ("second", {"aa11/run.json", "aa22/run.json", "bb33/run.json"}),
    ],
)
def test_resolve_reads_no_record_for_an_id_or_a_folder_and_one_file_of_each_run_for_a_name(
    results: Path, query: str, files: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: set[str] = set()

    def read_and_note(path: Path, max_bytes: int) -> bytes:
        opened.add(f"{path.parent.name}/{path.name}")
        return read_at_most(path, max_bytes)

    monkeypatch.setattr("normlab.store.reading.read_at_most", read_and_note)
    monkeypatch.chdir(results)
    assert resolve_run(query, results).run_id == "aa22"
    assert opened == files


def test_exact_id_wins_over_longer_ids(results):
    make(results, "aa11-2")
    assert resolve_run("aa11", results).run_id == "aa11"


@pytest.mark.parametrize("query", ["aa", "", "twin", "bb3"])
def test_ambiguous_query_lists_the_candidates(results, query):
    make(results, "cc44", "twin")
    make(results, "cc55", "twin")
    make(results, "dd66", "bb3")
    expected = {
        "aa": r"aa11 \(first\), aa22 \(second\);",
        "": "no run ''",
        "twin": r"cc44 \(twin\), cc55 \(twin\);",
        "bb3": r"bb33, dd66 \(bb3\);",
    }
    with pytest.raises(StoreError, match=expected[query]):
        resolve_run(query, results)


def test_unknown_query_lists_the_runs_and_the_nearest(results):
    with pytest.raises(StoreError, match=r"no run 'secnd' in .*did you mean 'second'.*aa11 \(first\)"):
        resolve_run("secnd", results)
    with pytest.raises(StoreError, match=r"no runs in .*missing.*normlab train"):
        resolve_run("x", results / "missing")


def test_a_sweep_is_found_from_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_sweep(tmp_path / "results", "first", [Record(steps=20, depth=1, width=8, warmup_steps=2)])
    (first.parent / "second").mkdir()
    monkeypatch.chdir(first.parent / "second")
    selection = select_runs("../first", "results")
    assert (len(selection.started), selection.home) == (1, first)


def test_the_name_of_a_sweep_comes_before_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that read and commands that delete must mean the same one: `normlab open` makes such a folder."""
    records = [Record(steps=20, depth=1, width=8, warmup_steps=2, seed=seed) for seed in (0, 1)]
    mine = write_sweep(tmp_path / "results", "first", records)
    write_sweep(tmp_path / "first", "first", records[:1])
    monkeypatch.chdir(tmp_path)
    assert find_sweep("first", "results") == mine.relative_to(tmp_path)
    assert len(select_runs("first", "results").records) == 2
    # Also where the results folder has the name of the sweep.
    assert select_runs("first", "first").name == "first"
    # A path means the folder, and no name the results folder.
    for folder in ("./first", str(tmp_path / "first")):
        selection = select_runs(folder, "results")
        assert (len(selection.records), selection.name) == (1, "")
    assert select_runs([], "first").name == ""
    # A folder whose name no sweep has is meant.
    (tmp_path / "first").rename(tmp_path / "theirs")
    assert len(select_runs("theirs", "results").records) == 1


def test_a_run_and_a_sweep_have_their_own_names_behind_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(steps=20, depth=1, width=8, warmup_steps=2)
    sweep = write_sweep(tmp_path / "results", "first", [record])
    run = tmp_path / "results" / "runs" / record.run_id
    (run / "stats").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("best").symlink_to(run)
    Path("mine").symlink_to(sweep)
    for name in ("best", f"results/runs/{record.run_id}/stats/..", "best/.", "mine"):
        (found,) = select_runs(name, "results").started
        assert (found.run_id, found.state) == (record.run_id, "finished"), name
    assert resolve_run("best", "results").path == run


def test_unknown_query_names_the_nearest_sweep_where_a_sweep_may_be_named(results: Path) -> None:
    for name in ("depths", "widths"):
        sweep_folder(results, name).mkdir(parents=True)
        write_plan(sweep_folder(results, name), Plan(name, "1", [], []))
    sweep_folder(results, "killed").mkdir()
    with pytest.raises(StoreError) as error:
        resolve_run("dephts", results, or_sweep=True)
    assert str(error.value).startswith(f"no run or sweep 'dephts' in {results} (did you mean 'depths'?): give the ")
    choices = "the name of a sweep (depths, widths), or the id, its beginning or the name of a run (aa11 (first), "
    assert choices in str(error.value)
    with pytest.raises(StoreError) as error:
        resolve_run("dephts", results)
    assert "widths" not in str(error.value)


def test_unknown_query_among_many_names_the_closest_and_the_commands_that_print_all(results: Path) -> None:
    for number in range(20):
        make(results, f"ee{number:02d}", f"norm{number}")
        sweep = sweep_folder(results, f"sweep{number}")
        sweep.mkdir(parents=True)
        write_plan(sweep, Plan(sweep.name, "1", [], []))
    with pytest.raises(StoreError) as error:
        resolve_run("noorm7", results, or_sweep=True)
    assert str(error.value).startswith(f"no run or sweep 'noorm7' in {results} (did you mean 'norm7' or ")
    assert str(error.value).endswith(
        f"?): give the name of a sweep (one of 20, which `normlab list sweeps --results-dir {results}` prints), or the "
        f"id, its beginning or the name of a run (one of 23, which `normlab summarize {results}` prints)"
    )
