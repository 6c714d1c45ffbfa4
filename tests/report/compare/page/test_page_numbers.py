"""The numbers of the comparison page equal those of `normlab summarize`, `inspect` and the records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import Record

from normlab.store.format import DIVERGED, RUNS_FOLDER, number
from support.browser import opened
from support.compare_pages import BY, SECTIONS, STEPS, drawn, grid, lines, normlab, ready


def rows_of(results: Path, record: Record, kind: str) -> list[dict[str, Any]]:
    """Return the metrics rows of one kind."""
    with (results / RUNS_FOLDER / record.run_id / "metrics.jsonl").open() as file:
        return [row for row in map(json.loads, file) if row["kind"] == kind]


def row_of(page, section: str, text: str):
    """Return the first row of a table with a text."""
    return page.locator(f"#{section} tbody tr", has_text=text).first


def test_page_opens_and_every_figure_is_drawn(browser, path):
    with opened(browser, path) as page:  # asserts that there were no requests and no console messages
        ready(page)
        for section in SECTIONS:
            figure = drawn(page, section)
            assert figure["data"], section
            assert len(figure["caption"]) > 80, section
        assert page.title() == "two norms"


def test_losses_equal_the_cells_of_summarize(browser, path, cells):
    with opened(browser, path) as page:
        marks = [trace for trace in drawn(ready(page), "losses")["data"] if trace.get("meta")]
        expected = {row["cell"]: row for row in cells}
        assert {trace["name"] for trace in marks} == set(expected)
        for trace in marks:
            row = expected[trace["name"]]
            assert trace["x"] == [row["val_loss"]]
            assert not trace["error_x"].get("array")  # the interval of two seeds is wider than the picture
        best = min(cells, key=lambda row: row["val_loss"])
        assert page.locator("#sentences p").first.inner_text().startswith(f"{best['cell']} has the lowest")
        text = next(cell["text"]["val loss"] for cell in page.evaluate("CELLS") if cell["cell"] == best["cell"])
        assert text.removesuffix(" (n=2)") in page.locator("#sentences p").first.inner_text()
        assert "Of 24 runs, 1 diverged" in page.locator("#sentences").inner_text()


def test_tables_equal_summarize(browser, path, cells, runs):
    with opened(browser, path) as page:
        ready(page)
        listed = [text.split("\t") for text in page.locator("#cells tbody tr").all_inner_texts()]
        expected = {" ".join(text[1:4]): text for text in listed}
        for row in cells:
            seeds = [run["val_loss"] for run in runs if run["id"] in row["run_ids"] and run["lr"] == row["lr"]]
            assert any(f"{a:.4f} and {b:.4f} (n=2)" in expected[row["cell"]] for a, b in (seeds, seeds[::-1]))
        listed = [text.split("\t") for text in page.locator("#runs tbody tr").all_inner_texts()]
        heads = [head.strip() for head in page.locator("#runs thead th").all_inner_texts()]
        assert len(listed) == len(runs) == 24
        for row in runs:
            (text,) = [text for text in listed if row["id"] in text]
            shown = dict(zip(heads, map(str.strip, text), strict=True))
            assert shown["state"].startswith(row["state"])
            assert shown["val loss"] == ("diverged" if row["state"] == DIVERGED else f"{row['val_loss']:.4f}")
            assert shown["train loss"] == f"{number(row['train_loss']):.4f}"
            assert shown["step"] == f"{row['step']}/{row['steps']}"
        assert "diverged at step 250" in row_of(page, "runs", "diverged").inner_text()
        assert page.locator("#runs tbody tr", has_text="stuck").count() == 1


def test_rates_equal_summarize(browser, path, sweep, cells):
    by_rate = json.loads(normlab("summarize", str(sweep), "--by", f"{BY},optim.lr", "--format", "json"))
    with opened(browser, path) as page:
        traces = drawn(ready(page), "rates")["data"]
        curves = [trace for trace in traces if trace.get("meta") and "cell" in trace["meta"]]
        bars = [trace for trace in traces if trace.get("meta") and trace["meta"].get("sensitivity")]
    expected = {(row["norm"], row["placement"], row["model.depth"], row["optim.lr"]): row for row in by_rate}
    for trace in curves:
        norm, placement, depth = trace["name"].split()
        for lr, loss, high in zip(trace["x"], trace["y"], trace["error_y"]["array"], strict=True):
            row = expected.pop((norm, placement, int(depth), lr))
            if row["seeds_diverged"]:
                assert row["val_loss"] == "inf"
                assert loss is None
            else:
                assert loss == row["val_loss"]
                assert high == 0  # as above
    assert not expected
    assert dict(zip(bars[0]["y"], bars[0]["x"], strict=True)) == {
        row["cell"]: row["lr_sensitivity"] for row in cells if row["lr_sensitivity"] is not None
    }
    (crossed,) = [trace for trace in traces if trace.get("text") == ["1/2"]]
    assert crossed["x"] == [1e-2]


def test_matrix_equals_summarize(browser, path, cells):
    with opened(browser, path) as page:
        figure = drawn(ready(page), "matrix")
    expected = {(row["norm"], row["placement"], row["model.depth"]): row["val_loss"] for row in cells}
    actual = {
        (norm, placement, panel["meta"]["depth"]): value
        for panel in figure["data"]
        for placement, values in zip(panel["y"], panel["z"], strict=True)
        for norm, value in zip(panel["x"], values, strict=True)
    }
    assert actual == expected
    texts = [annotation["text"] for annotation in figure["layout"]["annotations"]]
    assert sum("1 diverged" in text for text in texts) == 1
    assert sum(" and<" in text for text in texts) == len(expected)  # the losses of both seeds


def test_curves_equal_the_records(browser, path, results):
    with opened(browser, path) as page:
        ready(page).locator("#group").select_option("runs")
        page.locator("#smooth").fill("0")
        actual = {trace["meta"]["columns"][0]: trace for trace in lines(page)}
        assert len(actual) == 24
        for record in grid():
            trained = rows_of(results, record, "train")
            expected = [number(row["loss"]) for row in trained]
            assert actual[record.run_id]["x"] == [row["step"] for row in trained]
            losses = [math.nan if loss is None else loss for loss in actual[record.run_id]["y"]]
            assert losses == pytest.approx(expected, rel=1e-6, nan_ok=True)  # float32
        page.locator("#quantity").select_option("val")
        for record in grid():
            evaluations = [(row["step"], row["loss"]) for row in rows_of(results, record, "eval")]
            (line,) = [trace for trace in lines(page) if trace["meta"]["columns"][0] == record.run_id]
            assert list(zip(line["x"], line["y"], strict=True)) == evaluations


def test_line_and_band_are_mean_and_range_over_seeds(browser, path, results):
    with opened(browser, path) as page:
        ready(page).locator("#smooth").fill("0")
        traces = drawn(page, "curves")["data"]
    members = [record for record in grid() if (record.norm, record.placement, record.depth) == ("layernorm", "pre", 8)]
    losses = [[row["loss"] for row in rows_of(results, record, "train")] for record in members]
    (line,) = [trace for trace in traces if trace.get("name") == "layernorm pre 8 (n=2)"]
    assert line["y"] == pytest.approx([sum(pair) / 2 for pair in zip(*losses, strict=True)], rel=1e-6)
    band = traces[traces.index(line) - 1]
    assert band["fill"] == "toself"
    assert band["y"][:STEPS] == pytest.approx([max(pair) for pair in zip(*losses, strict=True)], rel=1e-6)
    assert band["y"][STEPS:][::-1] == pytest.approx([min(pair) for pair in zip(*losses, strict=True)], rel=1e-6)


def test_marks_of_divergence_and_spikes(browser, path):
    with opened(browser, path) as page:
        ready(page).locator("#group").select_option("runs")
        traces = drawn(page, "curves")["data"]
        marks = {tuple(trace["meta"]["columns"]): trace for trace in traces if trace.get("mode") == "markers"}
        by_kind = {kind: [mark for (_, of), mark in marks.items() if of == kind] for kind in ("diverged", "spike")}
        (diverged,) = by_kind["diverged"]
        assert diverged["x"] == [250]
        assert math.isfinite(diverged["y"][0])
        assert any(301 in mark["x"] for mark in by_kind["spike"])
        page.get_by_label("marks").uncheck()
        assert not [trace for trace in drawn(page, "curves")["data"] if trace.get("mode") == "markers"]


def test_smoothing_is_a_local_linear_fit(browser, path):
    with opened(browser, path) as page:
        ready(page).locator("#group").select_option("runs")
        page.locator("#smooth").fill("3")
        assert page.locator("#smooth-value").inner_text() == "5 steps"
        traces = drawn(page, "curves")["data"]
    smooth = next(trace for trace in traces if trace.get("meta") and trace["meta"]["columns"][1] == "smoothed")
    name = smooth["meta"]["columns"][0]
    raw = next(trace for trace in traces if trace.get("meta") and trace["meta"]["columns"] == [name, "measured"])
    assert raw["opacity"] < 0.5
    assert traces.index(raw) < traces.index(smooth)
    measured = np.array(raw["y"])
    for at in (0, 7, 200, len(measured) - 1):
        away = np.arange(len(measured)) - at
        _, fitted = np.polyfit(away, measured, 1, w=np.sqrt(0.5 ** (np.abs(away) / 5)))
        assert smooth["y"][at] == pytest.approx(fitted, rel=1e-6)


def inspected(results: Path, record: Record, statistic: str) -> list[dict[str, Any]]:
    """Return the rows of `inspect` for a statistic."""
    return json.loads(normlab("inspect", record.run_id, statistic, "--json", "--results-dir", str(results)))


@pytest.mark.parametrize("statistic", ["resid_rms", "dresid_rms", "attn_ratio"])
def test_profiles_equal_those_of_inspect(browser, path, results, statistic):
    record = next(record for record in grid() if (record.norm, record.placement, record.depth) == ("rmsnorm", "pre", 8))
    rows = inspected(results, record, statistic)
    with opened(browser, path) as page:
        ready(page).locator("#group").select_option("runs")
        page.locator("#statistic").select_option(statistic)
        page.locator("#step").fill("0")
        step = int(page.locator("#step-value").inner_text())
        traces = [trace for trace in drawn(page, "profiles")["data"] if trace.get("meta")]
        moments = {
            "at init": 0,
            "after warm-up": next(at for at in rows[0]["steps"] if at >= 50),
            "at the end": rows[0]["steps"][-1],
            f"at step {step}": step,
        }
        for moment, at in moments.items():
            (line,) = [trace for trace in traces if trace["meta"]["columns"] == [moment, record.run_id]]
            assert line["y"] == pytest.approx([row["values"][row["steps"].index(at)] for row in rows], rel=1e-6)
        panels = drawn(page, "heatmaps")["data"]
        (panel,) = [trace for trace in panels if trace["meta"]["label"] == record.run_id]
        for place, values in zip(rows, panel["z"], strict=True):
            expected = [place["values"][place["steps"].index(at)] for at in panel["x"]]
            assert values == pytest.approx([math.log10(value) for value in expected], rel=1e-5, abs=1e-6)
        assert len(panel["x"]) <= 32


def test_every_core_statistic_is_drawn(browser, path):
    with opened(browser, path) as page:
        ready(page).get_by_role("searchbox").fill("rmsnorm pre depth=8")  # one cell is quicker to draw than eight
        names = page.locator("#statistic option").evaluate_all("options => options.map((option) => option.value)")
        assert {"resid_rms", "resid_growth", "grad_norm", "update_ratio", "norm_gain"} <= set(names)
        for name in names:
            page.locator("#statistic").select_option(name)
            figure = drawn(page, "profiles")
            assert figure["data"], name
            assert name in figure["caption"], name
        page.locator("#statistic").select_option("grad_norm")
        sites = page.locator("#site option").evaluate_all("options => options.map((option) => option.value)")
        assert len(sites) > 3
        before = drawn(page, "profiles")["data"]
        page.locator("#site").select_option(sites[2])
        assert drawn(page, "profiles")["data"] != before
        page.get_by_label("relative depth").check()
        xs = [trace["x"] for trace in drawn(page, "profiles")["data"]]
        assert all(0 <= x <= 1 for values in xs for x in values)
