"""`normlab verify RUN`: each different block of recorded runs is checked once, against the trained one too."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normlab.config.compose import compose_run
from normlab.store.query import find_runs
from normlab.store.record import RunRecord
from normlab.training.start import train
from normlab.verify import runs as verify_runs
from normlab.verify.check import Check, check_equal
from support.small_run import small_run

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def records(tmp_path: Path) -> list[RunRecord]:
    """Return runs with two blocks and two seeds, sorted by id."""
    for norm, seed in itertools.product(("rmsnorm", "layernorm"), (0, 1)):
        overrides = [f"norm={norm}", f"seed={seed}", "train.steps=2"]
        train(compose_run([*small_run(tmp_path / "results"), *overrides]), trackers=[])
    return [run for run in find_runs(tmp_path / "results") if isinstance(run, RunRecord)]


def two_checks(config: Any) -> list[Check]:
    return [Check(config.norm.name, "holds", passed=True, result=""), check_equal(config.norm.name, "is it", 1, 2)]


def test_each_block_is_checked_once(
    records: list[RunRecord], run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_runs, "all_checks_of_run", two_checks)
    code, out, _ = run_command("verify", "results", "--json")
    assert code == 1  # one check fails
    rows = json.loads(out)
    assert sorted((row["subject"].partition("-")[0], row["passed"]) for row in rows) == [
        ("layernorm", False), ("layernorm", True), ("rmsnorm", False), ("rmsnorm", True),
        ("run layernorm", True), ("run rmsnorm", True),
    ]  # fmt: skip


def test_a_block_that_is_no_longer_the_trained_one_fails(
    records: list[RunRecord], run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_runs, "all_checks_of_run", lambda config: iter(()))
    monkeypatch.setattr(verify_runs, "fingerprint", lambda config: "0" * 16)
    code, out, _ = run_command("verify", records[0].run_id)
    assert code == 1
    assert f"has the block that was trained  expected {records[0].run.fingerprint}, found {'0' * 16}" in out


def test_a_damaged_run_is_reported(
    records: list[RunRecord], run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_runs, "all_checks_of_run", lambda config: iter(()))
    (records[0].folder.path / "run.json").write_text("{")
    code, out, err = run_command("verify", "results")
    assert (code, out.splitlines()[-1].startswith("2 checks: all hold")) == (2, True)
    (damaged,) = err.splitlines()
    assert damaged.startswith("warning: ")
    assert damaged.endswith("; the run is not verified")
    code, out, err = run_command("verify", records[0].run_id)
    assert (code, out, err.count("\n"), "is damaged" in err) == (2, "", 1, True)


def test_a_folder_with_an_equals_sign_is_a_run(
    records: list[RunRecord], run_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(verify_runs, "all_checks_of_run", lambda config: iter(()))
    path = tmp_path / "lr=3" / records[0].run_id
    path.parent.mkdir()
    records[0].folder.path.rename(path)
    code, out, _ = run_command("verify", str(path))
    assert (code, out.splitlines()[-1].startswith("1 check: all hold")) == (0, True)


@pytest.mark.exhaustive
def test_all_checks_of_a_recorded_run_hold(records: list[RunRecord], run_command: Command) -> None:
    code, out, err = run_command("verify", records[0].run_id)
    assert (code, err) == (0, "")
    assert any("compiled, bf16" in line for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "error: no run 'nothing'"),
        (["results", "norm=rmsnorm"], "results: not option=value"),
        (["norm=rmsnorm", "--trust"], "--trust: has no effect without a recorded run"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, records: list[RunRecord], run_command: Command
) -> None:
    code, out, err = run_command("verify", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not list(records[0].folder.path.glob("verify*"))
