"""The comparison page of unusual runs: long names, markup in a name, divergence, no result; no text is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from synthetic_runs import Record, write_run

from normlab.store.files import write_atomic
from normlab.store.format import DIVERGED, RUNS_FOLDER, with_checksum
from support.browser import PHONE, WIDE, opened
from support.compare_pages import SECTIONS, drawn, normlab, ready


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
@pytest.mark.parametrize("which", ["path", "crowded"])
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


@pytest.mark.parametrize(
    "name",
    [
        "<img src=x onerror=alert(1)>",
        "a $x^2$ %{x} &lt; <b>b</b>",
        "</script>%{fullData.name}",
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
        with_checksum({**run, "name": name, "config": {**run["config"], "norm": {"preset": name, "name": "x"}}}),
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
