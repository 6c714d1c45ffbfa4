"""The page's numbers equal the JSON of `summarize`."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from normlab.report.intervals import mean_interval
from normlab.report.runs_table import COLUMNS

ADDED_TO_CELLS = {"index", "runs", "at_best", "text"}


def printed(run_command, *arguments):
    code, out, _ = run_command("summarize", *arguments, "--format", "json")
    assert code == 0
    return json.loads(out)


@pytest.mark.exhaustive
@pytest.mark.parametrize("by", ["norm", "norm,placement", "placement,model.depth,norm", "optim.lr", "seed,norm"])
def test_cells_equal_those_of_summarize(grid, compare, run_command, tmp_path, by):
    grid()
    data, rows = compare("--by", by), printed(run_command, str(tmp_path), "--by", by)
    assert data["by"] == by.split(",")
    assert [len(cell["runs"]) for cell in data["cells"]] == [row.pop("runs") for row in rows]
    plain = [{key: value for key, value in cell.items() if key not in ADDED_TO_CELLS} for cell in data["cells"]]
    assert plain == rows
    assert [list(cell) for cell in plain] == [list(row) for row in rows]
    for index, cell in enumerate(data["cells"]):
        runs = [data["runs"][number] for number in cell["runs"]]
        assert cell["index"] == index
        assert [run["id"] for run in runs] == cell["run_ids"]
        assert {run["cell"] for run in runs} == {index}
        best = [data["runs"][number] for number in cell["at_best"]]
        assert all(run["lr"] == cell["lr"] for run in best)
        assert len({run["seed"] for run in best}) == cell["seeds"]
        assert len(best) == sum(run["lr"] == cell["lr"] and run["state"] in ("finished", "diverged") for run in runs)
        assert list(cell["text"]) == data["cell_columns"]


def test_where_selects_runs(grid, compare, run_command, tmp_path):
    grid()
    arguments = ["--by", "norm", "--where", "model.depth>=4,norm=rmsnorm"]
    data, rows = compare(*arguments), printed(run_command, str(tmp_path), *arguments)
    assert [{key: cell[key] for key in rows[0] if key != "runs"} for cell in data["cells"]] == [
        {key: value for key, value in row.items() if key != "runs"} for row in rows
    ]
    assert len(data["runs"]) == 12


def test_runs_equal_those_of_summarize(grid, compare, run_command, tmp_path):
    grid()
    data = {run["id"]: run for run in compare()["runs"]}
    rows = printed(run_command, str(tmp_path))
    assert len(rows) == len(data) == 48
    for row in rows:
        assert {key: data[row["id"]][key] for key in COLUMNS} == {key: row[key] for key in COLUMNS}


def test_data_of_a_run_beyond_summarize(trained, compare):
    trained("one", losses=[5.0, 4.0, 3.0, 2.0], seed=3, lr=2e-3, measured=[0, 2])
    trained("two", math.inf, steps=4, seed=4, lr=1e-3)
    one, two = compare()["runs"]
    assert (one["warmup"], one["tokens_per_step"], one["diverged_at"], two["diverged_at"]) == (5, 512, None, 4)
    assert one["evals"] == {"steps": [0, 4], "values": [5.5, 2.0]}
    assert one["paces"] == {"steps": [4], "seconds": [1.5]}
    assert one["settings"] == {"optim.lr": "0.002", "seed": "3"}
    assert one["spikes"] == {"loss": [], "grad_norm": []}
    assert (one["state"], two["state"]) == ("finished", "diverged")
    assert two["note"].startswith("diverged at step 4")
    assert "no statistics on record" in two["note"]
    assert one["note"] == ""


def test_downsampled_times_keep_both_ends(trained, compare):
    folder = trained("a")
    with folder.lock():
        folder.append({"kind": "pace", "step": step, "seconds": step / 7} for step in range(21, 1021))
    paces = compare()["runs"][0]["paces"]
    assert len(paces["steps"]) == 200
    assert (paces["steps"][0], paces["steps"][-1], paces["seconds"][-1]) == (20, 1020, 1020 / 7)
    assert max(np.diff(paces["steps"])) == 6


def test_spikes_equal_those_of_inspect(trained, compare, run_command, tmp_path):
    rng = np.random.default_rng(0)
    losses = 3 + rng.normal(0, 0.01, 3000)
    losses[[500, 1200, 2999]] += 2
    trained("spiky", losses=losses.tolist(), steps=3000)
    (run,) = compare()["runs"]
    code, out, _ = run_command("inspect", "spiky", "spikes", "--json", "--results-dir", str(tmp_path))
    rules = {row["rule"]: row["at"] for row in json.loads(out)}
    assert code == 0
    assert run["spikes"] == {"loss": rules["loss_olmo_core"], "grad_norm": rules["grad_norm_olmo_core"]}
    assert {500, 1200, 2999} <= set(run["spikes"]["loss"])
    assert run["spike_counts"] == {of: len(steps) for of, steps in run["spikes"].items()}


def test_all_spikes_are_counted_and_the_first_have_steps(trained, compare, monkeypatch):
    losses = 3 + np.random.default_rng(0).normal(0, 0.01, 2000)
    losses[[500, 1000, 1500]] += 2
    trained("spiky", losses=losses.tolist(), steps=2000)
    every = compare()["runs"][0]["spikes"]["loss"]
    monkeypatch.setattr("normlab.report.compare.data.MAX_SPIKES", 2)
    (run,) = compare()["runs"]
    assert run["spikes"]["loss"] == every[:2]
    assert run["spike_counts"]["loss"] == len(every) > 2


def test_losses_over_learning_rates(grid, compare):
    grid()
    data = compare("--by", "norm,placement,model.depth")
    runs = data["runs"]
    for cell, points in zip(data["cells"], data["rates"], strict=True):
        assert [point["lr"] for point in points] == cell["learning_rates"]
        for point in points:
            members = [runs[number] for number in cell["runs"]]
            losses = [
                math.inf if run["state"] == "diverged" else run["val_loss"]
                for run in members
                if run["lr"] == point["lr"] and run["state"] in ("finished", "diverged")
            ]
            diverged = sum(map(math.isinf, losses))
            assert (point["seeds"], point["seeds_diverged"]) == (len(losses), diverged)
            assert [float(run["loss"]) for run in point["runs"]] == losses
            expected = mean_interval({(place, place): loss for place, loss in enumerate(losses)})
            assert (float(point["val_loss"]), point["val_loss_low"], point["val_loss_high"]) == expected[:3]
            finite = [loss for loss in losses if math.isfinite(loss)]
            assert point["val_loss_of_others"] == (pytest.approx(np.mean(finite)) if finite and diverged else None)


def test_the_matrix(grid, compare, run_command, tmp_path):
    grid()
    data = compare("--by", "norm")["matrix"]
    rows = printed(run_command, str(tmp_path), "--by", "norm,placement,model.depth")
    assert (data["norms"], data["placements"], data["depths"]) == (["layernorm", "rmsnorm"], ["post", "pre"], [2, 4])
    assert len(data["cells"]) == len(rows) == 8
    for cell, row in zip(data["cells"], rows, strict=True):
        assert cell["depth"] == row["model.depth"]
        assert len(cell["runs"]) == row["runs"]
        assert {key: cell[key] for key in row if key != "runs"} == {k: v for k, v in row.items() if k != "runs"}


def test_matrix_warns_of_mixed_options(trained, compare):
    config = json.loads((trained("a", norm="rmsnorm").path / "run.json").read_bytes())["config"]
    wide = {**config, "model": {**config["model"], "width": 256}}
    trained("b", norm="rmsnorm", run={"config": wide})
    trained("c", norm="layernorm")
    cells = {cell["norm"]: cell["warnings"] for cell in compare("--by", "norm,model.width")["matrix"]["cells"]}
    assert "mixes model.width 128 and 256" in cells["rmsnorm"]
    assert not any("mixes" in warning for warning in cells["layernorm"])


def test_warning_for_an_option_that_follows_from_another(trained, compare):
    config = json.loads((trained("a", norm="rmsnorm").path / "run.json").read_bytes())["config"]
    longer = {**config, "norm": {"name": "layernorm", "preset": ""}, "train": {**config["train"], "steps": 2000}}
    trained("b", run={"config": longer})
    data = compare()
    assert data["by"] == ["norm"]
    assert "the cells differ in more than norm: train.steps 100 and 2000" in data["warnings"]


def test_default_cell_options(trained, compare):
    trained("a", norm="rmsnorm", lr=1e-3, seed=0)
    assert compare()["by"] == ["norm", "placement"]
    trained("b", norm="rmsnorm", lr=2e-3, seed=1)
    data = compare()
    assert (data["by"], data["differing"]) == (["norm", "placement"], ["optim.lr", "seed"])
    trained("c", norm="rmsnorm", depth=4)
    assert compare()["by"] == ["model.depth"]
    trained("d", norm="layernorm", placement="post", run={"resolved": {"device": "cuda", "precision": "bf16"}})
    data = compare()
    assert data["by"] == ["norm", "placement", "model.depth"]
    assert data["differing"] == [*data["by"], "optim.lr", "seed"]
    assert [line.partition(":")[0] for line in data["banners"]] == [
        "the runs use 2 precisions", "the runs use 2 devices",
    ]  # fmt: skip


def test_banners_for_losses_that_are_not_comparable(trained, compare):
    corpora = [{"name": name, "sha256": name * 8, "tokenizer": cut} for name, cut in (("ab", "bytes"), ("cd", "bpe"))]
    trained("a", norm="rmsnorm", run={"corpus": corpora[0], "versions": {"torch": "2.1"}})
    trained("b", norm="layernorm", run={"corpus": corpora[1], "versions": {"torch": "2.2"}})
    data = compare()
    assert data["banners"] == [
        "the runs use 2 corpora: ab abababab, cd cdcdcdcd: their losses are not comparable",
        "the runs use 2 tokenizers: bpe, bytes: tokens differ, so their losses are not comparable",
        "the runs differ in numerics: torch 2.1 and 2.2: equal options and seeds give different bits",
    ]
    assert data["best"] is None
    assert data["summary"][0].startswith("No best cell: the runs use 2 corpora (ab abababab, cd ")
