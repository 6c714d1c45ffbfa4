"""The sentences that a page begins with, in each of the cases that there are."""

from __future__ import annotations

import math

import pytest

from normlab.report.compare.answer import answer, best, ranked
from normlab.report.groups import cells
from normlab.report.intervals import mean_interval, paired
from normlab.report.outcomes import outcome
from normlab.store.query import examine


@pytest.fixture
def make(make_run):
    made = iter(range(1000))

    def one(norm, losses, lr=1e-3, *, state=None, first_seed=0, **options):
        for seed, loss in enumerate(losses, start=first_seed):
            told = state or ("diverged" if math.isinf(loss) else "finished")
            ended = {"val_loss": math.nan if math.isinf(loss) else loss, "best_val_loss": loss}
            make_run(f"run{next(made):03}", told, norm=norm, lr=lr, seed=seed, status=ended, **options)

    return one


@pytest.fixture
def found(tmp_path):
    def read(*by):
        from normlab.store.runs import RunFolder

        entries = [examine(RunFolder(path)) for path in sorted((tmp_path / "runs").iterdir())]
        return cells([one for entry in entries if (one := outcome(entry))], by or ("norm",))

    return read


def test_the_best_is_told_apart(make, found):
    make("layernorm", [2.21, 2.25, 2.30])
    make("rmsnorm", [2.01, 2.06, 2.09])
    make("rmsnorm", [2.11, 2.16, 2.29], lr=1e-2)
    seen = found()
    mean, _, high, _ = mean_interval([2.01, 2.06, 2.09])
    test = paired([2.01 - 2.21, 2.06 - 2.25, 2.09 - 2.30])
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
    assert second == (
        "Not told apart from the next, layernorm: paired difference -inf, n = 3 seeds, too few for an interval; "
        "1 of 3 seeds of it diverged."
    )
    assert third == "1 of 6 runs diverged: layernorm (1)."


def test_seeds_of_every_cell_diverged(make, found):
    make("layernorm", [math.inf, math.inf, 2.0])
    make("rmsnorm", [math.inf, 2.2, 2.3])
    first, *_, third = answer(found())
    assert first == (
        "rmsnorm is best, though seeds of every cell diverged: 1 of 3 diverged, others 2.2500 nats a token, at "
        "learning rate 0.001."
    )
    assert third == "3 of 6 runs diverged: layernorm (2), rmsnorm (1)."


def test_many_seeds_against_one_that_diverges_every_time(make, found):
    make("layernorm", [math.inf] * 6)
    make("rmsnorm", [2.0 + seed / 10 for seed in range(6)])
    second = answer(found())[1]
    assert second == (
        "Far below the next, layernorm (paired difference -inf [-inf, -inf], n = 6 seeds, by signed-rank (6 of 6 pairs "
        "with a diverged run); 6 of 6 seeds of it diverged)."
    )


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


def test_plateaus(make, found):
    make("rmsnorm", [3.3, 2.0])
    make("layernorm", [2.5])
    told = answer(found())[-1]
    assert told == "1 of 3 runs never left the unigram plateau: rmsnorm (1)."


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
