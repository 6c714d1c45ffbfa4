"""A run that starts from the weights in a folder of transformers (`train.start_from=FOLDER`)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normlab import load
from normlab.base.errors import ConfigError
from normlab.hf.export import export
from normlab.store.runs import RunFolder
from support.run_folders import OVERRIDES, Command, Train, contents, differences, steps_of
from support.transformers_folders import change, change_tensor

MODEL = ["model=llama_nano", "norm=rmsnorm", "train.steps=8"]


@pytest.fixture
def folder(train: Train, tmp_path: Path) -> Path:
    """The folder of a model of 8 updates."""
    run = train(*MODEL, results="first")
    export(load(run.path), tmp_path / "model")
    return tmp_path / "model"


def initial_loss(run: RunFolder) -> float:
    return next(row["loss"] for row in run.rows("eval").rows if row["step"] == 0)


def test_the_run_starts_at_step_0_with_the_weights(folder: Path, train: Train, tmp_path: Path) -> None:
    (first,) = (RunFolder(path) for path in (tmp_path / "first" / "runs").iterdir())
    run = train(*MODEL, "train.start_from=model", "optim.lr=1e-4")
    assert initial_loss(run) == pytest.approx(first.rows("eval").rows[-1]["loss"], abs=1e-6)
    assert [row["step"] for row in run.rows("train").rows] == [*range(8)]
    record = run.run()
    path, _, digest = record["config"]["train"]["start_from"].rpartition("@")
    assert (path, record["identity"]["config"]["train"]["start_from"]) == (str(folder), digest)
    assert len(digest) == 64
    # Without updates, the run measures and keeps the weights.
    still = train(*MODEL, "train.start_from=model", "train.steps=0")
    expected, model = load(first.path).model.state_dict(), load(still.path).model.state_dict()
    assert all(torch.equal(model[name], expected[name]) for name in expected)
    assert list(load(still.path).stats("resid_rms").index) == [0]


def test_a_resume_needs_no_folder(folder: Path, train: Train, interrupt: Callable[..., None], tmp_path: Path) -> None:
    """Bit for bit, also before the first checkpoint after an update; the path is not in the id."""
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    whole = train(*MODEL, f"train.start_from={moved}", results="whole")
    interrupt(2)
    run = train(*MODEL, "train.start_from=model")
    assert run.state() == "interrupted"
    assert whole.run_id == run.run_id
    shutil.rmtree(run.path / "checkpoints" / "step_00000003")
    assert steps_of(run) == [0]
    shutil.rmtree(folder)
    again = train(*MODEL, "train.start_from=model")
    assert (again.path, again.state()) == (run.path, "finished")
    assert differences(whole.path, again.path) == []


def test_an_impossible_start_is_one_line_and_writes_nothing(folder: Path, command: Command, tmp_path: Path) -> None:
    for overrides, message in (
        ([], "train.start_from={folder}: holds another model than norm.name=batchnorm, model.positions=learned"),
        (
            [*MODEL, "data.tokenizer=chars"],
            "data.tokenizer=chars: is not the tokenizer of train.start_from={folder}; set",
        ),
        ([], "set model=llama_nano norm=rmsnorm_llama placement=pre"),
        ([*MODEL, "norm.gain=false", "data.tokenizer=chars"], "data.tokenizer={folder}/tokenizer.json"),
        ([*MODEL, "train.start_from=modell"], "train.start_from=modell: no run 'modell'"),
        ([*MODEL, "train.start_from=model@5"], "=model@5: a folder of weights has no steps; leave out @5"),
        ([*MODEL, "train.start_from=first"], "train.start_from=first: the folder has no config.json; name one that"),
        ([*MODEL, "train.start_from=hf://a/b"], "train.start_from=hf://a/b: "),
    ):
        code, out, err = command("train.start_from=model", *overrides)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message.format(folder=folder) in err
        assert not (tmp_path / "results").exists()


@pytest.mark.process
def test_the_runs_of_a_pack_start_from_the_weights(
    folder: Path, train: Train, run_command: Command, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    sweep = ["sweep", *OVERRIDES, *MODEL, f"results_dir={results}", "sweep.pack=2", "seed=0,1"]
    assert run_command(*sweep, "train.start_from=model")[0] == 0
    runs = [RunFolder(path) for path in (results / "runs").iterdir()]
    assert [len(run.run()["pack"]["runs"]) for run in runs] == [2, 2]
    alone = train(*MODEL, "train.start_from=model", results="alone")
    assert [initial_loss(run) for run in runs] == pytest.approx([initial_loss(alone)] * 2, abs=1e-5)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    assert contents(folder)


@pytest.mark.parametrize(("model", "norm"), [("llama_nano", "rmsnorm"), ("gpt2_nano", "layernorm")])
def test_norms_of_a_folder_are_tapered_away(model: str, norm: str, train: Train, tmp_path: Path) -> None:
    """The run starts as the folder's model, and its blocks end without statistics of tokens."""
    config = [f"model={model}", f"norm={norm}", "train.steps=30"]
    first = train(*config, results="first")
    export(load(first.path), tmp_path / "model")
    taper = ["norm.taper_warmup=5", "norm.taper_steps=20"]
    run = train(*config, *taper, "train.start_from=model")
    assert initial_loss(run) == pytest.approx(first.rows("eval").rows[-1]["loss"], abs=1e-6)
    last = run.rows("eval").rows[-1]["loss"]
    assert last < initial_loss(run) + 0.1
    tapered = load(run.path).model
    block: Any = tapered.blocks[0]
    close: Any = tapered.head.close
    block_norm = block.wiring.attn.norms["in"]
    x = torch.randn(3, 1, close.affine.gain.numel())
    bias = block_norm(0 * x)
    torch.testing.assert_close(block_norm(2 * x) - bias, 2 * (block_norm(x) - bias))
    with pytest.raises(ConfigError, match=r"norm.taper_steps=20"):
        export(load(run.path), tmp_path / "tapered")


def test_a_model_comes_out_as_it_came_in(train: Train, tmp_path: Path) -> None:
    """With its own tokenizer, whose token after a text is that after a document: no token is added."""
    first = train(*MODEL, "data.tokenizer=bpe", "data.vocab_size=300", results="first")
    export(load(first.path), tmp_path / "model")
    start = ["train.start_from=model", f"data.tokenizer={tmp_path / 'model' / 'tokenizer.json'}", "train.steps=0"]
    run = train(*MODEL, *start)
    assert initial_loss(run) == pytest.approx(first.rows("eval").rows[-1]["loss"], abs=1e-6)
    export(load(run.path), tmp_path / "again")
    before, after = (contents(tmp_path / name) for name in ("model", "again"))
    assert [name for name in before if before[name] != after[name]] == ["README.md"]


def test_a_padded_vocabulary_is_a_warning_of_the_plan_and_of_the_run(
    folder: Path, command: Command, run_command: Command, tmp_path: Path
) -> None:
    """Once for the runs of a plan, and once for a run that starts; a run that is finished needs no folder."""
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        change_tensor(name, lambda rows: torch.cat([rows, rows[:7]]))(folder)
    change(vocab_size=257 + 7)(folder)
    warning = "has vocab_size=264, and its tokenizer 257 of these tokens; normlab drops the 7 rows without a token"
    start = [*MODEL, "train.start_from=model", "train.steps=1"]
    code, _, err = run_command("sweep", *OVERRIDES, *start, f"results_dir={tmp_path}", "seed=0,1", "--dry-run")
    assert (code, err.count(warning)) == (0, 1)
    counts = [command(*start)[2].count(warning) for _ in range(2)]
    assert counts == [1, 0]
    (run,) = (RunFolder(path) for path in (tmp_path / "results" / "runs").iterdir())
    assert any(warning in each for each in run.run()["warnings"])
