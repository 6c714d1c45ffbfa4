"""`normlab rm` and `normlab rename`: what is deleted, what stays, and that nothing outside of a record changes."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from synthetic_runs import Record, write_sweep

from normlab.base.errors import StoreError
from normlab.store.plans import read_plan
from normlab.store.query import find_runs
from normlab.store.runs import RunFolder
from normlab.sweeps import removal
from normlab.sweeps.files import write_plan, write_queue
from support.run_folders import Command, contents

RECORDS = [Record(steps=4, depth=1, width=8, seed=seed, warmup_steps=1, stats_every=None) for seed in range(3)]
A, B, C = (record.run_id for record in RECORDS)
RUNS, SWEEPS = Path("results", "runs"), Path("results", "sweeps")


@pytest.fixture
def _results(_working_folder: None) -> None:
    """Write the sweep `first` of the runs A and B, and `second` of B and C."""
    write_sweep(Path("results"), "other", RECORDS)
    plan = read_plan(SWEEPS / "other")
    for name, runs in (("first", plan.runs[:2]), ("second", plan.runs[1:])):
        (SWEEPS / name).mkdir()
        write_plan(SWEEPS / name, replace(plan, name=name, runs=runs, packs=plan.packs[:2]))
    shutil.rmtree(SWEEPS / "other")


pytestmark = pytest.mark.usefixtures("_results")


def left() -> tuple[list[str], list[str]]:
    assert not [name for folder in (RUNS, SWEEPS) for name in os.listdir(folder) if name.startswith(".")]
    return sorted(os.listdir(SWEEPS)), [name for name in (A, B, C) if (RUNS / name).exists()]


def test_a_run_that_another_sweep_uses_stays(run_command: Command) -> None:
    code, out, _ = run_command("rm", "first", "--yes")
    assert (code, left()) == (0, (["second"], [B, C]))
    *sizes, stays, deleted = out.splitlines()
    assert [line.split()[-1] for line in sizes] == [str(RUNS / A), str(SWEEPS / "first")]
    assert stays == f"run {B} stays as it is: used by sweep second"
    assert deleted.startswith("deleted ")


def test_a_search_names_the_sweep_of_what_it_found(run_command: Command) -> None:
    write_sweep(Path("results"), "first-search", [replace(RECORDS[0], seed=9)])
    code, out, _ = run_command("rm", "first-search", "--yes")
    assert (code, "sweep first stays: its values are those that this search found" in out) == (0, True)
    assert (SWEEPS / "first").exists()


def test_the_search_of_a_sweep_is_deleted_with_it(run_command: Command) -> None:
    write_sweep(Path("results"), "first-search", [replace(RECORDS[0], seed=9)])
    code, out, _ = run_command("rm", "first", "--yes")
    assert (code, left()) == (0, (["second"], [B, C]))
    assert str(SWEEPS / "first-search") in out
    assert len(list(RUNS.iterdir())) == 2


def test_sweeps_that_share_a_run_are_deleted_together(run_command: Command) -> None:
    assert run_command("rm", "first", str(SWEEPS / "second"), "--yes")[0] == 0
    assert left() == ([], [])


def test_a_run_of_a_sweep_is_refused_by_its_name(run_command: Command) -> None:
    code, out, err = run_command("rm", B, "--yes")
    expected = f"error: run {B}: is used by sweep first, second; delete that sweep too, with `normlab rm SWEEP RUN`\n"
    assert (code, out, err) == (2, "", expected)
    shutil.rmtree(SWEEPS / "second")
    assert run_command("rm", C[:-1], "--yes")[0] == 0
    assert left() == (["first"], [A, B])


def test_a_run_from_which_a_sweep_starts_others_is_refused(run_command: Command) -> None:
    plan = read_plan(SWEEPS / "first")
    config = plan.runs[0].config
    runs = [replace(plan.runs[0], config=config | {"train": config["train"] | {"start_from": f"{C}@2"}}), plan.runs[1]]
    write_plan(SWEEPS / "first", replace(plan, runs=runs))
    shutil.rmtree(SWEEPS / "second")
    code, _, err = run_command("rm", C, "--yes")
    assert (code, "used by sweep first" in err) == (2, True)


def test_of_the_plans_only_the_runs_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "read_plan", None)
    monkeypatch.setattr("normlab.store.query.read_plan", None)
    assert [run.run_id for run in removal.plan_removal([C], "results", only_checkpoints=True).runs] == [C]
    with pytest.raises(StoreError, match=f"run {C}: is used by sweep second;"):
        removal.plan_removal([C], "results")


def test_it_asks_on_a_terminal_and_refuses_without_one(run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(Path("results"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    code, _, err = run_command("rm", "first")
    assert (code, err.startswith("error: no terminal to ask: add --yes to delete 1 run and 1 sweep")) == (2, True)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    questions: list[str] = []
    monkeypatch.setattr(typer, "confirm", questions.append)
    code, out, _ = run_command("rm", "first")
    assert (code, out.splitlines()[-1], len(questions)) == (1, "nothing is deleted", 1)
    assert {name for name in contents(Path("results")) if not name.endswith("lock")} == {
        name for name in before if not name.endswith("lock")
    }
    monkeypatch.setattr(typer, "confirm", lambda _: True)
    assert run_command("rm", "first")[0] == 0
    assert left() == (["second"], [B, C])


@pytest.mark.parametrize("name", ["", "results", "results/runs", "missing", "results/sweeps", "."])
def test_other_folders_are_refused(name: str, run_command: Command) -> None:
    code, out, err = run_command("rm", name, "--yes")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert left() == (["first", "second"], [A, B, C])


def test_a_record_outside_of_a_results_folder_is_refused(run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RUNS / A, Path("copy", A))
    shutil.copytree(SWEEPS / "first", Path("project", "first"))
    for name in (f"copy/{A}", "project/first", "./project/first"):
        code, _, err = run_command("rm", name, "--yes")
        assert (code, "stays, since it is not in a folder" in err) == (2, True), err
    monkeypatch.chdir(Path("copy", A))
    assert run_command("rm", ".", "--yes")[0] == 2
    assert Path("run.json").exists()


def test_active_runs_and_sweeps_are_refused(run_command: Command) -> None:
    before = contents(Path("results"))
    with RunFolder(RUNS / A).lock():
        for command in (["rm", "first", "--yes"], ["rm", "first", "--checkpoints", "--yes"]):
            code, _, err = run_command(*command)
            assert (code, err.endswith("; wait for it or stop it\n")) == (2, True), err
            assert f"run {A} is active in process" in err
    with removal.file_lock(SWEEPS / "first" / "lock", "x"):
        for command in (["rm", "first", "--yes"], ["rename", "first", "new"]):
            code, _, err = run_command(*command)
            assert (code, "sweep first is active in process" in err) == (2, True), err
    (SWEEPS / "first" / "slurm").mkdir()
    write_queue(SWEEPS / "first", {0: "12_0"})
    for command in (["rm", "first", "--yes"], ["rename", "first", "new"]):
        code, _, err = run_command(*command)
        assert (code, "Slurm has its job 12_0" in err) == (2, True), err
    assert before.items() <= contents(Path("results")).items()


@pytest.mark.parametrize(
    ("link", "command"),
    [
        (RUNS / A, ["rm", "first", "--yes"]),
        (RUNS / A / "checkpoints", ["rm", "first", "--yes"]),
        (RUNS / A / "checkpoints", ["rm", "first", "--checkpoints", "--yes"]),
        (RUNS / A, ["rm", A, "--yes"]),
        (SWEEPS / "first", ["rm", "first", "--yes"]),
        (SWEEPS / "first", ["rename", "first", "new"]),
        (SWEEPS / "first" / "logs", ["rename", "first", "new"]),
    ],
)  # fmt: skip
def test_links_out_of_a_record_are_refused(
    link: Path, command: list[str], tmp_path: Path, run_command: Command
) -> None:
    if command[1] == A:
        shutil.rmtree(SWEEPS / "first")
    victim = tmp_path / "victim"
    shutil.copytree(link, victim) if link.exists() else (victim / "step_00000004").mkdir(parents=True)
    (victim / "step_00000009").mkdir(exist_ok=True)
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(victim)
    before = contents(tmp_path)
    code, _, err = run_command(*command)
    assert (code, err.count("\n"), f"{link.name}: is a symbolic link to {victim}" in err) == (2, 1, True), err
    assert before.items() <= contents(tmp_path).items()
    assert (victim / "step_00000009").exists()


def test_a_plan_of_a_stranger_deletes_nothing_else(run_command: Command) -> None:
    Path("victim").mkdir()
    plan = read_plan(SWEEPS / "first")
    for run_id in ("../../victim", "..", "/victim", ""):
        write_plan(SWEEPS / "first", replace(plan, runs=[replace(plan.runs[0], run_id=run_id), plan.runs[1]]))
        code, _, err = run_command("rm", "first", "--yes")
        assert (code, "is not a run id" in err, Path("victim").exists()) == (2, True, True)


def test_results_may_be_a_link_to_another_disk(run_command: Command) -> None:
    shutil.move("results", "disk")
    Path("results").symlink_to(Path("disk").absolute())
    assert run_command("rm", "first", "--yes")[0] == 0
    assert left() == (["second"], [B, C])


@pytest.mark.parametrize("kind", ["runs", "sweeps"])
def test_a_link_of_a_stranger_deletes_nothing(kind: str, run_command: Command) -> None:
    """A plan names a folder that a link of the results folder leads to: the user's own runs, or no run at all."""
    shutil.copytree("results", "stranger")
    shutil.rmtree(Path("stranger", kind))
    Path("stranger", kind).symlink_to(Path("results", kind).absolute())
    before = contents(Path("results"))
    code, out, err = run_command("rm", "stranger/sweeps/first", "--yes")
    assert (code, out) == (2, ""), err
    assert contents(Path("results")) == before


def test_a_folder_that_is_no_run_stays(run_command: Command) -> None:
    shutil.rmtree(RUNS / A)
    (RUNS / A).mkdir()
    (RUNS / A / "thesis.txt").write_text("mine")
    assert run_command("rm", "first", "--yes")[0] == 0
    assert (RUNS / A / "thesis.txt").exists()


def test_a_run_that_a_new_sweep_uses_is_not_deleted(run_command: Command) -> None:
    """The sweep is planned while the command waits for an answer."""
    planned = removal.plan_removal(["first"], "results")
    shutil.copytree(SWEEPS / "first", SWEEPS / "third")
    write_plan(SWEEPS / "third", replace(read_plan(SWEEPS / "first"), name="third"))
    with pytest.raises(StoreError, match="sweep third uses it"):
        planned.execute()
    assert left() == (["first", "second", "third"], [A, B, C])


def test_a_start_of_a_planned_run_keeps_its_checkpoints(run_command: Command) -> None:
    """Until the run that starts from it exists."""
    plan = read_plan(SWEEPS / "first")
    config = plan.runs[0].config
    starts = replace(plan.runs[0], config=config | {"train": config["train"] | {"start_from": f"{C}@2"}})
    write_plan(SWEEPS / "first", replace(plan, runs=[starts, plan.runs[1]]))
    assert C in {run.run_id for run in removal.plan_removal(["second"], "results", only_checkpoints=True).runs}
    shutil.rmtree(RUNS / A)
    assert C in removal.plan_removal(["second"], "results", only_checkpoints=True).kept


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_after_a_kill_the_next_command_finishes(
    killed_at: int, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed in the deletion of the first run, of the second run, or of the sweep."""
    shutil.rmtree(SWEEPS / "second")
    calls: list[Path] = []
    with monkeypatch.context() as patch:

        def kill(folder: Path) -> None:
            calls.append(folder)
            if len(calls) == killed_at:
                next(folder.glob("*.json")).unlink()
                raise KeyboardInterrupt
            delete(folder)

        delete = shutil.rmtree
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            removal.plan_removal(["first"], "results").execute()
    assert [run.run_id for run in find_runs("results")] == [
        run for run in (A, B, C) if run in (A, B)[killed_at:] or run == C
    ]
    assert run_command("rm", "first" if killed_at < 3 else C, "--yes")[0] == 0
    assert left() == ([], [C] if killed_at < 3 else [])
    assert not list(Path("results").glob("runs/.*"))


def test_names_that_a_killed_command_has_deleted_are_no_error(run_command: Command) -> None:
    """Of two sweeps the first is gone; of one, its folder still has the hidden name."""
    assert run_command("rm", "first", "--yes")[0] == 0
    code, out, _ = run_command("rm", "first", "second", "--yes")
    assert (code, out.startswith("already deleted, or never there: no run or sweep 'first'")) == (0, True), out
    assert left() == ([], [])
    (SWEEPS / ".third.normlab-deleted").mkdir()
    assert run_command("rm", "third", "--yes")[0] == 0
    assert left() == ([], [])
    assert run_command("rm", "third", "--yes")[0] == 2


def test_a_hidden_link_is_not_followed(run_command: Command) -> None:
    Path("victim").mkdir()
    (RUNS / ".x.normlab-deleted").symlink_to(Path("victim").absolute())
    assert run_command("rm", "first", "--yes")[0] == 0
    assert Path("victim").exists()


# Rename


def test_rename_changes_the_name_and_no_run(run_command: Command) -> None:
    before, table = contents(RUNS), run_command("summarize", "first")
    assert run_command("rename", "first", "new") == (0, f"{SWEEPS / 'new'}\n", "")
    assert contents(RUNS) == before
    assert (read_plan(SWEEPS / "new").name, left()[0]) == ("new", ["new", "second"])
    assert run_command("summarize", "new") == table


@pytest.mark.parametrize(
    ("sweep", "new", "message"),
    [
        ("first", "second", "second: exists in"),
        ("first", "first", "first: exists in"),
        ("first", "a/b", "error: a/b: is not a folder name"),
        ("first", "..", "error: ..: is not a folder name"),
        ("first", "", "must be a printable text of 1 to 100 characters"),
        ("first", "x" * 101, f"error: '{'x' * 101}': must be a printable text of 1 to 100 characters"),
        ("missing", "new", "missing: is not a sweep"),
        (A, "new", "is not a sweep; name one (the name of a run is part of its record"),
        ("study-depth-main-small-0", "new", "is a sweep of a study"),
    ],
)
def test_rename_refuses(sweep: str, new: str, message: str, run_command: Command) -> None:
    shutil.copytree(SWEEPS / "first", SWEEPS / "study-depth-main-small-0")
    before = contents(SWEEPS)
    code, out, err = run_command("rename", sweep, new)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert contents(SWEEPS) == before


@pytest.mark.parametrize("locked", ["first", "first-search"])
def test_rename_changes_a_sweep_and_its_search_or_neither(locked: str, run_command: Command) -> None:
    write_sweep(Path("results"), "first-search", [replace(RECORDS[0], seed=9)])
    before = contents(SWEEPS)
    with removal.file_lock(SWEEPS / locked / "lock", "x"):
        code, _, err = run_command("rename", "first", "new")
    assert (code, f"sweep {locked} is active in process" in err) == (2, True), err
    assert contents(SWEEPS).items() >= before.items()
    (SWEEPS / "new-search").mkdir()
    code, _, err = run_command("rename", "first", "new")
    assert (code, "new-search: exists in" in err, "first" in left()[0]) == (2, True, True), err
    (SWEEPS / "new-search").rmdir()
    assert run_command("rename", "first", "new")[0] == 0
    assert left()[0] == ["new", "new-search", "second"]


def test_after_a_kill_the_same_rename_finishes(run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", kill)
        with pytest.raises(KeyboardInterrupt):
            removal.rename_sweep("first", "new", "results")
    code, _, err = run_command("summarize", "first")
    assert (code, "if `normlab rename first new` was killed, run it again" in err) == (2, True)
    assert run_command("rename", "first", "new")[0] == 0
    assert (read_plan(SWEEPS / "new").name, left()[0]) == ("new", ["new", "second"])


def test_the_plan_of_another_sweep_is_not_read(run_command: Command) -> None:
    shutil.copy(SWEEPS / "second" / "plan.json", SWEEPS / "first" / "plan.json")
    for command in (["summarize", "first"], ["share", "first", "-o", "it.zip"], ["rename", "first", "new"]):
        code, out, err = run_command(*command)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "first/plan.json: is of sweep second, not of first" in err
    assert left()[0] == ["first", "second"]


def test_an_incomplete_pack_keeps_the_name_of_its_sweep() -> None:
    run = RECORDS[0].run() | {"pack": {"sweep": "first", "number": 0, "runs": [A, B]}}
    shutil.rmtree(RUNS / A)
    RunFolder.create(RUNS / A, run).write_status({"state": "interrupted", "step": 2})
    with pytest.raises(
        StoreError, match=f"run {A}: is not completed, and its pack resumes only in a sweep named first"
    ):
        removal.rename_sweep("first", "new", "results")
