"""A run that starts from another run's checkpoint (`train.start_from`) continues it bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.store.runs import RunFolder
from normlab.training import checkpoint, resume
from support.run_folders import Command, Train, contents, damage, differences, steps_of

CONSTANT = ["optim.schedule=constant", "optim.warmup_steps=2"]
WSD = ["optim.schedule=wsd", "optim.warmup_steps=2"]


def under_the_name_of(reference: RunFolder, run: RunFolder) -> Path:
    """Return a copy of a run's folder with the name of another one, because `differences` compares equal runs."""
    return shutil.copytree(run.path, run.path.parents[1] / "copies" / reference.run_id)


@pytest.mark.parametrize(("schedule", "suffix", "step"), [(CONSTANT, "", 8), (CONSTANT, "@4", 4), (WSD, "@6", 6)])
def test_the_run_equals_one_that_made_all_steps_itself(
    schedule: list[str], suffix: str, step: int, train: Train, interrupt: Callable[..., None]
) -> None:
    """For wsd, step 6 is the start of the decay of the first run, and no multiple of `train.checkpoint_every`."""
    first = train(*schedule, "train.steps=8", "run.name=first")
    before = contents(first.path)
    interrupt(10)
    assert train(*schedule, f"train.start_from=first{suffix}").state() == "interrupted"
    second = train(*schedule, f"train.start_from={first.path}@{step}")
    assert second.state() == "finished"
    assert contents(first.path) == before
    recorded = second.run()
    start = f"{first.run_id}@{step}"
    assert recorded["config"]["train"]["start_from"] == recorded["identity"]["config"]["train"]["start_from"] == start
    uninterrupted = train(*schedule, results="uninterrupted")
    assert uninterrupted.run_id != second.run_id
    assert differences(uninterrupted.path, under_the_name_of(uninterrupted, second)) == []


def test_steps_tokens_and_seconds_count_from_the_first_step_of_the_other_run(train: Train) -> None:
    first = train(*CONSTANT, "train.steps=8")
    second = train(*WSD, "optim.decay_fraction=0.34", f"train.start_from={first.run_id}", "train.steps=12")
    assert [row["step"] for row in second.rows("train").rows] == [*range(12)]
    assert second.rows("train").rows[:8] == first.rows("train").rows
    assert (second.status()["step"], second.status()["tokens"]) == (12, 12 / 8 * first.status()["tokens"])
    assert second.status()["seconds"] > first.status()["seconds"]
    assert [row["lr"] for row in second.rows("train").rows[7:10]] == [1e-3, 1e-3, pytest.approx(1e-3 * 3 / 4)]


@pytest.fixture
def first(train: Train) -> RunFolder:
    """A run with checkpoints at steps 4 and 8."""
    return train(*CONSTANT, "train.steps=8", "run.name=first")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.start_from=frist"], "train.start_from=frist: no run 'frist' in {results} (did you mean 'first'?)"),
        (["train.start_from=first@end"], "train.start_from=first@end: no run 'first@end' in {results}"),
        (["train.start_from={other}"], "train.start_from={other}: is in another results folder; copy it to {results}"),
        (["train.start_from=first@9"], "train.start_from={id}@9: the run has no checkpoint of step 9; choose one of 4"),
        (["train.start_from=first", "train.steps=8"], "train.steps=8: must be greater than the step of train.start_fr"),
        (
            ["train.start_from=first", "model.heads=1"],
            "train.start_from={id}@8: differs in model.heads=1 (there 2); only train.steps and options of one",
        ),
        (["train.start_from=first", "norm=rmsnorm"], "norm.name=rmsnorm (there batchnorm)"),
        (["train.start_from=first", "optim=sgd"], "optim.name=sgd (there adamw)"),
        (["train.start_from=first", "seed=1"], "seed=1 (there 0)"),
        (["train.start_from=first", "data.tokenizer=chars"], "corpus="),
        (["train.start_from=first", "precision=bf16"], "precision=bf16 (there fp32)"),
    ],
)
def test_an_impossible_start_is_one_line_and_writes_nothing(
    overrides: list[str], message: str, first: RunFolder, command: Command, tmp_path: Path
) -> None:
    other = shutil.copytree(first.path, tmp_path / "elsewhere" / "runs" / first.run_id)
    before = contents(tmp_path / "results")
    names = {"results": str(tmp_path / "results"), "other": str(other), "id": first.run_id}
    code, out, err = command(*CONSTANT, *(override.format(**names) for override in overrides))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert message.format(**names) in err
    assert contents(tmp_path / "results") == before


def lose_rows(run: RunFolder) -> None:
    run.metrics_path.write_bytes(run.metrics_path.read_bytes()[:100])


def change_a_digit(run: RunFolder) -> None:
    run.metrics_path.write_bytes(run.metrics_path.read_bytes().replace(b'"loss":5', b'"loss":4', 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: damage(run, 8), "state.safetensors: damaged"),
        (lose_rows, "rows before step 8 are missing; restore a copy"),
        (change_a_digit, "are not those that were written; restore a copy"),
    ],
    ids=["damaged checkpoint", "lost rows", "changed row"],
)
def test_a_damaged_run_is_no_start(
    change: Callable[[RunFolder], None], message: str, first: RunFolder, command: Command, tmp_path: Path
) -> None:
    change(first)
    before = contents(tmp_path / "results")
    code, _, err = command(*CONSTANT, "train.start_from=first")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert contents(tmp_path / "results") == before


def test_a_diverged_run_is_no_start(train: Train, command: Command) -> None:
    diverging = ["norm=none", "optim=sgd", "optim.lr=1e6", "optim.clip=null", "optim.warmup_steps=4"]
    diverged = train(*diverging)
    code, _, err = command(*diverging, f"train.start_from={diverged.run_id}", "train.steps=20")
    assert (code, err.count("\n")) == (2, 1)
    assert f"diverged at step {diverged.status()['step']}; choose an earlier checkpoint" in err


def test_a_started_run_needs_the_other_run_no_longer(
    first: RunFolder, train: Train, interrupt: Callable[..., None]
) -> None:
    interrupt(10)
    second = train(*CONSTANT, "train.start_from=first@8")
    shutil.rmtree(first.path / "checkpoints")
    first.metrics_path.unlink()
    assert train(*CONSTANT, "train.start_from=first@8").run_id == second.run_id
    assert second.state() == "finished"


@pytest.mark.parametrize(("owner", "name"), [(RunFolder, "create"), (checkpoint, "save"), (resume, "write_atomic")])
def test_a_run_killed_at_its_start_starts_again(
    owner: object, name: str, first: RunFolder, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Killed):
            train(*CONSTANT, "train.start_from=first")
    again = train(*CONSTANT, "train.start_from=first")
    assert [row["step"] for row in again.rows("train").rows] == [*range(16)]
    assert steps_of(again) == [12, 16]


@pytest.mark.process
def test_the_runs_of_a_sweep_start_together_and_a_missing_step_is_an_error_of_the_plan(
    first: RunFolder, train: Train, run_command: Command, tmp_path: Path
) -> None:
    from support.run_folders import OVERRIDES

    sweep = ["sweep", *OVERRIDES, *CONSTANT, f"results_dir={tmp_path / 'results'}", "sweep.name=decays", "sweep.pack=2",
             "optim.lr=1e-3,2e-3"]  # fmt: skip
    code, out, err = run_command(*sweep, "train.start_from=first@9", "--dry-run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no checkpoint of step 9" in err
    assert run_command(*sweep, "train.start_from=first@8")[0] == 0
    runs = [run for path in first.path.parent.iterdir() if (run := RunFolder(path)).run_id != first.run_id]
    assert [len(run.run()["pack"]["runs"]) for run in runs] == [2, 2]
    alone = train(*CONSTANT, results="alone")
    for run in runs:
        rows = run.rows("train").rows
        assert [row["step"] for row in rows] == [*range(16)]
        assert rows[:8] == first.rows("train").rows
    (same,) = (run for run in runs if run.run()["config"]["optim"]["lr"] == 1e-3)
    losses, expected = ([row["loss"] for row in each.rows("train").rows] for each in (same, alone))
    assert losses == pytest.approx(expected, abs=1e-5)
