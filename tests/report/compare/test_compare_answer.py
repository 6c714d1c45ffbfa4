"""The sentences that a page begins with, in each of the cases that there are."""

from __future__ import annotations

import itertools
import math

import pytest

from normlab.report.compare.answer import answer, best, ranked
from normlab.report.groups import group_cells
from normlab.report.intervals import mean_interval, paired_test
from normlab.report.outcomes import read_result
from normlab.store.query import examine


@pytest.fixture
def make(make_run):
    made = iter(range(1000))

    def one(norm, losses, lr=1e-3, *, state=None, first_seed=0, best=None, **options):
        for seed, loss in enumerate(losses, start=first_seed):
            told = state or ("diverged" if math.isinf(loss) else "finished")
            ended = {
                "val_loss": math.nan if math.isinf(loss) else loss,
                "best_val_loss": loss if best is None else best,
            }
            make_run(f"run{next(made):03}", told, norm=norm, lr=lr, seed=seed, status=ended, **options)

    return one


@pytest.fixture
def found(tmp_path):
    def read(*by):
        from normlab.store.runs import RunFolder

        entries = [examine(RunFolder(path)) for path in sorted((tmp_path / "runs").iterdir())]
        return group_cells([one for entry in entries if (one := read_result(entry))], by or ("norm",))

    return read


def test_the_best_is_told_apart(make, found):
    make("layernorm", [2.21, 2.25, 2.30])
    make("rmsnorm", [2.01, 2.06, 2.09])
    make("rmsnorm", [2.11, 2.16, 2.29], lr=1e-2)
    seen = found()
    mean, _, high, _ = mean_interval({(0, 0): 2.01, (1, 1): 2.06, (2, 2): 2.09})
    test = paired_test({(0, 0): 2.01 - 2.21, (1, 1): 2.06 - 2.25, (2, 2): 2.09 - 2.30})
    assert test.low is not None
    assert test.high is not None
    assert best(seen) == 1
    assert answer(seen) == [
        f"rmsnorm has the lowest final validation loss: {mean:.4f} ± {high - mean:.4f} nats a token "
        "(95% interval over n = 3 seeds), at its own best learning rate 0.001 (of 2 tried).",
        f"{-test.estimate:.4f} below the next, layernorm (paired difference {test.estimate:+.4f} [{test.low:+.4f}, "
        f"{test.high:+.4f}], n = 3 seeds).",
        "All 9 runs came to their end.",
        "Each cell's learning rate was chosen by the very loss that is shown, which flatters it.",
    ]


def test_the_interval_holds_zero(make, found):
    make("layernorm", [2.0, 2.3, 2.2])
    make("rmsnorm", [2.1, 2.0, 2.2])
    make("dyt", [2.5, 2.5, 2.6])
    first, second, third, fourth = answer(found())
    assert first.endswith("(95% interval over n = 3 seeds), at learning rate 0.001.")
    assert second.startswith("Not told apart from the next, layernorm: the 95% interval of their difference does not")
    assert "(paired difference -0.0667 [" in second
    assert second.endswith(", n = 3 seeds).")
    assert third == "All 9 runs came to their end."
    assert fourth == "The best of 3 cells was chosen by the very loss that is shown, which flatters it."


def test_one_seed_and_no_seed_in_common(make, found):
    make("layernorm", [2.2])
    make("rmsnorm", [2.1])
    assert answer(found())[:2] == [
        "rmsnorm has the lowest final validation loss: 2.1000 nats a token (n = 1 seed, so without an interval), at "
        "learning rate 0.001.",
        "Not told apart from the next, layernorm: paired difference -0.1000, n = 1 seed, no interval.",
    ]
    make("dyt", [2.15], first_seed=7)
    assert answer(found())[1] == (
        "Not told apart from the next, dyt: they have no seed in common (2.1500 nats a token (n = 1 seed, so without "
        "an interval))."
    )


def test_a_diverged_seed_is_worse_than_none_and_never_hidden(make, found):
    make("layernorm", [1.0, math.inf, 1.0])
    make("rmsnorm", [2.1, 2.2, 2.3])
    seen = found()
    assert ranked(seen) == [1, 0]
    first, second, third = answer(seen)
    assert first.startswith("rmsnorm has the lowest final validation loss: 2.2000 ± ")
    assert second == ("The next, layernorm, has 1 of 3 seeds that diverged; n = 3 pairs are too few for an interval.")
    assert third == "1 of 6 runs diverged: layernorm (1)."


def test_seeds_of_every_cell_diverged(make, found):
    make("layernorm", [math.inf, math.inf, 2.0])
    make("rmsnorm", [math.inf, 2.2, 2.3])
    first, *_, third = answer(found())
    assert first == (
        "rmsnorm is best, though seeds of every cell diverged: 1 of 3 seeds diverged; the others' final validation "
        "loss is 2.2500 nats a token, at learning rate 0.001."
    )
    assert third == "3 of 6 runs diverged: layernorm (2), rmsnorm (1)."


def test_many_seeds_against_one_that_diverges_every_time(make, found):
    make("layernorm", [math.inf] * 6)
    make("rmsnorm", [2.0 + seed / 10 for seed in range(6)])
    second = answer(found())[1]
    assert second == (
        "Far below the next, layernorm (n = 6 seeds, by signed-rank (6 of 6 pairs with a diverged run); 6 of 6 seeds "
        "of it diverged)."
    )


@pytest.mark.parametrize(
    ("diverged", "told"),
    [
        (2, "paired difference -0.1000 [no lower bound, -0.1000], n = 7 seeds, by signed-rank (2 of 7 pairs "),
        (4, "95% interval [no lower bound, -0.1000], n = 7 seeds, by signed-rank (4 of 7 pairs "),
        (7, "n = 7 seeds, by signed-rank (7 of 7 pairs "),
    ],
)
def test_no_number_is_made_up_for_a_diverged_seed(make, found, diverged, told):
    make("layernorm", [math.inf] * diverged + [2.1] * (7 - diverged))
    make("rmsnorm", [2.0] * 7)
    second = answer(found())[1]
    assert f"({told}" in second


@pytest.mark.parametrize("diverged", list(itertools.product([0, 1, 3, 6], repeat=2)))
@pytest.mark.parametrize("seeds", [1, 3, 6])
@pytest.mark.parametrize("first", [0, 1])
def test_infinity_is_never_printed(make, found, diverged, seeds, first):
    for norm, number, start in zip(("layernorm", "rmsnorm"), diverged, (0, first), strict=True):
        make(norm, [math.inf if seed < number else 2 + seed / 10 for seed in range(seeds)], first_seed=start)
    assert "inf" not in " ".join(answer(found()))


def test_a_lone_pair_with_a_diverged_seed(make, found):
    make("layernorm", [math.inf])
    make("rmsnorm", [2.0])
    second = "The next, layernorm, has 1 of 1 seed that diverged; n = 1 pair is too few for an interval."
    assert answer(found())[1] == second


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([math.inf, 2.2, 2.4], "1 of 3 seeds diverged; the others' final validation loss is 2.3000 nats a token"),
        ([math.inf, 2.2], "1 of 2 seeds diverged; the other's final validation loss is 2.2000 nats a token"),
    ],
)
def test_a_cell_alone_with_diverged_seeds(make, found, losses, told):
    make("rmsnorm", losses)
    assert answer(found())[0] == (
        f"rmsnorm: {told}, at learning rate 0.001; there is no other cell to compare it with."
    )


def test_no_seed_in_common_with_one_that_diverged(make, found):
    make("rmsnorm", [2.0])
    make("layernorm", [math.inf], first_seed=5)
    assert answer(found())[1] == (
        "Not told apart from the next, layernorm: they have no seed in common (1 of 1 seed diverged)."
    )


def test_a_cell_without_a_letter_is_called_by_its_words(make, found):
    make("rmsnorm", [2.0, 2.1], depth=200)
    make("rmsnorm", [2.2, math.inf], depth=1e-5)
    first, second, *_, last = answer(found("model.depth"), by=["model.depth"])
    assert first.startswith("model.depth=200 has the lowest final validation loss")
    assert second.startswith("The next, model.depth=1e-05, has 1 of 2 seeds that diverged")
    assert last == "1 of 4 runs diverged: model.depth=1e-05 (1)."
    two = ["run.name", "model.depth"]
    assert answer(found(*two), by=two)[0].startswith("run.name=- model.depth=200 has the lowest")
    named = ["norm", "model.depth"]
    assert answer(found(*named), by=named)[0].startswith("rmsnorm 200 has the lowest")


def test_a_cell_alone_without_a_letter(make, found):
    make("rmsnorm", [2.0])
    assert answer(found("run.name"), by=["run.name"])[0].startswith("run.name=-: final validation loss 2.0000")


def test_all_diverged(make, found):
    make("layernorm", [math.inf, math.inf])
    make("rmsnorm", [math.inf])
    seen = found()
    assert best(seen) is None
    assert answer(seen) == [
        "No cell is called the best: every run that has come out diverged.",
        "3 of 3 runs diverged: layernorm (2), rmsnorm (1).",
    ]


def test_a_cell_alone(make, found):
    make("rmsnorm", [2.1, 2.2], lr=1e-3)
    make("rmsnorm", [2.3, 2.4], lr=1e-2)
    seen = found()
    assert best(seen) is None
    first, *rest = answer(seen)
    assert first.startswith("rmsnorm: final validation loss 2.1500 ± ")
    assert first.endswith("0.001 (of 2 tried); there is no other cell to compare it with.")
    assert rest[-1] == "Each cell's learning rate was chosen by the very loss that is shown, which flatters it."


def test_one_cell_with_a_result_among_several(make, found):
    make("rmsnorm", [2.1, 2.2])
    make("layernorm", [0.0], state="failed")
    seen = found()
    assert best(seen) == 1
    assert answer(seen)[1:] == ["No other of the 2 cells has a result.", "1 of 3 runs failed: layernorm (1)."]


def test_nothing_has_come_out(make, found):
    assert answer([], ["damaged"])[1] == "1 of 1 run is in no cell: damaged (1)."
    make("rmsnorm", [0.0, 0.0], state="interrupted")
    make("layernorm", [0.0], state="failed")
    assert answer(found(), ["damaged", "not started", "not started"]) == [
        "No run has come out: there is no loss to compare.",
        "1 of 6 runs failed: layernorm (1); 2 have not ended: rmsnorm (2); 3 are in no cell: damaged (1), not started "
        "(2).",
    ]


def test_stuck_and_regressed(make, found):
    make("rmsnorm", [3.3, 2.0])
    make("layernorm", [2.5])
    assert answer(found())[-1] == "1 of 3 runs is stuck at the unigram entropy: rmsnorm (1)."
    make("dyt", [3.3, 3.3], best=2.6)
    told = "1 of 5 runs is stuck at the unigram entropy: rmsnorm (1); 2 regressed: dyt (2)."
    assert answer(found())[-2] == told


def test_corpora_do_not_compare(make, found):
    corpus = {"name": "a", "sha256": "b" * 64, "tokenizer": "bytes"}
    make("rmsnorm", [2.0, 2.1])
    make("layernorm", [1.0, 1.1], run={"corpus": corpus})
    seen = found()
    assert best(seen) is None
    assert answer(seen)[0] == (
        "No cell is called the best: the runs are on 2 corpora (a bbbbbbbb, stdlib aaaaaaaa) and 2 tokenizers "
        "(bytes, unknown), and losses compare only within one."
    )
