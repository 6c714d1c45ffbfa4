"""The numbers of the comparison page equal those of `normlab summarize` and of the records."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from normlab.analysis.intervals import holm
from normlab.report.histories import history, read_statistics
from normlab.store.format import RUNS_FOLDER
from normlab.store.runs import RunFolder
from support.browser import opened
from support.compare_pages import BY, FIGURES, STEPS, drawn, grid, normlab, open_table, points, ready

LABELS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "pre": "pre-norm", "post": "post-norm"}


def test_page_opens_and_every_figure_is_drawn(browser, path):
    with opened(browser, path) as page:  # asserts that there were no requests and no console messages
        ready(page)
        for figure in FIGURES:
            assert drawn(page, figure)["panels"], figure
        assert page.title() == "two norms"


def test_final_losses_equal_summarize(browser, path, cells):
    with opened(browser, path) as page:
        lines = points(ready(page), "factor")
    checked = 0
    for row in cells:
        line = lines[LABELS[row["placement"]], LABELS[row["norm"]]]
        (point,) = [point for point in line if point["x"] == row["model.depth"]]
        assert (point["n"], point["diverged"]) == (row["seeds"], row["seeds_diverged"])
        if row["seeds_diverged"]:
            assert (point["y"], row["val_loss"]) == (None, "inf")
            assert point["text"] == "1 of 3 seeds diverged"
        else:
            assert (point["y"], point["low"], point["high"]) == (
                row["val_loss"],
                row["val_loss_low"],
                row["val_loss_high"],
            )
            checked += 1
    assert checked == 7


def test_learning_rates_equal_summarize(browser, path, sweep):
    rows = json.loads(normlab("summarize", str(sweep), "--by", f"{BY},optim.lr", "--format", "json"))
    with opened(browser, path) as page:
        lines = points(ready(page), "rates")
    for row in rows:
        line = lines[f"depth {row['model.depth']}, {LABELS[row['placement']]}", LABELS[row["norm"]]]
        (point,) = [point for point in line if point["x"] == row["optim.lr"]]
        assert (point["n"], point["diverged"]) == (row["seeds"], row["seeds_diverged"])
        keys = {"y": "val_loss", "low": "val_loss_low", "high": "val_loss_high"}
        expected = dict.fromkeys(keys) if row["seeds_diverged"] else {key: row[name] for key, name in keys.items()}
        assert {key: point[key] for key in keys} == expected
    assert sum(map(len, lines.values())) == len(rows) == 12


def test_heat_map_equals_summarize(browser, path, cells):
    by_label = {row["label"]: row for row in cells}
    with opened(browser, path) as page:
        ready(page)
        for panel in page.locator("[data-figure=matrix] .panel").all():
            placement = panel.locator(".panel-title").inner_text()
            columns = panel.locator("thead th").all_inner_texts()[1:]
            for line in panel.locator("tbody tr").all():
                norm = line.locator("th").inner_text()
                for depth, text in zip(columns, line.locator("td").all_inner_texts(), strict=True):
                    row = by_label[f"{norm}, {placement}, depth {depth}"]
                    expected = "1/3" if row["seeds_diverged"] else f"{row['val_loss']:.3f}"
                    assert text.removeprefix("\N{MULTIPLICATION SIGN} ") == expected
        framed = page.locator("[data-figure=matrix] .is-best").all_inner_texts()
        lowest = {row["model.depth"]: math.inf for row in cells}
        for row in cells:
            if not row["seeds_diverged"]:
                lowest[row["model.depth"]] = min(lowest[row["model.depth"]], row["val_loss"])
        assert sorted(framed) == sorted(f"{loss:.3f}" for loss in lowest.values())


def rows_of(results, record, kind: str) -> list[dict]:
    with (results / RUNS_FOLDER / record.run_id / "metrics.jsonl").open() as file:
        return [row for row in map(json.loads, file) if row["kind"] == kind]


@pytest.mark.parametrize(
    ("series", "kind", "key"),
    [("val_loss", "eval", "loss"), ("train_loss", "train", "loss"), ("grad_norm", "train", "grad_norm")],
)
def test_curves_equal_the_records(browser, path, results, series, kind, key):
    with opened(browser, path) as page:
        ready(page).locator("#series").select_option(series)
        lines = points(page, "curves")
    for norm in ("layernorm", "rmsnorm"):
        records = [r for r in grid() if (r.norm, r.placement, r.depth) == (norm, "pre", 8)]
        values = np.array([[row[key] for row in rows_of(results, record, kind)] for record in records])
        steps = np.array([row["step"] for row in rows_of(results, records[0], kind)])
        size = -(-len(steps) // 160)
        drawn_points = lines["depth 8, pre-norm", LABELS[norm]]
        assert len(drawn_points) == -(-len(steps) // size)
        for index, point in enumerate(drawn_points):
            chunk = slice(index * size, (index + 1) * size)
            assert point["x"] == pytest.approx(steps[chunk].mean())
            assert point["y"] == pytest.approx(values[:, chunk].mean(), rel=1e-5)
            assert (point["low"], point["high"]) == pytest.approx(
                (values[:, chunk].min(), values[:, chunk].max()), rel=1e-5
            )


def test_units_of_the_curves(browser, path):
    with opened(browser, path) as page:
        key = ("depth 4, pre-norm", "RMSNorm")
        steps = [point["x"] for point in points(ready(page), "curves")[key]]
        page.locator("#unit").select_option("tokens")
        assert [point["x"] for point in points(page, "curves")[key]] == [step * 8 * 128 for step in steps]
        page.locator("#unit").select_option("flops")
        flops = [point["x"] for point in points(page, "curves")[key]]
        page.locator("#unit").select_option("hours")
        hours = [point["x"] for point in points(page, "curves")[key]]
        (cell,) = [c for c in page.evaluate("CELLS") if c["label"] == "RMSNorm, pre-norm, depth 4"]
        assert flops == pytest.approx([step * 8 * 128 * cell["flops_per_token"] for step in steps])
        assert hours[-1] == pytest.approx(STEPS * 8 * 128 / cell["tokens_per_s"] / 3600)


@pytest.mark.parametrize(("figure", "statistic"), [("gradients", "dresid_rms"), ("layers", "resid_rms")])
def test_layers_equal_the_statistics(browser, path, results, figure, statistic):
    with opened(browser, path) as page:
        ready(page)
        last = points(page, figure)
        page.locator(f"[data-figure={figure}] select").nth(1).select_option("first")
        first = points(page, figure)
    runs = [r for r in grid() if (r.norm, r.placement, r.depth) == ("layernorm", "post", 8)]
    folders = [RunFolder(results / RUNS_FOLDER / run.run_id) for run in runs]
    values = np.array([history(read_statistics(folder, []), statistic)[0].values[[0, -1]] for folder in folders])
    for lines, at in ((first, 0), (last, 1)):
        for point in lines["depth 8, post-norm", "LayerNorm"]:
            seeds = values[:, at, int(point["x"])]
            assert (point["y"], point["low"], point["high"]) == pytest.approx(
                (np.median(seeds), seeds.min(), seeds.max()), rel=1e-5
            )


def test_answer_equals_summarize_at_each_depth(browser, path, sweep, cells, runs):
    """The page has the best cell of each depth; a filter of one depth leaves one, as the headline."""
    with opened(browser, path) as page:
        text = ready(page).locator("#answer").inner_text()
        assert text.lower().startswith("lowest loss at each depth")
        losses = page.locator("#answer .loss").all_inner_texts()
        page.locator('[data-level="depth 8"]').click()
        headline = page.locator(".best").inner_text().replace("\xa0", " ")
        (loss,) = page.locator("#answer .loss").all_inner_texts()
    for depth, found in zip((4, 8), losses, strict=True):
        trained = [row for row in cells if row["model.depth"] == depth and not row["seeds_diverged"]]
        best = min(trained, key=lambda row: row["val_loss"])
        against = ",".join(f"{option}={best[option]}" for option in BY.split(","))
        rows = json.loads(normlab("summarize", str(sweep), "--against", against, "--format", "json"))
        others = [row for row in rows if row["model.depth"] == depth and row["cell"] != best["cell"]]
        p_values = holm([row["p"] for row in others])
        second = min((row for row in others if not row["seeds_diverged"]), key=lambda row: row["val_loss"])
        half = best["val_loss_high"] - best["val_loss"]
        arm = best["label"].removesuffix(f", depth {depth}")
        rate = f"{best['lr']:g}" + (", the best of 2" if depth == 4 else "")
        result = f"validation loss {best['val_loss']:.4f} ± {half:.4f} nats/token (95% interval, n=3), "
        assert found.replace("\xa0", " ") == f"{arm}: {result}at learning rate {rate}"
        assert f"the second best, {second['label']}" in text
        interval = f"[{-second['difference_high']:+.4f}, {-second['difference_low']:+.4f}]"
        assert f"{-second['difference']:+.4f} {interval}" in text
        assert f"p = {p_values[others.index(second)]:.2g} corrected for 3 comparisons" in text
        if depth == 4:
            assert (headline, loss) == (best["label"], f"{result}at learning rate {rate}")
    assert "1 diverged" in text
    assert "RMSNorm, post-norm, depth 8 (1 diverged of 3)" in text
    tokens, minutes = sum(run["step"] for run in runs) * 8 * 128, sum(run["seconds"] for run in runs) / 60
    flops = sum(run["step"] * 8 * 128 * run["flops_per_token"] for run in runs)
    compute = f"{flops:.2e}".replace("e+", "e")
    assert f"36 runs, {tokens / 1e6:#.3g}M tokens, {compute} FLOPs, {minutes:#.3g} minutes of training" in text


def test_best_at_each_level_of_the_x_axis_equals_summarize(browser, path, cells):
    """With one depth on the page, the levels of another factor on x have their best cells."""
    with opened(browser, path) as page:
        ready(page).locator('[data-level="depth 8"]').click()
        page.locator('[data-option="placement"]').select_option("x")
        text = page.locator("#answer").inner_text()
    for level, label in (("pre", "pre-norm"), ("post", "post-norm")):
        found = [row for row in cells if (row["model.depth"], row["placement"]) == (4, level)]
        best, second = sorted(found, key=lambda row: row["val_loss"])
        texts = [f"{LABELS[row['norm']]}, depth 4 ({row['val_loss']:.4f})" for row in (best, second)]
        assert f"{label} {texts[0]}, " in text
        assert f"better than {texts[1]}" in text


def test_smallest_gradient_is_that_of_the_profiles(browser, path):
    """The profiles themselves are compared with the records above."""
    ratios: dict[str, tuple[float, int]] = {}
    with opened(browser, path) as page:
        text = ready(page).locator("#answer").inner_text()
        data = page.evaluate("DATA.cells.map(({label, gradient, layers}) => [label, gradient, layers.dresid_rms.last])")
    for label, gradient, profile in data:
        *layers, head = profile
        value, layer = min((value, layer) for layer, value, *_ in layers)
        ratios[label] = value / head[1], layer
        assert (gradient["layer"], gradient["ratio"]) == (layer, pytest.approx(value / head[1], rel=1e-4))
    label, (ratio, layer) = min(ratios.items(), key=lambda item: item[1])
    assert f"{label}: layer {layer} has {ratio:.2g} times the gradient at the LM head" in text
    assert ("do not vanish" in text) == (ratio >= 0.1)


def test_tables_equal_summarize(browser, path, sweep, runs):
    table = normlab("summarize", str(sweep), "--format", "markdown").splitlines()
    expected = {
        tuple(text.strip() for text in line.strip("|").split("|"))
        for line in table
        if line.startswith("| ") and "---" not in line
    }
    with opened(browser, path) as page:
        ready(page)
        for details in ("cells", "runs"):
            open_table(page, details)
        head = [tuple(page.locator("#cells thead th").all_inner_texts())]
        rows = [tuple(line.split("\t")) for line in page.locator("#cells tbody tr").all_inner_texts()]
        assert {tuple(map(str.strip, row)) for row in head + rows} == expected
        heads = page.locator("#runs thead th").all_inner_texts()
        listed = [
            dict(zip(heads, row.split("\t"), strict=True)) for row in page.locator("#runs tbody tr").all_inner_texts()
        ]
    by_id = {row["id"]: row for row in listed}
    assert len(by_id) == len(runs) == 36
    for run in runs:
        row = by_id[run["id"]]
        assert row["state"] == run["state"]
        assert row["val loss"].strip() == ("" if run["val_loss"] is None else f"{run['val_loss']:.4f}")
