"""The page's numbers equal the JSON of `summarize` and the records."""

import itertools
import json
import math
import re

import numpy as np
import pytest

from normlab.analysis.paired_tests import holm
from normlab.analysis.table import summarize_by
from normlab.report.figure_data import make_figure
from normlab.report.figure_points import MAX_POINTS
from normlab.report.histories import histories, read_statistics
from support.compare_pages import lines_of


def printed(run_command, *arguments):
    code, out, _ = run_command("summarize", *arguments, "--format", "json")
    assert code == 0
    return json.loads(out)


def test_where_selects_runs(grid, compare, run_command, tmp_path):
    grid()
    arguments = ["--by", "norm", "--where", "model.depth>=4,norm=rmsnorm"]
    data, rows = compare(*arguments), printed(run_command, str(tmp_path), *arguments)
    (point,) = [point for points in lines_of(data, "factor").values() for point in points]
    assert [point["y"]] == [row["val_loss"] for row in rows]
    assert len(data["run_table"]["rows"]) == 12


def test_margins_equal_comparisons_of_summarize(grid, compare, run_command, tmp_path):
    """The best of each depth against the row of the second best in `--against` the best; corrected over both depths."""
    grid()
    data = compare("--by", "norm,placement,model.depth")
    margins = [fact for fact in data["facts"] if fact["name"] == "by how much"]
    assert len(margins) == 2
    p_values, seconds = [], []
    for depth, margin in zip((2, 4), margins, strict=True):
        rows = printed(run_command, str(tmp_path), "--where", f"depth={depth}", "--by", "norm,placement")
        best, second = sorted((row for row in rows if not row["seeds_diverged"]), key=lambda row: row["val_loss"])[:2]
        against = f"norm={best['norm']},placement={best['placement']}"
        where = ["--where", f"depth={depth}", "--by", "norm,placement", "--against", against]
        rows = {row["cell"]: row for row in printed(run_command, str(tmp_path), *where)}
        row = rows[second["cell"]]
        found = re.search(r"paired difference ([-+\d.]+)", margin["sentence"])
        assert found
        assert float(found[1]) == pytest.approx(-row["difference"], abs=6e-5)
        others = [each for cell, each in rows.items() if cell != best["cell"]]
        seconds.append((margin, row, len(p_values) + others.index(row)))
        p_values += [each["p"] for each in others]
    corrected = holm(p_values)
    known = len(p_values) - p_values.count(None)
    for margin, row, index in seconds:
        p = corrected[index]
        assert p is not None
        assert f"p = {p:.2g} corrected for {known} comparisons" in margin["sentence"]
        is_lower = row["difference_low"] > 0 and p < 0.05
        assert margin["badges"] == [["significant", "yes"] if is_lower else ["not significant", "no"]]


def test_a_contrast_has_one_p_value_on_the_page_and_in_the_table(make_run, compare, run_command, tmp_path):
    """Two depths with the same best cell: four comparisons in both, of which the page shows two."""
    rng = np.random.default_rng(3)
    names = {"rmsnorm": 0.0, "layernorm": 0.02, "dyt": 0.1}
    for (norm, shift), depth, seed in itertools.product(names.items(), (2, 4), range(8)):
        loss = 2 + shift + float(rng.normal(0, 0.01))
        status = {"val_loss": loss, "best_val_loss": loss}
        make_run(f"{norm}{depth}{seed}", norm=norm, depth=depth, seed=seed, status=status)
    by = ("--by", "norm,model.depth")
    margins = [fact["sentence"] for fact in compare(*by)["facts"] if fact["name"] == "by how much"]
    rows = {row["cell"]: row for row in printed(run_command, str(tmp_path), *by, "--against", "norm=rmsnorm")}
    for depth, margin in zip((2, 4), margins, strict=True):
        p = rows[f"layernorm {depth}"]["p_holm"]
        assert f"p = {p:.2g} corrected for 4 comparisons: each cell with the best cell of its size" in margin
    _, out, _ = run_command("summarize", str(tmp_path), *by, "--against", "norm=rmsnorm", "--notes")
    assert "corrected by Holm's method for 4 comparisons, of all cells with their baselines" in " ".join(out.split())


def test_every_cell_has_the_numbers_of_learning_rates_that_summarize_prints(
    make_run, compare, run_command, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "400")
    rng = np.random.default_rng(3)
    norms = ("layernorm", "rmsnorm", "dyt", "derf", "crmsnorm", "prmsnorm")
    for (index, norm), (at, lr), seed in itertools.product(enumerate(norms), enumerate((1e-3, 1e-2, 0.3)), range(3)):
        # The highest rate still trains in the first seed of LayerNorm.
        is_good = at == 1 or (norm, at, seed) == ("layernorm", 2, 0)
        loss = 2 + 0.2 * (not is_good) + 0.1 * index * at + float(rng.normal(0, 0.01))
        status = {"val_loss": loss, "best_val_loss": loss}
        make_run(f"{norm}{at}{seed}", norm=norm, lr=lr, seed=seed, status=status)
    data = compare("--by", "norm")
    [fact] = [fact for fact in data["facts"] if fact["name"] == "learning rates"]
    head, *rows = fact["table"]
    assert (head, len(rows)) == (["cell", "S", "highest rate"], len(norms))
    outputs = []
    for test in ("sensitivity", "range"):
        _, out, _ = run_command("summarize", str(tmp_path), "--by", "norm", "--test", test)
        outputs.append(out)
    assert "or more" in {name: rate for name, _, rate in rows}["LayerNorm"]
    for name, sensitivity, rate in rows:
        for output, title, text in zip(outputs, ("S", "highest rate"), (sensitivity, rate), strict=True):
            line = next(line for line in output.splitlines() if f"{title}: {name} " in line)
            assert text.removesuffix(", with gaps below") in line
            assert (
                f"{name} {sensitivity.partition(' ')[0]}, {rate.partition(' [')[0].partition(' (')[0]}"
                in fact["sentence"]
            )
    for number in ("S: for each seed", "highest rate: for each seed"):
        assert any(note.startswith(number) for note in data["notes"])


def test_curves_are_means_and_ranges_of_the_seeds(trained, compare):
    losses = np.random.default_rng(0).normal(3, 0.1, (3, 1000))
    losses[1, 700] = 9.0
    losses[2, 800:] = np.nan
    for seed, values in enumerate(losses):
        trained(f"run{seed}", losses=values.tolist(), steps=1000, seed=seed)
    data = compare()
    (points,) = lines_of(data, "loss", "train_loss").values()
    points = np.array(points)
    size = math.ceil(1000 / MAX_POINTS)
    bins = [losses[:, at : at + size] for at in range(0, 1000, size)]
    assert len(points) == len(bins) <= MAX_POINTS
    for (step, mean, low, high), at, values in zip(points.tolist(), range(0, 1000, size), bins, strict=True):
        kept = [row[np.isfinite(row)] for row in values if np.isfinite(row).any()]
        assert step == pytest.approx(np.mean(np.arange(at, min(at + size, 1000))))
        assert mean == pytest.approx(np.mean([row.mean() for row in kept]), rel=1e-5)
        assert (low, high) == pytest.approx((min(map(np.min, kept)), max(map(np.max, kept))), rel=1e-5)
    assert max(points[:, 3]) == 9.0  # no spike is lost
    assert [*lines_of(data, "loss", "val_loss").values()] == [[[0, 5.5, 5.5, 5.5], [1000, 2, 2, 2]]]


def test_a_short_curve_has_every_step(trained, compare):
    trained("one", losses=[5.0, 4.0, 3.0, 2.0])
    data = compare()
    for series, first in (("train_loss", 5), ("grad_norm", 6)):
        (points,) = lines_of(data, "loss", series).values()
        assert points == [[step, first - step, first - step, first - step] for step in range(4)]


def test_layers_are_medians_and_ranges_of_the_seeds(trained, compare, tmp_path):
    made = [trained(f"run{seed}", measured=range(0, 20, 2), seed=seed) for seed in range(3)]
    data = compare()
    (figure,) = [figure for figure in data["figures"] if figure["id"] == "layers"]
    measured = [{(name, each.site): each for name, each in histories(read_statistics(run, []))} for run in made]
    table = summarize_by(tmp_path)
    assert len(figure["variants"]) > 5
    for key in figure["variants"]:
        name, _, site = key.partition(" ")
        (points,) = lines_of(data, "layers", key).values()
        drawn = {-1: points}
        for at, moment in {0: "first", 3: "6"}.items():
            line = make_figure("layers", table, statistic=key, moment=moment).panels[0].lines[0]
            drawn[at] = [(point.x, point.y, point.low, point.high) for point in line.points]
        for at, values_of_layers in drawn.items():
            for layer, mean, low, high in values_of_layers:
                values = [float(run[name, site].values[at, int(layer)]) for run in measured]
                assert (mean, low, high) == pytest.approx((np.median(values), min(values), max(values)), rel=1e-5)


def test_cost_and_outcomes(trained, compare):
    """The runs of a pack share its time."""
    pack = {"sweep": "s", "number": 0, "runs": ["a", "b"]}
    flops = {"flops_per_token": 3e6}
    trained("a", run=flops, status={"tokens": 1000, "seconds": 3600.0, "pack": pack}, seed=0)
    trained("b", math.inf, run=flops, status={"tokens": 500, "seconds": 3600.0, "pack": pack}, seed=1, steps=4)
    data = compare()
    assert "2 runs, 1500 tokens, 4.50e9 FLOPs, 1 hours of training." in [fact["sentence"] for fact in data["facts"]]
    assert any(note.startswith("tok/s: of one run; ") for note in data["notes"])
    (figure,) = [figure for figure in data["figures"] if figure["id"] == "loss"]
    assert figure["variants"]["train_loss"]["panels"][0]["lines"][0][2] == [4]  # the step of the divergence
    trained("c", state="failed", status={"tokens": 0, "seconds": 900.0}, seed=2)
    data = compare()
    assert "3 runs, 1500 tokens, 4.50e9 FLOPs, 1.25 hours of training." in [fact["sentence"] for fact in data["facts"]]
    badges = [fact["badges"] for fact in data["facts"] if fact["name"] == "outcomes"]
    assert badges == [[["1 diverged", "bad"], ["1 failed", "bad"]]]


def test_an_option_that_follows_from_another_is_a_warning(trained, compare):
    config = json.loads((trained("a", norm="rmsnorm").path / "run.json").read_bytes())["config"]
    longer = {**config, "norm": {"name": "layernorm", "preset": ""}, "train": {**config["train"], "steps": 2000}}
    trained("b", run={"config": longer})
    data = compare()
    assert data["by"] == ["norm"]
    assert "the cells differ in more than norm: train.steps 100 and 2000" in data["warnings"]


def test_default_factors(trained, compare):
    trained("a", norm="rmsnorm", lr=1e-3, seed=0)
    assert compare()["by"] == ["norm", "placement"]
    trained("b", norm="rmsnorm", lr=2e-3, seed=1)
    assert compare()["by"] == ["norm", "placement"]
    trained("c", norm="rmsnorm", depth=4)
    assert compare()["by"] == ["model.depth"]
    trained(
        "d",
        norm="layernorm",
        placement="post",
        run={"resolved": {"device": "cuda", "device_name": "H200", "precision": "bf16"}},
    )
    data = compare()
    assert data["by"] == ["norm", "placement", "model.depth"]
    assert data["run_table"]["columns"][:6] == ["run", *data["by"], "optim.lr", "seed"]
    (line,) = [line for line in data["summary"] if line.startswith("The cells also differ in ")]
    assert "device: cuda H200 (LayerNorm), cpu (RMSNorm)" in line


def test_channels_of_the_command(grid, compare):
    grid()
    panels = {panel for panel, _ in lines_of(compare(), "factor")}
    assert panels == {"post-norm", "pre-norm"}
    chosen = lines_of(compare("--x", "placement", "--color", "model.depth", "--style", "norm"), "factor")
    assert {label for _, label in chosen} == {f"depth {d}, {norm}" for d in (2, 4) for norm in ("LayerNorm", "RMSNorm")}


def test_losses_that_are_not_comparable(trained, compare):
    corpora = [{"name": name, "sha256": name * 8, "tokenizer": cut} for name, cut in (("ab", "bytes"), ("cd", "bpe"))]
    trained("a", norm="rmsnorm", run={"corpus": corpora[0], "versions": {"torch": "2.1"}})
    trained("b", norm="layernorm", run={"corpus": corpora[1], "versions": {"torch": "2.2"}})
    data = compare()
    corpora = "the runs differ in corpus ab abababab and cd cdcdcdcd; tokenizer bpe 257 and bytes 257"
    assert data["warnings"][0].endswith("; numerics (torch: 2.1 and 2.2)")
    assert data["summary"][0].startswith(f"No best cell: {corpora}, so ")
