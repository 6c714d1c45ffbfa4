"""The controls of the comparison page: filter, channels, tables, theme; and where numbers are drawn."""

from __future__ import annotations

import json
import shlex

import pytest
from synthetic_runs import Record, write_sweep

from normlab.report.cells_table import summarize_by
from normlab.report.channels import choose_channels
from normlab.store.format import DIVERGED
from support.browser import opened
from support.compare_pages import FIGURES, drawn, normlab, points, ready


def chip(page, level: str):
    return page.locator(f'[data-level="{level}"]')


def test_hidden_level_leaves_every_figure_and_the_answer(browser, path, cells):
    with opened(browser, path) as page:
        before = {figure: drawn(ready(page), figure) for figure in FIGURES}
        answer = page.locator("#answer").inner_text()
        best = page.locator(".best").inner_text().replace("\xa0", " ")
        norm = best.split(",")[0]
        chip(page, norm).click()
        for figure in FIGURES:
            assert norm not in json.dumps(drawn(page, figure)), figure
            assert norm not in page.locator(f"[data-figure={figure}] .legend").inner_text()
        shown = [row for row in cells if norm not in row["label"]]
        second = sorted((row for row in shown if not row["seeds_diverged"]), key=lambda row: row["val_loss"])[:2]
        assert page.locator(".best").inner_text().replace("\xa0", " ") == second[0]["label"]
        data = page.evaluate("DATA")
        at = {cell["label"]: index for index, cell in enumerate(data["cells"])}
        (margin,) = [text for a, b, _, text in data["margins"] if [a, b] == [at[row["label"]] for row in second]]
        assert margin in page.locator("#answer").inner_text()
        assert "4 of 8 cells are shown" in page.locator("#answer").inner_text()
        other = "LayerNorm" if norm == "RMSNorm" else "RMSNorm"
        chip(page, other).click()  # the last visible level stays
        assert chip(page, other).get_attribute("aria-pressed") == "true"
        page.locator("#show-all").click()
        assert {figure: drawn(page, figure) for figure in FIGURES} == before
        assert page.locator("#answer").inner_text() == answer


def test_default_channels_are_those_of_figures(browser, path, sweep):
    table = summarize_by(sweep)
    channels = choose_channels(table.factors, [run.record for cell in table.cells for run in cell.runs], has_x=True)
    assert channels.x
    assert channels.color
    expected = {channels.x.option: "x", channels.color.option: "color"} | dict.fromkeys(
        (factor.option for factor in channels.panel), "panel"
    )
    with opened(browser, path) as page:
        selects = ready(page).locator("#factors select")
        chosen = {select.get_attribute("data-option"): select.input_value() for select in selects.all()}
        assert chosen == expected


def test_factors_swap_channels(browser, path):
    with opened(browser, path) as page:
        ready(page).locator('[data-option="placement"]').select_option("x")
        assert page.locator('[data-option="model.depth"]').input_value() == "panel"
        lines = points(page, "factor")
        assert {panel for panel, _ in lines} == {"depth 4", "depth 8"}
        page.locator('[data-option="model.depth"]').select_option("style")
        assert {label for _, label in points(page, "factor")} == {
            f"{norm}, depth {depth}" for norm in ("LayerNorm", "RMSNorm") for depth in (4, 8)
        }
        assert {panel for panel, _ in points(page, "factor")} == {""}


def test_commands_for_a_paper_run(browser, path, tmp_path):
    with opened(browser, path) as page:
        ready(page)
        commands = [page.locator(f"[data-figure={figure}] .code").text_content() for figure in FIGURES]
        page.locator('[data-option="placement"]').select_option("style")
        page.locator('[data-option="norm"]').select_option("x")
        chip(page, "depth 4").click()
        commands += [page.locator(f"[data-figure={figure}] .code").text_content() for figure in ("factor", "gradients")]
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program == "normlab"
        assert arguments[-2:] == ["-o", "figure.pdf"]
        output = tmp_path / "figure.pdf"
        normlab(*arguments[:-1], str(output))
        assert output.read_bytes().startswith(b"%PDF")
        output.unlink()
    assert "--where 'model.depth!=4'" in commands[-1]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_one_level_has_one_colour(browser, path, theme):
    colours: dict[str, set[str]] = {}
    with opened(browser, path, theme=theme) as page:
        ready(page)
        for figure in FIGURES:
            for panel in drawn(page, figure)["panels"]:
                for line in panel.get("lines", []):
                    colours.setdefault(line["label"], set()).add(line["colour"])
        swatches = page.locator("#factors .chip", has=page.locator("line"))
        for swatch in swatches.all():
            colours[swatch.inner_text()].add(swatch.locator("line").get_attribute("stroke"))
    assert set(colours) == {"LayerNorm", "RMSNorm"}
    assert all(len(each) == 1 for each in colours.values())


def test_theme_changes_ground_and_colours(browser, path):
    with opened(browser, path, theme="dark") as page:
        dark = drawn(ready(page), "factor")["panels"][0]["lines"][0]["colour"]
        page.locator("#theme").select_option("light")
        assert drawn(page, "factor")["panels"][0]["lines"][0]["colour"] != dark
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_points_are_where_the_axis_says(browser, path):
    """Each mean lies on the line through the labelled ticks."""
    with opened(browser, path) as page:
        spec = drawn(ready(page), "factor")
        svg = page.locator("[data-figure=factor] svg[role=img]").first
        ticks = svg.evaluate(
            """(svg) => [...svg.querySelectorAll('text[text-anchor=end]')]
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
    assert len(ticks) > 2
    assert circles == pytest.approx(expected, abs=0.01)


def test_interval_beyond_the_frame_ends_in_an_arrow(browser, tmp_path):
    """Cells with a small and a huge interval; nothing is drawn outside the frame."""
    write_sweep(tmp_path, "made", [Record(norm=norm, steps=60, stats_every=None) for norm in ("layernorm", "rmsnorm")])
    normlab("compare", "made", "--results-dir", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        ready(page)
        paths = page.evaluate(
            """() => {
              const point = (y, low, high) => ({x: 0, y, low, high, seeds: [y], n: 3, diverged: 0});
              const line = (label, ...points) => ({label, colour: 'red', dash: '', points});
              const place = document.querySelector('[data-figure=factor] .panels');
              const panels = [{title: '', lines: [line('a', point(2, 1.99, 2.01)), line('b', point(2.1, -50, 60))]}];
              drawLines(place, {title: '', panels, x: {ticks: [[0, 'x']]}, isConnected: false});
              const frame = place.querySelector('clipPath rect');
              const drawn = [...place.querySelectorAll('path[fill=none]')].map((path) => path.getAttribute('d'));
              return [drawn, Number(frame.getAttribute('y')), Number(frame.getAttribute('height'))];
            }"""
        )
    drawings, top, height = paths
    heights = [float(part.split(",")[1]) for path in drawings for part in path.replace("L", "M").split("M")[1:]]
    assert all(top - 0.01 <= y <= top + height + 0.01 for y in heights)
    inside, beyond = drawings
    assert (inside.count("L"), beyond.count("L")) == (3, 5)  # an arrow has one stroke more than a cap, at both ends


def test_diverged_seeds_are_marked(browser, path):
    with opened(browser, path) as page:
        assert ready(page).locator("[data-figure=factor] text.mark").all_text_contents() == ["1/3"]


def test_tables_are_sorted_by_a_click(browser, path):
    with opened(browser, path) as page:
        ready(page).locator("#cells summary").click()
        head = page.locator("#cells thead").get_by_role("button", name="val loss", exact=True)
        column = 1 + page.locator("#cells thead th").all_inner_texts().index("val loss")

        def texts():
            return page.locator(f"#cells tbody td:nth-child({column})").all_inner_texts()

        means = [float(text.split()[0]) for text in texts()[:-1]]
        assert means == sorted(means)  # the best first
        assert "diverged" in texts()[-1]
        head.click()
        head.click()
        assert [float(text.split()[0]) for text in texts() if "diverged" not in text] == means[::-1]
        assert page.locator("#cells th[aria-sort=descending]").count() == 1
        chip(page, "depth 4").click()
        assert page.locator("#cells tbody tr").count() == 4


def test_tooltip_names_the_nearest_point(browser, path, cells):
    with opened(browser, path) as page:
        dot = ready(page).locator('[data-figure=factor] circle[r="3.6"]').first
        box = dot.bounding_box()
        page.mouse.move(box["x"] + 4, box["y"] + 4)
        text = page.locator("#tip").inner_text()
        (row,) = [row for row in cells if row["label"] == "LayerNorm, post-norm, depth 4"]
        assert text.startswith(f"LayerNorm: {row['val_loss']:.4f} [")
        page.mouse.move(1, 1)
        assert not page.locator("#tip").is_visible()


def test_heat_map_over_any_two_factors(browser, path):
    with opened(browser, path) as page:
        selects = ready(page).locator("[data-figure=matrix] select")
        selects.nth(0).select_option("placement")
        spec = drawn(page, "matrix")
        assert (spec["columns"], spec["rows"]) == (["post-norm", "pre-norm"], ["LayerNorm", "RMSNorm"])
        assert [panel["title"] for panel in spec["panels"]] == ["depth 4", "depth 8"]
        selects.nth(1).select_option("model.depth")
        assert drawn(page, "matrix")["rows"] == ["4", "8"]


def test_every_control_works_by_keyboard(browser, path):
    """Tab reaches every control, and every control has a label."""
    with opened(browser, path) as page:
        ready(page)
        controls = page.locator("main :is(button, select, summary):visible")
        unnamed = controls.evaluate_all(
            """all => all.filter((control) =>
                !(control.labels?.length || control.ariaLabel || control.textContent.trim()))
              .map((control) => control.outerHTML)"""
        )
        assert unnamed == []
        expected = controls.count()
        page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
        reached = set()
        for _ in range(expected + 10):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate(
                    """[...document.querySelectorAll('main :is(button, select, summary)')]
                        .indexOf(document.activeElement)"""
                )
            )
        assert len(reached - {-1}) == expected
        chip(page, "depth 4").focus()
        page.keyboard.press("Space")
        assert chip(page, "depth 4").get_attribute("aria-pressed") == "false"
        assert page.evaluate("document.activeElement.dataset.level") == "depth 4"


def test_all_diverged(browser, tmp_path):
    records = [
        Record(norm=norm, seed=seed, steps=60, outcome=DIVERGED, at=20, stats_every=None)
        for norm in ("layernorm", "rmsnorm")
        for seed in (0, 1)
    ]
    write_sweep(tmp_path, "made", records)
    normlab("compare", "made", "--results-dir", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        ready(page)
        assert page.locator(".best").inner_text().startswith("No best cell: in every cell with a result, a run div")
        assert page.locator("#answer").inner_text().count("4 diverged") == 1
        assert page.locator("[data-figure=factor] text.mark").all_text_contents() == ["2/2", "2/2"]
