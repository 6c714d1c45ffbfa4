"""The explain page: its numbers equal the modules', its diagrams match the formulas, and it is accessible."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from playwright.sync_api import Browser, Page

from normlab import catalogue
from normlab.explain import norm_examples, page
from normlab.explain.flow import conditions_of, parse_formula
from normlab.norms.base import load_all as load_norms
from normlab.placements.base import load_all as load_placements
from normlab.plugins import plugin_file
from support.browser import PHONE, opened

Command = Callable[..., tuple[int, str, str]]

ORIGINAL = np.array(norm_examples.ORIGINAL)
LARGE = 1e12
MATRICES = {
    "original": ORIGINAL,
    "edited": ORIGINAL + np.array([[0, 0, 0, -7.25, 0, 0], [0] * 6, [0.125, 0, 0, 0, 0, 100], [0, 1e-3, 0, 0, 0, 0]]),
    "all zeros": np.zeros((4, 6)),
    "a constant row and a constant column": np.array(
        [[3, 1, -2, 0.5, 7, 1], [2, 2, 2, 2, 2, 2], [3, 4, -4, 9, 7.5, 2], [3, -6, 1, 0.25, -1, 5]], float
    ).copy(),
    "huge": np.array([[LARGE, -LARGE, 5e11, 0, 1, -3], [LARGE] * 6, [1e11, 2e11, 3e11, 4e11, 5e11, 7e11], [1] * 6]),
    "tiny": ORIGINAL * 1e-9,
}
STATISTICS = {
    "mean": np.mean, "variance": np.var, "min": np.min, "max": np.max,
    "rms": lambda values: np.sqrt(np.mean(np.square(values))),
}  # fmt: skip


def by_module(name: str, x: np.ndarray, over: str = "row") -> np.ndarray:
    """Return a module's output for a matrix, over its rows or its columns."""
    module = load_norms()[name]().build(x.shape[1] if over == "row" else x.shape[0]).double()  # pyright: ignore
    with torch.no_grad():
        y = module(torch.tensor(x if over == "row" else x.T))
    return y.numpy() if over == "row" else y.numpy().T


def batchnorm_evaluated(x: np.ndarray, updates: int) -> np.ndarray:
    """Return the output in evaluation after training batches of the original matrix."""
    module = load_norms()["batchnorm"]().build(6).double()  # pyright: ignore
    with torch.no_grad():
        for _ in range(updates):
            module.train()(torch.tensor(ORIGINAL))
        return module.eval()(torch.tensor(x)).numpy()


LIVE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "zscore": lambda x: by_module("zscore", x, "column"),
    "minmax": lambda x: by_module("minmax", x, "column"),
    "batchnorm": lambda x: by_module("batchnorm", x),
    "batchnorm_eval": lambda x: batchnorm_evaluated(x, norm_examples.UPDATES),
    "layernorm": lambda x: by_module("layernorm", x),
    "rmsnorm": lambda x: by_module("rmsnorm", x),
}
TORCH = {
    "batchnorm": lambda x: F.batch_norm(x, None, None, training=True, eps=1e-5),
    "layernorm": lambda x: F.layer_norm(x, (6,), eps=1e-5),
    "rmsnorm": lambda x: F.rms_norm(x, (6,), eps=1e-6),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "explain.html"
    page.write(path)
    return path


@pytest.fixture(scope="module")
def open_page(browser: Browser, written: Path) -> Iterator[Page]:
    with opened(browser, written) as tab:
        yield tab


def type_in(open_page: Page, x: np.ndarray) -> None:
    """Fill the fields whose value differs."""
    values = open_page.locator("#before input").evaluate_all("fields => fields.map(field => Number(field.value))")
    for (row, column), value in np.ndenumerate(x):
        if values[row * x.shape[1] + column] != value:
            open_page.get_by_label(f"token {row + 1}, channel {column + 1}", exact=True).fill(repr(float(value)))


def numbers(open_page: Page, selector: str) -> list[dict[str, str]]:
    return open_page.locator(selector).evaluate_all(
        "cells => cells.map(cell => ({...cell.dataset, text: cell.textContent, title: cell.title}))"
    )


def result(open_page: Page, selector: str) -> np.ndarray:
    cells = numbers(open_page, f"{selector} td.value")
    for cell in cells:
        check_text(cell)
    return np.array([float(cell["value"]) for cell in cells]).reshape(4, 6)


def check_text(cell: dict[str, str]) -> None:
    """Check that the text of a cell is its value, rounded."""
    value, text = float(cell["value"]), float(cell["text"].replace("\N{MINUS SIGN}", "-"))
    assert cell["title"] == cell["value"]
    decimals = 0.5e-2 if abs(value) < 9.995 else 0.5e-1 if abs(value) < 99.95 else 0.5
    bound = decimals if 0.005 <= abs(value) < 9999.5 else max(0.5 * abs(value) if abs(value) < 0.005 else 0, 5e-7)
    assert abs(value - text) <= max(bound, 0.05 * abs(value) if abs(value) >= 9999.5 else 0) * 1.0001, cell


def check_statistics(open_page: Page, selector: str, x: np.ndarray) -> None:
    """Check the statistics of each row and column against numpy."""
    cells = numbers(open_page, f"{selector} table.matrix:not(.kept) td.stat")
    assert len(cells) == 5 * (4 + 6)
    for cell in cells:
        check_text(cell)
        values = x[int(cell["at"])] if cell["of"] == "row" else x[:, int(cell["at"])]
        expected = STATISTICS[cell["stat"]](values)
        size = np.abs(values).max()
        scale = size**2 if cell["stat"] == "variance" else size
        assert float(cell["value"]) == pytest.approx(expected, rel=1e-6, abs=1e-12 * scale + 1e-300), (selector, cell)


@pytest.mark.parametrize("which", MATRICES)
def test_live_norms_equal_the_modules(open_page: Page, which: str) -> None:
    x = MATRICES[which]
    type_in(open_page, x)
    check_statistics(open_page, "#before", x)
    for key, module in LIVE.items():
        actual, expected = result(open_page, f"#live-{key}"), module(x)
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9 * max(1, np.abs(expected).max()), err_msg=key)
        if key in TORCH:
            reference = TORCH[key](torch.tensor(x)).numpy()
            atol = 1e-9 * max(1, np.abs(reference).max())
            np.testing.assert_allclose(actual, reference, rtol=1e-6, atol=atol, err_msg=key)
        check_statistics(open_page, f"#live-{key}", actual)


@pytest.mark.parametrize("key", ["zscore", "minmax"])
def test_over_rows_equals_the_norm_module(open_page: Page, key: str) -> None:
    x = MATRICES["edited"]
    type_in(open_page, x)
    choice = open_page.locator(f"#live-{key} select")
    choice.select_option("row")
    np.testing.assert_allclose(result(open_page, f"#live-{key}"), by_module(key, x), rtol=1e-6, atol=1e-9)
    assert "a row" in open_page.locator(f"#live-{key} .over").inner_text()
    choice.select_option("column")


@pytest.mark.parametrize("updates", [0, 1, 100])
def test_running_statistics_equal_the_module(open_page: Page, updates: int) -> None:
    x = MATRICES["edited"]
    type_in(open_page, x)
    open_page.get_by_label("training updates").fill(str(updates))
    np.testing.assert_allclose(result(open_page, "#live-batchnorm_eval"), batchnorm_evaluated(x, updates), rtol=1e-6)
    module = load_norms()["batchnorm"]().build(6).double()  # pyright: ignore
    for _ in range(updates):
        module(torch.tensor(ORIGINAL))
    kept = np.array([float(cell["value"]) for cell in numbers(open_page, "table.kept td.stat")]).reshape(4, 6)
    expected = [module.running_mean, x.mean(0), module.running_var, x.var(0, ddof=1)]
    np.testing.assert_allclose(kept, np.stack(expected), rtol=1e-6)
    open_page.get_by_label("training updates").fill(str(norm_examples.UPDATES))


def test_buttons_show_invariances(open_page: Page) -> None:
    open_page.get_by_role("button", name="reset").click()
    before = {key: result(open_page, f"#live-{key}") for key in LIVE}
    open_page.get_by_role("button", name="add 3 to every value").click()
    after = {key: result(open_page, f"#live-{key}") for key in LIVE}
    np.testing.assert_allclose(after["layernorm"], before["layernorm"], atol=1e-12)
    np.testing.assert_allclose(after["batchnorm"], before["batchnorm"], atol=1e-12)
    assert np.abs(after["rmsnorm"] - before["rmsnorm"]).max() > 0.1
    assert "Largest change" in open_page.locator("#live-rmsnorm .moved").inner_text()
    assert open_page.locator("#live-layernorm .moved").inner_text().endswith(": 0")
    open_page.get_by_role("button", name="reset").click()
    for key in LIVE:
        np.testing.assert_array_equal(result(open_page, f"#live-{key}"), before[key])


@pytest.mark.parametrize("text", ["", "1e13"])
def test_invalid_number_is_reported_and_changes_nothing(open_page: Page, text: str) -> None:
    open_page.get_by_role("button", name="reset").click()
    before = result(open_page, "#live-layernorm")
    field = open_page.get_by_label("token 2, channel 3", exact=True)
    field.fill(text)
    assert field.get_attribute("aria-invalid") == "true"
    assert "token 2, channel 3" in open_page.locator("[role=status]").inner_text()
    np.testing.assert_array_equal(result(open_page, "#live-layernorm"), before)
    field.fill("5")
    assert field.get_attribute("aria-invalid") == "false"
    open_page.get_by_role("button", name="reset").click()


def test_message_stays_while_any_field_is_invalid(open_page: Page) -> None:
    open_page.get_by_role("button", name="reset").click()
    first, second = (open_page.get_by_label(f"token 1, channel {channel}", exact=True) for channel in (1, 4))
    status = open_page.locator("[role=status]")
    first.fill("")
    second.fill("1e13")
    assert status.inner_text().startswith("token 1, channel 4: ")
    second.fill("1")
    assert first.get_attribute("aria-invalid") == "true"
    assert status.inner_text().startswith("token 1, channel 1: ")
    first.fill("1")
    assert status.inner_text() == ""
    open_page.get_by_role("button", name="reset").click()


def test_every_live_norm_has_a_card_with_its_source_and_eps(open_page: Page) -> None:
    keys = open_page.locator("[data-live]").evaluate_all("cards => cards.map(card => card.dataset.live)")
    assert keys == list(LIVE)
    for each in norm_examples.LIVE:
        card = open_page.locator(f"#live-{each['key']}").inner_text()
        assert load_norms()[each["norm"]].source in card
        eps = load_norms()[each["norm"]]().eps  # pyright: ignore
        assert f"{eps:.0e}".replace("-0", "\N{MINUS SIGN}") in card


@pytest.mark.parametrize("name", load_norms())
def test_every_norm_shows_its_modules_output(open_page: Page, name: str) -> None:
    details = open_page.locator(f"details#norm-{name}")
    details.locator("summary").focus()
    open_page.keyboard.press("Enter")
    assert details.get_attribute("open") is not None
    torch.manual_seed(norm_examples.SEED)
    options = load_norms()[name](**norm_examples.OPTIONS.get(name, {}))  # pyright: ignore
    module = options.build(6).double()
    shape = (norm_examples.SEQUENCES.get(name, 1), -1, 6)
    x = torch.tensor(ORIGINAL).reshape(shape)
    with torch.no_grad():
        expected = module(x).reshape(4, 6).numpy()
        state = dict(module.state_dict())
        reference = options.reference(x, state).reshape(4, 6).numpy()
    actual = result(open_page, f"details#norm-{name}")
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(actual, reference, rtol=1e-6, atol=1e-9)
    check_statistics(open_page, f"details#norm-{name}", actual)
    text = details.inner_text()
    assert options.formula in text
    assert options.source in text
    open_page.keyboard.press("Enter")


def test_groups_are_outlined(open_page: Page) -> None:
    """There is an edge between neighbours of different groups."""
    values = "table.matrix:not(.kept) td.value"
    count = {
        side: {key: open_page.locator(f"#live-{key} {values}.edge-{side}").count() for key in LIVE}
        for side in ("top", "left")
    }
    assert count["top"] == {
        "zscore": 6,
        "minmax": 6,
        "batchnorm": 6,
        "batchnorm_eval": 0,
        "layernorm": 24,
        "rmsnorm": 24,
    }
    assert count["left"] == {
        "zscore": 24,
        "minmax": 24,
        "batchnorm": 24,
        "batchnorm_eval": 0,
        "layernorm": 4,
        "rmsnorm": 4,
    }


PLACEMENTS = load_placements()
NORMS_PER_CALL = {"A_qkv": 3, "heads_qkv": 3, "N": 1}
"""The norms inside a function of a formula."""


def count_norms(formula: str) -> int:
    """Return the number of norms in a formula without conditions."""
    calls = [node.func.id for node in ast.walk(ast.parse(formula)) if isinstance(node, ast.Call)]  # pyright: ignore
    return sum(NORMS_PER_CALL.get(name, 0) for name in calls) * (2 if "F(" in formula else 1)


def drawn(open_page: Page, name: str) -> list[dict[str, Any]]:
    return open_page.locator(f"#placement-{name} svg.flow").evaluate_all(
        """drawings => drawings.map(drawing => {
          const frame = drawing.querySelector(".frame").getBBox();
          const norms = [...drawing.querySelectorAll('[data-kind="norm"]')].map(norm => norm.getBBox().y);
          const inside = norms.filter(y => y > frame.y && y < frame.y + frame.height).length;
          return {inside, all: norms.length, below: norms.filter(y => y > frame.y + frame.height).length};
        })"""
    )


@pytest.mark.parametrize("name", PLACEMENTS)
def test_diagram_has_the_norms_of_the_formula(open_page: Page, name: str) -> None:
    placement = PLACEMENTS[name]
    sides = (True, False) if conditions_of(placement.formula) else (True,)
    forms = [
        "; ".join(f"{target} = {ast.unparse(value)}" for target, value in parse_formula(placement.formula, side))
        for side in sides
    ]
    diagrams = drawn(open_page, name)
    assert [diagram["inside"] for diagram in diagrams] == [count_norms(form) for form in forms]
    assert {diagram["below"] for diagram in diagrams} == {count_norms(placement.embedding_formula)}
    above = {diagram["all"] - diagram["inside"] - diagram["below"] for diagram in diagrams}
    assert above == {count_norms(placement.head_formula)}
    card = open_page.locator(f"#placement-{name}").inner_text()
    source = next(entry["source"] for entry in catalogue.placements() if entry["name"] == name)
    for text in (
        source,
        placement.embedding_formula,
        placement.head_formula,
        placement.inside,
        *placement.formula.split("; "),
    ):
        assert text in card


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("open_all", [False, True])
def test_nothing_is_cut_on_a_phone(browser: Browser, written: Path, theme: str, open_all: bool) -> None:
    with opened(browser, written, PHONE, theme) as phone:
        if open_all:
            phone.get_by_role("button", name="open all").click()
        assert phone.evaluate("document.documentElement.scrollWidth") == PHONE[0]
        out = phone.evaluate(
            """() => [...document.querySelectorAll("body *:not(.skip):not(.hidden)")].filter(element => {
              const box = element.getBoundingClientRect();
              return (box.right > innerWidth + 0.5 || box.left < -0.5) && !element.closest(".scroll");
            }).map(element => element.outerHTML.slice(0, 80))"""
        )
        assert out == []


def test_theme_changes_the_background(browser: Browser, written: Path) -> None:
    with opened(browser, written) as tab:
        backgrounds = []
        for theme in ("light", "dark"):
            tab.get_by_label("theme").select_option(theme)
            backgrounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(set(backgrounds)) == 2


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_numbers_have_contrast_in_either_theme(browser: Browser, written: Path, theme: str) -> None:
    """The contrast is at least 4.5, as WCAG requires of text."""
    with opened(browser, written, theme=theme) as tab:
        worst = tab.evaluate(
            """() => {
              const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
              const light = (colour) => {
                canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
                const linear = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(
                  part => part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
                return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
              };
              return Math.min(...[...document.querySelectorAll("#live td.value, #live td.stat")].map(cell => {
                const style = getComputedStyle(cell);
                const both = [light(style.color), light(style.backgroundColor)];
                return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
              }));
            }"""
        )
        assert worst >= 4.5


def test_matrix_is_editable_by_keyboard(browser: Browser, written: Path) -> None:
    with opened(browser, written) as tab:
        reached = []
        for _ in range(40):
            tab.keyboard.press("Tab")
            reached.append(
                tab.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.id")
            )
        assert reached.index("token 1, channel 1") < reached.index("token 4, channel 6") < reached.index("reset")
        tab.get_by_label("token 1, channel 1", exact=True).focus()
        tab.keyboard.press("Control+A")
        tab.keyboard.type("-2.5")
        x = ORIGINAL.copy()
        x[0, 0] = -2.5
        np.testing.assert_allclose(result(tab, "#live-layernorm"), by_module("layernorm", x), rtol=1e-6)


def test_link_opens_its_norm(browser: Browser, written: Path) -> None:
    with opened(browser, written) as tab:
        tab.evaluate("location.hash = '#norm-dyt'")
        tab.wait_for_function("document.getElementById('norm-dyt').open")


def test_invalid_fragment_is_ignored(browser: Browser, written: Path) -> None:
    with opened(browser, written) as tab:
        tab.evaluate("location.hash = '#%'")
        tab.wait_for_timeout(100)
        tab.evaluate("location.hash = '#norm-dyt'")
        tab.wait_for_function("document.getElementById('norm-dyt').open")


def test_command_writes_the_page_to_its_output(run_command: Command) -> None:
    assert run_command("explain") == (0, "explain.html\n", "")
    assert run_command("explain", "-o", "new/folder/page.html") == (0, "new/folder/page.html\n", "")
    assert Path("explain.html").read_bytes() == Path("new/folder/page.html").read_bytes()
    data = Path("explain.html").read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0]
    # Plugins of other tests are still registered, and are not on the page.
    catalogued = {name for name, kind in load_norms().items() if kind.__module__.startswith("normlab.")}
    assert {entry["name"] for entry in json.loads(data)["norms"]} == catalogued
    catalogued = {name for name in PLACEMENTS if plugin_file("placement", name) is None}
    assert {entry["name"] for entry in json.loads(data)["placements"]} == catalogued


def test_open_shows_the_page_in_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from normlab.cli.explain import explain

    urls: list[str] = []
    monkeypatch.setattr("webbrowser.open", urls.append)
    path = tmp_path / "page.html"
    explain(str(path), open=True)
    assert urls == [path.as_uri()]
    assert capsys.readouterr().out == f"{path}\n"


@pytest.mark.parametrize("output", ["x.txt", "."])
def test_invalid_output_is_refused_and_leaves_no_file(tmp_path: Path, run_command: Command, output: str) -> None:
    code, out, err = run_command("explain", "-o", output)
    assert (code, out) == (2, "")
    assert err.startswith("error: -o ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
