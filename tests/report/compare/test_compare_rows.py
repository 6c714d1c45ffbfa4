"""The page's numbers are those of `summarize`: the same code, and here held to the same JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from normlab.report.intervals import mean_interval
from normlab.report.summary import COLUMNS

ADDED_TO_CELLS = {"index", "label", "runs", "at_best", "text"}


def printed(run_command, *words):
    code, out, _ = run_command("summarize", *words, "--format", "json")
    assert code == 0
    return json.loads(out)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["norm", "norm,placement", "placement,model.depth,norm", "optim.lr", "seed,norm"])
def test_cells_are_those_of_summarize(grid, compare, run_command, tmp_path, by):
    grid()
    shown, rows = compare("--by", by), printed(run_command, str(tmp_path), "--by", by)
    assert shown["by"] == by.split(",")
    assert [len(cell["runs"]) for cell in shown["cells"]] == [row.pop("runs") for row in rows]
    plain = [{key: value for key, value in cell.items() if key not in ADDED_TO_CELLS} for cell in shown["cells"]]
    assert plain == rows
    assert [list(one) for one in plain] == [list(row) for row in rows]
    for index, cell in enumerate(shown["cells"]):
        runs = [shown["runs"][number] for number in cell["runs"]]
        assert cell["index"] == index
        assert cell["label"] == cell["cell"]
        assert [run["id"] for run in runs] == cell["run_ids"]
        assert {run["cell"] for run in runs} == {index}
        best = [shown["runs"][number] for number in cell["at_best"]]
        assert all(run["lr"] == cell["lr"] and run["came_out"] for run in best)
        assert len({run["seed"] for run in best}) == cell["seeds"]
        assert len(best) == sum(run["lr"] == cell["lr"] and run["came_out"] for run in runs)
        assert list(cell["text"]) == shown["cell_columns"]


def test_cells_that_a_condition_leaves(grid, compare, run_command, tmp_path):
    grid()
    words = ["--by", "norm", "--where", "model.depth>=4,norm=rmsnorm"]
    shown, rows = compare(*words), printed(run_command, str(tmp_path), *words)
    assert [{key: cell[key] for key in rows[0] if key != "runs"} for cell in shown["cells"]] == [
        {key: value for key, value in row.items() if key != "runs"} for row in rows
    ]
    assert len(shown["runs"]) == 12


def test_runs_are_those_of_summarize(grid, compare, run_command, tmp_path):
    grid()
    shown = {run["id"]: run for run in compare()["runs"]}
    rows = printed(run_command, str(tmp_path))
    assert len(rows) == len(shown) == 48
    for row in rows:
        assert {key: shown[row["id"]][key] for key in COLUMNS} == row


def test_what_a_run_shows_besides(trained, compare):
    trained("one", losses=[5.0, 4.0, 3.0, 2.0], seed=3, lr=2e-3, measured=[0, 2])
    trained("two", math.inf, steps=4, seed=4, lr=1e-3)
    one, two = compare()["runs"]
    assert (one["warmup"], one["tokens_per_step"], one["diverged_at"], two["diverged_at"]) == (5, 512, None, 4)
    assert one["evals"] == {"steps": [0, 4], "values": [5.5, 2.0]}
    assert one["paces"] == {"steps": [4], "seconds": [1.5]}
    assert one["settings"] == {"optim.lr": "0.002", "seed": "3"}
    assert one["spikes"] == {"loss": [], "grad_norm": []}
    assert (one["came_out"], two["came_out"], one["state"], two["state"]) == (True, True, "finished", "diverged")
    assert two["note"].startswith("diverged at step 4")
    assert "nothing was measured inside it" in two["note"]
    assert one["note"] == ""


def test_times_are_thinned_and_keep_both_ends(trained, compare):
    folder = trained("a")
    with folder.lock():
        folder.append({"kind": "pace", "step": step, "seconds": step / 7} for step in range(21, 1021))
    paces = compare()["runs"][0]["paces"]
    assert len(paces["steps"]) == 200
    assert (paces["steps"][0], paces["steps"][-1], paces["seconds"][-1]) == (20, 1020, 1020 / 7)
    assert max(np.diff(paces["steps"])) == 6


def test_spikes_are_at_their_steps(trained, compare, run_command, tmp_path):
    chance = np.random.default_rng(0)
    losses = 3 + chance.normal(0, 0.01, 3000)
    losses[[500, 1200, 2999]] += 2
    trained("spiky", losses=losses.tolist(), steps=3000)
    (run,) = compare()["runs"]
    code, out, _ = run_command("inspect", "spiky", "spikes", "--json", "--results-dir", str(tmp_path))
    rules = {row["rule"]: row["at"] for row in json.loads(out)}
    assert code == 0
    assert run["spikes"] == {"loss": rules["loss_olmo_core"], "grad_norm": rules["grad_norm_olmo_core"]}
    assert {500, 1200, 2999} <= set(run["spikes"]["loss"])
    assert run["spike_counts"] == {of: len(steps) for of, steps in run["spikes"].items()}


def test_of_very_many_spikes_all_are_counted_and_the_first_are_told(trained, compare, monkeypatch):
    losses = 3 + np.random.default_rng(0).normal(0, 0.01, 2000)
    losses[[500, 1000, 1500]] += 2
    trained("spiky", losses=losses.tolist(), steps=2000)
    every = compare()["runs"][0]["spikes"]["loss"]
    monkeypatch.setattr("normlab.report.compare.data.MOST_SPIKES", 2)
    (run,) = compare()["runs"]
    assert run["spikes"]["loss"] == every[:2]
    assert run["spike_counts"]["loss"] == len(every) > 2


def test_losses_over_learning_rates(grid, compare):
    grid()
    shown = compare("--by", "norm,placement,model.depth")
    runs = shown["runs"]
    for curve in shown["rates"]["curves"]:
        cell = shown["cells"][curve["cell"]]
        assert [point["lr"] for point in curve["points"]] == cell["learning_rates"]
        for point in curve["points"]:
            own = [runs[number] for number in cell["runs"]]
            losses = [
                math.inf if run["state"] == "diverged" else run["val_loss"]
                for run in own
                if run["lr"] == point["lr"] and run["came_out"]
            ]
            diverged = sum(map(math.isinf, losses))
            assert (point["n"], point["diverged"]) == (len(losses), diverged)
            assert [float(one["loss"]) for one in point["losses"]] == losses
            found = mean_interval({(place, place): loss for place, loss in enumerate(losses)})
            assert (float(point["mean"]), point["low"], point["high"]) == (found.estimate, found.low, found.high)
            finite = [loss for loss in losses if math.isfinite(loss)]
            assert point["of_others"] == (pytest.approx(np.mean(finite)) if finite and diverged else None)


def test_the_matrix(grid, compare, run_command, tmp_path):
    grid()
    shown = compare("--by", "norm")["matrix"]
    rows = printed(run_command, str(tmp_path), "--by", "norm,placement,model.depth")
    assert (shown["norms"], shown["placements"], shown["depths"]) == (["layernorm", "rmsnorm"], ["post", "pre"], [2, 4])
    assert len(shown["cells"]) == len(rows) == 8
    for cell, row in zip(shown["cells"], rows, strict=True):
        assert cell["depth"] == row["model.depth"]
        assert len(cell["runs"]) == row["runs"]
        assert {key: cell[key] for key in row if key != "runs"} == {k: v for k, v in row.items() if k != "runs"}


def test_a_row_of_the_matrix_says_what_it_mixes(trained, compare):
    config = json.loads((trained("a", norm="rmsnorm").path / "run.json").read_bytes())["config"]
    wide = {**config, "model": {**config["model"], "width": 256}}
    trained("b", norm="rmsnorm", run={"config": wide})
    trained("c", norm="layernorm")
    cells = {cell["norm"]: cell["warnings"] for cell in compare("--by", "norm,model.width")["matrix"]["cells"]}
    assert "mixes model.width 128 and 256" in cells["rmsnorm"]
    assert not any("mixes" in warning for warning in cells["layernorm"])


def test_a_word_that_another_implies_is_warned_of(trained, compare):
    config = json.loads((trained("a", norm="rmsnorm").path / "run.json").read_bytes())["config"]
    longer = {**config, "norm": {"name": "layernorm", "preset": ""}, "train": {**config["train"], "steps": 2000}}
    trained("b", run={"config": longer})
    shown = compare()
    assert shown["by"] == ["norm"]
    assert "the cells differ in more than norm: train.steps 100 and 2000" in shown["warnings"]


def test_words_that_cells_are_made_of_unasked(trained, compare):
    trained("a", norm="rmsnorm", lr=1e-3, seed=0)
    assert compare()["by"] == ["norm", "placement"]
    trained("b", norm="rmsnorm", lr=2e-3, seed=1)
    shown = compare()
    assert (shown["by"], shown["differing"]) == (["norm", "placement"], ["optim.lr", "seed"])
    trained("c", norm="rmsnorm", depth=4)
    assert compare()["by"] == ["model.depth"]
    trained("d", norm="layernorm", placement="post", run={"resolved": {"device": "cuda", "precision": "bf16"}})
    shown = compare()
    assert shown["by"] == ["norm", "placement", "model.depth"]
    assert shown["differing"] == [*shown["by"], "optim.lr", "seed"]
    assert [line.partition(":")[0] for line in shown["banners"]] == [
        "the runs are on 2 precisions", "the runs are on 2 devices",
    ]  # fmt: skip


def test_what_keeps_losses_from_being_compared(trained, compare):
    corpora = [{"name": name, "sha256": name * 8, "tokenizer": cut} for name, cut in (("ab", "bytes"), ("cd", "bpe"))]
    trained("a", norm="rmsnorm", run={"corpus": corpora[0], "versions": {"torch": "2.1"}})
    trained("b", norm="layernorm", run={"corpus": corpora[1], "versions": {"torch": "2.2"}})
    shown = compare()
    assert shown["banners"] == [
        "the runs are on 2 corpora: ab abababab, cd cdcdcdcd: their losses do not compare",
        "the runs are on 2 tokenizers: bpe, bytes: a token is not the same, and their losses do not compare",
        "the runs' numerics differ: torch 2.1 and 2.2: the same words and seeds do not give the same bits",
    ]
    assert shown["best"] is None
    assert shown["answer"][0].startswith("No cell is called the best: the runs are on 2 corpora (ab abababab, cd ")
