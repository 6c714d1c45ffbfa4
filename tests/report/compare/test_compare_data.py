"""The page's numbers equal the JSON of `summarize` and the records."""

from __future__ import annotations

import itertools
import json
import math
import re

import numpy as np
import pytest

from normlab.analysis.intervals import holm
from normlab.report.compare import data as compare_data
from normlab.report.figure_points import MAX_POINTS
from normlab.report.histories import histories, read_statistics


def printed(run_command, *arguments):
    code, out, _ = run_command("summarize", *arguments, "--format", "json")
    assert code == 0
    return json.loads(out)


def test_where_selects_runs(grid, compare, run_command, tmp_path):
    grid()
    arguments = ["--by", "norm", "--where", "model.depth>=4,norm=rmsnorm"]
    data, rows = compare(*arguments), printed(run_command, str(tmp_path), *arguments)
    assert [{key: cell[key] for key in rows[0]} for cell in data["cells"]] == rows
    assert len(data["run_table"]["rows"]) == 12


def test_margins_equal_comparisons_of_summarize(grid, compare, run_command, tmp_path):
    """Each pair of one depth against the row of `--against` with the better cell as the baseline."""
    grid()
    data = compare("--by", "norm,placement,model.depth")
    checked = 0
    for better, worse, is_significant, text in data["margins"]:
        a, b = data["cells"][better], data["cells"][worse]
        against = ",".join(f"{option}={a[option]}" for option in data["by"])
        rows = {
            row["cell"]: row
            for row in printed(run_command, str(tmp_path), "--by", ",".join(data["by"]), "--against", against)
        }
        row = rows[b["cell"]]
        assert row["baseline"] == a["cell"]
        assert b["label"] in text
        if isinstance(row["difference"], float) and isinstance(row["difference_low"], float):
            found = re.search(r"paired difference ([-+\d.]+)", text)
            assert found
            assert float(found[1]) == pytest.approx(-row["difference"], abs=6e-5)
            same_depth = [r for r in rows.values() if r["model.depth"] == a["model.depth"] and r["cell"] != a["cell"]]
            p_values = [r["p"] for r in same_depth]
            p = holm(p_values)[same_depth.index(row)]
            assert f"p = {p:.2g}" in text
            assert is_significant == (row["difference_low"] > 0 and p < 0.05)
            checked += 1
    assert checked >= 3
    assert [size for size, _ in data["sizes"]] == ["depth 2", "depth 4"]
    assert {(better, worse) for better, worse, *_ in data["margins"]} == {
        pair for _, ranked in data["sizes"] for pair in itertools.combinations(ranked, 2)
    }


def test_margins_of_the_best_cells_only(grid, compare, monkeypatch):
    grid()
    monkeypatch.setattr("normlab.report.compare.summary_text.MAX_COMPARED", 6)
    data = compare("--by", "norm,placement,model.depth")
    expected = [[*pair] for _, ranked in data["sizes"] for pair in itertools.combinations(ranked[:3], 2)]
    assert sorted(pair[:2] for pair in data["margins"]) == sorted(expected)
    assert len(expected) == 6


def test_curves_are_means_and_ranges_of_the_seeds(trained, compare):
    losses = np.random.default_rng(0).normal(3, 0.1, (3, 1000))
    losses[1, 700] = 9.0
    losses[2, 800:] = np.nan
    for seed, values in enumerate(losses):
        trained(f"run{seed}", losses=values.tolist(), steps=1000, seed=seed)
    (cell,) = compare()["cells"]
    points = np.array(cell["curves"]["train_loss"])
    size = math.ceil(1000 / MAX_POINTS)
    bins = [losses[:, at : at + size] for at in range(0, 1000, size)]
    assert len(points) == len(bins) <= MAX_POINTS
    for (step, mean, low, high), at, values in zip(points.tolist(), range(0, 1000, size), bins, strict=True):
        kept = [row[np.isfinite(row)] for row in values if np.isfinite(row).any()]
        assert step == pytest.approx(np.mean(np.arange(at, min(at + size, 1000))))
        assert mean == pytest.approx(np.mean([row.mean() for row in kept]), rel=1e-5)
        assert (low, high) == pytest.approx((min(map(np.min, kept)), max(map(np.max, kept))), rel=1e-5)
    assert max(points[:, 3]) == 9.0  # no spike is lost
    assert cell["curves"]["val_loss"] == [[0, 5.5, 5.5, 5.5], [1000, 2, 2, 2]]


def test_a_short_curve_has_every_step(trained, compare):
    trained("one", losses=[5.0, 4.0, 3.0, 2.0])
    (cell,) = compare()["cells"]
    assert cell["curves"]["train_loss"] == [[step, 5 - step, 5 - step, 5 - step] for step in range(4)]
    assert cell["curves"]["grad_norm"] == [[step, 6 - step, 6 - step, 6 - step] for step in range(4)]


def test_layers_are_medians_and_ranges_of_the_seeds(trained, compare):
    made = [trained(f"run{seed}", measured=range(0, 20, 2), seed=seed) for seed in range(3)]
    (cell,) = compare()["cells"]
    measured = [{(name, each.site): each for name, each in histories(read_statistics(run, []))} for run in made]
    moments = {"first": 0, "warmup": 3, "last": -1}  # warm-up ends at step 5, so the first step after it is 6
    assert len(cell["layers"]) > 5
    for key, by_moment in cell["layers"].items():
        name, _, site = key.partition(" ")
        for moment, at in moments.items():
            for layer, mean, low, high in by_moment[moment]:
                values = [float(run[name, site].values[at, layer]) for run in measured]
                assert (mean, low, high) == pytest.approx((np.median(values), min(values), max(values)), rel=1e-5)


def test_a_large_page_has_fewer_steps_of_layers(trained, compare, monkeypatch):
    trained("run", measured=range(0, 20, 2))
    full = compare()
    monkeypatch.setattr(compare_data, "MAX_LAYER_VALUES", 1)
    small = compare()
    assert list(full["moments"]) == ["first", "warmup", "last"]
    assert list(small["moments"]) == ["last"]
    assert {key: {"last": value["last"]} for key, value in full["cells"][0]["layers"].items()} == small["cells"][0][
        "layers"
    ]


def test_cost_and_outcomes(trained, compare):
    trained("a", status={"tokens": 1000, "seconds": 1800.0}, seed=0)
    trained("b", math.inf, status={"tokens": 500, "seconds": 900.0}, seed=1, steps=4)
    trained("c", state="failed", status={"tokens": 0, "seconds": 0.0}, seed=2)
    (cell,) = compare()["cells"]
    assert (cell["tokens"], cell["hours"]) == (1500, 0.75)
    assert cell["bad"] == {"diverged": 1, "failed": 1}
    assert (cell["is_bad"], cell["diverged_at"]) == (True, [4])


def test_flops_are_summed_where_every_record_has_them(trained, compare):
    trained("a", run={"flops_per_token": 3e6}, status={"tokens": 1000}, seed=0)
    trained("b", run={"flops_per_token": 3e6}, status={"tokens": 500}, seed=1)
    assert compare()["cells"][0]["flops"] == 4.5e9
    trained("c", status={"tokens": 500}, seed=2)
    assert compare()["cells"][0]["flops"] is None


def test_the_runs_of_a_pack_share_its_time(trained, compare):
    pack = {"sweep": "s", "number": 0, "runs": ["a", "b", "other"]}
    for seed, name in enumerate("ab"):
        trained(name, status={"seconds": 3600.0, "pack": pack}, seed=seed)
    data = compare()
    assert data["cells"][0]["hours"] == pytest.approx(2 / 3)
    assert any(note.startswith("tok/s: of one run; ") for note in data["notes"])


def test_an_option_that_follows_from_another_is_a_warning(trained, compare):
    config = json.loads((trained("a", norm="rmsnorm").path / "run.json").read_bytes())["config"]
    longer = {**config, "norm": {"name": "layernorm", "preset": ""}, "train": {**config["train"], "steps": 2000}}
    trained("b", run={"config": longer})
    data = compare()
    assert data["by"] == ["norm"]
    assert "the cells differ in more than norm: train.steps 100 and 2000" in data["warnings"]
    assert data["warnings"][-1] in data["caveats"]


def test_default_factors(trained, compare):
    trained("a", norm="rmsnorm", lr=1e-3, seed=0)
    assert compare()["by"] == ["norm", "placement"]
    trained("b", norm="rmsnorm", lr=2e-3, seed=1)
    assert compare()["by"] == ["norm", "placement"]
    trained("c", norm="rmsnorm", depth=4)
    assert compare()["by"] == ["model.depth"]
    trained("d", norm="layernorm", placement="post", run={"resolved": {"device": "cuda", "precision": "bf16"}})
    data = compare()
    assert data["by"] == ["norm", "placement", "model.depth"]
    assert data["run_table"]["columns"][:6] == ["run", *data["by"], "optim.lr", "seed"]
    assert data["caveats"][0] == "the runs differ in device cpu and cuda; precision bf16 and fp32"


def test_channels_of_the_command(grid, compare):
    grid()
    assert compare()["channels"] == {"model.depth": "x", "norm": "color", "placement": "panel"}
    chosen = compare("--x", "placement", "--color", "model.depth", "--style", "norm")["channels"]
    assert chosen == {"placement": "x", "model.depth": "color", "norm": "style"}


def test_interactions_are_those_of_summarize(grid, compare, tmp_path, run_command, monkeypatch):
    grid()
    tests = compare()["interactions"]
    arguments = ["summarize", str(tmp_path), "--by", "norm,placement,model.depth", "--test", "interaction", "--format"]
    rows = json.loads(run_command(*arguments, "json")[1])
    assert [row[:2] for row in tests["rows"]] == [[row["where"], row["contrast"]] for row in rows]
    at = tests["columns"].index("p (Holm)")
    for texts, row in zip(tests["rows"], rows, strict=True):
        assert texts[2].startswith(f"{row['estimate']:+.4f}")
        assert float(texts[at].replace("<", "")) == pytest.approx(row["p_holm"], rel=0.06, abs=1e-4)
    assert all(note in run_command(*arguments, "latex")[1] for note in tests["notes"])
    monkeypatch.setattr(compare_data, "MAX_INTERACTIONS", len(rows) - 1)
    assert compare()["interactions"]["rows"] == []


def test_losses_that_are_not_comparable(trained, compare):
    corpora = [{"name": name, "sha256": name * 8, "tokenizer": cut} for name, cut in (("ab", "bytes"), ("cd", "bpe"))]
    trained("a", norm="rmsnorm", run={"corpus": corpora[0], "versions": {"torch": "2.1"}})
    trained("b", norm="layernorm", run={"corpus": corpora[1], "versions": {"torch": "2.2"}})
    data = compare()
    corpora = "the runs differ in corpus ab abababab and cd cdcdcdcd; tokenizer bpe and bytes"
    assert data["caveats"][0] == f"{corpora}; numerics (torch) 2.1 and 2.2"
    assert data["interactions"]["rows"] == []
    assert data["not_comparable"].startswith(f"No best cell: {corpora}, so ")
    assert data["summary"][0] == data["not_comparable"]
