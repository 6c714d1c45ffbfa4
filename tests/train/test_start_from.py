"""A run that starts from another run's checkpoint (`train.start_from`) continues it bit for bit."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.store.runs import RunFolder
from normlab.training import checkpoint, start_from
from support.run_folders import OVERRIDES, Command, Train, contents, damage, differences

CONSTANT = ["optim.schedule=constant", "optim.warmup_steps=2"]
WSD = ["optim.schedule=wsd", "optim.warmup_steps=2"]
DIVERGING = ["norm=none", "optim=sgd", "optim.lr=1e6", "optim.clip=null"]


@pytest.fixture
def first(train: Train) -> RunFolder:
    """A run with checkpoints at steps 4 and 8."""
    return train(*CONSTANT, "train.steps=8", "run.name=first")


@pytest.mark.few(1)
@pytest.mark.parametrize(("schedule", "suffix", "step"), [(CONSTANT, "", 8), (CONSTANT, "@4", 4), (WSD, "@6", 6)])
def test_the_run_equals_one_that_made_all_steps_itself(
    schedule: list[str], suffix: str, step: int, train: Train, interrupt: Callable[..., None], tmp_path: Path
) -> None:
    """For wsd, step 6 is the start of the decay of the first run, and no multiple of `train.checkpoint_every`."""
    first = train(*schedule, "train.steps=8", "run.name=first")
    before = contents(first.path)
    interrupt(10)
    assert train(*schedule, f"train.start_from=first{suffix}").state() == "interrupted"
    assert contents(first.path) == before
    shutil.rmtree(first.path / "checkpoints")  # the run needs the first one no longer
    second = train(*schedule, f"train.start_from={first.path}@{step}")
    recorded, start = second.run(), f"{first.run_id}@{step}"
    assert recorded["config"]["train"]["start_from"] == recorded["identity"]["config"]["train"]["start_from"] == start
    alone = train(*schedule, results="alone")
    assert alone.run_id != second.run_id
    assert differences(alone.path, second.path) == []


def test_steps_tokens_and_seconds_count_from_the_first_step_of_the_other_run(first: RunFolder, train: Train) -> None:
    second = train(*WSD, "optim.decay_fraction=0.34", f"train.start_from={first.run_id}", "train.steps=12")
    rows, status, earlier = second.rows("train").rows, second.status(), first.status()
    assert [row["step"] for row in rows] == [*range(12)]
    assert rows[:8] == first.rows("train").rows
    assert [row["lr"] for row in rows[7:10]] == [1e-3, 1e-3, pytest.approx(1e-3 * 3 / 4)]
    assert (status["step"], status["tokens"]) == (12, 12 / 8 * earlier["tokens"])
    assert status["seconds"] > earlier["seconds"]


def lose_rows(run: RunFolder) -> None:
    run.metrics_path.write_bytes(run.metrics_path.read_bytes()[:100])


def change_a_digit(run: RunFolder) -> None:
    run.metrics_path.write_bytes(run.metrics_path.read_bytes().replace(b'"loss":5', b'"loss":4', 1))


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("change", "override", "message"),
    [
        (None, "train.start_from=frist", "train.start_from=frist: no run 'frist' in {results} (did you mean 'first'?)"),
        (None, "train.start_from=first@end", "train.start_from=first@end: no run 'first@end' in {results}"),
        (None, "train.start_from={other}", "train.start_from={other}: is in another results folder; copy it to"),
        (None, "train.start_from=first@9", "train.start_from={id}@9: the run has no checkpoint of step 9; choose one"),
        (None, "train.steps=8", "train.steps=8: must be greater than the step of train.start_from={id}@8"),
        (None, "model.heads=1", "differs in model.heads=1 (there 2); set it as there (only train.steps and options"),
        (None, "norm=rmsnorm", "differs in norm.name=rmsnorm (there batchnorm)"),
        (None, "optim=sgd", "differs in optim.name=sgd (there adamw)"),
        (None, "seed=1", "differs in data.seed=1 (there 0), seed=1 (there 0)"),
        (None, "data.tokenizer=chars", "corpus="),
        (None, "precision=bf16", "differs in precision=bf16 (there fp32)"),
        (lambda run: damage(run, 8), "train.steps=9", "state.safetensors: damaged"),
        (lose_rows, "train.steps=9", "rows before step 8 are missing; restore a copy"),
        (change_a_digit, "train.steps=9", "are not those that were written; restore a copy"),
    ],
)
def test_an_impossible_start_is_one_line_and_writes_nothing(
    change: Callable[[RunFolder], None] | None,
    override: str,
    message: str,
    first: RunFolder,
    command: Command,
    tmp_path: Path,
) -> None:
    other = shutil.copytree(first.path, tmp_path / "elsewhere" / "runs" / first.run_id)
    if change is not None:
        change(first)
    before = contents(tmp_path / "results")
    names = {"results": str(tmp_path / "results"), "other": str(other), "id": first.run_id}
    code, out, err = command(*CONSTANT, "train.start_from=first", override.format(**names))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message.format(**names) in err
    assert contents(tmp_path / "results") == before


@pytest.mark.parametrize("is_completed", [True, False])
def test_statistics_of_another_run_are_no_start(
    is_completed: bool, first: RunFolder, train: Train, interrupt: Callable[..., None], command: Command
) -> None:
    other = train(*CONSTANT, "train.steps=8", "seed=1", "stats.every=2")
    if not is_completed:
        interrupt(6)
    parent = train(*CONSTANT, "train.steps=8", "seed=2", "stats.every=2")
    assert (parent.state() == "finished") == is_completed
    shutil.copy(other.path / "stats" / "core.bin", parent.path / "stats" / "core.bin")
    code, _, err = command(
        *CONSTANT, f"train.start_from={parent.run_id}@4", "train.steps=20", "seed=2", "stats.every=2"
    )
    assert (code, err.count("\n")) == (2, 1), err
    assert "damaged rows: " in err or "are not those that were written" in err


def test_a_diverged_run_is_no_start(train: Train, command: Command) -> None:
    diverged = train(*DIVERGING)
    code, _, err = command(*DIVERGING, f"train.start_from={diverged.run_id}", "train.steps=20")
    assert (code, err.count("\n")) == (2, 1)
    assert f"diverged at step {diverged.status()['step']}; choose an earlier checkpoint" in err


@pytest.mark.few(2)
@pytest.mark.parametrize(("owner", "name"), [(RunFolder, "create"), (checkpoint, "save"), (start_from, "write_atomic")])
def test_a_run_killed_at_its_start_starts_again(
    owner: object, name: str, first: RunFolder, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(KeyboardInterrupt):
            train(*CONSTANT, "train.start_from=first")
    again = train(*CONSTANT, "train.start_from=first")
    assert [row["step"] for row in again.rows("train").rows] == [*range(16)]


@pytest.mark.process
def test_the_runs_of_a_pack_start_together_and_a_missing_step_is_an_error_of_the_plan(
    first: RunFolder, train: Train, run_command: Command
) -> None:
    sweep = [
        "sweep",
        *OVERRIDES,
        *CONSTANT,
        f"results_dir={first.path.parents[1]}",
        "sweep.pack=2",
        "optim.lr=1e-3,2e-3",
    ]
    code, out, err = run_command(*sweep, "train.start_from=first@9", "--dry-run")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no checkpoint of step 9" in err
    assert run_command(*sweep, "train.start_from=first@8")[0] == 0
    runs = [run for path in first.path.parent.iterdir() if (run := RunFolder(path)).run_id != first.run_id]
    assert [len(run.run()["pack"]["runs"]) for run in runs] == [2, 2]
    for run in runs:
        alone = train(
            *CONSTANT, f"optim.lr={run.run()['config']['optim']['lr']}", "train.start_from=first@8", "run.fresh=true"
        )
        losses, expected = ([row["loss"] for row in each.rows("train").rows] for each in (run, alone))
        assert losses == pytest.approx(expected, abs=1e-5)
