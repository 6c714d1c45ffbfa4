"""The controls of the comparison page: filter, channels, tables, tooltips, theme, keyboard."""

from __future__ import annotations

import json

import pytest

from normlab.analysis.table import summarize_by
from normlab.report.channels import choose_channels
from support.browser import opened
from support.compare_pages import FIGURES, drawn, open_table, points, ready


def chip(page, level: str):
    return page.locator(f'[data-level="{level}"]')


def test_hidden_level_leaves_every_figure_and_the_answer(browser, path, cells):
    with opened(browser, path) as page:
        before = {figure: drawn(ready(page), figure) for figure in FIGURES}
        answer = page.locator("#answer").inner_text()
        chip(page, "depth 8").click()  # so that the page has one best cell
        best = page.locator(".best").inner_text().replace("\xa0", " ")
        norm = best.split(",")[0]
        chip(page, norm).click()
        for figure in FIGURES:
            assert norm not in json.dumps(drawn(page, figure)), figure
            assert norm not in page.locator(f"[data-figure={figure}] .legend").inner_text()
        shown = [row for row in cells if norm not in row["label"] and row["model.depth"] == 4]
        second = sorted((row for row in shown if not row["seeds_diverged"]), key=lambda row: row["val_loss"])[:2]
        assert page.locator(".best").inner_text().replace("\xa0", " ") == second[0]["label"]
        data = page.evaluate("DATA")
        at = {cell["label"]: index for index, cell in enumerate(data["cells"])}
        (margin,) = [text for a, b, _, text in data["margins"] if [a, b] == [at[row["label"]] for row in second]]
        assert margin in page.locator("#answer").inner_text()
        assert page.locator("[data-figure=matrix] .is-best").all_inner_texts() == [f"{second[0]['val_loss']:.3f}"]
        assert "2 of 8 cells are shown" in page.locator("#answer").inner_text()
        other = "LayerNorm" if norm == "RMSNorm" else "RMSNorm"
        chip(page, other).click()  # the last visible level stays
        assert chip(page, other).get_attribute("aria-pressed") == "true"
        page.locator("#show-all").click()
        assert {figure: drawn(page, figure) for figure in FIGURES} == before
        assert page.locator("#answer").inner_text() == answer


def test_interactions_with_a_hidden_level_are_left_out(browser, path):
    with opened(browser, path) as page:
        open_table(ready(page), "interactions")
        rows = page.locator("#interactions tbody tr")
        tests = page.evaluate("DATA.interactions.rows")
        assert rows.count() == len(tests) > 3
        chip(page, "depth 8").click()
        left = [texts for texts in tests if "depth 8" not in f"{texts[0]} {texts[1]}"]
        assert 0 < len(left) < len(tests)
        assert [row.split("\t") for row in rows.all_inner_texts()] == left


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
            colours[swatch.inner_text()].add(str(swatch.locator("line").get_attribute("stroke")))
    assert set(colours) == {"LayerNorm", "RMSNorm"}
    assert all(len(each) == 1 for each in colours.values())


@pytest.mark.parametrize("option", ["placement", "model.depth"])
def test_colours_stay_when_levels_are_hidden(browser, path, option):
    def colours():
        lines = [line for panel in drawn(page, "curves")["panels"] for line in panel["lines"]]
        return {line["label"]: line["colour"] for line in lines}

    with opened(browser, path) as page:
        ready(page).locator(f'[data-option="{option}"]').select_option("color")
        before = colours()
        first, last = before
        chip(page, first).click()
        assert colours() == {last: before[last]}


def test_theme_changes_ground_and_colours(browser, path):
    with opened(browser, path, theme="dark") as page:
        circle = ready(page).locator("[data-figure=factor] circle").first
        dark = circle.get_attribute("fill")
        page.locator("#theme").select_option("light")
        assert circle.get_attribute("fill") != dark
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_tables_are_sorted_by_a_click(browser, path):
    with opened(browser, path) as page:
        assert not ready(page).locator("#tables details[open]").count()
        open_table(page, "cells")
        head = page.locator("#cells thead").get_by_role("button", name="val loss", exact=True)
        column = 1 + page.locator("#cells thead th").all_inner_texts().index("val loss")

        def texts():
            return page.locator(f"#cells tbody td:nth-child({column})").all_inner_texts()

        means = [float(text.split()[0]) for text in texts()[:-1]]
        assert means == sorted(means)  # the best first
        assert "diverged" in texts()[-1]
        head.click()
        assert page.locator("#cells th[aria-sort]").evaluate("(head) => [head.textContent, head.ariaSort]") == [
            "val loss",
            "ascending",
        ]
        head.click()
        assert "diverged" in texts()[-1]  # a text is last in both directions
        assert [float(text.split()[0]) for text in texts() if "diverged" not in text] == means[::-1]
        assert page.locator("#cells th[aria-sort]").evaluate("(head) => head.ariaSort") == "descending"
        classes = page.locator(f"#cells tbody td:nth-child({column})").evaluate_all(
            "(all) => all.map((td) => td.className)"
        )
        assert classes == ["number"] * (len(classes) - 1) + [""]
        chip(page, "depth 4").click()
        assert page.locator("#cells tbody tr").count() == 4


def test_tooltip_names_the_nearest_point(browser, path, cells):
    with opened(browser, path) as page:
        dot = ready(page).locator('[data-figure=factor] circle[r="3.6"]').first
        box = dot.bounding_box()
        assert box
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


SELECTS = [
    '[data-option="model.depth"]',
    "[data-figure=layers] select >> nth=0",
    "[data-figure=matrix] select >> nth=1",
]


@pytest.mark.parametrize("select", ["#series", "#theme", *SELECTS])
def test_drop_down_keeps_the_focus(browser, path, select):
    """An arrow key chooses the next option; another one the option after that."""
    with opened(browser, path) as page:
        ready(page)
        page.locator(select).focus()
        before = page.locator(select).input_value()
        page.keyboard.press("ArrowDown")
        assert page.locator(select).input_value() != before
        assert page.evaluate("document.activeElement.tagName") == "SELECT"


def test_every_tab_stop_has_a_name(browser, path):
    with opened(browser, path) as page:
        unnamed = (
            ready(page)
            .locator("[tabindex]")
            .evaluate_all(
                "(all) => all.filter((each) => !each.ariaLabel && !each.hasAttribute('aria-labelledby')).length"
            )
        )
    assert unnamed == 0
