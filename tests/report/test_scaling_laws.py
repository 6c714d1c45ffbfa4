"""`--test scaling`: laws of the loss over compute against `scipy.optimize`, and multipliers of laws that are known."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize

from normlab.analysis.factor_tests.run import TESTS, run_test
from normlab.analysis.factors import Factor
from normlab.analysis.law_fit import fit, laws_at
from normlab.analysis.scaling_laws import Ladder, fit_laws, forecast_errors
from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError
from normlab.report.channels import level_colors
from normlab.report.figure_data import make_figure
from normlab.report.figure_draw import write_figure

WIDTHS = (32, 48, 64, 96)
SEEDS = range(4)


def ladder_of(theta, sd, sizes=4, seeds=4, seed=0):
    """Return a ladder of two arms with known laws."""
    rng = np.random.default_rng(seed)
    log_compute = np.linspace(27.0, 31.5, sizes)
    laws = laws_at(np.array(theta), np.stack([log_compute - 31.5] * 2))
    return Ladder(laws[:, :, None] + rng.normal(0, sd, (2, sizes, seeds)), np.stack([log_compute] * 2))


SHARED = [1.4, math.log(0.7), math.log(0.6), math.log(0.12), math.log(0.15)]
OWN = [1.4, 1.2, *SHARED[1:]]


@pytest.mark.parametrize("sizes", [4, 5])
@pytest.mark.parametrize("theta", [SHARED, OWN], ids=["shared", "own"])
@pytest.mark.parametrize("has_own_e", [False, True])
def test_fit_is_that_of_scipy(theta, has_own_e, sizes):
    ladder = ladder_of(theta, 0.01, sizes)
    [found], [squares] = fit(ladder.means_GK[None], ladder.x_GK, ladder.weights_GK, has_own_e)

    def missed(parameters):
        return ((laws_at(parameters, ladder.x_GK) - ladder.means_GK) * np.sqrt(ladder.weights_GK)).ravel()

    starts = [OWN if has_own_e else SHARED, found + 0.05]
    bounds = [0.0] * (2 if has_own_e else 1) + [-np.inf] * 4, np.inf
    fits = [optimize.least_squares(missed, start, bounds=bounds, xtol=1e-14, ftol=1e-14) for start in starts]
    assert squares == pytest.approx(2 * min(each.cost for each in fits), rel=1e-6)


def test_all_draws_are_fitted_as_each_alone():
    ladders = [ladder_of(SHARED, 0.02, seed=seed) for seed in range(5)]
    means = np.stack([each.means_GK for each in ladders])
    weights = ladders[0].weights_GK
    together, _ = fit(means, ladders[0].x_GK, weights, has_own_e=False)
    for index, each in enumerate(means):
        alone, _ = fit(each[None], ladders[0].x_GK, weights, has_own_e=False)
        np.testing.assert_allclose(together[index], alone[0], rtol=1e-6)


def test_sizes_of_equal_compute_have_no_law():
    losses = ladder_of(SHARED, 0.01).losses_GKS
    laws = fit_laws(Ladder(losses, np.zeros(losses.shape[:2])))
    assert laws.is_determined_G == [False, False]


def test_multipliers_of_known_laws():
    """L = E + A C^-alpha without noise: L_b(m C) = L_g(C), so that m = (A_b / A_g)^(1 / alpha_b) C^(a_g / a_b - 1)."""
    ladder = ladder_of(SHARED, 0.0)
    laws = fit_laws(ladder)
    np.testing.assert_allclose(laws.theta_P, SHARED, rtol=1e-5)
    for multiple in (0.1, 1.0, 10.0):
        compute = multiple * math.exp(31.5)
        expected = (0.7 / 0.6) ** (1 / 0.12) * multiple ** (0.15 / 0.12 - 1)
        found = laws.multiplier(1, 0, compute)
        assert found.value == pytest.approx(expected, rel=1e-3)
        assert (found.low, found.high, found.p) == (None, None, None)
        # The other way round it is not 1 / m: the arms have different exponents.
        loss = 1.4 + 0.7 * multiple**-0.12
        needed = ((loss - 1.4) / 0.6) ** (-1 / 0.15)
        assert laws.multiplier(0, 1, compute).value == pytest.approx(needed / multiple, rel=1e-3)
    assert laws.growth(1, 0).value == pytest.approx(math.exp(4.5 * (0.15 / 0.12 - 1)), rel=1e-3)


def test_a_baseline_that_never_reaches_the_loss():
    theta = [2.0, 1.0, math.log(0.7), math.log(0.6), math.log(0.12), math.log(0.3)]
    laws = fit_laws(ladder_of(theta, 0.002))
    assert laws.has_own_e
    assert laws.multiplier(1, 0, math.exp(31.5)).value == math.inf


def test_a_baseline_whose_loss_does_not_fall():
    ladder = ladder_of(SHARED, 0.002)
    losses = ladder.losses_GKS.copy()
    losses[0] += (2.5 - losses[0].mean(1))[:, None]
    laws = fit_laws(Ladder(losses, ladder.log_compute_GK))
    assert laws.multiplier(1, 0, math.exp(31.5)).value > 1e6


def test_noise_as_large_as_the_loss():
    """Draws of two noisy seeds may be negative; there is still an interval, a wide one."""
    found = fit_laws(ladder_of(SHARED, 1.0, seeds=2)).multiplier(1, 0, math.exp(31.5))
    assert (found.high or 0.0) / (found.low or 1.0) > 1e3


def test_arms_with_an_e_of_their_own_are_found_seldom_without_one():
    found = [fit_laws(ladder_of(SHARED, 0.02, seed=seed)).has_own_e for seed in range(40)]
    assert sum(found) < 8


def test_sizes_off_the_law_widen_the_intervals():
    ladder = ladder_of(SHARED, 0.005, sizes=5)
    before = fit_laws(ladder)
    losses = ladder.losses_GKS.copy()
    losses[:, 2] += 0.1
    after = fit_laws(Ladder(losses, ladder.log_compute_GK))
    assert (after.p_form or 0.0) < 1e-6 < (before.p_form or 0.0)
    assert after.spread > 5 * before.spread
    compute = math.exp(31.5)
    narrow, wide = before.multiplier(1, 0, compute), after.multiplier(1, 0, compute)
    assert (wide.high or 0.0) / (wide.low or 1.0) > ((narrow.high or 0.0) / (narrow.low or 1.0)) ** 2


def test_a_forecast_is_that_of_the_other_sizes():
    """Whatever the loss at the largest size is, it changes no forecast of it."""
    ladder = ladder_of(SHARED, 0.01)
    [error, _] = forecast_errors(ladder)
    losses = ladder.losses_GKS.copy()
    losses[0, -1] += 0.5
    [higher, _] = forecast_errors(Ladder(losses, ladder.log_compute_GK))
    assert higher.value - error.value == pytest.approx(0.5, abs=1e-6)
    assert (error.low or 0.0) <= 0 <= (error.high or 0.0)
    assert (higher.low or 0.0) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [5, 0], ids=["1.5 times", "equal"])
def test_intervals_hold_the_truth(case, monkeypatch):
    """`scaling_characteristics.py` has all cases with 500 ladders; here are 40 with fewer draws."""
    import scaling_characteristics

    monkeypatch.setattr("normlab.analysis.scaling_laws.DRAWS", 300)
    found = scaling_characteristics.simulate(scaling_characteristics.CASES[case], 40)
    assert min(found.coverage.values()) > 0.85
    assert (found.forecast or 0.0) > 0.85
    least, most = scaling_characteristics.CASES[case].decided
    assert least - 0.15 <= found.decided <= most + 0.1


# The rows of the test


@pytest.fixture
def make_ladder(make_run, tmp_path):
    """Writes runs of two norms at several widths, whose losses are those of two laws; returns their table."""

    def make(widths=WIDTHS, diverged=(), sd=0.01, seeds=SEEDS, norms=("layernorm", "rmsnorm"), flat=()):
        rng = np.random.default_rng(0)
        for (index, norm), width, seed in itertools.product(enumerate(norms), widths, seeds):
            above = (0.7 - 0.05 * index) * (width / 96) ** -0.5
            if norm in flat:
                above = 0.7
            loss = 1.4 + above + float(rng.normal(0, sd))
            state = "diverged" if (norm, width, seed) in diverged else "finished"
            config = {
                "norm": {"name": norm}, "placement": {"name": "pre"}, "model": {"width": width},
                "train": {"tokens_per_parameter": 20.0, "steps": width * width}, "seed": seed, "data": {"seed": seed},
            }  # fmt: skip
            status = {"val_loss": loss, "best_val_loss": loss, "tokens": 1e3 * width**2}
            make_run(f"{norm}-{width}-{seed}", state, run={"config": config, "flops_per_token": 6.0 * width**2},
                     status=status)  # fmt: skip
        return summarize_by(tmp_path)

    return make


def test_rows(make_ladder):
    table = make_ladder()
    rows = run_test("scaling", table.cells, table.factors)
    ratio = "RMSNorm / LayerNorm"
    assert [row["contrast"] for row in rows] == [
        "E: all arms", "exponent: LayerNorm", "exponent: RMSNorm",
        "seen - forecast: LayerNorm, width 96", "seen - forecast: RMSNorm, width 96",
        f"multiplier, width 32: {ratio}", f"multiplier, width 48: {ratio}", f"multiplier, width 64: {ratio}",
        f"multiplier, width 96: {ratio}", f"multiplier, forecast for 10 times the largest: {ratio}",
        f"multiplier, forecast for 100 times the largest: {ratio}", f"growth of the multiplier: {ratio}",
    ]  # fmt: skip
    # Compute grows as width^4, and what the law has above E falls as width^-1/2.
    truth = {"E: all arms": 1.4, "exponent: LayerNorm": 0.125, f"multiplier, width 96: {ratio}": (0.7 / 0.65) ** 8}
    for row in rows:
        if row["contrast"] in truth:
            # One interval in twenty does not hold the truth, and twice as wide a one nearly always does.
            width = row["high"] - row["low"]
            assert row["low"] - width / 2 < truth[row["contrast"]] < row["high"] + width / 2
    assert rows[8]["compute"] == 6e3 * 96**4
    # One multiplier and its growth are tested, with Holm's correction over both.
    assert [row["contrast"] for row in rows if row["p"] is not None] == [rows[8]["contrast"], rows[11]["contrast"]]
    widths = [row["high"] / row["low"] for row in rows[8:11]]
    assert widths == sorted(widths)


def test_seeds_that_diverged_are_counted_and_left_out(make_ladder):
    table = make_ladder(diverged=[("rmsnorm", 48, 1), ("rmsnorm", 96, 2)])
    rows = run_test("scaling", table.cells, table.factors)
    [row] = [row for row in rows if row["contrast"] == "exponent: RMSNorm"]
    assert (row["n"], row["bad"], row["runs"]) == (14, 2, 16)
    assert math.isfinite(row["estimate"])


def test_an_arm_with_too_few_sizes_is_named(make_ladder):
    table = make_ladder(diverged=[("rmsnorm", width, seed) for width in WIDTHS[:2] for seed in SEEDS])
    rows = run_test("scaling", table.cells, table.factors)
    [row] = [row for row in rows if row["contrast"] == "exponent: RMSNorm"]
    assert row["missing"] == "fewer than 3 sizes at which runs have learned"
    assert (row["bad"], row["runs"]) == (8, 16)
    assert not any(" / " in row["contrast"] for row in rows)


def test_single_seeds_have_no_interval(make_ladder):
    table = make_ladder(seeds=range(1))
    rows = run_test("scaling", table.cells, table.factors)
    assert all(row["low"] is None and row["p"] is None and row["estimate"] is not None for row in rows)
    notes = TESTS["scaling"].notes(rows)
    assert "no intervals: they need two seeds at some size of each arm" in notes
    assert not any("bootstrap" in note for note in notes)


def test_an_arm_whose_losses_do_not_fall_has_no_law(make_ladder):
    """Its exponent would be at the bound of the fit, and the multiplier a number with a hundred digits."""
    table = make_ladder(flat=["rmsnorm"])
    rows = run_test("scaling", table.cells, table.factors)
    [row] = [row for row in rows if row["contrast"] == "exponent: RMSNorm"]
    assert (row["estimate"], row["missing"]) == (None, "no law: the losses fall too little, or not as a law")
    assert not any(" / " in row["contrast"] for row in rows)
    alone = [cell for cell in table.cells if cell.levels["norm"] == "layernorm"]
    expected = run_test("scaling", alone, table.factors)
    assert [row["estimate"] for row in rows[:3]] == [row["estimate"] for row in expected[:3]]
    # Nothing is said of what the table lacks.
    assert not any("multiplier" in note or "baseline" in note for note in TESTS["scaling"].notes(rows))


def add_check(make_run, table, width, gain, *, lr=0.02, seeds=1):
    """Add runs of a second rate of some seeds, whose losses are lower by a gain than those at the law's rate."""
    [cell] = [cell for cell in table.cells if cell.levels == {**cell.levels, "norm": "rmsnorm", "model.width": width}]
    for seed in range(seeds):
        loss = cell.final.losses[seed, seed] - gain
        config = {
            "norm": {"name": "rmsnorm"}, "placement": {"name": "pre"}, "model": {"width": width},
            "train": {"tokens_per_parameter": 20.0, "steps": width * width}, "seed": seed, "data": {"seed": seed},
            "optim": {"lr": lr},
        }  # fmt: skip
        make_run(f"check-{width}-{lr}-{seed}", run={"config": config, "flops_per_token": 6.0 * width**2},
                 status={"val_loss": loss, "best_val_loss": loss, "tokens": 1e3 * width**2})  # fmt: skip


def checked_rows(make_ladder, make_run, tmp_path, gains):
    """Return the rows of a ladder without and with a second rate of one seed at each size."""
    table = make_ladder(seeds=SEEDS)
    for width, gain in gains.items():
        add_check(make_run, table, width, gain)
    checked = summarize_by(tmp_path)
    return run_test("scaling", table.cells, table.factors), run_test("scaling", checked.cells, checked.factors)


def test_a_rate_with_one_seed_checks_that_of_the_law(make_ladder, make_run, tmp_path):
    """It is lower by chance, and changes no law; the lowest loss of a cell would be that of one seed."""
    without, rows = checked_rows(make_ladder, make_run, tmp_path, {48: -0.1, 96: 0.005})
    regrets = {row["contrast"]: row for row in rows if row["contrast"].startswith("regret")}
    assert [*regrets] == ["regret: RMSNorm, width 48", "regret: RMSNorm, width 96"]
    row = regrets["regret: RMSNorm, width 96"]
    assert (row["estimate"], row["n"], row["lr"]) == (pytest.approx(0.005), 1, 0.02)
    assert row["low"] < 0 < row["high"]
    estimates = [row["estimate"] for row in rows if row not in regrets.values()]
    assert estimates == [row["estimate"] for row in without]
    [note] = [note for note in TESTS["scaling"].notes(rows) if note.startswith("regret: ")]
    assert "the one with the most seeds" in note


def test_a_rate_that_does_not_train_checks_nothing(make_ladder, make_run, tmp_path):
    without, rows = checked_rows(make_ladder, make_run, tmp_path, {96: -30.0})
    assert [row["estimate"] for row in rows] == [row["estimate"] for row in without]


def test_a_size_with_a_wrong_rate_is_in_no_law(make_ladder, make_run, tmp_path):
    _, rows = checked_rows(make_ladder, make_run, tmp_path, {64: 0.3})
    contrasts = [row["contrast"] for row in rows]
    assert "regret, void: RMSNorm, width 64" in contrasts
    assert not any(text.startswith("multiplier, width 64") for text in contrasts)
    [row] = [row for row in rows if row["contrast"] == "exponent: RMSNorm"]
    assert row["n"] == 12


def test_each_rate_that_checks_is_tested(make_ladder, make_run, tmp_path):
    """A rate with several seeds is better by more than its noise; one with one seed is better by more, by chance."""
    table = make_ladder(seeds=SEEDS)

    def regret(width, gains):
        for lr, seeds in ((0.02, 1), (0.03, 3)):
            add_check(make_run, table, width, gains[lr], lr=lr, seeds=seeds)
        checked = summarize_by(tmp_path)
        rows = run_test("scaling", checked.cells, checked.factors)
        [row] = [row for row in rows if row["contrast"].endswith(f": RMSNorm, width {width}")]
        return row

    without_gain = regret(48, {0.02: 0.0, 0.03: -0.1})
    assert (without_gain["lr"], without_gain["n"]) == (0.02, 1)
    half = without_gain["high"]
    # Half of the interval of three seeds is half / sqrt(3) = 0.58 half.
    row = regret(64, {0.02: 0.7 * half, 0.03: 0.65 * half})
    assert row["contrast"] == "regret, void: RMSNorm, width 64"
    assert (row["lr"], row["n"], row["estimate"]) == (0.03, 3, pytest.approx(0.65 * half))


def test_losses_of_which_none_fall_are_an_error(make_ladder):
    table = make_ladder(flat=["layernorm", "rmsnorm"])
    for command in (lambda: run_test("scaling", table.cells, table.factors), lambda: make_figure("scaling", table)):
        with pytest.raises(ConfigError, match="the losses do not fall with compute as a law does"):
            command()


def test_the_size_is_not_compared(make_ladder):
    table = make_ladder()
    with pytest.raises(ConfigError, match=r"--over model\.width: laws are fitted over the size"):
        run_test("scaling", table.cells, table.factors, over=["model.width"])


def test_errors(make_ladder, make_run, tmp_path):
    table = make_ladder(widths=WIDTHS[:2])
    with pytest.raises(ConfigError, match="needs 3 sizes at which runs of an arm have learned; sweep the size"):
        run_test("scaling", table.cells, table.factors)


def test_the_command(make_ladder, run_command, tmp_path):
    make_ladder()
    code, out, _ = run_command("summarize", str(tmp_path), "--by", "norm,width", "--test", "scaling", "--notes")
    assert code == 0
    text = " ".join(out.split())
    assert "with the FLOPs of training C, fitted to the n runs that have learned" in text
    assert "one E for all arms" in text
    assert "two-sided, corrected by Holm's method for 2 tests" in text
    code, out, _ = run_command(
        "summarize", str(tmp_path), "--by", "norm,width", "--test", "scaling", "--against", "norm=rmsnorm", "--format",
        "csv",
    )  # fmt: skip
    assert code == 0
    assert "growth of the multiplier: LayerNorm / RMSNorm" in out


# The figure


def test_figure(make_ladder, tmp_path):
    """Points are the cells, and lines the laws, up to ten times the compute of the largest size."""
    table = make_ladder()
    figure = make_figure("scaling", table)
    rows = {row["contrast"]: row for row in run_test("scaling", table.cells, table.factors)}
    [panel] = figure.panels
    assert [line.label for line in panel.lines] == ["LayerNorm", "RMSNorm"]
    colors = level_colors(Factor("norm", ("layernorm", "rmsnorm")))
    assert [line.color for line in panel.lines] == list(colors.values())
    for line, norm in zip(panel.lines, ("layernorm", "rmsnorm"), strict=True):
        cells = {cell.levels["model.width"]: cell for cell in table.cells if cell.levels["norm"] == norm}
        assert [point.x for point in line.points] == [6e3 * width**4 for width in WIDTHS]
        means = [cells[width].final.interval.estimate for width in WIDTHS]
        assert [point.y for point in line.points] == means
        assert line.law[-1].x == pytest.approx(10 * line.points[-1].x)
        # The law of the figure is that of the table: E + A C^-alpha.
        e, alpha = rows["E: all arms"]["estimate"], rows[f"exponent: {line.label}"]["estimate"]
        heights: list[float] = []
        for point in line.law:
            assert point.y is not None
            heights.append(point.y)
        above = [height - e for height in heights]
        slope = math.log(above[0] / above[-1]) / math.log(line.law[-1].x / line.law[0].x)
        assert slope == pytest.approx(alpha)
        for point, mean in zip(line.points, means, strict=True):
            law = np.interp(math.log(point.x), [math.log(each.x) for each in line.law], heights)
            assert law == pytest.approx(mean, abs=0.02)
    assert "Lines: the laws of `normlab summarize --test scaling`" in figure.caption
    for suffix, start in ((".pdf", b"%PDF"), (".png", b"\x89PNG"), (".svg", b"<?xml")):
        write_figure(figure, tmp_path / f"figure{suffix}")
        assert (tmp_path / f"figure{suffix}").read_bytes().startswith(start)


def test_figure_of_an_arm_without_a_law(make_ladder, tmp_path):
    table = make_ladder(diverged=[("rmsnorm", width, seed) for width in WIDTHS[:2] for seed in SEEDS], seeds=SEEDS)
    figure = make_figure("scaling", table)
    [panel] = figure.panels
    assert [bool(line.law) for line in panel.lines] == [True, False]
    assert [len(line.points) for line in panel.lines] == [4, 2]
    write_figure(figure, tmp_path / "figure.png")


def test_figure_names_a_size_that_no_law_has(make_ladder, make_run, tmp_path):
    add_check(make_run, make_ladder(seeds=SEEDS), 64, 0.3)
    figure = make_figure("scaling", summarize_by(tmp_path))
    assert "each cell at the learning rate of its law, the one with the most seeds" in figure.caption
    assert figure.caption.endswith(
        "The laws leave out sizes at which another learning rate is better: RMSNorm, width 64."
    )


def test_figure_with_too_few_sizes(make_ladder):
    with pytest.raises(ConfigError, match="figure scaling: needs 3 sizes at which runs of an arm have learned"):
        make_figure("scaling", make_ladder(widths=WIDTHS[:2]))
