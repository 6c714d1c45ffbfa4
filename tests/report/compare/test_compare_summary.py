"""The summary sentences of the page."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from normlab.analysis.best import compare_with_best, rank_cells
from normlab.analysis.cells import group_cells
from normlab.analysis.comparability import intact_runs
from normlab.analysis.intervals import mean_interval
from normlab.analysis.paired_tests import paired_test
from normlab.report.compare.summary_text import margin_text, summary_facts
from normlab.store.query import find_runs


def summary_sentences(cells, missing=()):
    return [fact.sentence for fact in summary_facts(cells, missing)]


@pytest.fixture
def make(make_run):
    numbers = iter(range(1000))

    def make_seeds(norm, losses, lr=1e-3, *, state=None, first_seed=0, best=None, **options):
        for seed, loss in enumerate(losses, start=first_seed):
            run_state = state or ("diverged" if math.isinf(loss) else "finished")
            status = {
                "val_loss": math.nan if math.isinf(loss) else loss,
                "best_val_loss": loss if best is None else best,
            }
            make_run(f"run{next(numbers):03}", run_state, norm=norm, lr=lr, seed=seed, status=status, **options)

    return make_seeds


@pytest.fixture
def read_cells(tmp_path):
    def read(*by):
        return group_cells(intact_runs(find_runs(tmp_path))[0], by or ("norm",))

    return read


def test_best_cell_below_the_second_best(make, read_cells):
    make("layernorm", [2.21, 2.25, 2.30])
    make("rmsnorm", [2.01, 2.06, 2.09])
    make("rmsnorm", [2.11, 2.16, 2.29], lr=1e-2)
    cells = read_cells()
    mean, _, high, _ = mean_interval({(0, 0): 2.01, (1, 1): 2.06, (2, 2): 2.09})
    assert high is not None
    test = paired_test({(0, 0): 2.01 - 2.21, (1, 1): 2.06 - 2.25, (2, 2): 2.09 - 2.30})
    assert test.low is not None
    assert test.high is not None
    assert summary_sentences(cells) == [
        f"Best: RMSNorm: validation loss {mean:.4f} ± {high - mean:.4f} nats/token "
        "(95% interval, n=3), at learning rate 0.001, the best of 2.",
        f"The loss is {-test.estimate:.4f} nats/token below that of the second best, LayerNorm (paired difference "
        f"{test.estimate:+.4f} [{test.low:+.4f}, {test.high:+.4f}], n=3, p = {test.p:.2g}).",
        "All 9 runs finished.",
        "Note: each cell's learning rate is selected on this same loss, so its loss is optimistic.",
    ]


def test_interval_that_includes_zero(make, read_cells):
    make("layernorm", [2.0, 2.3, 2.2])
    make("rmsnorm", [2.1, 2.0, 2.2])
    make("dyt", [2.5, 2.5, 2.6])
    first, second, third, fourth = summary_sentences(read_cells())
    assert first.endswith("(95% interval, n=3), at learning rate 0.001.")
    assert second.startswith("Not significantly better than the second best, LayerNorm (paired difference -0.0667 [")
    assert second.endswith(" corrected for 2 comparisons: each cell with the best cell of its size).")
    assert third == "All 9 runs finished."
    assert fourth == "Note: the best of 3 cells is selected on this same loss, so its loss is optimistic."


def test_one_pair_and_no_pair(make, read_cells):
    make("layernorm", [2.2])
    make("rmsnorm", [2.1])
    assert summary_sentences(read_cells())[:2] == [
        "Best: RMSNorm: validation loss 2.1000 nats/token (n=1, no interval), at learning rate 0.001.",
        "Not significantly better than the second best, LayerNorm: paired difference -0.1000, n=1 is too few for an "
        "interval.",
    ]
    make("dyt", [2.15], first_seed=7)
    assert summary_sentences(read_cells())[1] == (
        "Not significantly better than the second best, DyT: the two cells have no seed in common "
        "(2.1500 nats/token (n=1, no interval))."
    )


def test_diverged_seed_ranks_last_and_is_reported(make, read_cells):
    make("layernorm", [1.0, math.inf, 1.0])
    make("rmsnorm", [2.1, 2.2, 2.3])
    cells = read_cells()
    assert rank_cells(cells) == [1, 0]
    first, second, third = summary_sentences(cells)
    assert first.startswith("Best: RMSNorm: validation loss 2.2000 ± ")
    assert second == "The second best is LayerNorm: 1 of 3 seeds diverged; n=3 is too few for an interval."
    assert third == "Of 6 runs, 1 diverged: LayerNorm (1)."


def test_best_cell_against_one_whose_seeds_all_diverged(make, read_cells):
    make("layernorm", [math.inf] * 6)
    make("rmsnorm", [2.0 + seed / 10 for seed in range(6)])
    second = summary_sentences(read_cells())[1]
    assert second == (
        "The loss is far below that of the second best, LayerNorm (n=6, signed-rank (6 of 6 pairs with a diverged "
        "run), p = 0.031; 6 of 6 seeds diverged in LayerNorm)."
    )


@pytest.mark.parametrize(
    ("diverged", "text"),
    [
        (2, "paired difference -0.1000 [no lower bound, -0.1000], n=7, signed-rank (2 of 7 pairs "),
        (4, "95% interval [no lower bound, -0.1000], n=7, signed-rank (4 of 7 pairs "),
        (7, "n=7, signed-rank (7 of 7 pairs "),
    ],
)
def test_diverged_seeds_give_no_finite_bound(make, read_cells, diverged, text):
    make("layernorm", [math.inf] * diverged + [2.1] * (7 - diverged))
    make("rmsnorm", [2.0] * 7)
    second = summary_sentences(read_cells())[1]
    assert f"({text}" in second


@pytest.mark.parametrize("diverged", list(itertools.product([0, 1, 3, 6], repeat=2)))
@pytest.mark.parametrize("seeds", [1, 3, 6])
@pytest.mark.parametrize("first", [0, 1])
def test_infinity_is_never_printed(make, read_cells, diverged, seeds, first):
    for norm, number, start in zip(("layernorm", "rmsnorm"), diverged, (0, first), strict=True):
        make(norm, [math.inf if seed < number else 2 + seed / 10 for seed in range(seeds)], first_seed=start)
    assert "inf" not in " ".join(summary_sentences(read_cells()))


def test_cells_are_compared_at_equal_depth_only(make, read_cells):
    """A deeper model has a lower loss, whatever its norm."""
    for depth, losses in {2: (3.0, 2.9), 16: (2.5, 2.6)}.items():
        for norm, loss in zip(("layernorm", "rmsnorm"), losses, strict=True):
            make(norm, [loss, loss + 0.01, loss + 0.03], depth=depth)
    cells = read_cells("norm", "model.depth")
    sentences = summary_sentences(cells)
    assert [text.partition(" ±")[0] for text in sentences if text.startswith("Best")] == [
        "Best at depth 2: RMSNorm: validation loss 2.9133",
        "Best at depth 16: LayerNorm: validation loss 2.5133",
    ]
    assert "the second best, LayerNorm, depth 2 (paired difference -0.1000" in sentences[1]
    for sentence in (sentences[1], sentences[3]):  # one comparison at each depth
        assert sentence.endswith(" corrected for 2 comparisons: each cell with the best cell of its size).")
    assert sentences[-1] == "All 12 runs finished."  # of two cells, the selection is not worth a note


def test_a_size_without_a_good_cell(make, read_cells):
    make("layernorm", [math.inf, 2.0], depth=1)
    make("rmsnorm", [math.inf, math.inf], depth=1)
    make("layernorm", [2.0, 2.1], depth=2)
    sentences = summary_sentences(read_cells("norm", "model.depth"))
    assert sentences[0] == "No best cell at depth 1: in every cell with a result, a run diverged or has not learned."
    assert sentences[1].startswith("LayerNorm, depth 2: validation loss 2.0000 and 2.1000 nats/token (n=2), at ")


def test_margins_are_corrected_for_all_comparisons_with_the_better_cell(make, read_cells):
    draw = np.random.default_rng(0)
    losses = {
        norm: 2 + shift + draw.normal(0, 0.02, 20) for norm, shift in (("dyt", 0), ("rmsnorm", 0.02), ("zscore", 0.1))
    }
    for norm, values in losses.items():
        make(norm, values.tolist())
    cells = read_cells()
    ranked = rank_cells(cells)
    compared = dict(zip(ranked[1:], compare_with_best(cells, {"": ranked})[""], strict=True))
    names = [cell.key[0] for cell in cells]
    assert names[ranked[0]] == "dyt"
    p_values = {norm: stats.ttest_rel(losses["dyt"], losses[norm]).pvalue for norm in ("rmsnorm", "zscore")}
    low, high = sorted(p_values, key=p_values.__getitem__)
    corrected = {low: 2 * p_values[low], high: max(2 * p_values[low], p_values[high])}  # Holm 1979
    for norm, p in corrected.items():
        margin = compared[names.index(norm)]
        assert f"p = {p:.2g} corrected for 2 comparisons" in margin_text(cells[names.index(norm)], margin)
        assert margin.is_lower == (p < 0.05)
    assert len(compared) == 2


def test_single_cell(make, read_cells):
    make("rmsnorm", [2.1, 2.2], lr=1e-3)
    make("rmsnorm", [2.3, 2.4], lr=1e-2)
    cells = read_cells()
    first, *rest = summary_sentences(cells)
    assert first.startswith("RMSNorm: validation loss 2.1000 and 2.2000 nats/token (n=2), at learning rate")
    assert first.endswith("0.001, the best of 2; no other cell to compare with.")
    assert rest[-1] == "Note: each cell's learning rate is selected on this same loss, so its loss is optimistic."


def test_no_run_has_a_result(make, read_cells):
    assert summary_sentences([], ["damaged"])[1] == "Of 1 run, 1 in no cell: damaged (1)."
    make("rmsnorm", [0.0, 0.0], state="interrupted")
    make("layernorm", [0.0], state="failed")
    assert summary_sentences(read_cells(), ["damaged", "not started", "not started"]) == [
        "No run has a final loss yet: there is nothing to compare.",
        "Of 6 runs, 1 failed: LayerNorm (1). 2 not finished: RMSNorm (2). 3 in no cell: damaged (1); not started (2).",
    ]


def test_stuck_and_regressed(make, read_cells):
    make("rmsnorm", [3.3, 2.0])
    make("layernorm", [2.5])
    assert summary_sentences(read_cells())[-1] == "Of 3 runs, 1 stuck: RMSNorm (1)."
    make("dyt", [3.3, 3.3], best=2.6)
    text = "Of 5 runs, 1 stuck: RMSNorm (1). 2 regressed: DyT (2)."
    assert summary_sentences(read_cells())[-2] == text


@pytest.mark.parametrize(("loss", "best"), [(3.3, 3.3), (3.3, 2.4)], ids=["stuck", "regressed"])
def test_a_cell_with_a_run_that_has_not_learned_is_never_the_best(make, read_cells, loss, best):
    """Nor one above the band around the unigram entropy, which is no bad outcome of a short run."""
    make("rmsnorm", [loss, loss], best=best)
    make("layernorm", [4.5, 4.5])
    make("dyt", [loss, 2.0], best=best if best < 3 else None)
    cells = read_cells()
    assert [cells[index].name for index in rank_cells(cells)] == ["dyt", "rmsnorm", "layernorm"]
    no_best = "No best cell: in every cell with a result, a run diverged or has not learned."
    assert summary_sentences(cells)[0] == no_best
    make("zscore", [2.9, 2.9])
    assert summary_sentences(read_cells())[0].startswith("Best: z-score: validation loss 2.9000 and")


def test_the_second_best_may_have_a_lower_mean(make, read_cells):
    make("rmsnorm", [2.9] * 24)
    make("layernorm", [2.0] * 23 + [3.3])
    best, margin, *_ = summary_sentences(read_cells())
    assert best.startswith("Best: RMSNorm: ")
    assert margin.startswith(
        "The mean loss of the second best, LayerNorm, is lower, but a run of it has not learned (paired difference +0."
    )


def test_cells_on_different_corpora_are_not_ranked(make, read_cells):
    corpus = {"name": "a", "sha256": "b" * 64, "tokenizer": "bpe"}
    make("rmsnorm", [2.0, 2.1])
    make("layernorm", [1.0, 1.1], run={"corpus": corpus})
    cells = read_cells()
    assert summary_sentences(cells)[0] == (
        "No best cell: the runs differ in corpus a bbbbbbbb and stdlib aaaaaaaa; tokenizer bpe 257 and bytes 257, so "
        "their losses are not comparable."
    )
