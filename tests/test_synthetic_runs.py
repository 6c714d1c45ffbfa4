"""scripts/synthetic_runs.py: synthetic run folders have the format of real ones and the requested content."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from synthetic_runs import BASELINES, STUCK, Record, learning_rates, main, write_run, write_sweep
from synthetic_statistics import Size, layout

from normlab.analysis.results import read_results
from normlab.config.compose import compose_run
from normlab.config.optim import AdamW
from normlab.stats.spikes import count_spikes
from normlab.stats.statistic import CORE
from normlab.store.format import LOCK_FILE
from normlab.store.query import select_runs
from normlab.store.record import RunRecord, flatten
from normlab.store.runs import RunFolder
from normlab.store.series import series
from normlab.training.optim import learning_rate
from normlab.training.start import train

SMALL = {"depth": 3, "width": 32, "context": 32, "steps": 60, "batch_size": 4, "warmup_steps": 10}


@pytest.mark.parametrize(
    ("norm", "placement"),
    [("rmsnorm", "pre"), ("layernorm", "post"), ("dyt", "peri"), ("scalenorm", "deepnorm"), ("batchnorm", "pre")],
)
def test_columns_equal_those_of_a_real_run(overrides, norm, placement):
    chosen = [f"norm={norm}", f"placement={placement}", "model.depth=3", "train.steps=1", "stats.every=10"]
    config = compose_run([*overrides, *chosen])
    real = train(config, trackers=[]).folder.statistics.read(CORE)[0][0].layout
    size = Size(
        norm=norm, placement=placement, depth=3, width=config.model.width, context=config.model.context
    )  # fmt: skip
    assert layout(size) == real
    assert set(size.parameters()) == set(real.families)


def test_files_and_keys_equal_those_of_a_real_run(overrides, tmp_path):
    real = train(compose_run(overrides), trackers=[]).folder
    made = write_run(tmp_path / "made", Record(**SMALL))
    assert {path.name for path in real.path.iterdir()} - {"checkpoints", "tokenizer.json"} == {
        path.name for path in made.path.iterdir()
    }
    assert made.run().keys() == real.run().keys()
    for part in ("resolved", "identity"):
        assert made.run()[part].keys() == real.run()[part].keys()
    for group in {*real.run()["config"]} - {"data"}:  # the real corpus is of files
        assert group in made.run()["config"]
        assert flatten(made.run()["config"][group]).keys() == flatten(real.run()["config"][group]).keys()
    assert made.status().keys() == real.status().keys()
    assert made.status()["spikes"].keys() == real.status()["spikes"].keys()
    kinds = [{row["kind"]: tuple(row) for row in folder.rows().rows} for folder in (made, real)]
    assert kinds[0] == kinds[1]


def test_without_statistics_files_equal_those_of_a_real_run(overrides, tmp_path):
    real = train(compose_run([*overrides, "stats=off"]), trackers=[]).folder
    made = write_run(tmp_path / "made", Record(**SMALL, stats_every=None))
    assert made.run()["config"]["stats"] == real.run()["config"]["stats"]
    assert {path.name for path in real.path.iterdir()} - {"checkpoints", "tokenizer.json"} == {
        path.name for path in made.path.iterdir()
    }
    assert made.status().keys() == real.status().keys()


def test_rows_steps_and_tokens_agree(tmp_path):
    folder = write_run(tmp_path, Record(**SMALL))
    rows = series(folder)
    assert rows["step"].tolist() == list(range(60))
    assert np.isfinite(rows["loss"]).all()
    assert rows["clip_factor"] == pytest.approx(np.minimum(1, 1 / rows["grad_norm"]), rel=1e-6)
    optim = AdamW(lr=1e-3, schedule="cosine", warmup_steps=10, final_lr_fraction=0.1)
    expected = [learning_rate(optim, 60, step) for step in range(60)]
    assert learning_rates(Record(**SMALL), np.arange(60)) == pytest.approx(expected)
    assert folder.status()["tokens"] == 60 * 4 * 32
    assert [row["step"] for row in folder.rows("eval").rows] == [0, 60]


@pytest.mark.parametrize(
    ("options", "state", "last"),
    [
        ({}, "finished", 60),
        ({"outcome": "diverged", "at": 41}, "diverged", 42),
        ({"outcome": "failed", "at": 20}, "failed", 20),
        ({"outcome": "interrupted"}, "interrupted", 30),
        ({"outcome": "running", "at": 15}, "killed", 15),
        ({"outcome": STUCK}, "finished", 60),
    ],
)
def test_each_outcome_is_read_back(tmp_path, options, state, last):
    folder = write_run(tmp_path, Record(**SMALL, **options))
    run = RunRecord.read(folder)
    assert (run.state, run.problem) == (state, "")
    assert len(series(folder)["loss"]) == last
    [inside], damaged = folder.statistics.read(CORE)
    assert (inside.steps.tolist(), damaged) == (list(range(0, last, 10)), 0)
    ([result], _) = read_results([run])
    assert result.state == {"interrupted": "unfinished", "running": "unfinished"}.get(
        options.get("outcome"), options.get("outcome", "finished")
    )
    if state == "diverged":
        assert math.isnan(series(folder)["loss"][-1])
        assert run.status.diverged.step == 41
        assert inside.single_site("resid_rms")[-1, -1] > 100 * inside.single_site("resid_rms")[0, -1]
    elif options == {}:
        assert result.loss < BASELINES["bigram"]


def test_a_run_with_a_held_lock_is_running(tmp_path):
    folder = write_run(tmp_path, Record(**SMALL, outcome="running"))
    assert (folder.path / LOCK_FILE).exists()
    with RunFolder(folder.path).lock():
        assert folder.state() == "running"


def test_a_spike_is_at_the_requested_step(tmp_path):
    options = {**SMALL, "steps": 400, "spike_at": 300}
    counts = count_spikes(series(write_run(tmp_path, Record(**options))))
    (spikes,) = (count.spikes for count in counts if count.rule.name == "loss_olmo_core")
    assert spikes[0] == 300
    assert spikes[-1] < 320


def test_equal_records_write_equal_files(tmp_path):
    one, again = (write_run(tmp_path / name, Record(**SMALL)) for name in "ab")
    other = write_run(tmp_path / "a", Record(**SMALL, seed=1))
    assert one.run_id == again.run_id != other.run_id
    for name in ("metrics.jsonl", "stats/core.bin", "run.json"):
        assert (one.path / name).read_bytes() == (again.path / name).read_bytes()
        assert (one.path / name).read_bytes() != (other.path / name).read_bytes()


def test_streams_and_gradients_follow_known_results(tmp_path):
    inside = {
        placement: write_run(tmp_path, Record(**{**SMALL, "depth": 12}, placement=placement)).statistics.read(CORE)[0][
            0
        ]
        for placement in ("pre", "post")
    }
    streams = {name: one.single_site("resid_rms")[-1] for name, one in inside.items()}
    assert streams["pre"][13] > 3 * streams["pre"][1]
    assert streams["post"][13] < 1.5 * streams["post"][2]
    back = inside["post"].single_site("dresid_rms")[-1]
    assert back[13] > 10 * back[1]


def test_a_sweep_is_found_by_its_folder(tmp_path):
    records = [Record(**SMALL, seed=seed, norm=norm) for seed in (0, 1) for norm in ("rmsnorm", "dyt")]
    folder = write_sweep(tmp_path, "four", records)
    selection = select_runs([str(folder)], tmp_path)
    assert [run.run_id for run in selection.started] == [record.run_id for record in records]
    assert len(selection.records) == 4


def test_the_command_writes_the_grid(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["records.py", str(tmp_path / "made"), "--runs", "24"])
    main()
    printed = capsys.readouterr().out.strip()
    assert printed == str(tmp_path / "made" / "sweeps" / "demo24")
    entries = select_runs([printed], tmp_path).started
    configs = [entry.folder.run()["config"] for entry in entries]
    choices = {
        (c["norm"]["name"], c["placement"]["name"], c["model"]["depth"], c["optim"]["lr"], c["seed"]) for c in configs
    }
    assert len(entries) == len(choices) == 24
    assert [len({choice[place] for choice in choices}) for place in range(5)] == [2, 2, 2, 1, 3]
    assert json.loads((tmp_path / "made/sweeps/demo24/plan.json").read_text())["name"] == "demo24"
