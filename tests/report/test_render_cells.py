"""The table of cells and the tests as text: columns, order, formats, and bold numbers in LaTeX."""

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from normlab.analysis.factor_tests.base import FactorTest, Question, TestRow
from normlab.analysis.factor_tests.run import TESTS

FORMATS = ("table", "markdown", "latex", "csv", "json")


@pytest.fixture
def make(make_run):
    """Makes a run with a final loss and any options; it diverged if the loss is infinite."""
    made = iter(range(10_000))

    def make_one(loss: float, norm="rmsnorm", placement="pre", depth=4, warmup=0, seed=0, lr=1e-3):
        config = {
            "norm": {"name": norm},
            "placement": {"name": placement},
            "model": {"depth": depth, "width": 128},
            "optim": {"name": "adamw", "lr": lr, "warmup_steps": warmup},
            "train": {"steps": 100},
            "data": {"seed": seed},
            "seed": seed,
        }
        state = "diverged" if math.isinf(loss) else "finished"
        status = {"val_loss": math.nan if math.isinf(loss) else loss, "best_val_loss": loss}
        return make_run(f"run{next(made):04}", state, run={"config": config}, status=status)

    return make_one


@pytest.fixture
def summarize(tmp_path, run_command):
    """Runs `normlab summarize` on the runs; returns stdout."""

    def call(*arguments: str, fails: bool = False) -> str:
        code, out, err = run_command("summarize", str(tmp_path), *arguments)
        assert code == (2 if fails else 0), err
        return err if fails else out

    return call


def rows_of(text: str, format: str) -> list[dict[str, str]]:
    """Parse a table of Markdown or LaTeX with the titles of its columns as keys; bold and escapes are kept."""
    lines = text.splitlines()
    if format == "markdown":
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        head, _, *body = table
    else:
        table = [line.removesuffix(r" \\").split(" & ") for line in lines if line.endswith(r" \\")]
        head, *body = table
    return [dict(zip(head, cells, strict=True)) for cells in body]


# Columns and order


@pytest.fixture
def three_cells(make):
    """Cells with the losses 2.3 (layernorm), 2.1 (rmsnorm) and infinity (dyt), over three seeds."""
    for seed in range(3):
        make(2.3 + seed / 100, "layernorm", seed=seed)
        make(2.1 + seed / 50, "rmsnorm", seed=seed)
        make(math.inf if seed == 2 else 2.0, "dyt", seed=seed)


def test_chosen_columns_of_json_and_csv(three_cells, summarize):
    arguments = ["--by", "norm", "--columns", "val_loss, seeds,Val_Loss_Low", "--format"]
    rows = json.loads(summarize(*arguments, "json"))
    assert [list(row) for row in rows] == [["norm", "val_loss", "seeds", "val_loss_low"]] * 3
    low, _ = stats.t.interval(0.95, 2, loc=2.31, scale=stats.sem([2.3, 2.31, 2.32]))
    assert list(rows[1].values()) == ["layernorm", pytest.approx(2.31), 3, pytest.approx(low)]
    assert rows[0] == {"norm": "dyt", "val_loss": "inf", "seeds": 3, "val_loss_low": None}
    table = list(csv.reader(io.StringIO(summarize(*arguments, "csv"))))
    assert table[0] == ["norm", "val_loss", "seeds", "val_loss_low"]
    assert table[1] == ["dyt", "inf", "3", ""]
    assert float(table[2][1]) == rows[1]["val_loss"]


@pytest.mark.parametrize("format", ["markdown", "latex"])
@pytest.mark.parametrize("columns", ["val loss,runs", "VAL_LOSS,Runs"])
def test_chosen_columns_of_a_text(three_cells, summarize, format, columns):
    rows = rows_of(summarize("--by", "norm", "--columns", columns, "--format", format), format)
    assert [list(row) for row in rows] == [["norm", "val loss", "runs"]] * 3
    half = stats.t.ppf(0.975, 2) * stats.sem([2.3, 2.31, 2.32])
    sign = {"markdown": "±", "latex": r"$\pm$"}[format]
    assert [row["val loss"] for row in rows] == [
        "1 of 3 diverged, others 2.0000",
        f"2.3100 {sign} {half:.4f} (n=3)",
        f"2.1200 {sign} {2 * half:.4f} (n=3)",
    ]
    assert {row["runs"] for row in rows} == {"3"}


def test_flops_and_mfu_of_packs(make_run, summarize):
    run = {"flops_per_token": 1e9, "resolved": {"device_name": "NVIDIA A100 80GB PCIe", "precision": "bf16"}}
    for seed, speed in enumerate((1e4, 2e4)):
        status = {"tokens_per_s": speed, "pack": {"sweep": "s", "number": 0, "runs": ["aa0", "aa1"]}}
        make_run(f"aa{seed}", seed=seed, run=run, status=status)
    text = summarize("--by", "norm", "--columns", "tok/s,tflop/s,mfu", "--notes")
    assert all(part in text for part in ("15,000", "9.6 %", "TFLOP/s: of one run", "MFU: model FLOP/s of all runs"))
    default = summarize("--by", "norm", "--format", "markdown")
    assert ("TFLOP/s" in default, "| MFU |" in default) == (False, True)
    (row,) = json.loads(summarize("--by", "norm", "--format", "json"))
    assert (row["flops_per_token"], row["flops_per_s"]) == (1e9, 1.5e13)
    assert row["mfu"] == pytest.approx(2 * 1.5e13 / 312e12)
    rows = json.loads(summarize("--runs", "--format", "json"))
    assert sorted(row["flops_per_s"] for row in rows) == [1e13, 2e13]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--columns", "val_los"], "--columns: unknown column 'val_los' (did you mean 'val"),
        (["--columns", "val_loss,"], "--columns: unknown column ''"),
    ],
)
def test_unknown_columns(three_cells, summarize, format, arguments, message):
    error = summarize("--by", "norm", *arguments, "--format", format, fails=True)
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--columns=val_loss", "--test=trend"])
def test_options_of_cells_are_rejected_with_runs(three_cells, summarize, option):
    name = option.partition("=")[0]
    error = summarize("--runs", option, fails=True)
    assert error == f"error: {name}: has no effect with --runs; leave out one or the other\n"


# LaTeX


def test_latex_is_a_tabular_of_booktabs(make, summarize):
    """Special characters in names are escaped; the notes are comments."""
    make(2.25, "a_b%c&d#e", depth=2)
    make(2.5, "x{y}$z~^\\", depth=4)
    text = summarize("--by", "norm,depth", "--columns", "val_loss,best_lr", "--format", "latex")
    assert text.splitlines()[:8] == [
        r"\begin{tabular}{lrlr}",
        r"\toprule",
        r"norm & depth & val loss & best lr \\",
        r"\midrule",
        r"a\_b\%c\&d\#e & 2 & 2.2500 (n=1) & 0.001 \\",
        r"x\{y\}\$z\textasciitilde{}\textasciicircum{}\textbackslash{} & 4 & 2.5000 (n=1) & 0.001 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    notes = text.splitlines()[8:]
    assert notes
    assert all(line.startswith("% ") for line in notes)


# Tests over factors

PLACEMENTS, DEPTHS, WARMUPS, SEEDS = ("post", "pre"), (2, 4, 8), (0, 100), (0, 1, 2)


@pytest.fixture
def losses(make) -> np.ndarray:
    """Losses of placement, depth, warm-up and seed; post-norm of depth 8 without warm-up diverged."""
    values = 2.5 + np.random.default_rng(0).normal(0, 0.1, (2, 3, 2, 3))
    values[0, 2, 0] = math.inf
    for index, loss in np.ndenumerate(values):
        place, depth, warmup, seed = index
        make(float(loss), "rmsnorm", PLACEMENTS[place], DEPTHS[depth], WARMUPS[warmup], SEEDS[seed])
    return values


BY = ("--by", "placement,depth,warmup_steps")


def expected_rows(test: str, losses: np.ndarray) -> dict[tuple[str, str], float]:
    """Return the estimate of each row by its labels, computed from the losses."""
    names = {0: "no warm-up", 1: "warm-up 100"}
    if test == "interaction":
        means = losses.mean(-1)
        changes = means[:, :, 1] - means[:, :, 0]
        text = "(pre-norm - post-norm) x (warm-up 100 - no warm-up)"
        return {(f"depth {depth}", text): changes[1, i] - changes[0, i] for i, depth in enumerate(DEPTHS)}
    if test == "trend":
        where = {(place, warmup): f"{PLACEMENTS[place]}-norm, {names[warmup]}" for place in (0, 1) for warmup in names}
        return {
            (text, "slope over ln(depth)"): np.polyfit(np.log(DEPTHS), losses[place, :, warmup].mean(-1), 1)[0]
            if np.isfinite(losses[place, :, warmup]).all()
            else math.inf
            for (place, warmup), text in where.items()
        }
    bad = np.isinf(losses).mean(-1)
    return {
        (f"{PLACEMENTS[place]}-norm, depth {depth}", "warm-up 100 - no warm-up"): bad[place, i, 1] - bad[place, i, 0]
        for place in (0, 1)
        for i, depth in enumerate(DEPTHS)
    }


OVER = {"interaction": "placement,warmup_steps", "trend": "depth", "counts": "warmup_steps"}


def test_a_third_factor_is_explained_where_there_is_one(losses, summarize):
    for over, explained in (("placement,warmup_steps", False), ("placement,depth,warmup_steps", True)):
        text = summarize(*BY, "--test", "interaction", "--over", over, "--notes")
        assert ("x (E - F) of a third factor: " in text) == explained


@pytest.mark.few(1)
@pytest.mark.parametrize("test", list(OVER))
def test_tests_in_json_and_csv(losses, summarize, test):
    expected = expected_rows(test, losses)
    if test == "interaction":
        # Post-norm without warm-up diverged: minus its minus is plus.
        assert expected.pop(("depth 8", next(iter(expected))[1])) == math.inf
    arguments = [*BY, "--test", test, "--over", OVER[test], "--format"]
    rows = json.loads(summarize(*arguments, "json"))
    found = {(row["where"], row["contrast"]): row["estimate"] for row in rows}
    infinite = {key: value for key, value in found.items() if isinstance(value, str)}
    assert list(infinite.values()) == ([] if test == "counts" else ["inf"])
    for key, value in expected.items():
        if math.isfinite(value):
            assert found[key] == pytest.approx(value, abs=1e-12)
    assert len(found) == len(expected) + (test == "interaction")
    p_values = [row["p"] for row in rows]
    corrected = multipletests(p_values, method="holm")[1]
    assert corrected is not None
    assert [row["p_holm"] for row in rows] == pytest.approx(corrected.tolist())
    table = list(csv.DictReader(io.StringIO(summarize(*arguments, "csv"))))
    assert [(row["where"], float(row["estimate"])) for row in table] == [
        (row["where"], float(row["estimate"])) for row in rows
    ]
    if test == "counts":
        for row, (place, depth) in zip(rows, itertools.product((0, 1), (0, 1, 2)), strict=True):
            bad, other = (int(np.isinf(losses[place, depth, warmup]).sum()) for warmup in (1, 0))
            assert (row["bad"], row["baseline_bad"], row["runs"], row["baseline_runs"]) == (bad, other, 3, 3)
            exact: Any = stats.fisher_exact([[bad, 3 - bad], [other, 3 - other]])
            assert row["p"] == pytest.approx(exact.pvalue)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--test", "anova"],
            "--test anova: unknown test 'anova': choose one of anytime, counts, interaction, optimum, range, "
            "scaling, sensitivity, trend",
        ),
        (["--over", "depth"], "--over: has no effect without --test; add, for example, --test interaction"),
        (["--test", "trend", "--over", "placement"], "--test trend: needs a numeric factor"),
        (
            ["--test", "trend", "--over", "width"],
            "--over model.width: is not one of the factors placement, model.depth",
        ),
        (["--test", "interaction", "--over", "depth"], "--test interaction: needs two factors or more"),
        (["--test", "counts", "--against", "placement=peri"], "--against placement=peri: unknown placement 'peri'"),
    ],
)
def test_errors_of_tests(losses, summarize, arguments, message):
    error = summarize(*BY, *arguments, fails=True)
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--columns=runs", "--target=2"])
def test_options_of_cells_are_rejected_with_a_test(losses, summarize, option):
    assert f"{option.partition('=')[0]}: has no effect with --test" in summarize("--test", "trend", option, fails=True)


def test_the_note_of_a_test_names_its_learning_rate(losses, make, summarize):
    assert "at learning rate 0.001," in summarize("--test", "trend", "--over", "depth")
    for seed in SEEDS:
        make(1.0, "rmsnorm", PLACEMENTS[1], DEPTHS[0], WARMUPS[0], seed, lr=3e-3)
    assert "at the best learning rate of each cell" in summarize("--test", "trend", "--over", "depth")
    assert "at learning rate 0.001," in summarize("--test", "trend", "--over", "depth", "--where", "lr=0.001")


def test_bad_runs_of_a_test_are_shown_and_explained(losses, make, summarize):
    text = summarize("--test", "interaction", "--over", "placement,warmup_steps", "--format", "markdown")
    assert "| 3 of 12 |" in text
    assert "bad: runs of these cells that diverged, are stuck or regressed" in text
    text = summarize("--test", "interaction", "--over", "placement,warmup_steps", "--where", "depth<8")
    assert "bad:" not in text


def test_small_slopes_have_significant_digits(losses, summarize):
    table = summarize("--test", "trend", "--over", "warmup_steps", "--format", "markdown").replace("\\", "")
    (row,) = json.loads(summarize("--test", "trend", "--over", "warmup_steps", "--format", "json"))[:1]
    assert f"{row['estimate']:+#.3g} [{row['low']:+#.3g}, {row['high']:+#.3g}] (n=3)" in table
    assert abs(row["estimate"]) < 0.01


def test_a_test_without_cells_to_compare(make, summarize):
    make(2.0, norm="layernorm", placement="pre")
    make(2.1, norm="rmsnorm", placement="post")
    assert "no group of cells has the levels to compare" in summarize("--test", "interaction", fails=True)


def test_a_test_of_factors_is_a_class(losses, summarize, monkeypatch):
    """Its rows, its format and its notes are all that the command needs."""

    class Spread(FactorTest):
        name = "spread"
        summary = "the range of the losses"
        number_format = ".1f"

        def rows(self, question: Question) -> Iterator[TestRow]:
            for cell in question.cells:
                row = self.labels("", cell.label, "nats/token") | {"estimate": 1.25, "low": 1.0, "high": 1.5, "p": None}
                yield row | {"n": 3, "n_crossed": None, "bad": 0, "runs": 3}

        def notes(self, rows: Sequence[TestRow]) -> list[str]:
            return [f"spread: of {len(rows)} cells"]

    monkeypatch.setitem(TESTS, "spread", Spread())
    text = summarize(*BY, "--test", "spread")
    assert "post-norm, depth 8, no warm-up 1.2 [1.0, 1.5] (n=3)" in re.sub(" +", " ", text)
    assert "spread: of 12 cells" in text
    assert json.loads(summarize(*BY, "--test", "spread", "--format", "json"))[0]["test"] == "spread"
    assert "range, optimum, scaling, anytime or spread" in " ".join(summarize("--help").split())
    assert "spread, the range of the losses" in " ".join(summarize("--help").split())


@pytest.mark.parametrize("command", [[], ["--test", "interaction", "--over", "placement,depth"], ["--runs"]])
def test_a_table_names_the_words_that_its_notes_explain(losses, summarize, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a narrow table leaves out columns, and folds the line of words
    by = [] if command == ["--runs"] else [*BY]
    short = summarize(*by, *command).splitlines()
    long = summarize(*by, *command, "--notes").splitlines()
    [named] = [line for line in short if line.startswith("--notes explains: ")]
    words = named.removeprefix("--notes explains: ").split(", ")
    for word in words:
        assert any(line.startswith(f"{word}: ") for line in long)
        assert not any(line.startswith(f"{word}: ") for line in short)
    # What is no definition stands in both.
    assert set(short) - {named} <= set(long)
    assert not any(line.startswith("--notes") for line in long)


@pytest.mark.parametrize("format", ["markdown", "latex"])
def test_formats_for_papers_have_all_notes(losses, summarize, format):
    arguments = [*BY, "--against", "placement=pre", "--format", format]
    assert "vs baseline: " in summarize(*arguments)
    assert summarize(*arguments) == summarize(*arguments, "--notes")
    error = summarize(*BY, "--notes", "--format", "json", fails=True)
    assert error.startswith("error: --notes: has no effect with --format json")


def test_an_interval_with_one_end_is_shown(make_run, summarize):
    """All eight differences are below zero, and their order leaves the other end open."""
    for norm, shift in (("layernorm", 0.0), ("rmsnorm", -0.1)):
        for seed in range(8):
            loss = 2 + shift + shift * -0.1 * seed
            make_run(f"{norm}{seed}", norm=norm, seed=seed, status={"val_loss": loss, "best_val_loss": loss})
    text = summarize("--by", "norm", "--test", "anytime")
    assert "-0.0650 [-0.1000, inf] (n=8)" in text
    [row] = json.loads(summarize("--by", "norm", "--test", "anytime", "--format", "json"))
    assert (row["low"], row["high"]) == (pytest.approx(-0.1), None)


def test_the_table_of_a_run_has_definitions_too(make_run, run_command, tmp_path):
    make_run("one")
    assert "--notes explains: best val, " in run_command("summarize", str(tmp_path / "runs" / "one"))[1]
    assert (
        "best val: the lowest validation loss" in run_command("summarize", str(tmp_path / "runs" / "one"), "--notes")[1]
    )
