"""The comparison page in a browser: its figures equal the numbers of `normlab summarize`, and every control works."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import Record, write_run, write_sweep

from normlab.store.files import write_atomic
from normlab.store.outcome import STUCK
from normlab.store.schema import DIVERGED, RUNS_FOLDER, number, seal
from support.browser import PHONE, WIDE, opened

STEPS = 400
BY = "norm,placement,model.depth"
SECTIONS = ("losses", "curves", "rates", "matrix", "profiles", "heatmaps", "signatures")
DIVERGING = {"norm": "rmsnorm", "placement": "post", "depth": 4, "lr": 1e-2, "seed": 1}


def grid() -> list[Record]:
    """24 runs in eight cells: two learning rates at depth 4, one at depth 8, two seeds; one diverges, one spikes."""
    runs = []
    for norm in ("layernorm", "rmsnorm"):
        for placement in ("pre", "post"):
            for depth, lr in ((4, 1e-3), (4, 1e-2), (8, 1e-3)):
                for seed in (0, 1):
                    options = {"norm": norm, "placement": placement, "depth": depth, "lr": lr, "seed": seed}
                    more: dict[str, Any] = {}
                    if options == DIVERGING:
                        more = {"outcome": DIVERGED, "at": 250}
                    elif (norm, placement, lr, seed) == ("layernorm", "post", 1e-2, 0):
                        more = {"outcome": STUCK}
                    elif (norm, placement, depth, lr, seed) == ("rmsnorm", "pre", 4, 1e-3, 0):
                        more = {"spike_at": 301}
                    runs.append(Record(steps=STEPS, **options, **more))
    return runs


def normlab(*arguments: str) -> str:
    """Return what a command prints."""
    process = subprocess.run([sys.executable, "-m", "normlab", *arguments], capture_output=True, text=True, check=True)
    return process.stdout


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    write_sweep(folder, "two norms", grid())
    return folder


@pytest.fixture(scope="module")
def sweep(results) -> Path:
    return results / "sweeps" / "two norms"


@pytest.fixture(scope="module")
def path(sweep, tmp_path_factory) -> Path:
    """Return the path of the page."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    assert normlab("compare", str(sweep), "-o", str(path)).splitlines()[-1] == str(path)
    return path


@pytest.fixture(scope="module")
def cells(sweep) -> list[dict[str, Any]]:
    """Return the cells of `summarize`."""
    return json.loads(normlab("summarize", str(sweep), "--by", BY, "--format", "json"))


@pytest.fixture(scope="module")
def runs(sweep) -> list[dict[str, Any]]:
    """Return the runs of `summarize`."""
    return json.loads(normlab("summarize", str(sweep), "--format", "json"))


def ready(page):
    # `wait_for_function` evaluates text, which the page's policy forbids.
    page.evaluate("""async () => {
      while (document.documentElement.dataset.ready !== 'yes') await new Promise((resume) => setTimeout(resume, 20));
    }""")
    return page


def drawn(page, section: str) -> dict[str, Any]:
    """Scroll to a figure and return its traces, layout, caption and message."""
    page.locator(f"[data-figure={section}]").scroll_into_view_if_needed()
    return page.evaluate(
        """async (section) => {
          const figure = FIGURES.find((figure) => figure.section === section);
          while (figure.dirty) await new Promise((resume) => setTimeout(resume, 20));
          const plain = (key, value) => ArrayBuffer.isView(value) ? Array.from(value) : value;
          await figure.drawn;
          const {drawing, plot, caption} = figure;
          const content = drawing.empty ? {data: [], layout: {}} : {data: plot.data, layout: plot.layout};
          return {...JSON.parse(JSON.stringify(content, plain)), empty: drawing.empty, caption: caption.textContent};
        }""",
        section,
    )


def rows_of(results: Path, record: Record, kind: str) -> list[dict[str, Any]]:
    """Return the metrics rows of one kind."""
    with (results / RUNS_FOLDER / record.run_id / "metrics.jsonl").open() as file:
        return [row for row in map(json.loads, file) if row["kind"] == kind]


def lines(page, section: str = "curves", kind: str | None = None) -> list[dict[str, Any]]:
    """Return the named lines of a figure."""
    return [
        trace
        for trace in drawn(page, section)["data"]
        if "lines" in trace.get("mode", "") and trace.get("meta") and kind in (None, trace["meta"]["columns"][1])
    ]


def saved(page, section: str, button: str) -> bytes:
    """Return the file that a figure's button downloads."""
    figure = page.locator(f"[data-figure={section}]")
    figure.scroll_into_view_if_needed()
    with page.expect_download() as download:
        figure.get_by_role("button", name=button, exact=True).click()
    return Path(download.value.path()).read_bytes()


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


def test_axes_of_the_curves(browser, path):
    with opened(browser, path) as page:
        ready(page)
        steps = lines(page)[0]["x"]
        page.locator("#axis").select_option("tokens")
        figure = drawn(page, "curves")
        assert lines(page)[0]["x"] == [step * 8 * 128 for step in steps]
        assert figure["layout"]["xaxis"]["title"]["text"] == "tokens"
        page.locator("#axis").select_option("seconds")
        seconds = lines(page)[0]["x"]
        assert seconds == sorted(seconds)
        assert seconds[0] == 0
        assert seconds[-1] > 1
        page.get_by_label("log x").check()
        page.get_by_label("log y").check()
        layout = drawn(page, "curves")["layout"]
        assert (layout["xaxis"]["type"], layout["yaxis"]["type"]) == ("log", "log")
        page.locator("#axis").select_option("steps")
        page.get_by_label("without the first tenth").check()
        assert min(lines(page)[0]["x"]) == STEPS // 10


def test_unticked_cell_is_hidden_in_every_figure_and_changes_no_number(browser, path, cells):
    with opened(browser, path) as page:
        ready(page)
        name = "rmsnorm pre 4"
        before = {section: json.dumps(drawn(page, section)["data"]) for section in SECTIONS}
        assert all(
            name in before[section] for section in ("losses", "curves", "rates", "profiles", "heatmaps", "signatures")
        )
        first = page.locator("#cells tbody tr").first
        first.get_by_role("checkbox").uncheck()
        hidden = " ".join(first.inner_text().split()[:3])
        for section in SECTIONS:
            figure = drawn(page, section)
            data = json.dumps(figure["data"]) + json.dumps(figure["layout"].get("annotations"))
            assert f'"{hidden}' not in data, section
        marks = {trace["name"]: trace["x"] for trace in drawn(page, "losses")["data"] if trace.get("meta")}
        assert marks == {row["cell"]: [row["val_loss"]] for row in cells if row["cell"] != hidden}
        page.get_by_role("button", name="show all").click()
        assert {section: json.dumps(drawn(page, section)["data"]) for section in SECTIONS} == before


def test_hidden_run_leaves_its_line_and_the_count(browser, path):
    with opened(browser, path) as page:
        ready(page)
        run = page.locator("#runs tbody tr").first
        name = run.locator("td").nth(1).inner_text()
        run.get_by_role("checkbox").uncheck()
        named = [trace["name"] for trace in lines(page)]
        assert sum("(n=1 of 2)" in name for name in named) == 1
        page.locator("#group").select_option("runs")
        assert name not in [trace["name"] for trace in lines(page)]


def test_filter_narrows_tables_and_figures(browser, path):
    with opened(browser, path) as page:
        ready(page).get_by_role("searchbox").fill("rmsnorm depth=8")
        assert page.locator("#runs tbody tr").count() == 4
        assert page.locator("#cells tbody tr").count() == 2
        assert {trace["name"] for trace in drawn(page, "losses")["data"] if trace.get("meta")} == {
            "rmsnorm pre 8",
            "rmsnorm post 8",
        }
        for same in ("lr=1e-3 seed=0", "optim.lr=0.001 seed=0", "lr=1E-03 seed=0 norm="):
            page.get_by_role("searchbox").fill(same)
            assert page.locator("#runs tbody tr").count() == 8
        # A check box does not change runs that the filter hides.
        page.locator("#cells tbody tr input").first.uncheck()
        page.get_by_role("searchbox").fill("")
        assert page.locator("#runs tbody tr input:checked").count() == 23
        page.get_by_role("searchbox").fill("no such thing")
        assert page.locator("#runs tbody tr").count() == 0
        assert "Nothing is selected" in drawn(page, "losses")["empty"]
        assert "Nothing is selected" in drawn(page, "profiles")["empty"]
        assert not page.locator("[data-figure=losses] .buttons").is_visible()


COMPARED = {
    "depth>4": lambda run: run.depth > 4,
    "model.depth>=4": lambda run: run.depth >= 4,
    "n_layer<8": lambda run: run.depth < 8,
    "depth!=8": lambda run: run.depth != 8,
    "lr<0.005": lambda run: run.lr < 0.005,
    "learning_rate=1e-3": lambda run: run.lr == 1e-3,
    "placement!=pre rmsnorm": lambda run: run.placement != "pre" and run.norm == "rmsnorm",
    "state=diverged": lambda run: run.outcome == DIVERGED,
    "warmup=0": lambda run: False,
    "warmup>=0": lambda run: True,
    "optim.warmup_steps=null": lambda run: False,
}


def test_filter_compares_options_by_short_names(browser, path):
    with opened(browser, path) as page:
        ready(page)
        for text, meets in COMPARED.items():
            page.get_by_role("searchbox").fill(text)
            expected = sum(map(meets, grid()))
            assert (text, page.locator("#runs tbody tr").count()) == (text, expected)
            problem = page.locator("#filter-problem").inner_text()
            assert (text, problem) == (text, "" if expected else "no run matches the filter")


INVALID = {
    "depht>4": "depht: no run has this option",
    "depth>": "depth>: write option, comparison and value, such as depth>4",
    "depth=>4": "depth=>4: write option, comparison and value, such as depth>4",
    "norm>4": "norm>4: > compares numbers; use = or !=",
    "depth>deep": "depth>deep: > compares numbers; use = or !=",
    "eps=1": "eps: ambiguous, write norm.eps or optim.eps",
}


def test_filter_reports_invalid_terms(browser, path):
    with opened(browser, path) as page:
        ready(page)
        for text, problem in INVALID.items():
            page.get_by_role("searchbox").fill(text)
            assert page.locator("#filter-problem").inner_text() == problem
            assert page.locator("#runs tbody tr").count() == 24  # an invalid term hides nothing
        page.get_by_role("searchbox").fill("")
        assert page.locator("#filter-problem").inner_text() == ""


def test_tables_are_sorted_by_a_click(browser, path):
    with opened(browser, path) as page:
        ready(page)
        heads = page.locator("#cells thead th").all_inner_texts()
        column = next(place for place, head in enumerate(heads) if head.startswith("val loss")) + 1
        cell = f"#cells tbody tr td:nth-child({column})"

        def losses() -> list[float]:
            pairs = [text.split(" (")[0].split(" and ") for text in page.locator(cell).all_inner_texts()]
            return [(float(first) + float(second)) / 2 for first, second in pairs]

        assert losses() == sorted(losses())  # the best first
        sort = page.locator("#cells thead").get_by_role("button", name="val loss", exact=True)
        sort.click()
        sort.click()
        assert losses() == sorted(losses(), reverse=True)
        assert page.locator("#cells th[aria-sort=descending]").count() == 1
        # The figures follow the order of the cells.
        page.locator("#cells thead").get_by_role("button", name="norm", exact=True).click()
        panels = [trace["meta"]["label"] for trace in drawn(page, "heatmaps")["data"]]
        assert panels == sorted(panels, key=lambda label: label.split()[0])


def test_lines_of_every_learning_rate(browser, path):
    with opened(browser, path) as page:
        ready(page).locator("#which-rates").select_option("all")
        names = [trace["name"] for trace in lines(page)]
        assert "rmsnorm pre 4 lr 0.01 (n=2)" in names
        assert len({name.split(" (")[0] for name in names}) == 12
        dotted = [trace for trace in lines(page) if "remaining" in trace["meta"]["columns"][1]]
        assert [trace["meta"]["columns"] for trace in dotted] == [["rmsnorm post 4 lr 0.01", "mean of the 1 remaining"]]
        (solid,) = [
            trace for trace in lines(page) if trace["name"] == "rmsnorm post 4 lr 0.01 (n=2)" and trace not in dotted
        ]
        assert all(y is None for x, y in zip(solid["x"], solid["y"], strict=True) if x > 250)


def inspected(results: Path, record: Record, statistic: str) -> list[dict[str, Any]]:
    """Return the rows of `inspect` for a statistic."""
    return json.loads(normlab("inspect", record.run_id, statistic, "--json", "--results-dir", str(results)))


@pytest.mark.parametrize(
    "statistic",
    ["resid_rms", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("dresid_rms", "attn_ratio"))],
)
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


def test_slider_moves_the_last_panel(browser, path):
    with opened(browser, path) as page:
        ready(page)

        def last() -> list[Any]:
            traces = [trace for trace in drawn(page, "profiles")["data"] if trace.get("meta")]
            return [trace["y"] for trace in traces if trace["meta"]["columns"][0].startswith("at step")]

        end = last()
        page.locator("#step").focus()
        page.keyboard.press("ArrowLeft")
        assert last() != end
        page.keyboard.press("End")
        assert last() == end


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


def test_downloads_equal_the_figures(browser, path, cells):
    with opened(browser, path) as page:
        ready(page)
        rows = list(csv.DictReader(io.StringIO(saved(page, "losses", "CSV").decode())))
        assert {row["cell"]: (row["val loss"], row["low"], row["n"]) for row in rows} == {
            row["cell"]: (repr(row["val_loss"]), repr(row["val_loss_low"]), str(row["seeds"])) for row in cells
        }
        traces = lines(page)
        rows = list(csv.DictReader(io.StringIO(saved(page, "curves", "CSV").decode())))
        label = traces[0]["meta"]["columns"][0]
        mean = [row for row in rows if row["line"] == label and row["kind"].startswith("mean")]
        assert [float(row["step"]) for row in mean] == traces[0]["x"]
        for section in SECTIONS:
            assert saved(page, section, "PNG").startswith(b"\x89PNG\r\n\x1a\n"), section
            assert saved(page, section, "SVG").startswith(b"<svg"), section
            assert len(saved(page, section, "CSV").splitlines()) > 4, section
        with page.expect_download() as download:
            page.locator("#runs").get_by_role("button", name="CSV").click()
        assert len(Path(download.value.path()).read_text().splitlines()) == 25


@pytest.mark.process
def test_png_export_writes_every_figure(sweep, tmp_path):
    """`--format png` writes each figure as a file, none of them blank."""
    import struct
    import zlib

    normlab("compare", str(sweep), "-o", str(tmp_path / "paper.html"), "--format", "png")
    assert {path.name for path in tmp_path.iterdir()} == {"paper.html", *(f"paper-{name}.png" for name in SECTIONS)}
    for path in tmp_path.glob("*.png"):
        content = path.read_bytes()
        width, height = struct.unpack(">II", content[16:24])
        assert (width, content[:8]) == (2000, b"\x89PNG\r\n\x1a\n")
        assert height > 400
        at, pixels = 8, b""
        while at < len(content):
            (size,) = struct.unpack(">I", content[at : at + 4])
            pixels += content[at + 8 : at + 8 + size] if content[at + 4 : at + 8] == b"IDAT" else b""
            at += 12 + size
        assert len(set(zlib.decompress(pixels))) > 50, path.name


def test_theme_changes_the_colours(browser, path):
    with opened(browser, path, theme="dark") as page:
        ready(page)
        dark = drawn(page, "losses")["layout"]["paper_bgcolor"]
        page.locator("#theme").select_option("light")
        assert drawn(page, "losses")["layout"]["paper_bgcolor"] != dark
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def awkward() -> list[Record]:
    """Return runs with long names, five learning rates and divergence in several cells."""
    rates = (1e-4, 3.16e-4, 1e-3, 3.16e-3, 1e-2)
    return [
        Record(norm=norm, placement="pre", depth=depth, lr=lr, seed=seed, steps=40, stats_every=None, **outcome)
        for norm in ("a_norm_of_a_rather_long_name", "another_norm_that_is_long", "layernorm")
        for depth in (4, 12)
        for lr in rates
        for seed in (0, 1)
        for outcome in [{"outcome": DIVERGED, "at": 30} if lr == 1e-2 and seed else {}]
    ]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory) -> Path:
    """Return the path of the page of `awkward`."""
    folder = tmp_path_factory.mktemp("awkward")
    for record in awkward():
        write_run(folder / RUNS_FOLDER, record)
    normlab("compare", str(folder), "-o", str(folder / "page.html"))
    return folder / "page.html"


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("which", ["path", pytest.param("crowded", marks=pytest.mark.exhaustive)])
def test_no_text_is_cut_or_overlaps(browser, which, size, request):
    with opened(browser, request.getfixturevalue(which), size) as page:
        ready(page)
        for section in SECTIONS if which == "path" else SECTIONS[:4]:
            drawn(page, section)
        page.wait_for_timeout(100)
        # Visible texts of the figures; a small overlap is within the height of a line.
        overlapping = page.evaluate(
            """() => [...document.querySelectorAll('.plot')].flatMap((plot) => {
              const texts = [...plot.querySelectorAll('.main-svg text')]
                .map((text) => [text.textContent, text.getBoundingClientRect(), text])
                .filter(([text, box]) => text.trim() && box.width);
              const across = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left);
              const down = (a, b) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
              return texts.flatMap(([text, a], i) => texts.slice(i + 1)
                .filter(([, b]) => across(a, b) > 3 && down(a, b) > 5)
                .map(([other]) => `${plot.closest('figure').dataset.figure}: ${text} | ${other}`));
            })"""
        )
        assert overlapping == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        # A figure that is wider than the screen scrolls in its box.
        cut = page.evaluate(
            """() => [...document.querySelectorAll('.plot .main-svg text')].filter((text) => {
              const box = text.getBoundingClientRect(), around = text.closest('svg').getBoundingClientRect();
              const wide = box.left < around.left - 1 || box.right > around.right + 1;
              return box.width && (wide || box.top < around.top - 1 || box.bottom > around.bottom + 1);
            }).map((text) => text.closest('figure').dataset.figure + ': ' + text.textContent)"""
        )
        assert cut == []


def test_every_control_works_by_keyboard(browser, path):
    """Tab reaches every control, and every control has a label."""
    with opened(browser, path) as page:
        ready(page)
        for section in SECTIONS:
            drawn(page, section)
        controls = page.locator("main :is(button, select, input):visible")
        expected = controls.count()
        unnamed = controls.evaluate_all(
            """all => all.filter((control) =>
                !(control.labels?.length || control.ariaLabel || control.textContent.trim()))
              .map((control) => control.outerHTML)"""
        )
        assert unnamed == []
        page.evaluate("window.scrollTo(0, 0)")
        reached = set()
        for _ in range(expected + 40):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate(
                    "[...document.querySelectorAll('main :is(button, select, input)')].indexOf(document.activeElement)"
                )
            )
        assert len(reached - {-1}) == expected
        page.get_by_label("log y").focus()
        page.keyboard.press("Space")
        assert drawn(page, "curves")["layout"]["yaxis"]["type"] == "log"


@pytest.mark.parametrize(
    "name",
    [
        "<img src=x onerror=alert(1)>",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("a $x^2$ %{x} &lt; <b>b</b>", "</script>%{fullData.name}")
        ),
    ],
)
def test_run_name_is_never_markup(browser, tmp_path, name):
    """A run's name is not interpreted as HTML, a template or mathematics, in any figure or table."""
    record = Record(steps=40, stats_every=10)
    folder = write_run(tmp_path / "results" / RUNS_FOLDER, record)
    written = (folder.path / "run.json").read_text()
    run = {key: value for key, value in json.loads(written).items() if key != "sha256"}
    write_atomic(
        folder.path / "run.json",
        seal({**run, "name": name, "config": {**run["config"], "norm": {"preset": name, "name": "x"}}}),
    )
    page_path = tmp_path / "page.html"
    normlab("compare", str(tmp_path / "results"), "-o", str(page_path))
    with opened(browser, page_path) as page:
        page.on("dialog", lambda dialog: pytest.fail("a script of the name has run"))
        ready(page).locator("#group").select_option("runs")
        for section in SECTIONS:
            drawn(page, section)
        assert page.locator("img").count() == 0
        assert name in page.locator("#runs tbody").inner_text()
        assert name in page.locator("#cells tbody").inner_text()
        assert name in page.locator("[data-figure=losses] .plot").evaluate("plot => plot.textContent")
        drawings = page.locator(".plot .legendtext").evaluate_all("all => all.map((element) => element.textContent)")
        assert any(name in text for text in drawings)


def test_diverged_run_has_no_final_loss(browser, tmp_path):
    """A diverged seed at the best learning rate has no stroke, and the mark of the others is hollow."""
    records = [Record(steps=400, seed=seed, stats_every=None) for seed in (0, 1)]
    records += [Record(steps=400, seed=2, outcome=DIVERGED, at=350, stats_every=None)]
    for record in records:
        write_run(tmp_path / RUNS_FOLDER, record)
    normlab("compare", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        figure = drawn(ready(page), "losses")
        strokes, mark = figure["data"]
        assert len(strokes["x"]) == 2
        assert mark["marker"]["symbol"].endswith("-open")
        assert any("1 of 3 diverged" in annotation["text"] for annotation in figure["layout"]["annotations"])
        assert "diverged" in page.locator("#runs tbody tr", has_text="diverged").locator("td").all_inner_texts()


def test_matrix_reports_mixed_options(browser, tmp_path):
    for width in (64, 128):
        write_run(tmp_path / RUNS_FOLDER, Record(steps=40, width=width, stats_every=None))
    normlab("compare", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        figure = drawn(ready(page), "matrix")
        assert "model.width 64 and 128" in figure["caption"]
        assert any("*" in annotation["text"] for annotation in figure["layout"]["annotations"])


def test_short_run_is_not_drawn_after_its_end(browser, tmp_path):
    """A run is in no panel and in no mean of a step beyond its last."""
    for steps, norm in ((100, "rmsnorm"), (400, "layernorm")):
        write_run(tmp_path / RUNS_FOLDER, Record(steps=steps, norm=norm, warmup_steps=20))
    normlab("compare", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        assert "train.steps" in ready(page).locator("#warnings").inner_text()
        labels = [trace["meta"]["columns"] for trace in drawn(page, "profiles")["data"] if trace.get("meta")]
        last = [label for moment, label in labels if moment.startswith("at step")]
        assert (len(last), len([label for moment, label in labels if moment == "at init"])) == (1, 2)


def test_page_without_any_result(browser, tmp_path):
    """A page of damaged and empty runs has a message in place of each figure."""
    broken = tmp_path / RUNS_FOLDER / "broken"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("{")
    (tmp_path / RUNS_FOLDER / "empty").mkdir()
    normlab("compare", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        ready(page)
        for section in ("losses", "curves", "rates", "matrix", "profiles"):
            assert drawn(page, section)["empty"], section
        assert not page.locator("#heatmaps").is_visible()
        text = page.locator("#runs").inner_text()
        assert "broken" in text
        assert "is damaged" in text
        assert "empty" in text
