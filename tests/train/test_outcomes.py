"""Outcomes of real runs: divergence by the final loss, single and in a pack, and the messages."""

from collections.abc import Callable
from pathlib import Path

from normlab.config.compose import compose_run
from normlab.report.runs_table import summarize
from normlab.training.start import train, train_pack

BAD = ["optim.lr=10", "optim.clip=null"]
"""Overrides of a run that makes all its steps with finite losses and ends far worse than a uniform guess."""


def test_finite_final_loss_above_the_uniform_loss_is_divergence(
    overrides: list[str], run_command: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run_command("train", *overrides, *BAD)
    first, place = out.splitlines()
    assert code == 0
    assert first.startswith("diverged at step 12: its final validation loss is ")
    assert "more than 1 nat above ln V 5.5491 and the initial loss " in first
    assert err.splitlines()[-1].startswith("diverged at step 12/12  last val ")
    (row,) = summarize(Path(place))
    assert (row["state"], row["val_loss"], row["vs_bigram"]) == ("diverged", None, None)
    assert row["note"] == first
    again = run_command("train", *overrides, *BAD)[1].splitlines()
    assert again == ["diverged at step 12: nothing to do (run.fresh=true starts another run)", first, place]


def test_message_of_a_short_run_says_what_it_has_not_learned(
    overrides: list[str], run_command: Callable[..., tuple[int, str, str]]
) -> None:
    _, _, err = run_command("train", *overrides)
    assert err.splitlines()[-1].startswith("finished at step 12/12  val ")
    assert err.splitlines()[-1].endswith(": it has not yet learned how often tokens occur")


def test_run_has_the_same_outcome_in_a_pack_and_single(overrides: list[str], tmp_path: Path) -> None:
    configs = [compose_run([*overrides, "optim.clip=null", f"optim.lr={lr}"]) for lr in (1e-3, 10)]
    finished, diverged = train_pack(configs, trackers=[[], []])
    single = train(compose_run([*overrides, *BAD, f"results_dir={tmp_path / 'single'}"]), trackers=[])
    assert (finished.status.outcome, finished.state) == ("finished", "finished")
    assert (diverged.status.outcome, diverged.state, single.state) == ("diverged", "diverged", "diverged")
    for outcome in (diverged, single):
        divergence = outcome.status.diverged
        assert divergence is not None
        assert divergence.last_finite is not None
        assert (divergence.step, divergence.last_finite.step) == (12, 11)
        assert (outcome.status.val_loss or 0) > 7
    assert [outcome.already_ended for outcome in train_pack(configs, trackers=[[], []])] == [True, True]


def test_baselines_use_the_targets_of_the_evaluation(overrides: list[str]) -> None:
    record = train(
        compose_run([*overrides, "train.steps=1", "model.context=32", "eval.sequences=5"]), trackers=[]
    ).folder.run()
    assert record["corpus"]["baselines"]["targets"] == 5 * 32
