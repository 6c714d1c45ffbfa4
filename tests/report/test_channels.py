"""Channels of a figure: defaults, explicit choices, errors, and colours that do not depend on the kind of figure."""

import itertools
import re

import pytest
from synthetic_runs import Record, write_sweep

from normlab.analysis.factors import Factor
from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError
from normlab.report.channels import COLORS, choose_channels, level_colors
from normlab.report.figure_data import KINDS, make_figure

SMALL = {"context": 32, "steps": 20, "batch_size": 4}

LEVELS = {
    "norm": ("dyt", "layernorm", "rmsnorm"),
    "placement": ("post", "pre"),
    "model.depth": (2, 4, 8),
    "optim.warmup_steps": (0, 5),
}
FIELDS = {"norm": "norm", "placement": "placement", "model.depth": "depth", "optim.warmup_steps": "warmup_steps"}


@pytest.fixture
def table_of(tmp_path):
    """Writes a sweep of all combinations of these options' `LEVELS`; returns the table of its cells."""

    def make(*options: str, stats_every=None, where=(), by=None):
        if not (tmp_path / "sweeps").exists():
            combinations = itertools.product(*(LEVELS[option] for option in options))
            fields = [FIELDS[option] for option in options]
            write_sweep(
                tmp_path,
                "made",
                [
                    Record(**{**SMALL, "stats_every": stats_every, **dict(zip(fields, levels, strict=True))})
                    for levels in combinations
                ],
            )
        return summarize_by("made", by, where=where, results_dir=tmp_path)

    return make


def choose(table, *, has_x=True, **options):
    """Return the options on x, on colour, on style and of the panels."""
    runs = [run for cell in table.cells for run in cell.runs]
    channels = choose_channels(table.factors, runs, **options)
    channels = channels if has_x else channels.without_x()
    single = [factor and factor.option for factor in (channels.x, channels.color, channels.style)]
    return (*single, [factor.option for factor in channels.panel])


# Defaults


@pytest.mark.parametrize(
    ("options", "with_x", "without_x"),
    [
        (["norm"], ("norm", "norm", None, []), (None, "norm", None, [])),
        (["model.depth"], ("model.depth", None, None, []), (None, "model.depth", None, [])),
        (
            ["placement", "model.depth"],
            ("model.depth", "placement", None, []),
            (None, "placement", None, ["model.depth"]),
        ),
        (["norm", "placement"], ("norm", "placement", None, []), (None, "placement", None, ["norm"])),
        (
            ["optim.warmup_steps", "model.depth"],
            ("model.depth", "optim.warmup_steps", None, []),
            (None, "optim.warmup_steps", None, ["model.depth"]),
        ),
        (
            ["norm", "placement", "model.depth", "optim.warmup_steps"],
            ("model.depth", "norm", None, ["placement", "optim.warmup_steps"]),
            (None, "norm", None, ["model.depth", "placement", "optim.warmup_steps"]),
        ),
    ],
)
def test_defaults(table_of, options, with_x, without_x):
    """The numeric factor with the most levels is on x, the other one with the most levels is the colour."""
    table = table_of(*options)
    assert choose(table) == with_x
    assert choose(table, has_x=False) == without_x


# Explicit channels


@pytest.mark.parametrize(
    ("has_x", "given", "expected"),
    [
        (True, {"x": "norm"}, ("norm", "model.depth", None, ["placement"])),
        (True, {"color": "placement"}, ("model.depth", "placement", None, ["norm"])),
        (True, {"style": "norm"}, ("model.depth", "placement", "norm", [])),
        (True, {"x": "depth", "color": "norm", "style": "placement"}, ("model.depth", "norm", "placement", [])),
        (True, {"panel": ["norm"]}, ("model.depth", "placement", None, ["norm"])),
        (True, {"panel": ["placement", "norm"]}, ("model.depth", None, None, ["placement", "norm"])),
        (True, {"x": "placement", "color": "n_layer"}, ("placement", "model.depth", None, ["norm"])),
        (False, {"color": "model.depth"}, (None, "model.depth", None, ["norm", "placement"])),
        (False, {"style": "placement"}, (None, "norm", "placement", ["model.depth"])),
        (False, {"panel": ["norm", "placement"]}, (None, "model.depth", None, ["norm", "placement"])),
        (False, {"panel": ["placement"]}, (None, "norm", None, ["model.depth", "placement"])),
        (False, {"color": "norm", "style": "depth"}, (None, "norm", "model.depth", ["placement"])),
    ],
)
def test_explicit_channels(table_of, has_x, given, expected):
    assert choose(table_of("norm", "placement", "model.depth"), has_x=has_x, **given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": "dpth"}, "--x dpth: no run has this option (did you mean "),
        ({"color": "model.heads"}, "--color model.heads: is not one of the factors of these runs (norm, "),
        ({"style": "lr"}, "--style optim.lr: is not one of the factors of these runs (norm, placement, "),
        ({"x": "norm", "color": "norm"}, "--color norm: is on another channel already; name each factor once"),
        ({"panel": ["norm", "norm"]}, "--panel norm: is on another channel already"),
        ({"style": "depth", "panel": ["model.depth"]}, "--panel model.depth: is on another channel already"),
        ({"x": "depth", "color": "norm", "panel": []}, "--panel: not on a channel: placement; add to --panel"),
    ],
)
def test_errors(table_of, given, message):
    table = table_of("norm", "placement", "model.depth")
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        choose(table, **given)


# Colours and line styles


def test_numeric_levels_have_a_scale_from_dark_to_light():
    """Relative luminance as in Rec. 709; a single number has a colour of the palette."""
    colors = level_colors(Factor("model.depth", (1, 2, 4, 8, 16, 32))).values()
    channels = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in colors]
    luminance = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in channels]
    assert all(b - a > 10 for a, b in itertools.pairwise(luminance))
    assert level_colors(Factor("model.depth", (4,))) == {4: COLORS[0]}


@pytest.mark.parametrize(("option", "others"), [("norm", ["placement"]), ("model.depth", ["norm"])])
def test_a_level_has_one_colour_in_every_kind_of_figure(table_of, option, others):
    table = table_of(option, *others, stats_every=10)
    expected = dict(zip(LEVELS[option], level_colors(Factor(option, LEVELS[option])).values(), strict=True))
    names = {"dyt": "DyT", "layernorm": "LayerNorm", "rmsnorm": "RMSNorm", 2: "depth 2", 4: "depth 4", 8: "depth 8"}
    for kind in KINDS:
        # It needs three sizes of an arm, which has a colour (test_scaling_laws.py).
        if kind == "scaling":
            continue
        figure = make_figure(kind, table, color=option, panel=others if kind != "factor" else None)
        lines = {(line.label, line.color) for panel in figure.panels for line in panel.lines}
        assert lines == {(names[level], color) for level, color in expected.items()}, kind


def test_twenty_four_named_levels_have_different_colours():
    factor = Factor("norm", tuple(f"norm{index:02}" for index in range(24)))
    assert len(set(level_colors(factor).values())) == 24
