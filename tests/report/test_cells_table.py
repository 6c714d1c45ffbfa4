"""Cells of synthetic runs: counts, means, selected learning rates, comparisons and warnings."""

from __future__ import annotations

import csv
import io
import json
import math

import numpy as np
import pytest
from scipy import stats

from normlab.analysis.results import MAX_DAMAGED
from normlab.analysis.table import summarize_by
from normlab.errors import ConfigError, NormlabError, StoreError
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


def test_cell_has_losses_at_its_best_and_at_the_shared_learning_rate(make, tmp_path):
    for seed, (low, high) in enumerate([(2.1, 2.3), (2.2, 2.35), (2.15, 2.25)]):
        make("rmsnorm", 1e-3, seed, low)
        make("rmsnorm", 3e-3, seed, high)
        make("layernorm", 1e-3, seed, low + 0.4)
        make("layernorm", 3e-3, seed, high - 0.2)
        make("dyt", 1e-3, seed, 2.1)
        make("dyt", 3e-3, seed, 2.2)
    found = rows(tmp_path)
    assert list(found) == ["dyt", "layernorm", "rmsnorm"]
    rms, layer = found["rmsnorm"], found["layernorm"]
    assert (rms["lr"], layer["lr"], rms["shared_lr"], layer["shared_lr"]) == (1e-3, 3e-3, 1e-3, 1e-3)
    low, high = stats.t.interval(0.95, 2, loc=2.15, scale=stats.sem([2.1, 2.2, 2.15]))
    assert (rms["val_loss"], rms["val_loss_low"], rms["val_loss_high"]) == pytest.approx((2.15, low, high))
    assert layer["val_loss"] == pytest.approx(2.1)
    assert layer["shared_val_loss"] == pytest.approx(2.55)
    assert (rms["runs"], rms["finished"], rms["seeds"], rms["learning_rates"]) == (6, 6, 3, [1e-3, 3e-3])
    assert rms["selected"].startswith("lowest mean final validation loss of 2 learning rates")
    assert rms["lr_sensitivity"] == pytest.approx((2.15 + 2.3) / 2 - 2.15)
    assert rows(tmp_path, lr=3e-3)["rmsnorm"]["shared_val_loss"] == pytest.approx(2.3)
    with pytest.raises(ConfigError, match=r"--lr 0.1: no run has this learning rate; choose one of 0.001, 0.003"):
        rows(tmp_path, lr=0.1)


def test_diverged_runs_are_outcomes_and_failed_runs_are_not(make, tmp_path):
    for seed, loss in enumerate([2.0, math.inf, 2.1]):
        make("rmsnorm", 1e-3, seed, loss)
    make("rmsnorm", 1e-3, 3, 2.0, "failed")
    make("rmsnorm", 1e-3, 4, 2.0, "interrupted")
    make("rmsnorm", 1e-3, 5, math.nan)  # finished with a final loss of NaN
    row = rows(tmp_path)["rmsnorm"]
    counted = {key: row[key] for key in ("runs", "finished", "diverged", "failed", "unfinished", "seeds")}
    assert counted == {"runs": 6, "finished": 2, "diverged": 2, "failed": 1, "unfinished": 1, "seeds": 4}
    assert (row["val_loss"], row["val_loss_low"], row["best_val_loss"]) == (math.inf, None, math.inf)
    assert row["val_loss_of_others"] == pytest.approx(2.05)
    report = summarize_by(tmp_path, ["norm"])
    assert table_rows(report)[0]["val loss"] == "2 of 4 diverged, others 2.0500"
    assert "RMSNorm: unfinished runs, left out: 1 of 6" in report.warnings


def test_the_best_learning_rate_has_no_diverged_seed(make, tmp_path):
    for seed in (0, 1):
        make("rmsnorm", 1e-3, seed, 2.5)
        make("rmsnorm", 3e-3, seed, 2.0 if seed else math.inf)
    row = rows(tmp_path)["rmsnorm"]
    assert (row["lr"], row["val_loss"], row["diverged"]) == (1e-3, 2.5, 1)
    assert row["lr_sensitivity"] == pytest.approx((2.5 + (2.0 + 5.5) / 2) / 2 - 2.5)


def test_one_seed_has_no_interval_and_one_learning_rate_no_sensitivity(make, tmp_path):
    make("rmsnorm", 1e-3, 0, 2.5)
    report = summarize_by(tmp_path, ["norm"])
    (row,) = json_rows(report)
    assert (row["val_loss"], row["val_loss_low"], row["seeds"]) == (2.5, None, 1)
    assert (row["lr_sensitivity"], row["selected"]) == (None, None)
    assert table_rows(report)[0]["val loss"] == "2.5000 (n=1)"


def test_each_run_has_one_outcome(make, tmp_path):
    # The band is 3.04 to 3.36.
    for seed, (loss, best) in enumerate([(3.17, 3.17), (4.0, 3.2), (3.3, 2.8), (3.0, 3.0), (4.9, 4.9), (2.3e9, 5.4)]):
        make("post", 1e-3, seed, loss, status={"best_val_loss": best})
    make("post", 1e-3, 6, math.inf)
    make("post", 1e-3, 7, 2.0, "failed")
    row = rows(tmp_path)["post"]
    counted = {key: row[key] for key in ("finished", "stuck", "regressed", "diverged", "failed", "unfinished")}
    assert counted == {"finished": 2, "stuck": 1, "regressed": 2, "diverged": 2, "failed": 1, "unfinished": 0}
    assert sum(counted.values()) == row["runs"]
    lines = notes(summarize_by(tmp_path, ["norm"]))
    assert [note.split(":")[0] for note in lines[1:4]] == ["stuck", "regressed", "diverged"]


def test_runs_that_never_train_have_no_sensitivity(make, tmp_path):
    for lr, short, stuck, trained, mixed in (
        (1e-3, 4.91, 3.22, 2.2, 2.4),
        (3e-3, 4.93, 3.21, 2.0, 2.0),
        (1e-2, 4.92, 3.2, 2.1, 2.0),
    ):
        for seed in (0, 1):
            make("short", lr, seed, short)
            make("stuck", lr, seed, stuck)
            make("trained", lr, seed, trained)
            make("mixed", lr, seed, 3.2 if seed and lr == 3e-3 else math.inf if seed and lr == 1e-2 else mixed)
    found = rows(tmp_path)
    for cell in ("short", "stuck"):
        keys = ("lr_sensitivity", "near_best_lr", "too_high_lr", "bad_lrs")
        assert [found[cell][key] for key in keys] == [None, None, None, [1e-3, 3e-3, 1e-2]]
    assert found["trained"]["lr_sensitivity"] == pytest.approx((0.2 + 0.0 + 0.1) / 3)
    # The best learning rate is not one at which a seed is stuck or diverged.
    assert found["mixed"]["lr"] == 1e-3
    assert found["mixed"]["near_best_lr"] == [1e-3, 1e-3]
    assert found["mixed"]["too_high_lr"] == 3e-3
    assert found["mixed"]["lr_sensitivity"] == pytest.approx((0 + 0.2 + (2.0 + 5.5) / 2 - 2.4) / 3)
    report = summarize_by(tmp_path, ["norm"])
    assert {row["norm"]: row["S"] for row in table_rows(report)} == {
        "short": "-", "stuck": "-", "trained": "0.1000", "mixed": "0.5167",
    }  # fmt: skip


@pytest.mark.parametrize("shown", [["val loss"], ["S"], ["near-best lr"], ["too-high lr"], ["S", "too-high lr"]])
def test_each_shown_column_about_learning_rates_is_defined_once(shown, make, tmp_path):
    for lr, loss in ((1e-3, 2.1), (3e-3, 2.0), (1e-2, 2.01), (3e-2, 2.2), (1e-1, 3.2)):
        make("rmsnorm", lr, 0, loss)
    table = summarize_by(tmp_path, ["norm"])
    row = table_rows(table)[0]
    assert (row["near-best lr"], row["too-high lr"]) == ("0.003-0.01", "0.03")
    texts = [note.partition(": ") for note in notes(table, ["norm", *shown])]
    defined = {name: text for name, _, text in texts if name in ("S", "near-best lr", "too-high lr")}
    assert list(defined) == [name for name in shown if name != "val loss"]
    assert all(" bad" in text for text in defined.values())
    assert sum(name == "bad learning rate" for name, _, _ in texts) == bool(defined)
    limits = {"near-best lr": "0.02 nats/token", "too-high lr": "0.1 nats/token"}
    assert all(limit in defined.get(name, limit) for name, limit in limits.items())


def test_mixed_settings_are_a_warning(make, tmp_path):
    other = {"corpus": {"name": "files", "sha256": "f" * 64, "baselines": {"uniform": 5.5}}}
    gpu = {"resolved": {"device": "cuda", "precision": "bf16", "compile": "on"}}
    make("rmsnorm", 1e-3, 0, 2.0)
    make("rmsnorm", 1e-3, 1, 2.0, depth=8)
    make("rmsnorm", 1e-3, 2, 2.0, placement="post")
    make("rmsnorm", 1e-3, 3, 2.0, run=other)
    make("rmsnorm", 1e-3, 4, 2.0, run=gpu)
    (row,) = rows(tmp_path).values()
    warnings = "\n".join(row["warnings"])
    for warning in (
        "mixes model.depth 4 and 8",
        "mixes placement post and pre",
        "mixes corpus files ffffffff and stdlib aaaaaaaa",
        "mixes precision bf16 and fp32",
        "mixes numerics (compile) null and on",
    ):
        assert warning in warnings
    assert "mixes device cpu and cuda" in warnings
    assert not [warning for row in rows(tmp_path, "norm,model.depth,placement,corpus,device").values()
                for warning in row["warnings"]]  # fmt: skip


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


def test_best_learning_rate_at_the_end_of_the_grid_is_a_warning(make, tmp_path):
    make("rmsnorm", 1e-3, 0, 2.1)
    make("rmsnorm", 3e-3, 0, 2.0)
    assert "highest of the grid" in rows(tmp_path)["rmsnorm"]["warnings"][0]


def test_cells_that_differ_in_other_options_are_a_warning(make, tmp_path):
    make("rmsnorm", 1e-3, 0, 2.1)
    make("layernorm", 3e-3, 0, 2.0, depth=8)
    warnings = summarize_by(tmp_path, ["norm"]).table_warnings
    assert warnings[0] == "the cells differ in more than norm: model.depth 4 and 8"
    assert warnings[1].startswith("the cells have different learning rates")


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
    ranked = [100.0, 100.0, *(1.9 + s / 90 - 2.0 - s / 100 for s in range(2, 8))]
    shifted = stats.permutation_test(
        (stats.rankdata(np.abs(ranked)) * np.sign(ranked),), np.sum, permutation_type="samples", n_resamples=np.inf
    )
    assert row["p"] == pytest.approx(shifted.pvalue)
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
        ({"where": ["model.dpth>3"]}, r"did you mean 'model.depth'"),
    ],
)
def test_invalid_options_are_errors(make, tmp_path, options, message):
    make("layernorm", 1e-3, 0, 2.0)
    with pytest.raises(ConfigError, match=message):
        rows(tmp_path, **options)


def test_by_and_format_are_checked(make, tmp_path):
    make("layernorm", 1e-3, 0, 2.0)
    with pytest.raises(ConfigError, match=r"--by placment: no run has this option .did you mean 'placement'"):
        rows(tmp_path, "norm,placment")
    for bad in ("norm,norm", "norm,", ""):
        with pytest.raises(ConfigError) as caught:
            rows(tmp_path, bad)
        assert str(caught.value) == f"--by {bad}: name at least one option, each once, such as norm,placement"
    with pytest.raises(NormlabError, match="unknown format 'xml'"):
        render_cells(summarize_by(tmp_path, ["norm"]), "xml")


def test_short_option_names_are_accepted_where_they_mean_one_option(make, tmp_path):
    make("layernorm", 1e-3, 0, 2.0)
    make("layernorm", 1e-3, 0, 2.1, depth=8)
    make("rmsnorm", 1e-3, 0, 2.2, depth=8)
    table = summarize_by(tmp_path, ["norm", "depth"], against="n_layer=8", where=["depth>=4"])
    assert table.by == ["norm", "model.depth"]
    assert [row["baseline"] for row in json_rows(table)] == ["layernorm 8", None, None]
    with pytest.raises(ConfigError, match=r"--by name: is ambiguous; write norm.name or optim.name or placement.name"):
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
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b'"state": "finished"', b'"state": "finisied"'),
        lambda content: content.replace(b'"val_loss": 2.0', b'"val_loss": 1.0'),
        lambda content: with_checksum({"state": "finished", "step": 100}),
    ],
    ids=["empty", "cut", "flipped state", "flipped loss", "no loss"],
)
def test_damaged_status_is_counted_and_reported_with_its_reason(damage, make, tmp_path, run_command):
    make("layernorm", 1e-3, 0, 2.0)
    make("layernorm", 1e-3, 1, 2.0, "failed")
    broken = make("layernorm", 1e-3, 2, 2.0)
    status = broken.path / "status.json"
    status.write_bytes(damage(status.read_bytes()))
    (row,) = json_rows(summarize_by(tmp_path, ["norm"]))
    assert {key: row[key] for key in ("runs", "finished", "failed", "damaged")} == {
        "runs": 3, "finished": 1, "failed": 1, "damaged": 1,
    }  # fmt: skip
    warning = f"run {broken.run_id} is damaged and is left out: {status}: "
    _, out, err = run_command("summarize", str(tmp_path), "--by", "norm")
    assert ["damaged", "1"] in [line.split() for line in out.splitlines()]
    (line,) = [line for line in err.splitlines() if broken.run_id in line]
    assert warning in line
    _, out, err = run_command("summarize", str(tmp_path), "--by", "norm", "--format", "json")
    assert [warning in each for each in json.loads(out)[0]["warnings"] if broken.run_id in each] == [True]
    _, out, err = run_command("compare", str(tmp_path), "-o", str(tmp_path / "page.html"))
    assert "Of 3 runs, 1 failed: LayerNorm, pre-norm (1). 1 damaged: LayerNorm, pre-norm (1)." in out
    assert [warning in line for line in err.splitlines() if str(status) in line] == [True]


def test_only_the_first_damaged_runs_are_reported_with_their_reasons(make, tmp_path):
    for seed in range(9):
        (make("layernorm", 1e-3, seed, 2.0).path / "status.json").write_text("")
    (row,) = json_rows(summarize_by(tmp_path, ["norm"]))
    named = [warning for warning in row["warnings"] if "damaged" in warning]
    assert len(named) == MAX_DAMAGED + 1
    assert named[-1] == (
        "4 more runs are damaged and are left out: " + ", ".join(f"run{number:04}" for number in range(5, 9))
    )


def test_cell_without_an_outcome_has_a_row(make, tmp_path):
    make("layernorm", 1e-3, 0, 2.0, "failed")
    make("rmsnorm", 1e-3, 0, 2.0)
    row = rows(tmp_path, against="norm=layernorm", target=2.5)["layernorm"]
    assert (row["failed"], row["val_loss"], row["lr"], row["steps_to_target"]) == (1, None, None, None)
    for format in ("table", "json", "csv", "markdown"):
        assert render_cells(summarize_by(tmp_path, ["norm"], against="norm=layernorm"), format)


def test_steps_and_seconds_to_a_target_are_read_from_the_metrics(make, tmp_path):
    for seed, curve in enumerate([(5.5, 3.0, 2.4, 2.6), (5.5, 2.5, 2.3, 2.2)]):
        folder = make("rmsnorm", 1e-3, seed, curve[-1])
        for number, loss in enumerate(curve):
            folder.append([{"kind": "train", "step": number, "loss": 9.0}])
            folder.append([{"kind": "pace", "step": 10 * number, "seconds": 1.5 * number}])
            folder.append([{"kind": "eval", "step": 10 * number, "loss": loss}])
    row = rows(tmp_path, target=2.5)["rmsnorm"]
    assert (row["steps_to_target"], row["seconds_to_target"], row["target_reached"]) == (15, 2.25, 2)
    row = rows(tmp_path, target=2.25)["rmsnorm"]
    assert (row["steps_to_target"], row["target_reached"], row["target_runs"]) == (None, 1, 2)
    report = summarize_by(tmp_path, ["norm"], target=2.25)
    assert table_rows(report)[0]["to 2.25"] == "1 of 2"


def test_spikes_are_those_of_the_statuses(make, tmp_path):
    for seed, count in enumerate((3, 2)):
        make("rmsnorm", 1e-3, seed, 2.0, status={"spikes": {"clipped": {"spikes": count, "of_steps": 100}}})
    (row,) = rows(tmp_path).values()
    assert row["spikes"] == {"clipped": {"runs": 2, "spikes": 5, "of_steps": 200, "share": 0.025}}


def test_json_and_csv_have_all_values(make, tmp_path):
    make("rmsnorm", 1e-3, 0, math.inf, status={"spikes": {"clipped": {"spikes": 3, "of_steps": 100}}})
    make("layernorm", 1e-3, 0, 2.0)
    report = summarize_by(tmp_path, ["norm"])
    layer, rms = json.loads(render_cells(report, "json"))
    assert (rms["val_loss"], rms["spikes"]["clipped"]["spikes"], layer["run_ids"]) == ("inf", 3, ["run0001"])
    layer, rms = csv.DictReader(io.StringIO(render_cells(report, "csv")))
    assert (rms["spikes.clipped.spikes"], layer["spikes.clipped.spikes"], rms["val_loss"]) == ("3", "", "inf")
    assert rms["learning_rates"] == "[0.001]"


def test_metrics_are_not_read_without_need(make, tmp_path, monkeypatch):
    make("rmsnorm", 1e-3, 0, 2.0)
    monkeypatch.setattr("normlab.store.runs.RunFolder.rows", lambda *args: pytest.fail("metrics were read"))
    assert rows(tmp_path, against="norm=rmsnorm")["rmsnorm"]["val_loss"] == 2.0


def test_sweep_is_found_by_name_and_unstarted_runs_are_a_warning(make, tmp_path, run_command):
    first, second = make("rmsnorm", 1e-3, 0, 2.0), make("rmsnorm", 1e-3, 1, 2.0)
    make("other", 1e-3, 0, 2.0)
    results = tmp_path / "results"
    results.mkdir()
    (tmp_path / "runs").rename(results / "runs")
    sweep = sweep_folder(results, "mine")
    sweep.mkdir(parents=True)
    jobs = [PlannedRun(run_id, [], {}) for run_id in (first.run_id, second.run_id, "later")]
    write_plan(sweep, Plan("mine", "off", jobs, []))
    for path in ("mine", sweep):
        report = summarize_by(path, ["norm"])
        assert [row["cell"] for row in json_rows(report)] == ["rmsnorm"]
        assert report.table_warnings == ["runs that have not started: 1 of 3"]
    code, out, err = run_command("summarize", "mine", "--by", "norm")
    assert (code, "rmsnorm" in out) == (0, True)
    assert "warning: runs that have not started: 1 of 3" in err
    assert run_command("summarize", "mine")[1].count("rmsnorm") >= 1
    for content in ("{", '{"runs": []}', '{"runs": [{"run_id": "../runs"}]}', '{"runs": 3}'):
        (sweep / "plan.json").write_text(content)
        with pytest.raises(StoreError, match="is damaged"):
            summarize_by("mine", ["norm"])


def test_summarize_command(make, tmp_path, run_command):
    make("rmsnorm", 1e-3, 0, 2.0, depth=4)
    make("rmsnorm", 1e-3, 1, 2.0, depth=8)
    code, out, err = run_command("summarize", str(tmp_path), "--by", "norm")
    assert (code, err) == (0, "warning: RMSNorm: mixes model.depth 4 and 8\n")
    assert "2.0000 and 2.0000 (n=2)" in out
    code, out, err = run_command("summarize", str(tmp_path), "--by", "norm", "--where", "model.depth>=8")
    assert (code, err) == (0, "")
    assert "2.0000 (n=1)" in out
    assert len(json.loads(run_command("summarize", str(tmp_path), "--where", "seed=1", "--format", "json")[1])) == 1
    code, _, err = run_command("summarize", str(tmp_path), "--against", "norm=rmsnorm")
    assert (code, err.count("\n")) == (2, 1)
    assert "norm is not in --by model.depth; add it there" in err
    assert run_command("summarize", str(tmp_path), "--by", "norm", "--where", "nrom=a")[0] == 2


def crossed_runs(make, a: int, b: int) -> dict[str, np.ndarray]:
    """Make runs of two norms with a seeds crossed with b data seeds; return the losses by norm, shape (a, b)."""
    draw = np.random.default_rng(0)
    losses = {}
    for norm, mean in (("layernorm", 2.5), ("rmsnorm", 2.4)):
        losses[norm] = mean + draw.normal(0, 0.02, (a, 1)) + draw.normal(0, 0.02, (1, b)) + draw.normal(0, 1e-3, (a, b))
        for (seed, data_seed), loss in np.ndenumerate(losses[norm]):
            make(norm, 1e-3, seed, float(loss), data_seed=data_seed)
    return losses


def test_crossed_seeds_are_not_independent_runs(make, tmp_path):
    losses = crossed_runs(make, 6, 6)
    report = summarize_by(tmp_path, ["norm"], against="norm=layernorm")
    row = {row["cell"]: row for row in json_rows(report)}["rmsnorm"]
    assert (row["seeds"], row["seeds_crossed"], row["seeds_fixed"]) == (36, [6, 6], None)
    assert (row["pairs"], row["pairs_crossed"]) == (36, [6, 6])
    values = losses["rmsnorm"]
    means = [values.mean(axis).var(ddof=1) / 6 for axis in (0, 1)]
    half = stats.t.ppf(0.975, 5) * math.sqrt(sum(means))  # except for the small residual variance
    assert row["val_loss_high"] - row["val_loss"] == pytest.approx(half, rel=0.01)
    independent = stats.t.ppf(0.975, 35) * values.std(ddof=1) / 6
    assert row["val_loss_high"] - row["val_loss"] > 2 * independent
    text = {row["norm"]: row for row in table_rows(report)}["rmsnorm"]
    assert text["val loss"].endswith("(n=6x6)")
    assert text["vs baseline"].endswith("(n=6x6)")
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


def test_incomplete_crossing_is_noted(make, tmp_path):
    for seed, data_seed in [(0, 0), (1, 0), (2, 0), (1, 1), (2, 2)]:
        make("rmsnorm", 1e-3, seed, 2.1 + seed / 100 + data_seed / 50, data_seed=data_seed)
    report = summarize_by(tmp_path, ["norm"])
    assert table_rows(report)[0]["val loss"].endswith("(n=5 of 3x3)")
    assert any("incomplete crossing" in note for note in notes(report))
