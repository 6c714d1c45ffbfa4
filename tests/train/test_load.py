"""A run's record is held against its limits, the machine and the checkpoint before a model is built of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from resuming import Command, contents

import normlab
from normlab import memory
from normlab.errors import StoreError
from normlab.store.runs import RunFolder
from normlab.store.schema import SEAL, seal


@pytest.fixture
def folder(reference: Path, tmp_path: Path) -> RunFolder:
    """A copy of a trained run, to be damaged; its width is 32, its depth 2."""
    shutil.copytree(reference, tmp_path / reference.name)
    return RunFolder(tmp_path / reference.name)


@pytest.fixture
def trained(reference: Path, tmp_path: Path) -> RunFolder:
    """The same where `command` looks for it, stopped before its last checkpoint."""
    folder = RunFolder(tmp_path / "results" / "runs" / reference.name)
    shutil.copytree(reference, folder.path)
    folder.write_status({**folder.status(), "state": "interrupted"})
    return folder


def rewrite(folder: RunFolder, option: str, value: Any) -> None:
    """Change what run.json holds at a dotted path, with a seal that fits: the work of a person, not of a disk."""
    path = folder.path / "run.json"
    record = json.loads(path.read_bytes())
    *outer, last = option.split(".")
    part = record
    for name in outer:
        part = part[name]
    part[last] = value
    path.write_bytes(seal({name: value for name, value in record.items() if name not in ("version", SEAL)}))


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("config.model.context", 2**20, "1048576"),
        ("config.model.width", 2**17, "needs about 1 TiB of memory for its weights, and this machine has "),
        ("config.model.mlp_width", 2**20, "has no param blocks.0.mlp.up.weight of shape (1048576, 32)"),
        ("config.model.depth", 10_000, "has no param blocks.2.attn.q.weight of shape (32, 32)"),
        ("config.model.width", 2**40, "model.width=1099511627776: must be at most 131072"),
        ("config.model.depth", -1, "model.depth=-1: must be at least 1"),
        ("config.model.heads", 3, "model.heads=3: does not divide model.width=32"),
        ("config", 3, "holds no config that this normlab knows"),
        ("identity", None, "run.json: is damaged (it has no versions of its norm and placement)"),
    ],
)
def test_absurd_records_are_one_line_and_build_nothing(
    option: str, value: Any, told: str, folder: RunFolder, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*arguments: Any) -> None:
        raise AssertionError("nothing is built")

    monkeypatch.setattr("normlab.train.load.build_model", build)
    rewrite(folder, option, value)
    for command in (["sample", str(folder.path)], ["inspect", str(folder.path), "sharpness", "--probe"]):
        code, out, err = run_command(*command)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert told in err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("config.model.width", 2**17),
        ("config", 3),
        ("identity", None),
        ("resolved", None),
        ("versions", None),
        ("git", 3),
        ("run_id", 5),
        ("corpus", 3),
        ("pack", {}),
    ],
)
def test_a_record_of_something_else_is_not_resumed(
    option: str, value: Any, trained: RunFolder, command: Command
) -> None:
    rewrite(trained, option, value)
    before = contents(trained.path)
    code, out, err = command()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert f"run.json: is damaged (it is not the record of run {trained.run_id}); put back a copy" in err
    assert {name: content for name, content in contents(trained.path).items() if name != "lock"} == {
        name: content for name, content in before.items() if name != "lock"
    }


def test_weights_that_the_machine_has_no_memory_for(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run = normlab.load(folder.path)
    shutil.rmtree(folder.path / "checkpoints" / "step_00000012")
    needed = 8 * memory.weights_of(run.config)
    size = (folder.path / "checkpoints" / "step_00000016" / "state.safetensors").stat().st_size
    assert run.model
    monkeypatch.setattr(memory, "of_machine", lambda: size - 1)
    with pytest.raises(StoreError, match=r"the memory ran out while .*checkpoints was read"):
        assert normlab.load(folder.path).model
    with pytest.raises(memory.ConfigError, match=r"this machine has .*; use a machine with more"):
        memory.check_weights(run.config, needed - 1, "this machine")
    memory.check_weights(run.config, needed, "this machine")


@pytest.mark.parametrize("name", ["manifest.json", "meta.json", "state.safetensors"])
def test_a_part_of_a_checkpoint_of_terabytes_is_damage(name: str, folder: RunFolder, run_command: Command) -> None:
    os.truncate(folder.path / "checkpoints" / "step_00000016" / name, 2**40)
    code, _, err = run_command("sample", str(folder.path), "--tokens", "1")
    assert (code, err.count("\n")) == (0, 1)
    assert "step_00000016" in err
    assert "taking the checkpoint before it" in err


def test_a_tokenizer_of_terabytes_is_damage(folder: RunFolder) -> None:
    os.truncate(folder.path / "tokenizer.json", 2**40)
    with pytest.raises(StoreError, match=r"tokenizer.json: is damaged"):
        assert normlab.load(folder.path).tokenizer
