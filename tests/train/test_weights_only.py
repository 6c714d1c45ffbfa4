"""`normlab rm --checkpoints`: a completed run keeps its weights, and what needs the optimiser's state says why."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from normlab.base.errors import StoreError
from normlab.loaded.run import load
from normlab.store.runs import RunFolder
from normlab.training import checkpoint
from support.run_folders import Command, Train, contents, damage, flip_a_bit, steps_of


@pytest.fixture
def results(reference: Path, tmp_path: Path) -> Path:
    """Return a results folder with one completed run, whose state has buffers, moments and a mean of the weights."""
    shutil.copytree(reference, tmp_path / "results" / "runs" / reference.name)
    return tmp_path / "results"


@pytest.fixture
def run(results: Path) -> RunFolder:
    return RunFolder(next((results / "runs").iterdir()))


def command(run: RunFolder, results: Path) -> list[str]:
    return ["rm", run.run_id, "--checkpoints", "--yes", "--results-dir", str(results)]


def test_the_model_stays_and_the_moments_go(run: RunFolder, results: Path, run_command: Command) -> None:
    before, model = contents(run.path), load(run.path).model.state_dict()
    code, out, _ = run_command(*command(run, results))
    assert (code, out.splitlines()[-1].startswith("deleted ")) == (0, True)
    (folder,) = (run.path / "weights").iterdir()
    kinds = {name.partition("/")[0] for name in load_file(folder / "state.safetensors")}
    assert kinds == {"param", "buffer", "average"}
    record = {name: content for name, content in before.items() if "checkpoints" not in name}
    assert record == {name: content for name, content in contents(run.path).items() if "weights" not in name}
    for name, tensor in load(run.path).model.state_dict().items():
        assert torch.equal(tensor, model[name])
    after = contents(run.path)
    assert run_command(*command(run, results))[1].splitlines()[-1] == "deleted 0 B"
    assert contents(run.path) == after


def test_the_newest_intact_checkpoint_stays(run: RunFolder, results: Path, run_command: Command) -> None:
    older, newest = steps_of(run)
    damage(run, newest)
    assert run_command(*command(run, results))[0] == 0
    assert checkpoint.steps(run.path / "weights") == [older]
    flip_a_bit(run.path / "weights" / f"step_{older:08d}" / "state.safetensors")
    with pytest.raises(StoreError, match="every checkpoint of this run is damaged"):
        _ = load(run.path).model


@pytest.mark.parametrize("killed_in", ["copymode", "rmtree"])
def test_a_kill_leaves_a_model_and_the_same_command_finishes(
    killed_in: str, run: RunFolder, results: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed while the weights are written, and before the checkpoints are deleted."""
    model = load(run.path).model.state_dict()

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, killed_in, stop)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.drop_optimizer(run.path)
    for name, tensor in load(run.path).model.state_dict().items():
        assert torch.equal(tensor, model[name])
    assert run_command(*command(run, results))[0] == 0
    assert not (run.path / "checkpoints").exists()
    assert len(list((run.path / "weights").iterdir())) == 1


def test_what_resumes_names_the_reason(train: Train, tmp_path: Path, run_command: Command) -> None:
    options = ["optim.schedule=constant", "optim.warmup_steps=2"]
    run = train(*options, "train.steps=8", "run.name=mine")
    assert run_command(*command(run, run.path.parent.parent))[0] == 0
    before = contents(tmp_path)
    with pytest.raises(
        StoreError, match=r"start_from=.*: has no checkpoint \(yet, or `normlab rm --checkpoints` deleted them"
    ):
        train(*options, "train.start_from=mine")
    assert contents(tmp_path) == before
    assert train(*options, "train.steps=8").state() == "finished"  # nothing is left to train
    (run.path / "status.json").unlink()
    with pytest.raises(StoreError, match=r"its checkpoints are missing \(`normlab rm --checkpoints` deletes them, "):
        train(*options, "train.steps=8")


@pytest.mark.parametrize("member", [False, True])
def test_an_incomplete_run_or_pack_is_left_alone(
    member: bool, run: RunFolder, results: Path, run_command: Command
) -> None:
    """A run of a pack may have diverged before the others end; they resume together."""
    status = run.status()
    if member:
        other = RunFolder(shutil.copytree(run.path, run.path.with_name("other")))
        other.write_status(status | {"state": "interrupted"})
        run.write_status(status | {"pack": {"sweep": "s", "number": 0, "runs": [run.run_id, "other"]}})
    else:
        run.write_status(status | {"state": "interrupted"})
    before = contents(run.path / "checkpoints")
    code, out, _ = run_command(*command(run, results))
    assert (code, out) == (0, f"run {run.run_id} stays as it is: it is not completed, and resumes from them\n")
    assert contents(run.path / "checkpoints") == before
