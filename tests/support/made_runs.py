"""Runs with any state, losses and options, without training: the fixture `make_run`."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
from synthetic_runs import Record

from normlab.config.recorded import parse_config
from normlab.store.record import RunRecord, flatten
from normlab.store.run_json import RecordedCorpus, Run
from normlab.store.runs import RunFolder
from normlab.store.status import Status


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings with some values changed."""
    nested = {
        key: merged(tree[key], value) if isinstance(value, Mapping) and isinstance(tree.get(key), Mapping) else value
        for key, value in changes.items()
    }
    return {**tree, **nested}


def record_of(changes: Mapping[str, Any]) -> RunRecord:
    """Return the record of a run whose run.json has some other values."""
    run = merged(Record().run(), changes)
    run["identity"]["config"] = {name: run["config"][name] for name in run["identity"]["config"]}
    config, options = parse_config(run["config"]), flatten(run["config"])
    status, content = Status("running"), msgspec.convert(run, Run)
    return RunRecord(RunFolder("x"), "running", options=options, run=content, config=config, status=status)


@pytest.fixture
def make_run(tmp_path):
    """Writes a run as the trainer does, into a results folder; returns its folder."""

    def make(run_id: str, state: str | None = "finished", *, run=None, status=None, **options) -> RunFolder:
        preset, data_seed = options.pop("preset", ""), options.pop("data_seed", options.get("seed", 0))
        record = Record(**{"steps": 100, "stats_every": None, **options}).run()
        record |= {"run_id": run_id, "name": run_id}
        record = merged(record, {"config": {"norm": {"preset": preset}, "data": {"seed": data_seed}}})
        record["corpus"] |= {"sha256": "a" * 64, "baselines": {"uniform": 5.5, "unigram": 3.2, "bigram": 2.5}}
        record = merged(record, run or {})
        if isinstance(record["config"], dict):
            record["identity"]["config"] = {name: record["config"][name] for name in record["identity"]["config"]}
        folder = RunFolder.create(tmp_path / "runs" / run_id, record)
        if state is not None:
            numbers: dict[str, Any] = {
                "step": 100,
                "steps": 100,
                "train_loss": 1.9,
                "val_loss": 2.0,
                "best_val_loss": 2.0,
                "tokens_per_s": 12345.6,
                "seconds": 65.43,
            }
            if state == "diverged":
                numbers["diverged"] = {"step": 100, "loss": math.nan, "grad_norm": math.nan}
            made = msgspec.convert({"state": state} | numbers | (status or {}), Status, strict=False)
            references = msgspec.convert(record["corpus"], RecordedCorpus).references(made.initial_val_loss)
            folder.write_status(asdict(made.completed(references, None)))
        return folder

    return make
