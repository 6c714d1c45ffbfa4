"""The controls of the comparison page: what is drawn, filtered, sorted and exported."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from normlab.store.format import DIVERGED
from support.browser import opened
from support.compare_pages import SECTIONS, STEPS, drawn, grid, lines, normlab, ready, saved


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


@pytest.mark.browser
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
