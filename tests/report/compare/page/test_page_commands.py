"""The command below each figure, "For a paper": `normlab figure` accepts it and draws the same figure."""

from __future__ import annotations

import dataclasses
import math
import shlex

import pytest
from synthetic_runs import Record, write_run, write_sweep

from normlab.analysis.settings import format_setting
from normlab.analysis.table import summarize_by
from normlab.report.figure_data import Figure, make_figure
from normlab.store.format import RUNS_FOLDER
from normlab.store.runs import RunFolder
from support.browser import opened
from support.compare_pages import FIGURES, drawn, ready


def commands(page) -> dict[str, str]:
    """Return the command below each figure."""
    return dict(
        page.evaluate(
            """FIGURES.map((figure) => {
              drawNow(figure);
              return [figure.element.dataset.figure, figure.parts.command.textContent];
            })"""
        )
    )


def figure_of(command: str) -> Figure:
    """Return the data of the figure that a command draws."""
    program, figure, kind, sweep, *flags = shlex.split(command)
    assert (program, figure) == ("normlab", "figure")
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given.pop("-o") == "figure.pdf"
    by, where, panel = (given.pop(flag, None) for flag in ("--by", "--where", "--panel"))
    names = {"--x": "x", "--color": "color", "--style": "style", "--statistic": "statistic", "--at": "moment"}
    return make_figure(
        kind,
        summarize_by(sweep, by and by.split(","), where=[where] if where else []),
        panel=panel and panel.split(","),
        **{names[flag]: value for flag, value in given.items()},
    )


def accept(run_command, page, tmp_path, figures=()) -> None:
    """Assert that the CLI accepts the command of some or all figures."""
    output = tmp_path / "figure.pdf"
    failed = []
    by_figure = commands(page)
    for figure in figures or by_figure:
        command = by_figure[figure]
        arguments = shlex.split(command)
        assert (arguments[0], arguments[-1]) == ("normlab", "figure.pdf")
        code, _, err = run_command(*arguments[1:-1], str(output))
        failed += [(command, err)] if code else []
    assert failed == []
    assert output.read_bytes().startswith(b"%PDF")


def change(page) -> None:
    """Move two factors to other channels and hide a level."""
    page.locator('[data-option="placement"]').select_option("style")
    page.locator('[data-option="norm"]').select_option("x")
    page.locator('[data-level="depth 4"]').click()


@pytest.mark.parametrize("is_changed", [False, True], ids=["default", "changed"])
def test_commands_run(browser, path, tmp_path, run_command, is_changed):
    with opened(browser, path) as page:
        ready(page)
        if is_changed:
            change(page)
            assert all("--where 'model.depth!=4'" in command for command in commands(page).values())
        accept(run_command, page, tmp_path)


def values(points) -> list[float]:
    """Return the numbers of some points, with NaN for none."""
    return [math.nan if point[key] is None else point[key] for point in points for key in ("x", "y", "low", "high")]


@pytest.mark.parametrize("is_changed", [False, True], ids=["default", "changed"])
def test_commands_draw_what_the_page_draws(browser, path, is_changed):
    with opened(browser, path) as page:
        ready(page)
        if is_changed:
            change(page)
        by_figure = commands(page)
        specs = {figure: drawn(page, figure) for figure in FIGURES}
    for name, spec in specs.items():
        figure = figure_of(by_figure[name])
        assert [panel["title"] for panel in spec["panels"]] == [panel.title for panel in figure.panels], name
        for panel, expected in zip(spec["panels"], figure.panels, strict=True):
            if name == "matrix":
                fields = {f"{column},{row}": point.y for (column, row), point in expected.grid.items()}
                assert {at: field["value"] for at, field in panel["fields"].items()} == fields
                continue
            lines = [(line["label"], line["colour"]) for line in panel["lines"]]
            assert lines == [(line.label, line.color) for line in expected.lines], name
            for line, other in zip(panel["lines"], expected.lines, strict=True):
                points = values(map(dataclasses.asdict, other.points))
                assert values(line["points"]) == pytest.approx(points, rel=1e-5, nan_ok=True), name


@pytest.mark.parametrize("channel", ["style", "panel"])
def test_commands_run_without_a_factor_on_x(browser, path, tmp_path, run_command, channel):
    with opened(browser, path) as page:
        ready(page).locator('[data-option="model.depth"]').select_option(channel)
        accept(run_command, page, tmp_path, ["factor"])


UNEVEN = {
    "one cell without statistics": [Record(norm="layernorm", steps=40), Record(steps=40, stats_every=None)],
    "no final loss": [Record(norm=norm, steps=40, outcome="interrupted") for norm in ("layernorm", "rmsnorm")],
}


@pytest.mark.parametrize("which", UNEVEN)
def test_commands_run_for_uneven_sweeps(browser, tmp_path, run_command, which):
    write_sweep(tmp_path, "made", UNEVEN[which])
    run_command("compare", "made", "--results-dir", str(tmp_path), "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        accept(run_command, ready(page), tmp_path, ["curves", "layers"])


@pytest.mark.parametrize(
    ("option", "level"),
    [
        ("placement", "post"),
        ("model.rope_theta", 10000.0),
        ("model.rope_theta", None),
        ("norm.eps", 1.2345678e-5),
    ],
)
def test_command_leaves_out_a_hidden_level(browser, tmp_path, run_command, option, level):
    """Of two levels one is hidden; the command has the cells of the other."""
    group, _, name = option.rpartition(".")
    for seed, value in enumerate((level, {"post": "pre", 1.2345678e-5: 1e-6, None: 1.0}.get(level))):
        folder = write_run(tmp_path / RUNS_FOLDER, Record(steps=40, stats_every=None, seed=seed))
        run = {key: content for key, content in folder.run().items() if key not in ("sha256", "version")}
        run["config"] |= {group: {**run["config"][group], name: value}} if group else {option: {"name": value}}
        (folder.path / "run.json").unlink()
        RunFolder.create(folder.path, run)
    run_command("compare", str(tmp_path), "--by", option, "-o", str(tmp_path / "page.html"))
    with opened(browser, tmp_path / "page.html") as page:
        (factor,) = ready(page).evaluate("FACTORS")
        label = factor["labels"][factor["levels"].index(format_setting(level))]
        page.locator(f'[data-level="{label}"]').click()
        (line,) = [line for panel in drawn(page, "factor")["panels"] for line in panel["lines"]]
        figure = figure_of(commands(page)["factor"])
    assert label not in line["label"]
    assert sum(len(line.points) for line in figure.panels[0].lines) == len(line["points"]) == 1
