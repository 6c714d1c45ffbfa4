"""`train.keep`: the weights of some steps, beside the checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from normlab.base.errors import ConfigError, StoreError
from normlab.config.compose import compose_run
from normlab.loaded.run import load
from normlab.store.runs import RunFolder
from normlab.training.start import train_pack
from support.run_folders import OVERRIDES, Command, Train, differences

EVERY = ("train.steps=6", "train.checkpoint_every=0")


def trained(results: Path, *overrides: str, seeds: int = 1) -> list[RunFolder]:
    options = [*OVERRIDES, f"results_dir={results}", *EVERY, *overrides]
    configs = [compose_run([*options, f"seed={seed}"]) for seed in range(seeds)]
    return [outcome.folder for outcome in train_pack(configs, trackers=[[] for _ in configs])]


def weights(folder: RunFolder, step: int) -> dict[str, torch.Tensor]:
    model = load(folder.path, at=step).model
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def kept_steps(folder: RunFolder) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder.path / "weights").iterdir())


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", ["rmsnorm", "batchnorm"])
@pytest.mark.parametrize("seeds", [1, 2])
def test_they_are_those_of_a_run_that_ends_there(seeds: int, norm: str, tmp_path: Path) -> None:
    """Bit for bit; and keeping them changes nothing in the record."""
    kept = trained(tmp_path / "kept", f"norm={norm}", "train.keep=log", seeds=seeds)
    others = trained(tmp_path / "others", f"norm={norm}", seeds=seeds)
    for folder, other in zip(kept, others, strict=True):
        assert kept_steps(folder) == [0, 1, 2, 4]
        shutil.rmtree(folder.path / "weights")
        assert differences(folder.path, other.path) == []
    rate = ["optim.schedule=constant", "optim.warmup_steps=2"]
    long = trained(tmp_path / "long", f"norm={norm}", "train.keep=[4]", *rate, seeds=seeds)
    short = trained(tmp_path / "short", f"norm={norm}", "train.steps=4", *rate, seeds=seeds)
    for folder, end in zip(long, short, strict=True):
        found, expected = weights(folder, 4), weights(end, 4)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_resumed_run_has_all_of_them(train: Train, interrupt: Callable[..., None]) -> None:
    options = (*EVERY, "train.keep=[3,6]", "train.log_every=1")
    interrupt(5)
    folder = train(*options)
    assert (folder.state(), kept_steps(folder)) == ("interrupted", [3])
    train(*options)
    assert kept_steps(folder) == [3, 6]
    assert all(torch.equal(weights(folder, 6)[name], each) for name, each in load(folder.path).model.named_parameters())


def test_commands_read_them(tmp_path: Path, run_command: Command) -> None:
    (folder,) = trained(tmp_path, "train.keep=[2]", "stats.every=1", "optim.lr=0.1", "optim.warmup_steps=0")
    run = str(folder.path)
    outputs = {at: run_command("sample", run, "--tokens", "12", "--at", at) for at in ("2", "6")}
    assert {code for code, _, _ in outputs.values()} == {0}
    assert outputs["2"][1] != outputs["6"][1]
    code, out, err = run_command("sample", run, "--at", "4")
    assert (code, out) == (2, "")
    assert "has no weights of step 4, only of these: 2, 6; train.keep keeps more" in err
    code, out, _ = run_command("inspect", run, "resid_rms", "--at", "3")
    assert code == 0
    assert "step 3" in out
    assert "step 2" not in out
    code, _, err = run_command("inspect", run, "resid_rms", "--at", "30")
    assert (code, err.count("\n")) == (2, 1)
    assert "--at 30: not measured at this step (stats.every says at which); choose 4 or 5" in err


def test_eval_and_export_read_them(tmp_path: Path, run_command: Command) -> None:
    (folder,) = trained(tmp_path, "train.keep=[2]", "norm=layernorm", "optim.lr=0.1")
    run, text = str(folder.path), tmp_path / "text.txt"
    text.write_text("one two three, and the rest of it\n" * 4)
    for step in (2, 6):
        code, out, _ = run_command("eval", run, "--data", str(text), "--at", str(step), "--json")
        loss = load(folder.path, at=step).evaluate(text.read_text()).loss
        assert (code, json.loads(out)[0]["loss"]) == (0, loss)
        assert run_command("export", run, "--at", str(step), "-o", str(tmp_path / str(step)))[0] == 0
        exported = load_file(tmp_path / str(step) / "model.safetensors")
        embeddings = weights(folder, step)["embed.tokens.weight"]
        assert any(torch.equal(tensor, embeddings) for tensor in exported.values())


def test_steps_that_are_never_kept_are_named(tmp_path: Path, run_command: Command) -> None:
    with pytest.raises(ConfigError, match=r"train.keep=\[2,9\]: has a step after the last one, train.steps=6"):
        compose_run([*OVERRIDES, "train.steps=6", "train.keep=[2,9]"])
    trained(tmp_path, "train.keep=[2]")
    _, _, err = run_command("train", *OVERRIDES, f"results_dir={tmp_path}", *EVERY, "train.keep=[2,4]")
    assert "warning: train.keep=[2, 4]: no effect, because the run keeps these options of its first start" in err


@pytest.mark.parametrize("value", ["often", "[a]", "[1.5]", "[[1]]", "true"])
def test_other_values_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.keep"):
        compose_run([*OVERRIDES, f"train.keep={value}"])


def test_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    (folder,) = trained(tmp_path, "train.keep=[2]")
    (folder.path / "weights" / "step_00000002" / "state.safetensors").write_bytes(b"")
    with pytest.raises(StoreError, match="damaged"):
        _ = load(folder.path, at=2).model


def test_a_run_from_a_zip_file_without_weights_names_the_flag(tmp_path: Path, run_command: Command) -> None:
    """The command in the message, followed where the run was trained, gives a file with weights."""
    (folder,) = trained(tmp_path)
    results = folder.path.parent.parent
    assert run_command("share", folder.path.name, "-o", "first.zip", "--results-dir", str(results))[0] == 0
    assert run_command("open", "first.zip")[0] == 0
    opened = f"first/runs/{folder.path.name}"
    written = f"normlab share {folder.path.name} --checkpoints -o FILE.zip"
    for command in (["sample"], ["sample", "--at", "6"], ["eval", "--data", __file__]):
        code, out, err = run_command(command[0], opened, *command[1:])
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"`{written}`" in err
    assert run_command(*written.split()[1:], "--results-dir", str(results))[0] == 0
    assert run_command("open", "FILE.zip", "-o", "second")[0] == 0
    assert run_command("sample", f"second/runs/{folder.path.name}", "--tokens", "1")[0] == 0
