"""Packs of runs: each run has the record of a single run, and a pack resumes as a whole."""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from normlab.base.errors import StoreError
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.loaded.run import load
from normlab.store.runs import RunFolder
from normlab.training.start import TrainingResult, train, train_pack
from normlab.training.training_run import TrainingRun
from support.run_folders import OVERRIDES, differences, steps_of

NUMBERS = (
    ("seed=0", "optim.lr=1e-3"),
    ("seed=1", "optim.lr=3e-3", "optim.warmup_steps=2", "optim.clip=0.5"),
    ("seed=0", "data.seed=1", "optim.weight_decay=0", "optim.beta1=0.8", "init=xavier"),
)
"""Overrides of the runs of a pack."""
PACK = {"sweep": "some", "number": 0}


def configs_of(results: Path, *overrides: str, numbers: Sequence[Sequence[str]] = NUMBERS) -> list[RunConfig]:
    return [compose_run([*OVERRIDES, f"results_dir={results}", *overrides, *differing]) for differing in numbers]


def pack_of(configs: Sequence[RunConfig], **more: Any) -> list[TrainingResult]:
    return train_pack(configs, [[] for _ in configs], pack=PACK, **more)


def run_differences(one: RunFolder, other: RunFolder) -> list[str]:
    """Return the differences between the folders of two runs, without times."""
    return differences(one.path, other.path)


class SignallingTracker:
    """A tracker that sends this process a signal, or raises, after the row of a step."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        self.step, self.error = step, error

    def start(self, run: Any, first_step: int) -> None:
        pass

    def log(self, rows: Sequence[Any]) -> None:
        if any(row["kind"] == "train" and row["step"] == self.step for row in rows):
            if self.error is not None:
                raise self.error
            os.kill(os.getpid(), signal.SIGTERM)

    def finish(self, status: Any) -> None:
        pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("overrides", [("norm=rmsnorm",), ("norm=batchnorm", "train.accumulation=2")])
def test_run_has_the_same_record_in_a_pack_and_single(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Rows, statistics and weights agree to 1e-5 over ten steps in float32."""
    # No biases: those of keys and before batch norm have rounding errors as gradients, which Adam enlarges.
    overrides = (*overrides, "train.steps=10", "stats.every=2", "model.bias=false")
    overrides = (*overrides, "stats.tiers=[core,extended]", "stats.extended_every=5")
    singles = [train(config, trackers=[]).folder for config in configs_of(tmp_path / "single", *overrides)]
    packed = [outcome.folder for outcome in pack_of(configs_of(tmp_path / "packed", *overrides))]
    assert [folder.run_id for folder in packed] == [folder.run_id for folder in singles]
    for single, in_pack in zip(singles, packed, strict=True):
        assert in_pack.run()["pack"] == {**PACK, "runs": [folder.run_id for folder in packed]}
        for kind in ("train", "eval"):
            rows, expected = in_pack.rows(kind).rows, single.rows(kind).rows
            assert len(rows) == len(expected) > 1
            for row, expected_row in zip(rows, expected, strict=True):
                numbers = {name: row.pop(name) for name in expected_row.keys() - {"kind"}}
                assert numbers == pytest.approx({name: expected_row[name] for name in numbers}, rel=1e-4, abs=1e-5)
                assert row == {"kind": kind}
        for tier, steps, tolerance in (("core", [0, 2, 4, 6, 8], 1e-3), ("extended", [0, 5], 1e-2)):
            (parts, _), (expected_parts, _) = in_pack.statistics.read(tier), single.statistics.read(tier)
            assert [step for part in parts for step in part.steps.tolist()] == steps
            for part, expected_part in zip(parts, expected_parts, strict=True):
                assert part.layout == expected_part.layout
                torch.testing.assert_close(
                    torch.tensor(part.values), torch.tensor(expected_part.values),
                    rtol=tolerance, atol=tolerance / 10, equal_nan=True,
                )  # fmt: skip
        status, expected_status = in_pack.status(), single.status()
        for name in ("state", "step", "steps", "tokens", "checkpoint", "best_val_step"):
            assert status[name] == expected_status[name], name
        weights, expected_weights = (dict(load(folder.path).model.named_parameters()) for folder in (in_pack, single))
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=2e-4)
    losses = [folder.status()["val_loss"] for folder in packed]
    assert len({round(loss, 3) for loss in losses}) == 3, "the runs differ, or the comparison says nothing"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    outcomes = pack_of(configs_of(tmp_path_factory.mktemp("undisturbed")))
    assert [outcome.state for outcome in outcomes] == ["finished"] * 3
    return [outcome.folder for outcome in outcomes]


def test_interrupted_pack_resumes_bit_identical(undisturbed: list[RunFolder], tmp_path: Path) -> None:
    stopped = train_pack(configs_of(tmp_path), [[], [SignallingTracker(5)], []], pack=PACK)
    assert [outcome.state for outcome in stopped] == ["interrupted"] * 3
    assert {outcome.signal for outcome in stopped} == {signal.SIGTERM}
    folders = [outcome.folder for outcome in pack_of(configs_of(tmp_path))]
    assert [run_differences(*pair) for pair in zip(undisturbed, folders, strict=True)] == [[]] * 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [4, 8, 16])
def test_pack_killed_between_checkpoints_of_a_step_resumes_bit_identical(
    at: int, undisturbed: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = TrainingRun.save

    def killed(self: TrainingRun, step: int, *arguments: Any) -> None:
        if step == at and self.config.seed == 1:
            raise SystemExit("killed")
        ordinary(self, step, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, "save", killed)
        with pytest.raises(SystemExit):
            pack_of(configs_of(tmp_path))
    folders = [RunFolder(tmp_path / "runs" / folder.run_id) for folder in undisturbed]
    assert [at in steps_of(folder) for folder in folders] == [True, False, True]
    assert [folder.state() for folder in folders] == ["failed"] * 3
    pack_of(configs_of(tmp_path))
    assert [run_differences(*pair) for pair in zip(undisturbed, folders, strict=True)] == [[]] * 3


def test_damaged_checkpoint_of_one_run_rewinds_the_pack(
    undisturbed: list[RunFolder], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped = train_pack(configs_of(tmp_path), [[], [SignallingTracker(9)], []], pack=PACK)
    (newest,) = {steps_of(outcome.folder)[-1] for outcome in stopped}
    state = stopped[1].folder.path / "checkpoints" / f"step_{newest:08d}" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    folders = [outcome.folder for outcome in pack_of(configs_of(tmp_path))]
    assert "damaged (its size or SHA-256 differs from the manifest)" in capfd.readouterr().err
    assert [run_differences(*pair) for pair in zip(undisturbed, folders, strict=True)] == [[]] * 3


# The third run has a learning rate at which it diverges at once.
DIVERGING = (*NUMBERS[:2], ("seed=2", "optim.lr=1e30", "optim.warmup_steps=0"))


@pytest.mark.exhaustive
def test_diverged_run_is_frozen_and_the_others_keep_their_bits(tmp_path: Path) -> None:
    calm = pack_of(configs_of(tmp_path / "calm"))
    outcomes = pack_of(configs_of(tmp_path / "wild", numbers=DIVERGING))
    assert [outcome.state for outcome in outcomes] == ["finished", "finished", "diverged"]
    for one, other in zip(calm[:2], outcomes[:2], strict=True):
        assert one.folder.rows("train").rows == other.folder.rows("train").rows
    wild = outcomes[2].folder
    divergence = wild.status()["diverged"]
    single = train(configs_of(tmp_path / "single", numbers=DIVERGING)[2], trackers=[])
    assert single.state == "diverged"
    assert single.status.diverged is not None
    assert divergence["step"] == single.status.diverged.step == wild.status()["step"]
    assert wild.rows("train").rows[-1]["step"] == divergence["step"]
    assert steps_of(wild)[-1] == divergence["step"]
    assert all(row["step"] <= divergence["step"] for row in wild.rows().rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [1, 6, 9])
def test_pack_with_a_diverged_run_resumes_bit_identical(at: int, tmp_path: Path) -> None:
    undisturbed = [outcome.folder for outcome in pack_of(configs_of(tmp_path / "whole", numbers=DIVERGING))]
    configs = configs_of(tmp_path / "stopped", numbers=DIVERGING)
    train_pack(configs, [[SignallingTracker(at)], [], []], pack=PACK)
    outcomes = pack_of(configs)
    assert [outcome.state for outcome in outcomes] == ["finished", "finished", "diverged"]
    assert [run_differences(*pair) for pair in zip(undisturbed, (o.folder for o in outcomes), strict=True)] == [[]] * 3


def test_error_after_a_divergence_keeps_the_diverged_status(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, numbers=DIVERGING)
    with pytest.raises(ValueError, match="tracker failed"):
        train_pack(configs, [[SignallingTracker(13, ValueError("tracker failed"))], [], []], pack=PACK)
    states = [RunFolder(path).state() for path in (tmp_path / "runs").iterdir()]
    assert sorted(states) == ["diverged", "failed", "failed"]


def test_pack_ends_when_all_runs_diverge(tmp_path: Path) -> None:
    numbers = [("optim.lr=1e30", "optim.warmup_steps=0"), ("optim.lr=2e30", "optim.warmup_steps=0")]
    outcomes = pack_of(configs_of(tmp_path, numbers=numbers))
    assert [outcome.state for outcome in outcomes] == ["diverged"] * 2
    assert all(outcome.already_ended for outcome in pack_of(configs_of(tmp_path, numbers=numbers)))


def test_ended_pack_changes_nothing(undisturbed: list[RunFolder]) -> None:
    before = {path: path.read_bytes() for folder in undisturbed for path in folder.path.rglob("*") if path.is_file()}
    outcomes = pack_of(configs_of(undisturbed[0].path.parents[1]))
    assert [(outcome.state, outcome.already_ended) for outcome in outcomes] == [("finished", True)] * 3
    assert before == {path: path.read_bytes() for path in before}


def test_finished_run_is_not_rewound_with_its_pack(tmp_path: Path) -> None:
    folders = [outcome.folder for outcome in pack_of(configs_of(tmp_path))]
    shutil.rmtree(folders[1].path)
    before = {path: path.read_bytes() for folder in folders for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match=r"is finished, but its pack would resume from step 0"):
        pack_of(configs_of(tmp_path))
    assert {path: path.read_bytes() for path in before} == before


def test_run_of_a_pack_resumes_in_its_sweep_only(tmp_path: Path) -> None:
    configs = configs_of(tmp_path)
    stopped = train_pack(configs, [[SignallingTracker(5)], [], []], pack=PACK)
    before = json.dumps(stopped[0].folder.status())
    with pytest.raises(StoreError, match="one of a pack of 3 that trains together in sweep some; start that sweep"):
        train(configs[0], trackers=[])
    with pytest.raises(StoreError, match="in sweep some"):
        train_pack(configs[:2], pack={"sweep": "another", "number": 0})
    assert json.dumps(stopped[0].folder.status()) == before
    # A part of the pack, as after running out of memory, is reported.
    outcomes = train_pack(configs[:2], [[], []], pack={"sweep": "some", "number": 1})
    assert [outcome.state for outcome in outcomes] == ["finished"] * 2
    assert "the size of its pack changed from 3 to 2" in outcomes[0].status.changes_at_resume[0]
