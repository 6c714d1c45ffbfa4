"""Tests about the learning rate, against numpy and scipy: sensitivity, the highest rate that trains, the band."""

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from normlab.analysis.table import summarize_by
from normlab.report.figure_data import make_figure
from normlab.report.figure_draw import draw

Command = Callable[..., tuple[int, str, str]]
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
UNIFORM, UNIGRAM = 5.5, 3.2
"""Of `make_run`; losses up to 5 % above the unigram entropy are of runs that are stuck."""


@pytest.fixture
def losses() -> np.ndarray:
    """Losses by placement (pre, post), learning rate and seed; the second rate is the best."""
    noise = np.random.default_rng(0).normal(0, 0.004, (2, len(RATES), 5))
    return np.array([[2.2, 2.0, 2.05, 2.4], [2.3, 2.1, 2.6, 2.9]])[..., None] + noise


@pytest.fixture
def rows(tmp_path: Path, make_run: Callable[..., object], run_command: Command) -> Callable[..., dict[str, Any]]:
    """Write the runs of some losses, unless there are runs; return the rows of a test by their contrast."""

    def call(test: str, losses: np.ndarray) -> dict[str, Any]:
        runs = itertools.product(enumerate(("pre", "post")), enumerate(RATES), range(5))
        for (i, placement), (j, lr), seed in () if (tmp_path / "runs").exists() else runs:
            loss = float(losses[i, j, seed])
            status = {"val_loss": loss, "best_val_loss": loss}
            make_run(f"{placement}{j}{seed}", status=status, placement=placement, lr=lr, seed=seed)
        arguments = ("--by", "placement", "--against", "placement=pre", "--test", test, "--format", "json")
        code, out, err = run_command("summarize", str(tmp_path), *arguments)
        assert code == 0, err
        return {row["contrast"]: row for row in json.loads(out)}

    return call


def check(row: dict[str, Any], values: np.ndarray, scale: Callable[[float], float] = float) -> None:
    """Compare a row with the t interval of the values."""
    low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    assert (row["n"], row["lr"]) == (len(values), None)
    assert [row["estimate"], row["low"], row["high"]] == pytest.approx([*map(scale, (values.mean(), low, high))])


def crossing(losses: np.ndarray, limit: float) -> float:
    """Return ln of the rate where the rising losses of successive rates reach a limit."""
    return float(np.interp(limit, losses, np.log(RATES)[-len(losses) :]))


def test_sensitivity(rows: Callable[..., dict[str, Any]], losses: np.ndarray) -> None:
    losses[1, 3] = 9.0  # counts as ln V
    found = rows("sensitivity", losses)
    pre, post = np.minimum(losses, UNIFORM).mean(1) - losses.min(1)
    assert list(found) == ["S: post-norm", "S: pre-norm", "S: post-norm - pre-norm"]
    check(found["S: pre-norm"], pre)
    check(found["S: post-norm"], post)
    check(found["S: post-norm - pre-norm"], post - pre)
    assert found["S: post-norm - pre-norm"]["p"] == pytest.approx(stats.ttest_rel(post, pre).pvalue)


def test_range(rows: Callable[..., dict[str, Any]], losses: np.ndarray) -> None:
    found = rows("range", losses)
    highest, band = np.empty((2, 5)), np.empty((2, 5))
    for i, seed in itertools.product(range(2), range(5)):
        curve, lowest = losses[i, :, seed], losses[i, :, seed].min()
        highest[i, seed] = crossing(curve[1:], lowest + 0.1)
        below = float(np.interp(-lowest - 0.02, -curve[:2], np.log(RATES)[:2]))
        band[i, seed] = crossing(curve[1:], lowest + 0.02) - below
    for name, values in {"highest rate": highest, "band": band}.items():
        check(found[f"{name}: pre-norm"], values[0], math.exp)
        check(found[f"{name}: post-norm"], values[1], math.exp)
        check(found[f"{name}: post-norm / pre-norm"], values[1] - values[0], math.exp)
        compared = stats.ttest_rel(values[0], values[1])
        assert found[f"{name}: post-norm / pre-norm"]["p"] == pytest.approx(compared.pvalue)


def test_the_figure_of_learning_rates_marks_the_highest(
    rows: Callable[..., dict[str, Any]], losses: np.ndarray, tmp_path: Path, run_command: Command
) -> None:
    """On the line, with the interval of the test; no mark where the grid ends first."""
    losses[0, 3, 0] = 2.0
    found = rows("range", losses)
    figure = make_figure("lr", summarize_by(tmp_path))
    post, pre = figure.panels[0].lines
    assert (pre.label, pre.highest_rates, post.label) == ("pre-norm", [], "post-norm")
    [mark], row = post.highest_rates, found["highest rate: post-norm"]
    assert (mark.x, mark.low, mark.high, mark.n) == (row["estimate"], row["low"], row["high"], 5)
    assert mark.y == pytest.approx(np.interp(math.log(mark.x), np.log(RATES), losses[1].mean(1)))
    assert "Diamond with a horizontal bar: highest rate" in figure.caption
    drawn = [line.get_xdata() for line in draw(figure).axes[0].lines if line.get_marker() == "D"]
    assert drawn == [[mark.x]]
    page = tmp_path / "page.html"
    assert run_command("compare", str(tmp_path), "-o", str(page))[0] == 0
    assert f"highest rate that trains {mark.x:.3g} [{mark.low:.3g}, {mark.high:.3g}] (n=5)" in page.read_text()


def test_a_grid_that_ends_too_early_leaves_no_bound_there(
    rows: Callable[..., dict[str, Any]], losses: np.ndarray
) -> None:
    losses[0, 3, 0] = 2.0  # pre-norm still trains well at the highest rate
    losses[1, :, 0] = UNIGRAM  # one seed of post-norm trains at no rate
    found = rows("range", losses)
    pre, post, ratio = (found[f"highest rate: {name}"] for name in ("pre-norm", "post-norm", "post-norm / pre-norm"))
    assert (pre["high"], post["low"], ratio["low"], ratio["p"]) == (None, None, None, None)
    assert None not in (pre["low"], post["high"], ratio["high"])
    assert (found["band: post-norm"]["n"], found["band: post-norm / pre-norm"]["n"]) == (4, 4)


def test_a_number_that_the_grid_cuts_off_in_every_seed_has_no_interval_and_gaps_are_named(
    rows: Callable[..., dict[str, Any]], losses: np.ndarray, tmp_path: Path, run_command: Command
) -> None:
    losses[0] = np.array([2.2, 2.0, 2.0, 2.0])[:, None]
    losses[1] += np.array([0, 0.5, -0.5, 0])[:, None]  # the second rate no longer trains, the first and third do
    losses[1, 1, 0] = 2.15
    found = rows("range", losses)
    pre, post = (found[f"highest rate: {name}"] for name in ("pre-norm", "post-norm"))
    assert (pre["estimate"], pre["low"], pre["high"], pre["gaps"]) == (pytest.approx(RATES[-1]), None, None, 0)
    assert post["gaps"] == 0
    losses[1, 0] = 2.1
    shutil.rmtree(tmp_path / "runs")
    assert rows("range", losses)["highest rate: post-norm"]["gaps"] == 4
    _, out, _ = run_command("summarize", str(tmp_path), "--by", "placement", "--test", "range")
    assert "0.0300 or more (n=5)" in out
    assert "highest rate: post-norm: in 4 of 5 seeds a rate fails between two that train" in out


def test_a_cell_that_never_trains_has_no_number(
    rows: Callable[..., dict[str, Any]], losses: np.ndarray, tmp_path: Path, run_command: Command
) -> None:
    losses[1] = UNIGRAM
    for test in ("sensitivity", "range"):
        assert all(row["estimate"] is None for name, row in rows(test, losses).items() if "post" in name)
    code, out, _ = run_command("summarize", str(tmp_path), "--by", "placement", "--test", "range")
    assert code == 0
    assert "no seed that trains" in out


def test_several_runs_at_one_rate_have_no_number(
    rows: Callable[..., dict[str, Any]], losses: np.ndarray, make_run: Callable[..., object]
) -> None:
    """As of two models in one cell, whose curves would be mixed."""
    rows("range", losses)
    for lr in RATES:
        make_run(f"other{lr}", placement="post", lr=lr, seed=0, depth=8)
    found = rows("range", losses)
    assert found["band: post-norm"]["missing"] == "several runs at one rate"
    assert [found[name]["estimate"] for name in ("band: post-norm", "highest rate: post-norm")] == [None, None]


def test_an_estimate_has_no_reason_to_be_missing(rows: Callable[..., dict[str, Any]], losses: np.ndarray) -> None:
    """Also if it is at the end of the grid."""
    losses[1] = np.sort(losses[1])[:, ::-1]
    found = rows("range", losses)
    assert all(row["estimate"] is not None for row in found.values())
    assert [name for name, row in found.items() if "missing" in row] == []


def test_other_grids_are_not_compared_by_their_sensitivity(
    rows: Callable[..., dict[str, Any]], losses: np.ndarray, tmp_path: Path
) -> None:
    """And a seed without every learning rate is left out."""
    rows("sensitivity", losses)
    for seed in range(5):
        shutil.rmtree(tmp_path / "runs" / f"post3{seed}")
    shutil.rmtree(tmp_path / "runs" / "pre00")
    found = rows("sensitivity", losses)
    difference = found["S: post-norm - pre-norm"]
    assert (difference["estimate"], difference["p"], difference["missing"]) == (None, None, "other learning rates")
    check(found["S: pre-norm"], (np.minimum(losses[0], UNIFORM).mean(0) - losses[0].min(0))[1:])


def test_one_learning_rate_is_an_error(tmp_path: Path, make_run: Callable[..., object], run_command: Command) -> None:
    make_run("one")
    code, _, err = run_command("summarize", str(tmp_path), "--by", "placement", "--test", "sensitivity")
    assert (code, err.count("\n")) == (2, 1)
    assert "--test sensitivity: needs several learning rates" in err


def test_no_interval_is_below_the_lowest_possible_number(
    rows: Callable[..., dict[str, Any]], losses: np.ndarray, tmp_path: Path, run_command: Command
) -> None:
    """S is 0 or more and the band 1 or wider: where few seeds differ much, Student's interval goes below."""
    losses[1, :, 1:] = np.array([2.1002, 2.1, 2.1004, 2.1006])[:, None]  # flat, so that S is near 0, but for one seed
    losses[1, :, 0] = [2.9, 2.1, 2.9, 2.9]
    post = np.minimum(losses[1], UNIFORM).mean(0) - losses[1].min(0)
    low, high = stats.t.interval(0.95, 4, post.mean(), stats.sem(post))
    assert low < 0
    found = rows("sensitivity", losses)["S: post-norm"]
    assert (found["low"], found["high"]) == (0.0, pytest.approx(high))
    _, out, _ = run_command("summarize", str(tmp_path), "--by", "placement", "--test", "sensitivity", "--notes")
    assert "[0.0000, " in out
    assert "its interval is cut at 0, the lowest possible S" in " ".join(out.split())
    shutil.rmtree(tmp_path / "runs")
    losses[1] = np.array([2.9, 2.1, 2.9, 2.9])[:, None]  # narrow bands, but for one seed
    losses[1, :, 0] = [2.14, 2.1, 2.1, 2.14]
    band = rows("range", losses)["band: post-norm"]
    assert (band["low"], band["n"]) == (1.0, 5)
    assert band["high"] > band["estimate"] > 1
    _, out, _ = run_command("summarize", str(tmp_path), "--by", "placement", "--test", "range", "--notes")
    assert "its interval is cut at 1, the lowest possible ratio" in " ".join(out.split())
