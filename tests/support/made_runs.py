"""Runs with any state, losses and options, without training: the fixture `make_run`."""

from __future__ import annotations

import pytest

from normlab.store.parts import parse_part, part_to_json
from normlab.store.record import Corpus
from normlab.store.runs import RunFolder
from normlab.store.status import Status


@pytest.fixture
def make_run(tmp_path):
    """Writes a run as the trainer does, into a results folder; returns its folder."""

    def make(run_id: str, state: str | None = "finished", *, run=None, status=None, **options) -> RunFolder:
        options = {
            "norm": "rmsnorm",
            "preset": "",
            "placement": "pre",
            "depth": 4,
            "lr": 1e-3,
            "seed": 0,
        } | options
        record = {
            "run_id": run_id,
            "name": None,
            "config": {
                "norm": {"name": options["norm"], "preset": options["preset"]},
                "placement": {"name": options["placement"]},
                "model": {"depth": options["depth"], "width": 128},
                "optim": {"name": "adamw", "lr": options["lr"]},
                "train": {"steps": 100},
                "data": {"seed": options.get("data_seed", options["seed"])},
                "seed": options["seed"],
            },
            "resolved": {"device": "cpu", "precision": "fp32"},
            "corpus": {
                "name": "stdlib",
                "sha256": "a" * 64,
                "baselines": {"uniform": 5.5, "unigram": 3.2, "bigram": 2.5, "targets": 8192},
            },
            "created": 1_760_000_000,
        }
        record |= run or {}
        folder = RunFolder.create(tmp_path / "runs" / run_id, record)
        if state is not None:
            numbers = {
                "step": 100,
                "steps": 100,
                "train_loss": 1.9,
                "val_loss": 2.0,
                "best_val_loss": 2.0,
                "tokens_per_s": 12345.6,
                "seconds": 65.43,
            }
            content = {"state": state} | numbers | (status or {})
            parsed = parse_part(Status, content)
            final = parsed.completed(parse_part(Corpus, record["corpus"]).references(parsed.initial_val_loss), None)
            if final.outcome is not None:
                content = {"outcome": final.outcome} | content
            if final.state != state:
                content |= {"state": final.state, "diverged": part_to_json(final.diverged)}
            folder.write_status(content)
        return folder

    return make
