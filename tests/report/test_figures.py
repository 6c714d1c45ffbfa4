"""Figures: every point is a number of `summarize --format json`, and the files are fit for a paper."""

import itertools
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import Record, write_sweep

from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError, NormlabError
from normlab.catalogue.statistics.statistic import CORE
from normlab.report.channels import MAX_PANELS
from normlab.report.figure_axes import TICKS, number_ticks, short_number, value_axis
from normlab.report.figure_data import KINDS, curve_figure, make_figure
from normlab.report.figure_draw import draw, write_figure
from normlab.report.figure_layout import Line, Panel
from normlab.report.figure_points import Point
from normlab.store.runs import RunFolder

SMALL: dict[str, Any] = {"context": 32, "width": 32, "steps": 220, "batch_size": 4}
SEEDS = (0, 1, 2)
RATES = (1e-3, 3e-3)
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
PLACEMENTS = {"post": "post-norm", "pre": "pre-norm"}
DEPTHS = (2, 4)
BY = ["--by", "norm,placement,depth"]


def records() -> list[Record]:
    """A grid without one cell; in another cell, seeds diverged at one rate or at every rate."""
    grid = []
    for norm, placement, depth, lr, seed in itertools.product(NORMS, PLACEMENTS, DEPTHS, RATES, SEEDS):
        if (norm, placement, depth) == ("layernorm", "post", 4):
            continue  # a missing cell
        record = Record(**SMALL, norm=norm, placement=placement, depth=depth, lr=lr, seed=seed)
        is_bad = (norm, placement, depth) == ("rmsnorm", "post", 4) and seed == 1
        is_fast = (norm, placement, depth) == ("rmsnorm", "post", 2) and lr == 3e-3 and seed in (0, 2)
        grid.append(replace(record, outcome="diverged", at=150) if is_bad or is_fast else record)
    return grid


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    write_sweep(folder, "made", records())
    return folder


@pytest.fixture
def table(results):
    return summarize_by("made", results_dir=results)


@pytest.fixture
def cells(results, run_command):
    """Returns the cells of `summarize --format json`, by norm, placement and depth."""

    def read(*arguments: str) -> dict:
        code, out, _ = run_command("summarize", "made", *arguments, "--format=json", f"--results-dir={results}")
        assert code == 0
        return {(row["norm"], row["placement"], row["model.depth"]): row for row in json.loads(out)}

    return read


def compare(point, row):
    """Assert that a point has the numbers of a cell's row of JSON."""
    diverged, seeds = row["seeds_diverged"], row["seeds"]
    assert (point.diverged, point.n) == (diverged, seeds)
    if diverged:
        assert row["val_loss"] == "inf"
        assert (point.y, point.low, point.high) == (None, None, None)
    else:
        numbers = tuple(row[key] for key in ("val_loss", "val_loss_low", "val_loss_high"))
        assert (point.y, point.low, point.high) == numbers
        assert np.mean(point.seeds) == pytest.approx(point.y, abs=1e-12)
    assert len(point.seeds) == seeds - diverged


# Points


def test_points_of_factor(table, cells):
    """The panels are placements, the colours norms, and x is the depth."""
    expected = cells()
    figure = make_figure("factor", table, x="model.depth", color="norm", panel=["placement"])
    assert [panel.title for panel in figure.panels] == ["post-norm", "pre-norm"]
    assert (figure.x.is_log, figure.x.ticks) == (True, [(2.0, "2"), (4.0, "4")])
    drawn = {}
    for placement, panel in zip(PLACEMENTS, figure.panels, strict=True):
        for line in panel.lines:
            (norm,) = (norm for norm, title in NORMS.items() if title == line.label)
            for point in line.points:
                drawn[norm, placement, int(point.x)] = point
    assert drawn.keys() == expected.keys()
    for key, point in drawn.items():
        compare(point, expected[key])
    # The grid has every kind of cell.
    assert len(drawn) == 7
    assert drawn["rmsnorm", "post", 4].diverged == 1
    assert drawn["rmsnorm", "post", 2].diverged == 0


def test_points_of_lr(table, cells):
    """At each learning rate: the numbers of `summarize --where lr=...`."""
    figure = make_figure("lr", table, color="norm", panel=["placement", "model.depth"])
    titles = {f"{title}, depth {depth}": (name, depth) for name, title in PLACEMENTS.items() for depth in DEPTHS}
    assert [panel.title for panel in figure.panels] == list(titles)
    diverged = 0
    for lr in RATES:
        expected = cells("--where", f"lr={lr}")
        for panel in figure.panels:
            for line in panel.lines:
                (norm,) = (norm for norm, title in NORMS.items() if title == line.label)
                (point,) = (point for point in line.points if point.x == lr)
                compare(point, expected[norm, *titles[panel.title]])
                diverged += point.diverged
    assert diverged == 4
    assert sum(len(line.points) for panel in figure.panels for line in panel.lines) == 14


def runs_of(row: dict, results: Path) -> list[Path]:
    """Return the folders of the runs of a cell at its best learning rate."""
    folders = [results / "runs" / run_id for run_id in row["run_ids"]]
    return [
        folder
        for folder in folders
        if json.loads((folder / "run.json").read_text())["config"]["optim"]["lr"] == row["lr"]
    ]


def curve(folder: Path, kind: str, key: str) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[key] for row in rows if row["kind"] == kind}


def lines_of(figure):
    """Yield the norm, the placement and the points of each line of a figure of one depth."""
    for panel in figure.panels:
        (placement,) = (name for name, title in PLACEMENTS.items() if title == panel.title)
        for line in panel.lines:
            yield next(norm for norm, title in NORMS.items() if title == line.label), placement, line.points


def test_points_of_loss_are_mean_and_range_of_the_seeds(results, cells):
    table = summarize_by("made", where=["depth=2"], results_dir=results)
    expected = cells("--where", "depth=2", *BY)
    figure = make_figure("loss", table, color="norm", panel=["placement"])
    count = 0
    for norm, placement, points in lines_of(figure):
        folders = runs_of(expected[norm, placement, 2], results)
        curves = [curve(folder, "eval", "loss") for folder in folders]
        assert [point.x for point in points] == list(curves[0]) == [0, 100, 200, 220]
        values = np.array([list(each.values()) for each in curves])
        assert values.shape == (3, 4)
        assert [point.y for point in points] == pytest.approx(values.mean(0), abs=1e-12)
        assert [point.low for point in points] == values.min(0).tolist()
        assert [point.high for point in points] == values.max(0).tolist()
        assert {point.n for point in points} == {3}
        count += 1
    assert count == 4


def test_loss_of_a_diverged_seed_ends_where_it_diverged(results, cells):
    table = summarize_by("made", where=["depth=4", "placement=post"], results_dir=results)
    row = cells("--where", "depth=4,placement=post", *BY)["rmsnorm", "post", 4]
    (panel,) = make_figure("loss", table).panels
    (line,) = panel.lines
    curves = [curve(folder, "eval", "loss") for folder in runs_of(row, results)]
    assert sorted(map(len, curves)) == [2, 4, 4]
    for point in line.points:
        values = [each[int(point.x)] for each in curves if point.x in each]
        assert point.y == pytest.approx(np.mean(values), abs=1e-12)
        assert (point.low, point.high, point.n) == (min(values), max(values), len(values))


def test_points_of_layers_are_median_and_range_of_the_seeds(results, cells):
    table = summarize_by("made", where=["depth=4"], results_dir=results)
    expected = cells("--where", "depth=4", *BY)
    figure = make_figure("layers", table, color="norm", panel=["placement"], statistic="resid_rms")
    count = 0
    for norm, placement, points in lines_of(figure):
        profiles = []
        for folder in runs_of(expected[norm, placement, 4], results):
            [stored], _ = RunFolder(folder).statistics.read(CORE)
            profiles.append(stored.single_site("resid_rms")[-1])
        values = np.array(profiles, dtype=np.float64)
        layers = [int(point.x) for point in points]
        assert layers == np.flatnonzero(np.isfinite(values).all(0)).tolist()
        assert len(layers) >= 4
        assert [point.y for point in points] == pytest.approx(np.median(values, 0)[layers], rel=1e-12)
        assert [point.low for point in points] == values.min(0)[layers].tolist()
        assert [point.high for point in points] == values.max(0)[layers].tolist()
        count += 1
    assert count == 3


def test_one_seed_and_two_seeds_have_no_interval(results):
    for where, seeds in (("seed=0", 1), ("seed<2", 2)):
        figure = make_figure("factor", summarize_by("made", where=[where, "placement=pre"], results_dir=results))
        points = [point for panel in figure.panels for line in panel.lines for point in line.points]
        assert len(points) == 4
        assert {(point.low, point.high, point.n, len(point.seeds)) for point in points} == {(None, None, seeds, seeds)}


# Errors


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("bar", {}, "figure bar: unknown figure 'bar'"),
        (
            "layers",
            {"statistic": "resid_rsm"},
            "--statistic resid_rsm: unknown statistic by layer .*did you mean 'resid_rms'",
        ),
        ("layers", {"statistic": "resid_growth"}, "--statistic resid_growth: "),
        ("lr", {"statistic": "resid_rms"}, "--statistic resid_rms: has no effect on figure lr; leave it out"),
        ("loss", {"moment": "3"}, "--at 3: has no effect on figure loss; leave it out"),
        ("layers", {"moment": "middle"}, "--at middle: must be a step, first or last"),
        (
            "layers",
            {"moment": "99999"},
            r"--at 99999: not measured at this step \(stats.every says at which\); choose \d+ or \d+$",
        ),
    ],
)
def test_unknown_kinds_and_statistics(table, kind, options, message):
    with pytest.raises(ConfigError, match="^" + message):
        make_figure(kind, table, **options)


def test_too_many_panels(tmp_path):
    steps = range(MAX_PANELS + 1)
    write_sweep(
        tmp_path,
        "made",
        [Record(**{**SMALL, "steps": 2}, stats_every=None, warmup_steps=step) for step in steps],
    )
    panel = ["optim.warmup_steps"]
    message = f"figure lr: {MAX_PANELS + 1} panels, at most {MAX_PANELS}; .* move optim.warmup_steps to --color or"
    with pytest.raises(ConfigError, match=message):
        make_figure("lr", summarize_by("made", results_dir=tmp_path), panel=panel)
    fewer = summarize_by("made", where=["warmup_steps>0"], results_dir=tmp_path)
    assert len(make_figure("lr", fewer, panel=panel).panels) == MAX_PANELS


def test_runs_without_a_final_loss(tmp_path):
    write_sweep(tmp_path, "made", [Record(**SMALL, stats_every=None, outcome="interrupted")])
    with pytest.raises(NormlabError, match="figure lr: no selected run has a final loss yet"):
        make_figure("lr", summarize_by("made", results_dir=tmp_path))


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("figure.jpg", 2, "-o .*figure.jpg: a figure ends in .pdf, .svg, .png"),
        ("figure", 2, "-o .*figure: a figure ends in .pdf, .svg, .png"),
        ("figure.pdf", 3, "--columns 3: must be 1 or 2"),
        ("figure.png", 0, "--columns 0: must be 1 or 2"),
    ],
)
def test_wrong_suffix_or_columns_leave_no_file(table, tmp_path, name, columns, message):
    with pytest.raises(ConfigError, match=message):
        write_figure(make_figure("lr", table), tmp_path / name, columns)
    assert list(tmp_path.iterdir()) == []


# Axes


def curve_points(*values: float) -> list[Panel]:
    return [Panel("", [Line("", "", "solid", [Point(x, y, y, y) for x, y in enumerate(values)])])]


def test_ticks_are_round_numbers_in_the_range():
    assert number_ticks(0, 400) == [(0, "0"), (100, "100"), (200, "200"), (300, "300"), (400, "400")]
    assert number_ticks(2.2731, 2.3612) == [
        (2.28, "2.28"),
        (2.3, "2.3"),
        (2.32, "2.32"),
        (2.34, "2.34"),
        (2.36, "2.36"),
    ]
    assert number_ticks(0.3, 20, is_log=True) == [(0.3, "0.3"), (1, "1"), (3, "3"), (10, "10")]
    for low, high in itertools.combinations([-3e5, -1e-7, 0.0, 2.5e-6, 1.0, 1.001, 99.0, 1e7], 2):
        for is_log in {False, low > 0}:
            ticks = [tick for tick, _ in number_ticks(low, high, is_log=is_log)]
            assert 2 <= len(ticks) <= TICKS + 1
            assert all(0 <= (tick - low) / (high - low) + 1e-9 <= 1 + 2e-9 for tick in ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.25, "1.25"),
        (1234, "1234"),
        (12345, "12.3k"),
        (2e6, "2M"),
        (1e9, "1G"),
        (1e12, "1e12"),
        (3e-5, "3e-5"),
    ],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


def test_the_axis_of_losses_fits_what_was_trained():
    """It leaves out the first tenth of the steps, and the end of an interval that is longer than the range."""
    early = curve_figure("val_loss", curve_points(9.0, *[2 - index / 100 for index in range(20)]), "").y
    assert (early.low, early.high) == pytest.approx((1.81 - 0.18 * 0.08, 1.99 + 0.18 * 0.08))
    (line,) = curve_points(1.0, 2.0)[0].lines
    spread = [Panel("", [replace(line, points=[*line.points, Point(2, 1.5, -50, 60)])])]
    axis = curve_figure("val_loss", spread, "").y
    assert (axis.low, axis.high) == pytest.approx((0 - 0.24, 3 + 0.24))


@pytest.mark.parametrize(("largest", "is_log"), [(29.0, False), (31.0, True)])
def test_gradients_that_differ_much_have_a_logarithmic_axis(largest, is_log):
    axis = curve_figure("grad_norm", curve_points(1.0, 2.0, largest), "").y
    assert axis.is_log == is_log
    assert not curve_figure("val_loss", curve_points(1.0, 2.0, largest), "").y.is_log


# Drawings


def test_the_drawing_has_the_points_and_the_diverged_seeds(table):
    figure = make_figure("factor", table, x="model.depth", color="norm", panel=["placement"])
    canvas = draw(figure)
    axes = canvas.get_axes()
    assert [axis.get_title() for axis in axes] == ["post-norm", "pre-norm"]
    assert [axis.get_xlabel() for axis in axes] == ["depth", "depth"]
    assert axes[0].get_ylabel() == "validation loss, nats/token"
    for axis, panel in zip(axes, figure.panels, strict=True):
        drawn = [(line.get_color(), np.asarray(line.get_ydata(), dtype=float).tolist()) for line in axis.get_lines()]
        for line in panel.lines:
            means = [point.y for point in line.points if point.y is not None]
            assert (line.color, means) in drawn
            low, high = axis.get_ylim()
            assert all(low < y < high for y in means)
    assert [[text.get_text() for text in axis.texts] for axis in axes] == [["1/3"], []]
    (legend,) = canvas.legends
    assert [text.get_text() for text in legend.get_texts()] == ["LayerNorm", "RMSNorm"]


# Files


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("suffix", "kind"),
    [
        # Each kind of figure in one format, and each format for one kind.
        (suffix, kind) if suffix == ".svg" or kind == "factor" else
        pytest.param(suffix, kind, marks=pytest.mark.exhaustive)
        # The one with laws needs three sizes (test_scaling_laws.py).
        for suffix in (".pdf", ".svg", ".png") for kind in KINDS if kind != "scaling"
    ],
)  # fmt: skip
def test_files(table, tmp_path, kind, suffix):
    """PDF with embedded TrueType fonts, SVG that is XML, and PNG; equal bytes for equal figures."""
    file, again = tmp_path / "new" / f"figure{suffix}", tmp_path / f"again{suffix.upper()}"
    figure = make_figure(kind, table)
    write_figure(figure, file)
    content = file.read_bytes()
    if suffix == ".pdf":
        assert content.startswith(b"%PDF")
        assert b"/FontFile2" in content
        assert b"/Type3" not in content
        assert b"CreationDate" not in content
    elif suffix == ".svg":
        root = ET.fromstring(content)
        assert root.tag.endswith("svg")
        assert root.get("width") == "504pt"
    else:
        assert content.startswith(b"\x89PNG")
    write_figure(figure, again)
    assert again.read_bytes() == content
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_command_prints_the_caption_and_the_path(results, tmp_path, run_command):
    file = tmp_path / "depth.svg"
    arguments = ["figure", "factor", "made", "--x", "depth", "--color", "norm", "--panel", "placement"]
    code, out, err = run_command(*arguments, "-o", str(file), "--columns", "1", f"--results-dir={results}")
    assert code == 0
    caption, path = out.splitlines()
    assert caption.startswith(
        "Final validation loss, each cell at its best learning rate, selected on this same loss: "
    )
    assert path == str(file)
    assert ET.fromstring(file.read_bytes()).get("width") == f"{3.4 * 72:.6f}".rstrip("0").rstrip(".") + "pt"
    # The warnings are those of `summarize`.
    assert err == run_command("summarize", "made", f"--results-dir={results}")[2]
    assert re.match("warning: ", err)


def test_a_notebook_shows_the_figure(table):
    notebook: Any = draw(make_figure("factor", table))
    shown = notebook._repr_png_()
    assert shown.startswith(b"\x89PNG")


def test_the_axis_has_stuck_runs_below_those_of_a_short_run():
    """A short run above the band around the unigram entropy is not stuck. Drawn outside, a point would be no part."""
    points = [Point(1, 3.7, 3.69, 3.71), Point(2, 3.75, 3.74, 3.76), Point(3, 3.28, 3.2, 3.36, stuck=3)]
    axis = value_axis("loss", points)
    assert axis.low < 3.28
    assert axis.high > 3.76
    above = [*points[:2], Point(3, 5.4, 5.3, 5.5, stuck=3)]
    assert value_axis("loss", above).high < 4


def test_stuck_runs_are_open_points_and_named_in_the_caption(tmp_path):
    """Stuck runs that would stretch the axis end at its top; the caption counts them."""
    grid = [
        Record(**SMALL, placement=placement, depth=depth, seed=seed)
        for placement, depth, seed in itertools.product(PLACEMENTS, DEPTHS, SEEDS)
    ]
    stuck = [replace(r, outcome="stuck") if (r.placement, r.depth) == ("post", 4) else r for r in grid]
    captions = {}
    for name, runs in (("trained", grid), ("stuck", stuck)):
        write_sweep(tmp_path / name, "made", runs)
        figure = make_figure("factor", summarize_by("made", results_dir=tmp_path / name))
        captions[name] = figure.caption
        (axis,) = draw(figure).axes
        drawn = [point.y for line in figure.panels[0].lines for point in line.points if point.y is not None]
        top = axis.get_ylim()[1]
        open_points = [line for line in axis.lines if line.get_markerfacecolor() == "white"]
        assert len(open_points) == (name == "stuck")
        assert (max(drawn) > top) == (name == "stuck")
        assert [text.get_text() for text in axis.texts] == [f"{max(drawn):.2f}"] * (name == "stuck")
    assert captions["stuck"].endswith("open point: with stuck or regressed runs. Of 12 runs, 3 stuck.")
    assert captions["trained"].endswith("points: seeds.")
