"""Every study, on records made up for its grids: its arms are in its grids, and its report can be written."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normlab.analysis.results import read_results
from normlab.analysis.table import CellsTable
from normlab.options import plain_tree
from normlab.report.figure_data import Figure, make_figure
from normlab.store.query import Selection, find_runs
from normlab.store.runs import RunFolder
from normlab.studies.base import STUDIES, load_studies
from normlab.studies.judge import judge
from normlab.studies.report import write_report
from normlab.studies.run import Evidence, compose

load_studies()
SEEDS = 4


def make_up(name: str, folder: Path) -> Evidence:
    """Write a record for each run of the first seeds, with a loss that is lowest inside the grid of learning rates."""
    rng = np.random.default_rng(0)
    number = itertools.count()
    for _, _, composed in compose(STUDIES[name], "small", str(folder)):
        best = np.median([np.log(config.optim.lr) for _, config in composed])
        for _, config in composed:
            if config.seed >= SEEDS:
                continue
            tree = plain_tree(config)
            tree["optim"]["warmup_steps"] = config.optim.warmup_steps or 0
            run_id = f"run-{next(number)}"
            record = {
                "run_id": run_id,
                "name": None,
                "config": tree,
                "resolved": {"device": "cpu", "precision": "fp32", "init": config.init_rule},
                "corpus": {
                    "name": "made",
                    "sha256": "a" * 64,
                    "baselines": {"uniform": 5.5, "unigram": 3.2, "bigram": 2.5, "targets": 8192},
                },
                "created": 1_760_000_000,
            }
            loss = 2.5 + 0.1 * (np.log(config.optim.lr) - best) ** 2 / 5 + float(rng.normal(0, 0.01))
            run = RunFolder.create(folder / "runs" / run_id, record)
            status = {
                "state": "finished",
                "outcome": "finished",
                "step": 1,
                "steps": 1,
                "val_loss": loss,
                "best_val_loss": loss,
            }
            run.write_status(status | {"train_loss": loss, "tokens_per_s": 1.0, "seconds": 1.0, "tokens": 256})
    selection = Selection(find_runs(folder), "", folder)
    return Evidence(read_results(selection.records)[0], {}, [], selection, 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(STUDIES))
def test_the_report_of_a_study_can_be_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = STUDIES[name]
    evidence = make_up(name, tmp_path)
    verdicts = judge(study, "small", evidence.results, unverified={})
    for each in (*verdicts.claims, *verdicts.controls):
        assert "no estimate" not in each.reason
        assert "edge" not in each.reason
        assert re.search(r"\.$", each.claim.text)
    # Made-up records have no statistics and no curves: the loss takes their place in the pictures.
    monkeypatch.setattr("normlab.studies.report.make_figure", figure_of_losses)
    folder = tmp_path / "studies" / name
    write_report(verdicts, evidence, folder)
    report = json.loads((folder / "report.json").read_text())
    assert report["runs"] == len(evidence.results)
    assert study.question in (tmp_path / "studies" / "README.md").read_text()


def figure_of_losses(kind: str, table: CellsTable, **options: Any) -> Figure:
    options = {name: value for name, value in options.items() if name not in ("statistic", "moment")}
    return make_figure("lr" if kind in ("layers", "loss") else kind, table, **options)
