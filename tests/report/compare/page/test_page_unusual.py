"""The comparison page of unusual runs: long names, markup in a name, no result; no text is cut."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from synthetic_runs import Record, write_run, write_sweep

from normlab.store.files import write_atomic
from normlab.store.format import DIVERGED, RUNS_FOLDER, with_checksum
from support.browser import PHONE, WIDE, opened
from support.compare_pages import drawn, normlab, open_table, overlapping_texts, ready


def awkward() -> list[Record]:
    """Runs with long names, five learning rates and divergence in several cells."""
    rates = (1e-4, 3.16e-4, 1e-3, 3.16e-3, 1e-2)
    return [
        Record(norm=norm, placement="pre", depth=depth, lr=lr, seed=seed, steps=40, stats_every=None, **outcome)
        for norm in ("a_norm_of_a_rather_long_name", "another_norm_that_is_long", "layernorm")
        for depth in (4, 12)
        for lr in rates
        for seed in (0, 1)
        for outcome in [{"outcome": DIVERGED, "at": 30} if lr == 1e-2 and seed else {}]
    ]


def five_factors() -> list[Record]:
    grid = itertools.product(("layernorm", "rmsnorm"), ("pre", "post", "deepnorm"), (4, 16), (64, 128), (0, 10))
    return [
        Record(norm=norm, placement=place, depth=depth, width=width, warmup_steps=warmup, steps=40, seed=seed)
        for norm, place, depth, width, warmup in grid
        for seed in (0, 1)
    ]


def one_factor() -> list[Record]:
    return [Record(norm=norm, seed=seed, steps=40) for norm in ("layernorm", "rmsnorm", "dyt") for seed in (0, 1, 2)]


SWEEPS = {"awkward": awkward, "five": five_factors, "one": one_factor, "single": lambda: [Record(steps=1)]}


@pytest.fixture(scope="module")
def pages(tmp_path_factory, path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("unusual")
    made = {"path": path}
    for name, records in SWEEPS.items():
        write_sweep(folder / name, name, records())
        made[name] = folder / f"{name}.html"
        normlab("compare", name, "--results-dir", str(folder / name), "-o", str(made[name]))
    return made


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("which", ["path", *SWEEPS])
def test_no_text_is_cut_or_overlaps(browser, which, size, pages):
    with opened(browser, pages[which], size) as page:
        ready(page)
        page.wait_for_timeout(100)
        assert overlapping_texts(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        cut = page.evaluate(
            """() => [...document.querySelectorAll('.panel svg[role=img] text')].filter((text) => {
              const box = text.getBoundingClientRect();
              const around = text.closest('.chart').getBoundingClientRect();
              return box.left < around.left - 1 || box.right > around.right + 1;
            }).map((text) => text.closest('.chart').dataset.figure + ': ' + text.textContent)"""
        )
        assert cut == []


def test_a_single_run(browser, pages):
    with opened(browser, pages["single"]) as page:
        ready(page)
        assert page.locator(".eyebrow").inner_text().lower() == "the only cell"
        assert not page.locator("#factors").is_visible()
        assert page.locator("[data-figure=matrix]").count() == 0


@pytest.mark.parametrize(
    "name", ["<img src=x onerror=alert(1)>", "a $x^2$ %{x} &lt; <b>b</b>", "</script>%{fullData.name}"]
)
def test_run_name_is_never_markup(browser, tmp_path, name):
    """A name is not interpreted as HTML, in any figure or table."""
    for place, norm in enumerate((name, "other")):
        folder = write_run(tmp_path / "results" / RUNS_FOLDER, Record(steps=40, stats_every=10, seed=place))
        written = (folder.path / "run.json").read_text()
        run = {key: value for key, value in json.loads(written).items() if key != "sha256"}
        write_atomic(
            folder.path / "run.json",
            with_checksum({**run, "name": norm, "config": {**run["config"], "norm": {"preset": norm, "name": "x"}}}),
        )
    page_path = tmp_path / "page.html"
    normlab("compare", str(tmp_path / "results"), "-o", str(page_path))
    with opened(browser, page_path) as page:
        page.on("dialog", lambda dialog: pytest.fail("a script of the name has run"))
        ready(page)
        for figure in page.evaluate("FIGURES.map((figure) => figure.element.dataset.figure)"):
            drawn(page, figure)
        open_table(page, "runs")
        assert page.locator("img").count() == 0
        assert name in page.locator("#runs tbody").inner_text()
        assert name in page.locator("#factors").inner_text()
        assert name in page.locator("[data-figure=curves] .legend").inner_text()


def test_page_without_any_result(browser, tmp_path):
    """A page of damaged and empty runs says so."""
    broken = tmp_path / RUNS_FOLDER / "broken"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("{")
    normlab("compare", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        ready(page)
        assert page.locator(".best").inner_text().startswith("No run has a final loss yet")
        assert "1 damaged" in page.locator("#answer").inner_text()
        assert page.locator(".chart").count() == 0


def test_curves_of_runs_without_a_final_loss(browser, tmp_path):
    """Interrupted runs have curves, but no final loss."""
    write_run(tmp_path / RUNS_FOLDER, Record(steps=40, outcome="interrupted"))
    normlab("compare", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        ready(page)
        assert page.locator("[data-figure=factor]").count() == 0
        assert drawn(page, "curves")["panels"]


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


def test_damaged_and_missing_files(browser, tmp_path):
    """A run without statistics has no line by layer; a run with damaged files has what can be read, and a note."""
    records = [
        Record(norm=norm, seed=seed, steps=40, stats_every=None if norm == "dyt" else 10)
        for norm in ("layernorm", "rmsnorm", "dyt")
        for seed in (0, 1)
    ]
    write_sweep(tmp_path, "made", records)
    damaged = tmp_path / RUNS_FOLDER / records[2].run_id
    metrics = damaged / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-30] + b"\n\xff{\n")
    for file in (damaged / "stats").rglob("*.*"):
        file.write_bytes(b"damaged")
    normlab("compare", "made", "--results-dir", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        lines = [line for panel in drawn(ready(page), "layers")["panels"] for line in panel["lines"]]
        assert [line["label"] for line in lines] == ["LayerNorm", "RMSNorm"]
        assert {point["low"] == point["high"] for point in lines[1]["points"]} == {True}  # one seed is left
        (curve,) = [p for p in drawn(page, "curves")["panels"][0]["lines"] if p["label"] == "RMSNorm"]
        assert [point["x"] for point in curve["points"]] == [0, 40]
        notes = page.locator("#tables details").last
        notes.locator("summary").click()
        assert f"run {damaged.name}: " in notes.inner_text()


def hide_all_but(page, level: str) -> None:
    for chip in page.locator("#factors [data-level]").all():
        if chip.get_attribute("data-level") != level:
            chip.click()


def test_only_cells_without_a_result_are_shown(browser, tmp_path):
    records = [Record(norm=norm, steps=40) for norm in ("layernorm", "rmsnorm")]
    write_sweep(tmp_path, "made", [*records, Record(norm="dyt", steps=40, outcome="interrupted")])
    normlab("compare", "made", "--results-dir", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        hide_all_but(ready(page), "DyT")
        for figure in page.evaluate("FIGURES.map((figure) => figure.element.dataset.figure)"):
            assert "LayerNorm" not in json.dumps(drawn(page, figure))
        assert page.locator(".best").inner_text().startswith("No run that is shown has a final loss")
        assert "1 not finished" in page.locator("#answer").inner_text()


def test_hours_of_a_run_without_a_speed(browser, tmp_path):
    """A run that stopped before its first record of the speed."""
    folder = write_run(tmp_path / RUNS_FOLDER, Record(steps=40))
    status = {key: value for key, value in folder.status().items() if key != "sha256"}
    folder.write_status({**status, "tokens_per_s": None})
    normlab("compare", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        ready(page).locator("#unit").select_option("hours")
        lines = [line for panel in drawn(page, "curves")["panels"] for line in panel["lines"]]
    assert lines == []


def test_headline_names_a_resolved_setting_that_differs(browser, pages, tmp_path):
    records = [Record(placement=name, steps=20, stats_every=None) for name in ("pre", "peri")]
    write_sweep(tmp_path, "inits", records)
    path = tmp_path / RUNS_FOLDER / records[1].run_id / "run.json"
    run = json.loads(path.read_text())
    run["resolved"]["init"] = "gpt2"
    del run["sha256"]
    write_atomic(path, with_checksum(run))
    normlab("compare", "inits", "--results-dir", str(tmp_path), "-o", str(tmp_path / "page.html"))
    line = "the cells also differ in init: gpt2 (peri-LN), gpt2_scaled (pre-norm)"
    for page_path, count in ((tmp_path / "page.html", 1), (pages["one"], 0)):
        with opened(browser, page_path) as page:
            assert ready(page).locator("#answer dt", has_text="also differs").count() == count
            assert page.locator("#answer dd", has_text=line).count() == count
