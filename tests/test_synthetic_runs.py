"""scripts/bench/synthetic_runs.py: synthetic run folders have the format of real ones and the requested content."""

import math
from typing import Any

import pytest
from synthetic_runs import BASELINES, STUCK, Record, write_run
from synthetic_statistics import Size, layout

from normlab.analysis.comparability import intact_runs
from normlab.catalogue.statistics.statistic import CORE
from normlab.config.compose import compose_run
from normlab.store.record import RunRecord, flatten
from normlab.store.series import series
from normlab.training.start import train

SMALL: dict[str, Any] = {"depth": 3, "width": 32, "context": 32, "steps": 60, "batch_size": 4, "warmup_steps": 10}


@pytest.mark.parametrize(
    ("norm", "placement"),
    [("layernorm", "post"), ("dyt", "peri"), ("scalenorm", "deepnorm")],
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
    of_corpus = "data."  # the real corpus is of files
    keys = [{key for key in flatten(run.run()["config"]) if not key.startswith(of_corpus)} for run in (made, real)]
    assert keys[0] == keys[1]
    assert made.status().keys() == real.status().keys()
    assert made.status()["spikes"].keys() == real.status()["spikes"].keys()
    kinds = [{row["kind"]: tuple(row) for row in folder.rows().rows} for folder in (made, real)]
    assert kinds[0] == kinds[1]


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
    run = RunRecord.load(folder)
    assert (run.state, run.problem) == (state, "")
    assert len(series(folder)["loss"]) == last
    [inside], damaged = folder.statistics.read(CORE)
    assert (inside.steps.tolist(), damaged) == (list(range(0, last, 10)), 0)
    ([result], _) = intact_runs([run])
    assert result.result == {"interrupted": "unfinished", "running": "unfinished"}.get(
        options.get("outcome"), options.get("outcome", "finished")
    )
    if state == "diverged":
        assert math.isnan(series(folder)["loss"][-1])
        assert run.status.diverged is not None
        assert run.status.diverged.step == 41
        assert inside.single_site("resid_rms")[-1, -1] > 100 * inside.single_site("resid_rms")[0, -1]
    elif options == {}:
        assert result.loss < BASELINES["bigram"]
