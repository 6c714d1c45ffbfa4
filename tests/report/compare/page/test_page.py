"""The comparison page in a browser: it draws the description that Python made, and its controls work.

The numbers of the description are compared with `summarize` and with the records in `test_figures.py` and
`test_compare_data.py`.
"""

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from synthetic_runs import Record, write_run, write_sweep

from normlab.store.format import DIVERGED, RUNS_FOLDER
from support.browser import PHONE, WIDE, opened
from support.compare_pages import FIGURES, lines_of, normlab, open_table, ready

AXIS = {"name": "", "low": 1.5, "high": 2.5, "ticks": [[2, "2"]], "is_log": False}


def draw_lines(page, lines: list[list[dict]], **spec) -> ET.Element:
    """Draw a panel with these lines in the place of the final losses; return its SVG element."""
    drawing = {"x": AXIS | {"low": -1, "high": 1, "ticks": [[0, "x"]]}, "y": AXIS, "is_connected": False} | spec
    panel = {"title": "", "lines": [[0, points] for points in lines]}
    markup = page.evaluate(
        """(drawing) => {
          const place = document.querySelector('[data-figure=factor] .panels');
          drawLines(place, drawing);
          return place.querySelector('svg').outerHTML;
        }""",
        drawing | {"panels": [panel]},
    )
    return ET.fromstring(markup)


def mark(y: float | None, **more) -> dict:
    return {"x": 0, "y": y, "low": None, "high": None, "seeds": [], "diverged": "", "is_open": False, "text": ""} | more


def test_points_are_where_the_axis_says(browser, path):
    """Each mean lies on the line through the labelled ticks."""
    with opened(browser, path) as page:  # asserts that there were no requests and no console messages
        lines = lines_of(ready(page).evaluate("DATA"), "factor")
        svg = page.locator("[data-figure=factor] svg[role=img]").first
        ticks = svg.evaluate(
            """(svg) => [...svg.querySelectorAll('text[text-anchor=end]:not(.mark)')]
                .map((text) => [Number(text.textContent), Number(text.getAttribute('y')) - 4])"""
        )
        circles = svg.evaluate(
            """(svg) => [...svg.querySelectorAll('circle[r="3.6"]')].map((dot) => Number(dot.getAttribute('cy')))"""
        )
        assert page.locator("[data-figure=factor] text.mark").all_text_contents() == ["1/3"]
    (low, y_low), (high, y_high) = ticks[0], ticks[-1]
    expected = [
        y_low + (point["y"] - low) * (y_high - y_low) / (high - low)
        for (panel, _), line in lines.items()
        for point in line
        if panel == "post-norm" and point["y"] is not None
    ]
    assert len(ticks) >= 2
    assert circles == pytest.approx(expected, abs=0.01)


def test_a_stuck_run_above_the_frame_is_an_open_point_with_its_loss(browser, path):
    with opened(browser, path) as page:
        lines = [[mark(2.0)], [mark(2.4, is_open=True)], [mark(3.5, is_open=True)], [mark(3.6, is_open=True)]]
        svg = draw_lines(ready(page), lines)
    circles = [circle for circle in svg.findall(".//{*}circle") if circle.get("r") == "3.6"]
    assert [circle.get("fill") == "var(--ground)" for circle in circles] == [False, True, True, True]
    assert [text.text for text in svg.findall(".//{*}text[@class='mark']")] == ["3.50", "3.60"]
    heights = [float(circle.get("cy") or 0) for circle in circles]
    assert heights[0] > heights[1] > heights[2] == heights[3]


def test_curves_are_clipped_and_a_diverged_seed_has_a_cross_at_its_step(browser, path):
    """The axis of curves over 400 steps has ticks; the cross is where 250 is between them."""
    with opened(browser, path) as page:
        ready(page)
        curves = page.locator("[data-figure=loss] svg[role=img] path:not([stroke-width='2'])")
        clips = curves.evaluate_all("(all) => all.map((path) => path.getAttribute('clip-path'))")
        crosses = page.locator("[data-figure=loss] path[stroke-width='2']")
        (drawing,) = crosses.evaluate_all("(all) => all.map((cross) => cross.getAttribute('d'))")
        ticks = crosses.first.evaluate(
            """(cross) => [...cross.closest('svg').querySelectorAll('text[text-anchor=middle]')]
                .map((text) => [Number(text.textContent), Number(text.getAttribute('x'))])"""
        )
    (first, x_first), (second, x_second) = ticks[:2]
    x = float(drawing.removeprefix("M").split(",")[0]) + 4
    assert x == pytest.approx(x_first + (250 - first) * (x_second - x_first) / (second - first), abs=0.2)
    assert len(clips) == 16  # a curve and a band for each of eight lines
    assert all(clip and clip.startswith("url(#clip") for clip in clips)


# Controls


def test_a_legend_hides_a_line_in_every_figure(browser, path):
    with opened(browser, path) as page:
        curves = ready(page).locator(".panel .curve")
        count = curves.count()
        page.locator("[data-figure=lr] [data-label=RMSNorm]").focus()
        page.keyboard.press("Space")
        ready(page)
        assert 0 < curves.count() < count
        pressed = page.locator("[data-label=RMSNorm]").evaluate_all("(all) => all.map((each) => each.ariaPressed)")
        assert set(pressed) == {"false"}
        assert page.evaluate("document.activeElement.dataset.label") == "RMSNorm"
        page.keyboard.press("Space")
        ready(page)
        assert curves.count() == count


def test_a_list_chooses_the_statistic_of_one_figure(browser, path):
    """An arrow key chooses the next one; the focus stays."""
    with opened(browser, path) as page:
        figures = ready(page).locator("[data-figure=layers]")
        assert [figure.locator("select").first.input_value() for figure in figures.all()] == ["dresid_rms", "resid_rms"]
        names = figures.first.locator("select")
        before = figures.first.locator(".panel svg").first.inner_html()
        names.select_option("attn_rms")
        assert figures.first.locator(".axis-name.y").inner_text().startswith("↑ attn_rms")
        assert "attention" in figures.first.locator(".muted").first.inner_text()
        names.focus()
        page.keyboard.press("ArrowDown")
        assert names.input_value() != "attn_rms"
        assert page.evaluate("document.activeElement.tagName") == "SELECT"
        assert figures.first.locator(".panel svg").first.inner_html() != before
        assert figures.last.locator("select").first.input_value() == "resid_rms"


def test_tables_equal_summarize_and_are_sorted_by_a_click(browser, path):
    table = normlab("summarize", str(path.parent / "sweeps" / "two norms"), "--format", "markdown").splitlines()
    expected = [line[2:-2].split(" | ") for line in table if line.startswith("| ") and "---" not in line]
    with opened(browser, path) as page:
        assert not ready(page).locator("#tables details[open]").count()
        open_table(page, "cells")
        columns = page.locator("#cells thead th").all_inner_texts()
        rows = [row.split("\t") for row in page.locator("#cells tbody tr").all_inner_texts()]
        assert [columns, *rows] == [[text.strip() for text in row] for row in expected]
        page.locator("#cells thead").get_by_role("button", name="val loss", exact=True).click()
        column = page.locator(f"#cells tbody td:nth-child({1 + columns.index('val loss')})")
        means = [float(text.split()[0]) for text in column.all_inner_texts()[:-1]]
        assert means == sorted(means)
        assert "diverged" in column.last.inner_text()  # texts come last
        assert page.locator("#cells th[aria-sort]").evaluate("(head) => head.ariaSort") == "ascending"


def test_tooltip_names_the_nearest_point(browser, path):
    with opened(browser, path) as page:
        point = lines_of(ready(page).evaluate("DATA"), "factor")["post-norm", "LayerNorm"][0]
        box = page.locator('[data-figure=factor] circle[r="3.6"]').first.bounding_box()
        assert box
        page.mouse.move(box["x"] + 4, box["y"] + 4)
        text = page.locator("#tip").inner_text()
        assert text == f"LayerNorm: {point['text']}"
        assert text.startswith(f"LayerNorm: {point['y']:.4f} [")
        page.mouse.move(1, 1)
        assert not page.locator("#tip").is_visible()


def test_every_control_is_reached_by_the_keyboard_and_has_a_name(browser, path):
    with opened(browser, path) as page:
        controls = ready(page).locator("main :is(button, select, summary, [tabindex]):visible")
        unnamed = controls.evaluate_all(
            """(all) => all.filter((control) =>
                !(control.labels?.length || control.ariaLabel || control.textContent.trim())).length"""
        )
        assert unnamed == 0
        expected = controls.count()
        page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
        reached = set()
        for _ in range(expected + 10):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("[...document.querySelectorAll('main *')].indexOf(document.activeElement)"))
        assert len(reached - {-1}) == expected


def test_colours_follow_the_theme_and_paper_is_light(browser, path):
    found = {}
    colours = """() => [document.body, document.querySelector('[data-figure=factor] circle')]
        .map(getComputedStyle).map(({backgroundColor, fill}) => [backgroundColor, fill])"""
    for theme in ("light", "dark"):
        with opened(browser, path, theme=theme) as page:
            found[theme] = ready(page).evaluate(colours)
            page.emulate_media(media="print")
            found[f"{theme} paper"] = page.evaluate(colours)
    assert found["light"] == found["light paper"] == found["dark paper"]
    assert found["dark"][0][0] != found["light"][0][0] == "rgb(255, 255, 255)"
    assert found["dark"][1][1] != found["light"][1][1] == "rgb(0, 114, 178)"


def test_everything_is_printed(browser, path):
    """Figures below the window too, and open tables in full."""
    with opened(browser, path, PHONE) as page:
        page.locator("#tables summary").first.wait_for()
        page.wait_for_timeout(100)
        assert page.locator("[data-figure=layers] .panel").count() == 0
        page.pdf()
        drawn = "[...FIGURES.values()].filter(({element}) => element.querySelector('.panel')).map(({spec}) => spec.id)"
        assert set(page.evaluate(drawn)) == set(FIGURES)
        page.locator("#tables details").evaluate_all("(all) => { for (const each of all) each.open = true; }")
        page.emulate_media(media="print")
        cut = "(all) => all.filter((table) => table.scrollHeight > table.clientHeight + 1).length"
        assert page.locator(".tall").evaluate_all(cut) == 0


# Unusual runs

LONG = ("a_norm_with_a_name_that_is_too_long_for_an_axis", "another_norm_with_a_name_that_is_too_long", "layernorm")


def awkward() -> list[Record]:
    """Runs with long names, five learning rates and divergence in several cells."""
    cells = itertools.product(LONG, (4, 12), (1e-4, 3.16e-4, 1e-3, 3.16e-3, 1e-2), (0, 1))
    return [
        Record(norm=norm, depth=depth, lr=lr, seed=seed, steps=40, stats_every=None, **outcome)
        for norm, depth, lr, seed in cells
        for outcome in [{"outcome": DIVERGED, "at": 30} if lr == 1e-2 and seed else {}]
    ]


def page_of(folder: Path, records: list[Record] | None) -> Path:
    """Write the page of some runs, or of those in the folder."""
    if records is not None:
        write_sweep(folder, "made", records)
    name = str(folder) if records is None else "made"
    normlab("compare", name, "--results-dir", str(folder), "-o", str(folder / "page.html"))
    return folder / "page.html"


@pytest.mark.parametrize("which", ["grid", "awkward"])
def test_no_text_is_cut_or_overlaps(browser, which, path, tmp_path):
    """A turned text may be shortened, and its box is a few pixels larger than its letters."""
    made = path if which == "grid" else page_of(tmp_path, awkward())
    for size in (WIDE, PHONE):
        with opened(browser, made, size) as page:
            ready(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
            problems = page.evaluate(
                """() => [...document.querySelectorAll('.panel svg[role=img]')].flatMap((panel) => {
                  const around = panel.closest('.chart').getBoundingClientRect();
                  const texts = [...panel.querySelectorAll('text')]
                    .map((text) => [text.textContent, text.getBoundingClientRect(), text.hasAttribute('transform')]);
                  const across = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left);
                  const down = (a, b) => Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
                  const level = texts.filter(([, , isTurned]) => !isTurned);
                  const cut = texts.filter(([, box]) => box.left < around.left - 1 || box.right > around.right + 1);
                  const pairs = level.flatMap(([text, a], i) => level.slice(i + 1)
                    .filter(([, b]) => across(a, b) > 3 && down(a, b) > 5).map(([other]) => `${text} | ${other}`));
                  return [...cut.map(([text]) => text), ...pairs];
                })"""
            )
            assert problems == []


def test_a_page_of_damaged_runs_and_of_unfinished_ones(browser, tmp_path):
    broken = tmp_path / RUNS_FOLDER / "broken"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("{")
    with opened(browser, page_of(tmp_path, None)) as page:
        assert ready(page).locator(".best").inner_text().startswith("No run has a final loss yet")
        assert "damaged (1)" in page.locator("#facts").inner_text()
        assert page.locator(".chart").count() == 0
    write_run(tmp_path / RUNS_FOLDER, Record(steps=40, outcome="interrupted"))
    with opened(browser, page_of(tmp_path, None)) as page:
        figures = ready(page).locator(".chart").evaluate_all("(all) => all.map((each) => each.dataset.figure)")
        assert figures[:2] == ["unfinished", "loss"]
        assert "factor" not in figures
        assert page.locator("[data-figure=unfinished] .curve").count() == 1
