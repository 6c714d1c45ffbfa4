"""A record is checked against the limits, the machine and the checkpoint before a model is built; its device."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import normlab
from normlab.base.errors import StoreError
from normlab.model.gpt import GPT
from normlab.store.format import with_checksum, without_checksum
from normlab.store.runs import RunFolder
from normlab.training import checkpoint
from support.run_folders import Command, contents


@pytest.fixture
def folder(reference: Path, tmp_path: Path) -> RunFolder:
    """A copy of a trained run of width 32 and depth 2."""
    shutil.copytree(reference, tmp_path / reference.name)
    return RunFolder(tmp_path / reference.name)


@pytest.fixture
def trained(reference: Path, tmp_path: Path) -> RunFolder:
    """The same in the folder of `command`, with the status interrupted."""
    folder = RunFolder(tmp_path / "results" / "runs" / reference.name)
    shutil.copytree(reference, folder.path)
    folder.write_status({**folder.status(), "state": "interrupted"})
    return folder


def rewrite(folder: RunFolder, option: str, value: Any) -> None:
    """Change the value at a dotted path of run.json and write it with a checksum."""
    path = folder.path / "run.json"
    record = json.loads(without_checksum(path.read_bytes()))
    *outer, last = option.split(".")
    part = record
    for name in outer:
        part = part[name]
    part[last] = value
    path.write_bytes(with_checksum(record))


@pytest.mark.parametrize(
    ("pack", "command"),
    [
        ({}, "the same `normlab train` makes one"),
        ({"sweep": "first", "number": 0}, "the same `normlab sweep ... sweep.name=first` makes one"),
    ],
)
def test_a_run_without_a_checkpoint_names_the_command_that_makes_one(
    pack: dict[str, Any], command: str, folder: RunFolder
) -> None:
    rewrite(folder, "pack", pack)
    shutil.rmtree(folder.path / checkpoint.FOLDER)
    with pytest.raises(StoreError, match=rf"^run {folder.run_id} has no checkpoint: .*; else {command}$"):
        _ = normlab.load(folder.path).model


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("config.model.width", 2**40, "model.width=1099511627776: must be at most 131072"),
        ("config.model.heads", 3, "model.heads=3: does not divide model.width=32"),
        ("config", 3, "Expected `object`, got `int` - at `$.config`"),
        ("config.optim.lecay", 1, "optim has no option lecay"),
    ],
)
def test_invalid_records_fail_in_one_line_before_building_a_model(
    option: str, value: Any, message: str, folder: RunFolder, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*arguments: Any) -> None:
        raise AssertionError("nothing is built")

    monkeypatch.setattr("normlab.loaded.run.build_model", build)
    rewrite(folder, option, value)
    code, out, err = run_command("sample", str(folder.path))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("config.model.width", 2**40, "model.width=1099511627776: must be at most 131072"),
        ("config", 3, "Expected `object`, got `int` - at `$.config`"),
        ("identity.precision", "fp64", "it is not the record of run "),
    ],
)
def test_invalid_record_is_not_resumed(
    option: str, value: Any, problem: str, trained: RunFolder, command: Command
) -> None:
    rewrite(trained, option, value)
    before = contents(trained.path)
    code, out, err = command()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert f"run.json: is damaged ({problem}" in err
    assert "); restore a copy" in err
    assert {name: content for name, content in contents(trained.path).items() if name != "lock"} == {
        name: content for name, content in before.items() if name != "lock"
    }


@pytest.mark.parametrize("name", ["manifest.json", "meta.json", "state.safetensors"])
def test_huge_checkpoint_file_is_damage(name: str, folder: RunFolder, run_command: Command) -> None:
    os.truncate(folder.path / "checkpoints" / "step_00000016" / name, 2**40)
    code, _, err = run_command("sample", str(folder.path), "--tokens", "1")
    assert (code, err.count("\n")) == (0, 1)
    assert "step_00000016" in err
    assert "using the previous checkpoint" in err


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"name": "x", "definition": "[" * 200_000}, "not a tokenizer.json"),
        ({"name": "x", "definition": '{"model": 3}'}, "not a tokenizer.json"),
        ({"name": "chars"}, "characters"),
    ],
    ids=["nested", "no tokenizer", "no characters"],
)
def test_damaged_tokenizer_fails_in_one_line(
    state: dict[str, Any], problem: str, folder: RunFolder, run_command: Command
) -> None:
    (folder.path / "tokenizer.json").write_text(json.dumps(state))
    before = contents(folder.path)
    code, out, err = run_command("sample", str(folder.path), "--tokens=3")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert f"{folder.path}/tokenizer.json: is damaged (it holds no tokenizer: " in err
    assert problem in err
    assert contents(folder.path) == before


def test_a_run_with_a_damaged_status_is_not_loaded(folder: RunFolder, run_command: Command) -> None:
    (folder.path / "status.json").write_text("")
    code, out, err = run_command("sample", str(folder.path), "--tokens=2")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {folder.path / 'status.json'}: is damaged")


@pytest.mark.parametrize(
    ("device", "has_gpu", "expected"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda"),
        ("cuda", False, "cpu"),
    ],
)
def test_the_device_of_the_model(
    device: str, has_gpu: bool, expected: str, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with device=cuda can be read on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    run = normlab.load(reference)
    run.config.device = device
    assert run.device.type == expected


def test_a_full_gpu_is_one_line(reference: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(GPT, "forward", fill_memory)
    for words in (("sample", str(reference)), ("eval", str(reference), f"--data={__file__}")):
        code, _, err = run_command(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert (
            "the memory of the GPU ran out; stop what else uses it, or set CUDA_VISIBLE_DEVICES= to use the CPU" in err
        )
