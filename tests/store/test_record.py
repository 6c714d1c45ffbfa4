"""`RunRecord`: a real record parses completely, and a record with a wrong field is damaged, by name."""

import copy
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from synthetic_runs import Record

from normlab.analysis import settings
from normlab.catalogue.corpora import FilesData
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.placements.base import Placement
from normlab.config.recorded import config_from_record
from normlab.store.format import DAMAGED, KILLED, RUNNING, with_checksum
from normlab.store.record import RunRecord, flatten
from normlab.store.runs import RunFolder
from normlab.store.status import YEAR_10000

STATUS: dict[str, Any] = {
    "state": "diverged", "step": 40, "steps": 100, "val_loss": math.nan, "best_val_loss": 2.5, "initial_val_loss": 5.5,
    "checkpoint": 20, "changes_at_resume": ["from step 7: torch was 1 and is 2", "nan"], "error": "inf",
    "spikes": {"loss_olmo_core": {"spikes": 1, "of_steps": 30}},
    "pack": {"sweep": "nan", "number": 0, "runs": ["abc", "inf"]},
    "diverged": {
        "step": 40, "loss": math.nan, "grad_norm": math.inf,
        "last_finite": {"step": 39, "loss": 7.0, "grad_norm": 3.0},
    },
}  # fmt: skip
PATHS = ["../victim", "..", "/victim", "a/b", ".hidden", "a\0b", "\x1b[2J", "\ud800", "x" * 300]


def run_json(**options: Any) -> dict[str, Any]:
    """Return the run.json of a run in the folder `abc`."""
    return Record(**options).run() | {"run_id": "abc"}


def write(path: Path, run: dict[str, Any], status: dict[str, Any] | None = STATUS) -> RunFolder:
    folder = RunFolder.create(path, run)
    if status is not None:
        folder.write_status(status)
    return folder


def test_every_part_of_a_record_is_an_attribute(tmp_path: Path) -> None:
    run = RunRecord.load(write(tmp_path / "abc", run_json(lr=3e-3, seed=5)))
    assert (run.run_id, run.config.norm.name, run.config.model.depth, run.config.optim.lr) == (
        "abc", "rmsnorm", 4, 3e-3,
    )  # fmt: skip
    assert (run.machine.device, run.machine.instructions, run.corpus.name) == ("cpu", "AVX2", "stdlib")
    assert (run.options["norm.eps"], run.run.identity.config["norm"]["eps"]) == (1e-6, 1e-6)
    assert (run.references.bigram, run.references.initial) == (2.512, 5.5)
    assert (run.outcome, run.status.checkpoint) == ("diverged", 20)
    assert (
        str(run.status.diverged) == "loss nan, gradient norm inf; last finite at step 39: loss 7.0000, gradient norm 3"
    )


def test_only_the_numbers_of_a_status_may_be_nan(tmp_path: Path) -> None:
    status = write(tmp_path / "abc", run_json()).read_status()
    assert math.isnan(status.val_loss or 0)
    assert (status.error, status.pack.sweep, status.pack.runs) == ("inf", "nan", ("abc", "inf"))
    assert status.changes_at_resume[1] == "nan"


def test_a_path_that_is_no_utf8_is_read(tmp_path: Path) -> None:
    """Python has such a byte as half of a surrogate pair, which the decoder of msgspec refuses."""
    run = run_json()
    run["config"]["data"] |= {"name": "files", "path": ["caf\udce9.txt"]}
    record = RunRecord.load(write(tmp_path / "abc", run))
    assert record.options["data.path"] == json.dumps(["caf\udce9.txt"])
    assert isinstance(record.config.data, FilesData)
    assert record.config.data.path == ["caf\udce9.txt"]


def test_an_option_that_was_added_later_has_its_default(tmp_path: Path) -> None:
    run = run_json()
    del run["config"]["train"]["accumulation"]
    assert RunRecord.load(write(tmp_path / "abc", run)).config.train.accumulation == 1


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("run_id", path) for path in PATHS), *(("pack", {"runs": [path]}) for path in PATHS),
        ("pack", {"sweep": "../x"}), ("name", None), ("created", math.nan), ("flops_per_token", "x"), ("git", "abc"),
        ("fingerprint", None), ("versions", []), ("resolved", {}), ("resolved.devices", -1), ("resolved.devices", 1.5),
        ("corpus.baselines.unigram", None), ("corpus.baselines.bigram", math.inf), ("corpus.vocab_size", 10**400),
        ("identity", None), ("config", []), ("config.norm", "x"), ("config.norm.name", 3), ("config.placement", None),
        ("config.model", "x"), ("config.model.depth", 0), ("config.model.depth", 10**9), ("config.model.depth", 2.5),
        ("config.model.depth", True), ("config.model.new", 1), ("config.new", {}), ("config.optim.lr", None),
        ("config.optim.lr", math.nan), ("config.optim.lr", -1.0), ("config.optim.name", "x"), ("config.data.name", {}),
        ("config.seed", None), ("config.plugins", "x"), ("config.tracking.project", 1), ("config.run", {"fresh": 2}),
    ],
)  # fmt: skip
def test_a_wrong_field_of_run_json_is_damage(path: str, value: Any, tmp_path: Path) -> None:
    run: dict[str, Any] = copy.deepcopy(run_json())
    *groups, name = path.split(".")
    part = run
    for group in groups:
        part = part[group]
    part[name] = value
    entry = RunRecord.read(write(tmp_path / "abc", run))
    assert (entry.state, entry.options, entry.name) == (DAMAGED, {}, "abc")
    assert f"{tmp_path}/abc/run.json: is damaged (" in entry.problem
    assert "restore a copy" in entry.problem
    assert entry.problem.isprintable()


def test_the_options_of_a_norm_of_its_own_are_read_without_its_class(tmp_path: Path) -> None:
    run = run_json()
    run["config"]["norm"] |= {"eps": 1e-3, "of_a_plugin": [1, 2]}
    record = RunRecord.load(write(tmp_path / "abc", run))
    norm: Any = record.config.norm
    assert (norm.eps, norm.of_a_plugin) == (1e-3, [1, 2])


def test_the_options_of_a_stranger_replace_no_method(tmp_path: Path) -> None:
    run = run_json()
    for group, kind in (("norm", NormConfig), ("placement", Placement)):
        options = {field.name for field in fields(kind)}
        run["config"][group] |= dict.fromkeys(set(dir(kind)) - options, "hostile")
    config = RunRecord.load(write(tmp_path / "abc", run)).config
    assert not {"hostile"} & {*vars(config.norm).values(), *vars(config.placement).values()}


@pytest.mark.parametrize("name", [name for name in run_json() if name not in ("pack", "parameters", "warnings")])
def test_run_json_lacks_no_field(name: str, tmp_path: Path) -> None:
    run = run_json()
    del run[name]
    entry = RunRecord.read(write(tmp_path / "abc", run))
    assert entry.state == DAMAGED


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1}, {"step": None}, {"step": 1.5}, {"step": 10**400}, {"val_loss": "x"}, {"val_loss": 1e300},
        {"best_val_loss": []}, {"diverged": None}, {"diverged": {"loss": 1.0}}, {"outcome": "done"}, {"metrics": 3},
        {"spikes": {"a": 1}}, {"pack": "x"}, {"pack": {"runs": [["a"]]}}, {"pack": {"runs": ["../x"]}},
        {"changes_at_resume": "x"}, {"state": "finished", "outcome": None},
        {"state": "finished", "outcome": "stuck", "val_loss": None},
    ],
)  # fmt: skip
def test_a_wrong_field_of_a_status_is_damage(change: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "abc", run_json(), STATUS | change)
    entry = RunRecord.read(folder)
    assert entry.state == DAMAGED
    assert "status.json: is damaged (" in entry.problem
    assert "delete this one file" in entry.problem


@pytest.mark.parametrize("seconds", [2**63, 10**400, -1, YEAR_10000])
def test_a_time_that_no_date_holds_is_damage(seconds: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "abc", run_json(), None)
    (folder.path / "status.json").write_bytes(with_checksum(STATUS | {"run_id": "abc", "updated": seconds}))
    assert "status.json: is damaged (" in RunRecord.read(folder).problem


def test_a_run_without_a_status_has_none_of_its_numbers(tmp_path: Path) -> None:
    run = RunRecord.load(write(tmp_path / "abc", run_json(), None))
    assert (run.state, run.outcome, run.status.step, run.status.val_loss) == ("killed", None, 0, None)
    assert "sha256" not in run.folder.run()


def test_a_lost_status_of_a_run_with_steps_is_damage(tmp_path: Path) -> None:
    """A run that was killed before its first status has no training rows."""
    folder = write(tmp_path / "abc", run_json(), None)
    folder.append([{"kind": "eval", "step": 0, "loss": 5.0}])
    assert RunRecord.read(folder).state == KILLED
    folder.append([{"kind": "pace", "step": 3, "seconds": 1.0, "tokens_per_s": 9.0}])
    entry = RunRecord.read(folder)
    assert entry.state == DAMAGED
    assert "status.json: is missing; the same command resumes" in entry.problem
    assert RunRecord.load(folder, allow_lost_status=True).state == KILLED  # so that the run can resume
    with folder.lock():
        assert RunRecord.read(folder).state == RUNNING


def test_equal_groups_of_configs_are_parsed_and_flattened_once(tmp_path: Path) -> None:
    runs = [RunRecord.load(write(tmp_path / f"{seed}", run_json(seed=seed) | {"run_id": f"{seed}"})) for seed in (1, 2)]
    first, second = (run.config for run in runs)
    groups = ("model", "optim", "train", "eval", "stats", "tracking", "run")
    assert all(getattr(first, group) is getattr(second, group) for group in groups)
    assert [(run.config.seed, run.config.data.seed, run.options["data.seed"]) for run in runs] == [(1, 1, 1), (2, 2, 2)]
    assert all(run.options == flatten(run.run.config) for run in runs)


def test_a_config_that_may_be_changed_shares_no_group(tmp_path: Path) -> None:
    tree = RunRecord.load(write(tmp_path / "abc", run_json())).run.config
    assert config_from_record(tree).optim is not config_from_record(tree).optim


def test_equal_settings_of_many_runs_are_read_once_and_are_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunRecord.load(write(tmp_path / "abc", run_json()))
    runs = [replace(run) for _ in range(5000)]
    reads = Mock(side_effect=settings.read_settings)
    monkeypatch.setattr(settings, "read_settings", reads)
    assert len({id(settings.settings_of(each)) for _ in range(2) for each in runs}) == 1
    assert reads.call_count == len(runs)
