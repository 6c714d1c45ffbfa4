"""Cells of synthetic runs: counts, means, selected learning rates, comparisons and warnings."""

import csv
import io
import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats

from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError, StoreError
from normlab.report.cells_table import json_rows, notes, render_cells, table_rows
from normlab.store.format import with_checksum
from normlab.store.plans import Plan, PlannedRun, sweep_folder
from normlab.sweeps.files import write_plan


@pytest.fixture
def make(make_run):
    """Make a run with a final validation loss; it diverged if the loss is infinite."""
    made = iter(range(10_000))

    def make_cell_run(
        norm: str, lr: float, seed: int, loss: float, state: str | None = None, *, run=None, status=None, **options
    ):
        state = state or ("diverged" if math.isinf(loss) else "finished")
        ended = {"val_loss": math.nan if math.isinf(loss) else loss, "best_val_loss": loss} | (status or {})
        options |= {"norm": norm, "lr": lr, "seed": seed}
        return make_run(f"run{next(made):04}", state, run=run, status=ended, **options)

    return make_cell_run


def rows(path, by="norm", **options):
    return {row["cell"]: row for row in json_rows(summarize_by(path, by.split(","), **options))}


def test_cell_has_losses_at_its_best_learning_rate(make, tmp_path):
    for seed, (low, high) in enumerate([(2.1, 2.3), (2.2, 2.35), (2.15, 2.25)]):
        make("rmsnorm", 1e-3, seed, low, status={"val_loss_ema": low - 0.1})
        make("rmsnorm", 3e-3, seed, high, status={"val_loss_ema": high - 0.2})
        make("layernorm", 1e-3, seed, low + 0.4)
        make("layernorm", 3e-3, seed, high - 0.2)
        make("dyt", 1e-3, seed, 2.1)
        make("dyt", 3e-3, seed, 2.2)
    found = rows(tmp_path)
    assert list(found) == ["dyt", "layernorm", "rmsnorm"]
    rms, layer = found["rmsnorm"], found["layernorm"]
    assert (rms["lr"], layer["lr"]) == (1e-3, 3e-3)
    low, high = stats.t.interval(0.95, 2, loc=2.15, scale=stats.sem([2.1, 2.2, 2.15]))
    assert (rms["val_loss"], rms["val_loss_low"], rms["val_loss_high"]) == pytest.approx((2.15, low, high))
    assert layer["val_loss"] == pytest.approx(2.1)
    assert rms["val_loss_ema"] == pytest.approx(2.15 - 0.1)
    assert layer["val_loss_ema"] is None
    assert (rms["runs"], rms["finished"], rms["seeds"], rms["learning_rates"]) == (6, 6, 3, [1e-3, 3e-3])
    assert rows(tmp_path, where=["lr=3e-3"])["rmsnorm"]["val_loss"] == pytest.approx(2.3)


def test_diverged_runs_are_outcomes_and_failed_runs_are_not(make, tmp_path):
    for seed, loss in enumerate([2.0, math.inf, 2.1]):
        make("rmsnorm", 1e-3, seed, loss, status={"val_loss_ema": 1.9})
    make("rmsnorm", 1e-3, 3, 2.0, "failed")
    make("rmsnorm", 1e-3, 4, 2.0, "interrupted")
    make("rmsnorm", 1e-3, 5, math.nan)  # finished with a final loss of NaN
    row = rows(tmp_path)["rmsnorm"]
    counted = {key: row[key] for key in ("runs", "finished", "diverged", "failed", "unfinished", "seeds")}
    assert counted == {"runs": 6, "finished": 2, "diverged": 2, "failed": 1, "unfinished": 1, "seeds": 4}
    assert (row["val_loss"], row["val_loss_low"]) == (math.inf, None)
    assert row["val_loss_of_others"] == pytest.approx(2.05)
    assert row["val_loss_ema"] is None
    report = summarize_by(tmp_path, ["norm"])
    assert table_rows(report)[0]["val loss"] == "2 of 4 diverged, others 2.0500"
    assert "RMSNorm: unfinished runs, left out: 1 of 6" in report.warnings


def test_mixed_settings_are_a_warning(make, tmp_path):
    other = {"corpus": {"name": "files", "sha256": "f" * 64, "baselines": {"uniform": 5.5}}}
    gpu = {"resolved": {"device": "cuda", "device_name": "H200", "precision": "bf16", "compile": "on"}}
    make("rmsnorm", 1e-3, 0, 2.0)
    make("rmsnorm", 1e-3, 1, 2.0, depth=8, placement="post", run=other | gpu)
    mixtures = {
        "model.depth 4 and 8", "placement post and pre", "corpus files ffffffff and stdlib aaaaaaaa",
        "precision bf16 and fp32", "numerics (compile: off and on)", "device cpu and cuda H200",
    }  # fmt: skip
    (row,) = rows(tmp_path).values()
    assert {f"runs in one cell differ in {mixture}" for mixture in mixtures} <= set(row["warnings"])
    table = summarize_by(tmp_path, ["norm", "placement"])
    assert not [warning for cell in table.cells for warning in cell.warnings]
    assert table.table_warnings[0].startswith(
        "the cells differ in more than norm, placement: corpus files ffffffff and"
    )


def test_seeds_and_learning_rates_are_not_mixed_settings(make, tmp_path):
    make("rmsnorm", 1e-3, 0, 2.1)
    make("rmsnorm", 1e-3, 0, 2.3)
    make("rmsnorm", 3e-3, 1, 2.0)
    make("rmsnorm", 1e-2, 0, 2.5)
    (row,) = rows(tmp_path).values()
    assert row["warnings"] == [
        "seeds with several runs at one learning rate, averaged to one value each: 1",
        "the learning rates have different seeds (number of seeds: 0.001: 1, 0.003: 1, 0.01: 1)",
    ]
    (row,) = rows(tmp_path, where=["lr<0.01"]).values()
    assert "the best learning rate is the highest of the grid; a higher one may be better" in row["warnings"]


def test_comparison_with_a_baseline_is_paired_by_seed_and_corrected(make, tmp_path):
    draw = np.random.default_rng(0)
    losses = {norm: draw.normal(2.3, 0.01, 5) for norm in ("layernorm", "rmsnorm", "dyt")}
    for norm, values in losses.items():
        for seed in draw.permutation(5):
            make(norm, 1e-3, int(seed), float(values[seed]))
    found = rows(tmp_path, against="norm=layernorm")
    p = {norm: stats.ttest_rel(losses[norm], losses["layernorm"]).pvalue for norm in ("rmsnorm", "dyt")}
    for norm in p:
        difference = losses[norm] - losses["layernorm"]
        low, high = stats.t.interval(0.95, 4, loc=difference.mean(), scale=stats.sem(difference))
        row = found[norm]
        assert [row[key] for key in ("difference", "difference_low", "difference_high", "p")] == pytest.approx(
            [difference.mean(), low, high, p[norm]]
        )
        assert (row["baseline"], row["pairs"], row["test"]) == ("layernorm", 5, "paired t")
    less, more = sorted(p, key=p.__getitem__)
    assert found[less]["p_holm"] == pytest.approx(min(1, 2 * p[less]))
    assert found[more]["p_holm"] == pytest.approx(max(p[more], min(1, 2 * p[less])))
    assert (found["layernorm"]["baseline"], found["layernorm"]["p"]) == (None, None)


def test_pair_with_a_diverged_run_counts_as_a_loss(make, tmp_path):
    for seed in range(8):
        make("layernorm", 1e-3, seed, 2.0 + seed / 100)
        make("rmsnorm", 1e-3, seed, math.inf if seed < 2 else 1.9 + seed / 90)
        make("dyt", 1e-3, seed, 1.9 if seed else math.inf)
    make("rmsnorm", 1e-3, 8, 2.0)
    found = rows(tmp_path, against="norm=layernorm")
    row = found["rmsnorm"]
    assert (row["pairs"], row["test"]) == (8, "signed-rank (2 of 8 pairs with a diverged run)")
    assert "seeds with a result only in the cell or only in its baseline: 1" in row["warnings"]
    assert "by ranks" in table_rows(summarize_by(tmp_path, ["norm"], against="norm=layernorm"))[2][
        "vs baseline"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": "norm=laynorm"}, r"unknown norm 'laynorm' .*did you mean 'layernorm'"),
        ({"against": "placement=pre"}, r"placement is not in --by norm"),
        ({"against": "norm>layernorm"}, r"write option=value"),
        ({"against": "norm=layernorm"}, r"every cell is a baseline; name a value of an option that varies"),
        ({"by": "norm,placment"}, r"--by placment: no run has this option .did you mean 'placement'"),
        ({"by": "norm,norm"}, r"--by norm,norm: name at least one option, each once, such as norm,placement"),
    ],
)
def test_invalid_options_are_errors(make, tmp_path, options, message):
    make("layernorm", 1e-3, 0, 2.0)
    with pytest.raises(ConfigError, match=message):
        rows(tmp_path, **options)


def test_short_option_names_are_accepted_where_they_mean_one_option(make, tmp_path):
    make("layernorm", 1e-3, 0, 2.0)
    make("layernorm", 1e-3, 0, 2.1, depth=8)
    make("rmsnorm", 1e-3, 0, 2.2, depth=8)
    table = summarize_by(tmp_path, ["norm", "depth"], against="n_layer=8", where=["depth>=4"])
    assert table.by == ["norm", "model.depth"]
    assert [row["baseline"] for row in json_rows(table)] == ["layernorm 8", None, None]
    with pytest.raises(ConfigError, match=r"--by name: is ambiguous; write .*norm.name or optim.name or"):
        rows(tmp_path, "name")
    with pytest.raises(ConfigError):
        rows(tmp_path, "depth,model.depth")


def test_damaged_runs_are_left_out_with_a_warning(make, tmp_path):
    make("layernorm", 1e-3, 0, 2.0)
    broken = make("layernorm", 1e-3, 2, 2.0)
    broken.path.joinpath("run.json").write_text("{")
    report = summarize_by(tmp_path, ["norm"])
    assert json_rows(report)[0]["runs"] == 1
    (line,) = report.table_warnings
    assert line.startswith(f"run {broken.run_id} is damaged and is left out: {broken.path}/run.json: is damaged (")
    with pytest.raises(StoreError, match="no run has a readable record"):
        summarize_by(broken.path, ["norm"])
    with pytest.raises(StoreError, match="no runs in"):
        summarize_by(tmp_path / "empty", ["norm"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.replace(b'"val_loss": 2.0', b'"val_loss": 1.0'),
        lambda content: with_checksum({"state": "finished", "step": 100}),
    ],
    ids=["flipped loss", "no loss"],
)
def test_damaged_status_is_left_out_and_reported_with_its_reason(damage, make, tmp_path, run_command):
    make("layernorm", 1e-3, 0, 2.0)
    make("layernorm", 1e-3, 1, 2.0, "failed")
    broken = make("layernorm", 1e-3, 2, 2.0)
    status = broken.path / "status.json"
    status.write_bytes(damage(status.read_bytes()))
    (row,) = json_rows(summarize_by(tmp_path, ["norm"]))
    assert {key: row[key] for key in ("runs", "finished", "failed")} == {"runs": 2, "finished": 1, "failed": 1}
    warning = f"run {broken.run_id} is damaged and is left out: {status}: "
    for command in (["summarize", "--by", "norm"], ["compare", "-o", str(tmp_path / "page.html")]):
        _, out, err = run_command(*command, str(tmp_path))
        assert [warning in line for line in err.splitlines() if str(status) in line] == [True]
    assert "1 in no cell: damaged (1)" in out


def test_cell_without_an_outcome_has_a_row(make, tmp_path):
    make("layernorm", 1e-3, 0, 2.0, "failed")
    make("rmsnorm", 1e-3, 0, 2.0)
    row = rows(tmp_path, against="norm=layernorm", target=2.5)["layernorm"]
    assert (row["failed"], row["val_loss"], row["lr"], row["steps_to_target"]) == (1, None, None, None)
    for format in ("table", "json", "csv", "markdown"):
        assert render_cells(summarize_by(tmp_path, ["norm"], against="norm=layernorm"), format)


@pytest.mark.parametrize("target", ["nan", "inf", "-1", "0"])
def test_a_target_is_a_finite_loss_above_0(target, make, tmp_path, run_command):
    make("rmsnorm", 1e-3, 0, 2.0)
    message = f"error: --target {target}: must be a finite loss above 0, in nats/token\n"
    assert run_command("summarize", str(tmp_path), "--target", target) == (2, "", message)


def test_steps_and_seconds_to_a_target_are_read_from_the_metrics(make, tmp_path):
    for seed, curve in enumerate([(5.5, 3.0, 2.4, 2.6), (5.5, 2.5, 2.3, 2.2)]):
        folder = make("rmsnorm", 1e-3, seed, curve[-1])
        for number, loss in enumerate(curve):
            folder.append([{"kind": "pace", "step": 10 * number, "seconds": 1.5 * number, "tokens_per_s": 1.0}])
            folder.append([{"kind": "eval", "step": 10 * number, "loss": loss}])
    row = rows(tmp_path, target=2.5)["rmsnorm"]
    assert (row["steps_to_target"], row["seconds_to_target"], row["target_reached"]) == (15, 2.25, 2)
    row = rows(tmp_path, target=2.25)["rmsnorm"]
    assert (row["steps_to_target"], row["target_reached"], row["target_runs"]) == (None, 1, 2)
    report = summarize_by(tmp_path, ["norm"], target=2.25)
    assert table_rows(report)[0]["to 2.25"] == "1 of 2"


def test_json_and_csv_have_all_values(make, tmp_path):
    make("rmsnorm", 1e-3, 0, math.inf)
    make("layernorm", 1e-3, 0, 2.0)
    report = summarize_by(tmp_path, ["norm"])
    layer, rms = json.loads(render_cells(report, "json"))
    assert (rms["val_loss"], layer["run_ids"]) == ("inf", ["run0001"])
    layer, rms = csv.DictReader(io.StringIO(render_cells(report, "csv")))
    assert (rms["val_loss"], rms["learning_rates"], layer["run_ids"]) == ("inf", "[0.001]", '["run0001"]')


def test_sweep_is_found_by_name_and_unstarted_runs_are_a_warning(make, tmp_path, run_command):
    runs = [make("rmsnorm", 1e-3, 0, 2.0), make("rmsnorm", 1e-3, 1, 2.0)]
    make("other", 1e-3, 0, 2.0)
    sweep = sweep_folder(tmp_path, "mine")
    sweep.mkdir(parents=True)
    write_plan(
        sweep, Plan("mine", "off", [PlannedRun(each, [], {}) for each in (*(r.run_id for r in runs), "later")], [])
    )
    code, out, err = run_command("summarize", "mine", "--by", "norm", "--results-dir", str(tmp_path))
    assert (code, "rmsnorm" in out, "other" in out) == (0, True, False)
    assert err == "warning: runs that have not started: 1 of 3\n"


def test_crossed_seeds_are_not_independent_runs(make, tmp_path):
    for norm, seed, data_seed in itertools.product(("layernorm", "rmsnorm"), range(3), range(3)):
        loss = 2.4 + 0.1 * (norm == "layernorm") + seed / 100 + data_seed / 70 + seed * data_seed / 900
        make(norm, 1e-3, seed, loss, data_seed=data_seed)
    report = summarize_by(tmp_path, ["norm"], against="norm=layernorm")
    row, text = json_rows(report)[1], table_rows(report)[1]
    assert (row["seeds"], row["seeds_crossed"], row["seeds_fixed"]) == (9, [3, 3], None)
    assert (row["pairs"], row["pairs_crossed"]) == (9, [3, 3])
    assert text["val loss"].endswith("(n=3x3)")
    assert text["vs baseline"].endswith("(n=3x3)")
    assert sum("two random effects" in note for note in notes(report)) == 1
    assert "fixed" not in "".join(notes(report))


@pytest.mark.parametrize(("factor", "what"), [("data.seed", "data order"), ("seed", "initial weights")])
def test_fixed_seed_is_noted_once(make, tmp_path, factor, what):
    for norm in ("layernorm", "rmsnorm"):
        for seed in range(3):
            fixed, varied = (0, seed) if factor == "seed" else (seed, 0)
            make(norm, 1e-3, fixed, 2.1 + seed / 100, data_seed=varied)
    report = summarize_by(tmp_path, ["norm"])
    assert {row["seeds_fixed"] for row in json_rows(report)} == {factor}
    assert [note for note in notes(report) if "fixed" in note] == [
        f"{what} fixed ({factor}): its variance is not in the intervals"
    ]
    assert {text["val loss"][-5:] for text in table_rows(report)} == {"(n=3)"}
