"""Every study, on records made up for its grids: its arms are in its grids, and its report can be written."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import Record

from normlab.analysis.comparability import intact_runs
from normlab.analysis.table import CellsTable
from normlab.base.errors import ConfigError
from normlab.base.options import plain_tree
from normlab.report.figure_data import Figure, make_figure
from normlab.store.query import Selection, find_runs
from normlab.store.runs import RunFolder
from normlab.studies.base import STUDIES, load_studies
from normlab.studies.evidence import Evidence
from normlab.studies.judge import judge
from normlab.studies.report import write_report
from normlab.studies.run import Attempt, check_arms

load_studies()
BASELINES = {"uniform": 5.5, "unigram": 3.2, "bigram": 2.5, "targets": 8192}


def make_up(attempt: Attempt, folder: Path) -> Evidence:
    """Write a record for each run of the first seeds, with a loss that is lowest inside the grid of learning rates."""
    noise = np.random.default_rng(0)
    for index, (_, _, composed) in enumerate(attempt.compose(range(8))):
        for number, (_, config) in enumerate(composed):
            tree, run_id = plain_tree(config), f"run-{index}-{number}"
            tree["optim"]["warmup_steps"] = config.optim.warmup_steps or 0
            record = Record().run() | {"run_id": run_id, "name": run_id, "config": tree}
            record["identity"]["config"] = {name: tree[name] for name in record["identity"]["config"]}
            record["resolved"] |= {"init": config.init_rule}
            record["corpus"] |= {"name": "made", "sha256": "a" * 64, "baselines": BASELINES}
            record["flops_per_token"] = 100.0 * config.model.depth * config.model.width**2
            tokens = config.train.steps * config.train.batch_size * config.model.context
            law = 1.4 + (record["flops_per_token"] * tokens / 1e10) ** -0.1
            best = 0.3 if config.placement.name == "peri" else 0.01
            loss = law + 0.02 * np.log(config.optim.lr / best) ** 2 + float(noise.normal(0, 0.01))
            losses = dict.fromkeys(("train_loss", "val_loss", "best_val_loss"), loss)
            status = {
                "state": "finished",
                "outcome": "finished",
                "step": 1,
                "steps": 1,
                "tokens": tokens,
                "seconds": 1.0,
            }
            run = RunFolder.create(folder / "runs" / run_id, record)
            run.write_status(status | losses | {"tokens_per_s": 1.0})
    selection = Selection(find_runs(folder), "", folder)
    return Evidence(intact_runs(selection.records)[0], {}, [], selection, missing=0, damaged={})


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(STUDIES))
def test_the_report_of_a_study_can_be_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Attempt(STUDIES[name], str(tmp_path))
    evidence = make_up(attempt, tmp_path)
    verdicts = judge(STUDIES[name], evidence.results, unverified={})
    for each in (*verdicts.claims, *verdicts.controls):
        assert not re.search("no estimate|edge|differ", each.reason)
        assert each.claim.text.endswith(".")
    # Made-up records have no statistics and no curves: the loss takes their place in the pictures.
    monkeypatch.setattr("normlab.studies.report.make_figure", figure_of_losses)
    write_report(STUDIES[name], [(attempt, evidence)], tmp_path / "studies" / name)
    report = json.loads((tmp_path / "studies" / name / "report.json").read_text())
    assert report["attempts"][0]["runs"] == len(evidence.results)
    assert STUDIES[name].question in (tmp_path / "studies" / "README.md").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(STUDIES))
def test_the_arms_of_a_study_differ_in_compute_only_on_purpose(name: str, tmp_path: Path) -> None:
    """`check_arms` rejects a study whose grids hide another size."""
    study = STUDIES[name]
    for setting in study.settings:
        composed = Attempt(study, str(tmp_path), setting).compose(range(1))
        check_arms(study, [config for _, _, runs in composed for _, config in runs])


def test_a_study_with_a_hidden_difference_in_compute_is_rejected_unless_its_claim_intends_it(tmp_path: Path) -> None:
    study = STUDIES["norm_cost"]
    (control,) = study.controls
    hidden = dataclasses.replace(study, controls=[dataclasses.replace(control, intended=[])])
    configs = [config for _, _, runs in Attempt(study, str(tmp_path)).compose(range(1)) for _, config in runs]
    check_arms(study, configs)
    problem = "claim wider_is_slower: the arms .* differ in train.steps 40 and 400, which no condition names"
    with pytest.raises(ConfigError, match=problem):
        check_arms(hidden, configs)


def figure_of_losses(kind: str, table: CellsTable, **options: Any) -> Figure:
    options = {name: value for name, value in options.items() if name not in ("statistic", "moment")}
    return make_figure("lr" if kind in ("layers", "loss") else kind, table, **options)
