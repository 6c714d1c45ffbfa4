"""`RunRecord`: a real record is read completely, and one with any field missing or absurd is read without an error."""

from __future__ import annotations

import copy
import math

import pytest
from synthetic_runs import Record

from normlab.store.parts import parse_part, part_to_json
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.store.status import Status

FOLDER = RunFolder("runs/abc")
STATUS = {
    "state": "diverged", "step": 40, "steps": 100, "val_loss": "nan", "best_val_loss": 2.5, "initial_val_loss": 5.5,
    "checkpoint": 20, "changes_at_resume": ["from step 7: torch was 1 and is 2"],
    "spikes": {"loss_olmo_core": {"spikes": 1}},
    "diverged": {
        "step": 40, "loss": "nan", "grad_norm": "inf", "last_finite": {"step": 39, "loss": 7.0, "grad_norm": 3.0},
    },
}  # fmt: skip
ODD = [None, True, -1, 1.5, 10**400, "", "x", "nan", "\ud800", [], [1], {}, {"a": 1}, {"name": []}]


def test_every_part_of_a_record_is_an_attribute():
    run = RunRecord.parse(FOLDER, Record(lr=3e-3, seed=5).run(), STATUS, "diverged")
    assert (run.run_id, run.config.norm.name, run.config.model.depth, run.config.optim.lr) == (
        "abc", "rmsnorm", 4, 3e-3,
    )  # fmt: skip
    assert (run.machine.device, run.machine.instructions, run.corpus.name) == ("cpu", "AVX2", "stdlib")
    assert (run.options["norm.eps"], run.identity["norm.eps"], run.code_versions["norm"]) == (1e-6, 1e-6, 1)
    assert (run.references.bigram, run.references.initial) == (2.512, 5.5)
    assert (run.outcome, run.status.checkpoint) == ("diverged", 20)
    assert (
        str(run.status.diverged) == "loss nan, gradient norm inf; last finite at step 39: loss 7.0000, gradient norm 3"
    )
    assert math.isnan(run.status.val_loss or 0)


def test_an_empty_record_has_the_defaults():
    run = RunRecord.parse(FOLDER, {}, {}, "running")
    assert (run.name, run.outcome, run.config.model.depth, run.status.step) == ("abc", None, None, None)
    assert (run.pack.runs, run.options, run.references.unigram) == ((), {}, None)


def test_a_status_is_written_as_it_is_read():
    status = {**STATUS, "pack": {"sweep": "first", "number": 0, "runs": ["abc", "def"]}}
    parsed = parse_part(Status, status)
    assert parse_part(Status, part_to_json(parsed)) == parsed
    assert {key: value for key, value in part_to_json(parsed).items() if key in status and key != "diverged"} == {
        key: math.nan if value == "nan" else value for key, value in status.items() if key != "diverged"
    }
    assert not {"pack", "error", "outcome", "diverged", "metrics"} & {*part_to_json(Status(state="running"))}


def paths(tree, path=()):
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from paths(value, (*path, key))


@pytest.mark.parametrize("odd", ODD)
def test_absurd_fields_are_no_error(odd):
    sound = {"run": Record().run(), "status": STATUS}
    for *parents, last in paths(sound):
        if not parents:
            continue
        changed = copy.deepcopy(sound)
        part = changed
        for key in parents:
            part = part[key]
        part[last] = odd
        for state in ("finished", "diverged"):
            run = RunRecord.parse(FOLDER, changed["run"], changed["status"], state)
            assert run.outcome in (None, "finished", "stuck", "regressed", "diverged")
            assert isinstance(f"{run.name} {run.status.diverged} {run.references.start}", str)
