"""The comparison page on paper: every figure is drawn, in light colours, and no table is cut."""

from __future__ import annotations

import pytest

from support.browser import PHONE, opened
from support.compare_pages import FIGURES, ready

ON_PAPER = """() => addEventListener('beforeprint', () => {
  window.printed = {
    theme: document.documentElement.dataset.theme,
    figures: FIGURES.filter(({element}) => element.querySelector('.panel svg, .panel td')).map(({id}) => id),
  };
})"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_figure_is_printed_on_a_light_ground(browser, path, theme):
    with opened(browser, path, PHONE, theme=theme) as page:
        page.locator("#tables summary").first.wait_for()
        assert page.locator("[data-figure=layers] .panel").count() == 0  # it is below the window
        page.evaluate(ON_PAPER)
        page.pdf()
        assert page.evaluate("window.printed") == {"theme": "light", "figures": list(FIGURES)}
        assert page.evaluate("document.documentElement.dataset.theme") == theme


def test_open_tables_are_printed_in_full(browser, path):
    with opened(browser, path) as page:
        ready(page)
        page.locator("#tables details").evaluate_all("(all) => { for (const each of all) each.open = true; }")
        page.emulate_media(media="print")
        cut = page.locator(".tall").evaluate_all(
            "(all) => all.filter((table) => table.scrollHeight > table.clientHeight + 1).length"
        )
    assert cut == 0
