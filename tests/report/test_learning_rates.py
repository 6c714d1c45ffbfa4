import math
from collections.abc import Sequence

from normlab.analysis.learning_rates import Losses, arrange, best_lr, ranking, shared_lr

inf = math.inf


def grid(**losses: Sequence[float]) -> Losses:
    """Return losses by learning rate and replicate: grid(a=[1, 2]) is learning rate 1e-4 with two seeds."""
    rates = {"a": 1e-4, "b": 3e-4, "c": 1e-3, "d": 3e-3, "e": 1e-2}
    return {rates[name]: {(seed, 0): loss for seed, loss in enumerate(values)} for name, values in losses.items()}


def test_best_learning_rate_has_the_lowest_mean_without_divergence():
    assert best_lr(ranking(grid(a=[3, 3], b=[2, 2.2], c=[2.1, 2.2]))) == 3e-4
    assert best_lr(ranking(grid(a=[3, 3], b=[1, inf], c=[inf, inf]))) == 1e-4
    assert best_lr(ranking(grid(a=[2, inf], b=[1, inf], c=[inf, inf]))) == 3e-4
    assert best_lr(ranking(grid(a=[2, 2], b=[2, 2]))) == 1e-4
    assert best_lr({}) is None


def test_bad_learning_rates_rank_last():
    assert best_lr(ranking(grid(a=[3, 3], b=[2, 3.2], c=[inf, inf]), {3e-4, 1e-3})) == 1e-4
    assert best_lr(ranking(grid(a=[3.2, 3.2], b=[2, 3.2], c=[2, inf]), {1e-4, 3e-4, 1e-3})) == 3e-4


def test_shared_learning_rate_has_the_best_mean_rank():
    cells = [ranking(losses) for losses in (grid(a=[1], b=[2], c=[3]), grid(b=[1], c=[2], d=[0]), grid(b=[inf], c=[5]))]
    assert shared_lr(cells) == 3e-4  # its ranks are 1, 1 and 2; those of 1e-3 are 2, 2 and 1
    assert shared_lr([ranking(grid(a=[1])), ranking(grid(b=[1]))]) is None
    assert shared_lr([]) is None


def test_repeated_runs_count_as_one_value():
    found = arrange([(1e-3, (0, 0), 2.0), (1e-3, (0, 0), 3.0), (1e-4, (0, 0), 2.0), (1e-3, (1, 0), inf)])
    assert found == {1e-4: {(0, 0): 2.0}, 1e-3: {(0, 0): 2.5, (1, 0): inf}}
    assert list(found) == [1e-4, 1e-3]
