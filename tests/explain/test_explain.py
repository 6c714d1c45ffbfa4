"""The explain page: its numbers are the modules', its drawings the formulas', and it can be used by everyone."""

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
from browser import PHONE, opened
from playwright.sync_api import Browser, Page

from normlab import catalogue
from normlab.explain import matrix, norms, page
from normlab.explain.formula import choices, chosen
from normlab.norms.base import load_all as load_norms
from normlab.placements.base import load_all as load_placements

Command = Callable[..., tuple[int, str, str]]

ORIGINAL = np.array(matrix.ORIGINAL)
LARGE = 1e12
MATRICES = {
    "as it is": ORIGINAL,
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
    """What normlab's own module makes of a matrix, of its rows or of its columns."""
    module = load_norms()[name]().build(x.shape[1] if over == "row" else x.shape[0]).double()  # pyright: ignore
    with torch.no_grad():
        y = module(torch.tensor(x if over == "row" else x.T))
    return y.numpy() if over == "row" else y.numpy().T


def batchnorm_evaluated(x: np.ndarray, updates: int) -> np.ndarray:
    """The module after so many training batches, each the original matrix."""
    module = load_norms()["batchnorm"]().build(6).double()  # pyright: ignore
    with torch.no_grad():
        for _ in range(updates):
            module.train()(torch.tensor(ORIGINAL))
        return module.eval()(torch.tensor(x)).numpy()


LIVE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "zscore": lambda x: by_module("zscore", x, "column"),
    "minmax": lambda x: by_module("minmax", x, "column"),
    "batchnorm": lambda x: by_module("batchnorm", x),
    "batchnorm_eval": lambda x: batchnorm_evaluated(x, norms.UPDATES),
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
    with opened(browser, written) as one:
        yield one


def type_in(open_page: Page, x: np.ndarray) -> None:
    """As a person would: into those fields whose value is another."""
    there = open_page.locator("#before input").evaluate_all("fields => fields.map(field => Number(field.value))")
    for (row, column), value in np.ndenumerate(x):
        if there[row * x.shape[1] + column] != value:
            open_page.get_by_label(f"token {row + 1}, channel {column + 1}", exact=True).fill(repr(float(value)))


def numbers(open_page: Page, selector: str) -> list[dict[str, str]]:
    return open_page.locator(selector).evaluate_all(
        "cells => cells.map(cell => ({...cell.dataset, text: cell.textContent, title: cell.title}))"
    )


def result(open_page: Page, of: str) -> np.ndarray:
    cells = numbers(open_page, f"{of} td.value")
    for cell in cells:
        agrees(cell)
    return np.array([float(cell["value"]) for cell in cells]).reshape(4, 6)


def agrees(cell: dict[str, str]) -> None:
    """What can be read is what is meant, rounded."""
    value, text = float(cell["value"]), float(cell["text"].replace("\N{MINUS SIGN}", "-"))
    assert cell["title"] == cell["value"]
    decimals = 0.5e-2 if abs(value) < 9.995 else 0.5e-1 if abs(value) < 99.95 else 0.5
    bound = decimals if 0.005 <= abs(value) < 9999.5 else max(0.5 * abs(value) if abs(value) < 0.005 else 0, 5e-7)
    assert abs(value - text) <= max(bound, 0.05 * abs(value) if abs(value) >= 9999.5 else 0) * 1.0001, cell


def statistics_are(open_page: Page, of: str, x: np.ndarray) -> None:
    """Beside each row and under each column stand numpy's."""
    cells = numbers(open_page, f"{of} table.matrix:not(.kept) td.stat")
    assert len(cells) == 5 * (4 + 6)
    for cell in cells:
        agrees(cell)
        values = x[int(cell["at"])] if cell["of"] == "row" else x[:, int(cell["at"])]
        expected = STATISTICS[cell["stat"]](values)
        size = np.abs(values).max()
        scale = size**2 if cell["stat"] == "variance" else size
        assert float(cell["value"]) == pytest.approx(expected, rel=1e-6, abs=1e-12 * scale + 1e-300), (of, cell)


@pytest.mark.slow
@pytest.mark.parametrize("which", MATRICES)
def test_the_live_normalisers_are_the_modules(open_page: Page, which: str) -> None:
    x = MATRICES[which]
    type_in(open_page, x)
    statistics_are(open_page, "#before", x)
    for key, module in LIVE.items():
        seen, expected = result(open_page, f"#live-{key}"), module(x)
        np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-9 * max(1, np.abs(expected).max()), err_msg=key)
        if key in TORCH:
            theirs = TORCH[key](torch.tensor(x)).numpy()
            np.testing.assert_allclose(seen, theirs, rtol=1e-6, atol=1e-9 * max(1, np.abs(theirs).max()), err_msg=key)
        statistics_are(open_page, f"#live-{key}", seen)


@pytest.mark.parametrize("key", ["zscore", "minmax"])
def test_over_rows_it_is_the_norm_of_that_name(open_page: Page, key: str) -> None:
    x = MATRICES["edited"]
    type_in(open_page, x)
    choice = open_page.locator(f"#live-{key} select")
    choice.select_option("row")
    np.testing.assert_allclose(result(open_page, f"#live-{key}"), by_module(key, x), rtol=1e-6, atol=1e-9)
    assert "a row" in open_page.locator(f"#live-{key} .over").inner_text()
    choice.select_option("column")


@pytest.mark.parametrize("updates", [0, 1, 100])
def test_what_batchnorm_keeps(open_page: Page, updates: int) -> None:
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
    open_page.get_by_label("training updates").fill(str(norms.UPDATES))


def test_buttons_show_what_changes_nothing(open_page: Page) -> None:
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
def test_what_is_no_number_within_bounds_is_said_and_changes_nothing(open_page: Page, text: str) -> None:
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


def test_something_is_said_as_long_as_any_field_is_wrong(open_page: Page) -> None:
    open_page.get_by_role("button", name="reset").click()
    one, other = (open_page.get_by_label(f"token 1, channel {channel}", exact=True) for channel in (1, 4))
    status = open_page.locator("[role=status]")
    one.fill("")
    other.fill("1e13")
    assert status.inner_text().startswith("token 1, channel 4: ")
    other.fill("1")
    assert one.get_attribute("aria-invalid") == "true"
    assert status.inner_text().startswith("token 1, channel 1: ")
    one.fill("1")
    assert status.inner_text() == ""
    open_page.get_by_role("button", name="reset").click()


def test_there_is_a_normaliser_for_each_card_and_its_text_is_the_catalogues(open_page: Page) -> None:
    shown = open_page.locator("[data-live]").evaluate_all("cards => cards.map(card => card.dataset.live)")
    assert shown == list(LIVE)
    for each in norms.LIVE:
        card = open_page.locator(f"#live-{each['key']}").inner_text()
        assert load_norms()[each["norm"]].source in card
        eps = load_norms()[each["norm"]]().eps  # pyright: ignore
        assert f"{eps:.0e}".replace("-0", "\N{MINUS SIGN}") in card


@pytest.mark.slow
@pytest.mark.parametrize("name", load_norms())
def test_every_norm_is_there_as_its_module_computes_it(open_page: Page, name: str) -> None:
    details = open_page.locator(f"details#norm-{name}")
    details.locator("summary").focus()
    open_page.keyboard.press("Enter")
    assert details.get_attribute("open") is not None
    torch.manual_seed(norms.SEED)
    options = load_norms()[name](**norms.OPTIONS.get(name, {}))  # pyright: ignore
    module = options.build(6).double()
    shape = (norms.SEQUENCES.get(name, 1), -1, 6)
    x = torch.tensor(ORIGINAL).reshape(shape)
    with torch.no_grad():
        expected = module(x).reshape(4, 6).numpy()
        state = dict(module.state_dict())
        reference = options.reference(x, state).reshape(4, 6).numpy()
    seen = result(open_page, f"details#norm-{name}")
    np.testing.assert_allclose(seen, expected, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(seen, reference, rtol=1e-6, atol=1e-9)
    statistics_are(open_page, f"details#norm-{name}", seen)
    text = details.inner_text()
    assert options.formula in text
    assert options.source in text
    open_page.keyboard.press("Enter")


def test_groups_are_outlined(open_page: Page) -> None:
    """An edge wherever the neighbour is of another group: rows, columns, or nothing."""
    of = "table.matrix:not(.kept) td.value"
    count = {
        side: {key: open_page.locator(f"#live-{key} {of}.edge-{side}").count() for key in LIVE}
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
TOLD = {"A_qkv": 3, "heads_qkv": 3, "N": 1}
"""Norms of a call, by its name."""


def norms_of(formula: str) -> int:
    """How many norms there are in a formula without choices."""
    calls = [node.func.id for node in ast.walk(ast.parse(formula)) if isinstance(node, ast.Call)]  # pyright: ignore
    return sum(TOLD.get(name, 0) for name in calls) * (2 if "F(" in formula else 1)


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
def test_a_drawing_has_the_norms_of_the_formula(open_page: Page, name: str) -> None:
    placement = PLACEMENTS[name]
    sides = (True, False) if choices(placement.formula) else (True,)
    wanted = ["; ".join(map(ast.unparse, chosen(placement.formula, side))) for side in sides]
    seen = drawn(open_page, name)
    assert [one["inside"] for one in seen] == [norms_of(form) for form in wanted]
    assert {one["below"] for one in seen} == {norms_of(placement.opens)}
    assert {one["all"] - one["inside"] - one["below"] for one in seen} == {norms_of(placement.closes)}
    card = open_page.locator(f"#placement-{name}").inner_text()
    source = next(entry["source"] for entry in catalogue.placements() if entry["name"] == name)
    for text in (source, placement.opens, placement.closes, placement.inside, *placement.formula.split("; ")):
        assert text in card


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("open_all", [False, True])
def test_on_a_phone_nothing_is_cut(browser: Browser, written: Path, theme: str, open_all: bool) -> None:
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


def test_the_theme_can_be_chosen(browser: Browser, written: Path) -> None:
    with opened(browser, written) as one:
        grounds = []
        for theme in ("light", "dark"):
            one.get_by_label("theme").select_option(theme)
            grounds.append(one.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(set(grounds)) == 2


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_number_can_be_read_on_its_colour(browser: Browser, written: Path, theme: str) -> None:
    """A contrast of 4.5, as WCAG asks of text."""
    with opened(browser, written, theme=theme) as one:
        worst = one.evaluate(
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
                const [one, two] = [light(style.color), light(style.backgroundColor)];
                return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
              }));
            }"""
        )
        assert worst >= 4.5


def test_by_keyboard(browser: Browser, written: Path) -> None:
    with opened(browser, written) as one:
        reached = []
        for _ in range(40):
            one.keyboard.press("Tab")
            reached.append(
                one.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.id")
            )
        assert reached.index("token 1, channel 1") < reached.index("token 4, channel 6") < reached.index("reset")
        one.get_by_label("token 1, channel 1", exact=True).focus()
        one.keyboard.press("Control+A")
        one.keyboard.type("-2.5")
        x = ORIGINAL.copy()
        x[0, 0] = -2.5
        np.testing.assert_allclose(result(one, "#live-layernorm"), by_module("layernorm", x), rtol=1e-6)


def test_a_link_opens_what_it_leads_to(browser: Browser, written: Path) -> None:
    with opened(browser, written) as one:
        one.evaluate("location.hash = '#norm-dyt'")
        one.wait_for_function("document.getElementById('norm-dyt').open")


def test_a_link_to_what_is_no_name_leads_nowhere(browser: Browser, written: Path) -> None:
    with opened(browser, written) as one:
        one.evaluate("location.hash = '#%'")
        one.wait_for_timeout(100)
        one.evaluate("location.hash = '#norm-dyt'")
        one.wait_for_function("document.getElementById('norm-dyt').open")


def test_the_command_writes_the_page_where_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("explain") == (0, "explain.html\n", "")
    assert run_command("explain", "-o", "new/folder/page.html") == (0, "new/folder/page.html\n", "")
    assert Path("explain.html").read_bytes() == Path("new/folder/page.html").read_bytes()
    found = Path("explain.html").read_text(encoding="utf-8").partition('id="data">')[2].partition("</script>")[0]
    # Other tests may have registered norms of their own: only the project's are on the page.
    ours = {name for name, kind in load_norms().items() if kind.__module__.startswith("normlab.")}
    assert {one["name"] for one in json.loads(found)["norms"]} == ours
    assert {one["name"] for one in json.loads(found)["placements"]} == set(PLACEMENTS)


def test_open_hands_the_page_to_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from normlab.cli import explain

    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", asked.append)
    path = tmp_path / "page.html"
    explain(str(path), open=True)
    assert asked == [path.as_uri()]
    assert capsys.readouterr().out == f"{path}\n"


@pytest.mark.parametrize("output", ["x.txt", "."])
def test_what_is_no_page_is_refused_and_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_command: Command, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run_command("explain", "-o", output)
    assert (code, out) == (2, "")
    assert err.startswith("error: -o ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
