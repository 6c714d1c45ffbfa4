"""Where the comparison page draws its numbers: on the axis, inside the frame, and within the window."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest
from synthetic_runs import Record, write_sweep

from normlab.store.format import DIVERGED
from support.browser import PHONE, WIDE, opened
from support.compare_pages import drawn, normlab, overlapping_texts, points, ready


def write_page(folder: Path, records: Sequence[Record], *flags: str) -> Path:
    """Write the page of a sweep of some runs."""
    write_sweep(folder, "made", records)
    normlab("compare", "made", "--results-dir", str(folder), "-o", str(folder / "page.html"), *flags)
    return folder / "page.html"


def test_points_are_where_the_axis_says(browser, path):
    """Each mean lies on the line through the labelled ticks."""
    with opened(browser, path) as page:
        spec = drawn(ready(page), "factor")
        svg = page.locator("[data-figure=factor] svg[role=img]").first
        ticks = svg.evaluate(
            """(svg) => [...svg.querySelectorAll('text[text-anchor=end]:not(.mark)')]
                .map((text) => [Number(text.textContent), Number(text.getAttribute('y')) - 4])"""
        )
        circles = svg.evaluate(
            """(svg) => [...svg.querySelectorAll('circle[r="3.6"]')].map((dot) => Number(dot.getAttribute('cy')))"""
        )
    (low, y_low), (high, y_high) = ticks[0], ticks[-1]
    expected = [
        y_low + (point["y"] - low) * (y_high - y_low) / (high - low)
        for line in spec["panels"][0]["lines"]
        for point in line["points"]
        if point["y"] is not None
    ]
    assert len(ticks) >= 2
    assert circles == pytest.approx(expected, abs=0.01)


def draw_lines(page, lines: list[list[dict]], **spec) -> str:
    """Draw a panel with these lines in the place of the final losses; return its SVG element."""
    return page.evaluate(
        """([lines, spec]) => {
          const place = document.querySelector('[data-figure=factor] .panels');
          const all = lines.map((points, i) => ({label: String(i), colour: 'red', dash: '', points}));
          const panel = {title: '', lines: all};
          drawLines(place, {title: '', panels: [panel], x: {ticks: [[0, 'x']]}, ...spec});
          return place.querySelector('svg').outerHTML;
        }""",
        [lines, spec],
    )


def test_stuck_runs_that_stretch_the_axis_are_open_points_at_its_top(browser, path):
    lines = [[{"x": 0, "y": y, "seeds": [y], "n": 1, "stuck": int(y > 2.3)}] for y in (2.0, 2.2, 2.4, 3.5, 3.6)]
    with opened(browser, path) as page:
        near, far = (ET.fromstring(draw_lines(ready(page), lines[:count])) for count in (3, 5))
    for svg, above in ((near, []), (far, ["2.40", "3.50", "3.60"])):
        circles = [circle for circle in svg.findall(".//{*}circle") if circle.get("r") == "3.6"]
        assert [circle.get("fill") == "red" for circle in circles] == [True, True, *[False] * (len(circles) - 2)]
        assert [text.text for text in svg.findall(".//{*}text") if text.get("class") == "mark"] == above
        heights = [float(circle.get("cy") or 0) for circle in circles]
        assert heights[0] > heights[1] > heights[2]
        assert len(set(heights[2:])) == 1
    ticks = {text.text for text in far.findall(".//{*}text") if text.get("class") != "mark"}
    assert "2.1" in ticks
    assert "3" not in ticks


def test_interval_beyond_the_frame_ends_in_an_arrow(browser, path):
    """Cells with a small and a huge interval; nothing is drawn outside the frame."""
    cells = [(2, 1.99, 2.01), (2.1, -50, 60)]
    lines = [
        [{"x": 0, "y": y, "low": low, "high": high, "seeds": [y], "n": 3, "diverged": 0}] for y, low, high in cells
    ]
    with opened(browser, path) as page:
        svg = draw_lines(ready(page), lines, isConnected=False)
    found = re.search(r'<rect x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', svg)
    assert found
    top, height = map(float, found.groups())
    paths = re.findall(r'<path d="(M[^"]*)"', svg)
    heights = [float(y) for path in paths for y in re.findall(r",([-\d.]+)", path)]
    assert all(top - 0.01 <= y <= top + height + 0.01 for y in heights)
    inside, beyond = paths
    assert (inside.count("L"), beyond.count("L")) == (3, 5)  # an arrow has one stroke more than a cap, at both ends


def test_curves_are_clipped_to_the_frame(browser, path):
    """The axis leaves out the first tenth of training, so curves and bands start outside the frame."""
    with opened(browser, path) as page:
        spec = drawn(ready(page), "curves")
        paths = page.locator("[data-figure=curves] svg[role=img] path:not([stroke-width='2'])")
        clips = paths.evaluate_all("(all) => all.map((path) => path.getAttribute('clip-path'))")
    assert len(clips) == 2 * sum(len(panel["lines"]) for panel in spec["panels"])  # a curve and a band for each line
    assert all(clip and clip.startswith("url(#clip") for clip in clips)


def test_diverged_seeds_are_marked(browser, path):
    with opened(browser, path) as page:
        assert ready(page).locator("[data-figure=factor] text.mark").all_text_contents() == ["1/3"]


def test_diverged_seed_has_a_cross_at_its_step(browser, path):
    """The axis of curves over 400 steps has ticks; the cross is where 250 is between them."""
    with opened(browser, path) as page:
        ready(page)
        crosses = page.locator("[data-figure=curves] path[stroke-width='2']")
        (drawing,) = crosses.evaluate_all("(all) => all.map((cross) => cross.getAttribute('d'))")
        ticks = crosses.first.evaluate(
            """(cross) => [...cross.closest('svg').querySelectorAll('text[text-anchor=middle]')]
                .map((text) => [Number(text.textContent), Number(text.getAttribute('x'))])"""
        )
        lines = points(page, "curves")
    (first, x_first), (second, x_second) = ticks[:2]
    x = float(drawing.removeprefix("M").split(",")[0]) + 4
    assert x == pytest.approx(x_first + (250 - first) * (x_second - x_first) / (second - first), abs=0.2)
    assert max(point["x"] for line in lines.values() for point in line) == 400


def test_ticks_without_room_have_no_text(browser, path):
    rates = [0.001 * 1.05**index for index in range(40)]
    points = [{"x": lr, "y": 2 + lr, "low": None, "high": None, "seeds": [2 + lr], "n": 1} for lr in rates]
    axis = {"ticks": [[lr, f"{lr:.5f}"] for lr in rates], "isLog": True, "isSparse": True}
    with opened(browser, path) as page:
        svg = draw_lines(ready(page), [points], x=axis, isConnected=True)
        assert overlapping_texts(page) == []
    assert 3 < svg.count('text-anchor="middle"') < 20


def test_figures_are_drawn_near_the_window_and_after_a_resize(browser, path):
    panels = """() => Object.fromEntries(FIGURES.map(({element, isNear}) =>
        [element.dataset.figure, [isNear, [...element.querySelectorAll('.panel svg')]
          .map((svg) => [svg.viewBox.baseVal.width, svg.clientWidth])]]))"""
    with opened(browser, path, PHONE) as page:
        page.locator("#tables summary").first.wait_for()
        page.wait_for_timeout(100)
        assert page.evaluate(panels)["layers"] == [False, []]
        page.locator("[data-figure=layers]").scroll_into_view_if_needed()
        page.wait_for_timeout(200)
        assert page.evaluate(panels)["layers"][1]
        page.set_viewport_size({"width": 900, "height": 812})
        page.wait_for_timeout(500)
        near = {figure: widths for figure, (is_near, widths) in page.evaluate(panels).items() if is_near and widths}
        assert near
        assert max(width for widths in near.values() for width, _ in widths) > PHONE[0]
        assert all(inner == pytest.approx(outer, abs=1) for widths in near.values() for inner, outer in widths)


# Bugs of the page


def test_cross_after_the_last_point_is_inside_the_panel(browser, tmp_path):
    records = [Record(norm=norm, steps=60, outcome=DIVERGED, at=20) for norm in ("layernorm", "rmsnorm")]
    path = write_page(tmp_path, records)
    with opened(browser, path) as page:
        outside = ready(page).evaluate(
            """() => [...document.querySelectorAll("[data-figure=curves] path[stroke-width='2']")].filter((cross) =>
                cross.getBoundingClientRect().right > cross.closest('svg').getBoundingClientRect().right + 1).length"""
        )
    assert outside == 0


def test_range_from_zero_on_a_logarithmic_axis(browser, path):
    seeds = [(0, 1, 0, 2), (1, 100, 0, 200), (2, 5, 1, 6)]
    line = [{"x": x, "y": y, "low": low, "high": high} for x, y, low, high in seeds]
    with opened(browser, path) as page:
        svg = draw_lines(ready(page), [line], x={}, isBand=True, mayBeLog=True)
    assert not re.search("Infinity|NaN", svg)


def test_many_cells_are_drawn(browser, path):
    """800 cells with curves of 160 points."""
    with opened(browser, path) as page:
        error = ready(page).evaluate(
            """() => {
              const points = Array.from({length: 160}, (_, x) => ({x, y: 2, low: 1, high: 3, text: ''}));
              const lines = Array.from({length: 40}, () => ({label: '', colour: 'red', dash: '', points}));
              const panels = Array.from({length: 20}, () => ({title: '', lines}));
              const place = document.querySelector('[data-figure=factor] .panels');
              try { drawLines(place, {title: '', panels, x: {}, isBand: true, isCurve: true}); }
              catch (error) { return String(error); }
              return '';
            }"""
        )
    assert error == ""


def test_no_command_for_more_panels_than_a_figure_has(browser, path):
    with opened(browser, path) as page:
        hidden = ready(page).evaluate(
            """() => [24, 25].map((count) => {
              panelsOf = () => Array.from({length: count}, () => ['', []]);
              drawNow(FIGURES[0]);
              return FIGURES[0].parts.command.hidden;
            })"""
        )
    assert hidden == [False, True]


@pytest.mark.parametrize("draw", ["drawLines", "drawGrid"])
def test_panels_that_are_not_drawn_are_counted(browser, path, draw):
    with opened(browser, path) as page:
        text = ready(page).evaluate(
            """(draw) => {
              const place = document.querySelector('[data-figure=factor] .panels');
              const panels = Array.from({length: 30}, () => ({title: '', lines: [], fields: {}}));
              const spec = {title: '', panels, x: {ticks: [[0, 'x']]}, columns: ['a'], rows: ['b']};
              draw === 'drawGrid' ? drawGrid(place, spec) : drawLines(place, spec);
              return `${place.querySelectorAll('.panel').length}: ${place.innerText}`;
            }""",
            draw,
        )
    assert text.startswith("24: ")
    assert "6 more panels are not drawn" in text


NORMS = ("batchnorm", "bhyt", "crmsnorm", "derf", "dyt", "gatednorm", "groupnorm", "layernorm", "prmsnorm", "rmsnorm")
LONG = ("a_norm_with_a_name_that_is_too_long_for_an_axis", "another_norm_with_a_name_that_is_too_long", "layernorm")


@pytest.fixture(scope="module", params=["many norms", "long names"])
def wide_page(request, tmp_path_factory) -> Path:
    """Return a page whose x axis has many levels, or long names."""
    norms, depths = (NORMS, (4,)) if request.param == "many norms" else (LONG, (4, 8))
    records = [
        Record(norm=norm, placement=placement, depth=depth, steps=40, stats_every=None)
        for norm in norms
        for placement in ("pre", "post")
        for depth in depths
    ]
    return write_page(tmp_path_factory.mktemp("wide"), records, "--x", "norm", "--color", "placement")


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_heat_map_fits_its_figure(browser, wide_page, size):
    with opened(browser, wide_page, size) as page:
        drawn(ready(page), "matrix")
        # A table may be wider than the figure in an element that scrolls.
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_ticks_stay_in_their_panel(browser, wide_page, size):
    """Turned names too, whose boxes are a few pixels larger than their letters; a name may be shortened."""
    with opened(browser, wide_page, size) as page:
        drawn(ready(page), "factor")
        outside = page.evaluate(
            """() => [...document.querySelectorAll('[data-figure=factor] .panel svg text')].filter((text) => {
              const [box, panel] = [text.getBoundingClientRect(), text.closest('svg').getBoundingClientRect()];
              return box.left < panel.left - 1 || box.right > panel.right + 1 || box.bottom > panel.bottom + 8;
            }).map((text) => text.textContent)"""
        )
    assert outside == []


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_ticks_and_chips_have_room(browser, wide_page, size):
    with opened(browser, wide_page, size) as page:
        ready(page)
        assert overlapping_texts(page) == []
        rights = page.locator("#factors :is(button, select)").evaluate_all(
            "(all) => all.map((control) => control.getBoundingClientRect().right)"
        )
        edge = page.locator("#factors").evaluate("(place) => place.getBoundingClientRect().right")
    assert max(rights) <= edge + 1


def test_marks_of_diverged_seeds_do_not_overlap(browser, path):
    """Six lines of which a seed diverges at the two highest of six learning rates."""
    rates = [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
    point = {"low": None, "high": None, "seeds": [2], "n": 2}
    line = [{**point, "x": lr, "y": 2 if lr < 1e-2 else None, "diverged": int(lr >= 1e-2)} for lr in rates]
    with opened(browser, path) as page:
        draw_lines(
            ready(page), [line] * 6, x={"ticks": [[lr, str(lr)] for lr in rates], "isLog": True}, isConnected=True
        )
        # A cross has two strokes; the marks of several lines have no numbers, which are in the tooltips.
        boxes = page.locator("[data-figure=factor] path[d$='l-8,8']").evaluate_all(
            """(all) => all.map((mark) => mark.getBoundingClientRect())
                .map(({left, right, top, bottom}) => [left, right, top, bottom])"""
        )
    assert len(boxes) == 12
    overlapping = [
        (one, other)
        for one, other in itertools.combinations(boxes, 2)
        if min(one[1], other[1]) - max(one[0], other[0]) > 5 and min(one[3], other[3]) - max(one[2], other[2]) > 5
    ]
    assert overlapping == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_frame_of_the_best_cell_is_visible(browser, path, theme):
    """The frame and the field differ in luminance by a ratio of 3 (WCAG 1.4.11)."""
    with opened(browser, path, theme=theme) as page:
        drawn(ready(page), "matrix")
        fields = page.locator(".is-best").evaluate_all(
            """(fields) => fields.map(getComputedStyle)
                .map(({backgroundColor, outlineColor}) => [backgroundColor, outlineColor])"""
        )

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    assert len(fields) == 2  # one of each depth
    for colours in fields:
        low, high = sorted(map(luminance, colours))
        assert (high + 0.05) / (low + 0.05) >= 3
