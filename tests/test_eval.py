"""`normlab eval`: the loss of a run's model on other text, against one token after the other."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, normalizers

import normlab
from normlab.base.errors import ConfigError
from normlab.config.compose import compose_run
from normlab.data import tokenizers
from normlab.data.tokenizer_sources import train_bpe
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.training.start import train
from support.run_folders import Command

TEXTS = ("def first(x):\n    return x + 1\n" * 3, "café", "x")
"""One of several windows of 32 bytes, and short ones; é has two bytes."""


def expected_nats(model: torch.nn.Module, tokens: list[int], separator: int, context: int) -> float:
    """Return the sum of -log p of each token, from the tokens before it in its window."""
    stream, total = [separator, *tokens], 0.0
    for index, token in enumerate(tokens):
        start = index // context * context
        with torch.no_grad():
            logits = model(torch.tensor([stream[start : index + 1]]))[0, -1].numpy().astype(np.float64)
        total += np.logaddexp.reduce(logits) - logits[token]
    return total


def test_loss_of_texts(reference: Path) -> None:
    run = normlab.load(reference)
    tokens = [run.tokenizer.encode(text).tolist() for text in TEXTS]
    nats = sum(
        expected_nats(run.model, each, run.tokenizer.end_of_document, run.config.model.context) for each in tokens
    )
    found = run.evaluate(*TEXTS)
    assert (found.tokens, found.bytes) == (sum(map(len, tokens)), sum(len(text.encode()) for text in TEXTS))
    assert found.loss == pytest.approx(nats / found.tokens, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.bytes, rel=1e-5)
    with pytest.raises(ConfigError, match="the text is empty"):
        run.evaluate("", "")


def test_unknown_characters_are_counted(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(compose_run([*overrides, "data.tokenizer=chars", "train.steps=1"]), trackers=[]).folder
    normlab.load(folder.path).evaluate("a\u4e00b\u4e8c")
    assert (
        "tokenizer changes at least 2 of 4 characters of the text: its bits/byte cannot be" in capsys.readouterr().err
    )


def test_share_of_the_text_that_a_tokenizer_changes(
    overrides: list[str], tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer of lower case: its loss is that of another text, of which bits/byte would count the bytes."""
    definition = Tokenizer.from_str(train_bpe(["the cat sat on a mat"], 300).definition)
    definition.normalizer = normalizers.Lowercase()
    definition.save(path := str(tmp_path / "tokenizer.json"))
    folder = train(compose_run([*overrides, f"data.tokenizer={path}", "train.steps=1"]), trackers=[]).folder
    (tmp_path / "upper.txt").write_text("The CAT.")
    (tmp_path / "lower.txt").write_text("the cat.")
    data = [f"--data={tmp_path / name}" for name in ("upper.txt", "lower.txt")]
    code, out, err = run_command("eval", str(folder.path), *data, "--json")
    upper, lower = json.loads(out)
    assert (code, upper["changed"], lower["changed"]) == (0, 4 / 8, 0)
    assert upper["loss"] == lower["loss"]  # the same tokens
    assert err.count("changes at least 4 of 8 characters of the text") == 1
    monkeypatch.setenv("COLUMNS", "400")  # the paths of the files are long
    code, out, err = run_command("eval", str(folder.path), *data)
    assert ("50.00%" in out, "0.00%" in out) == (True, True)
    assert "compares models with different tokenizers only where changed is 0" in out


@pytest.mark.parametrize("sampled", [1 << 16, 9])
@pytest.mark.parametrize(("is_lowered", "share"), [(True, 4 / 9), (False, 0)])
def test_a_corpus_has_the_share_that_its_tokenizer_changes(
    sampled: int,
    is_lowered: bool,
    share: float,
    overrides: list[str],
    tmp_path: Path,
    run_command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The complete text, and a part of it, have four upper-case letters of nine."""
    monkeypatch.setattr(tokenizers, "SAMPLED", sampled)
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "cache"))
    definition = Tokenizer.from_str(train_bpe(["the cat sat on a mat"], 300).definition)
    if is_lowered:
        definition.normalizer = normalizers.Lowercase()
    definition.save(path := str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("The CAT.\n" * 400)
    command = ["train", *overrides, "data=files", f"data.path={tmp_path / 'text.txt'}", f"data.tokenizer={path}"]
    code, _, err = run_command(*command, "data.val_fraction=0.1", "train.steps=1")
    assert code == 0, err
    warning = f"warning: data.tokenizer={path}: changes 44.44% of the characters"
    assert err.count(warning) == int(is_lowered)
    (run,) = (tmp_path / "results" / "runs").iterdir()
    recorded = RunRecord.load(RunFolder(run)).corpus.changed_share
    assert recorded == share
    assert normlab.load(run).evaluate("The CAT.\n" * 400).changed_share == share


def test_command(reference: Path, tmp_path: Path, run_command: Command) -> None:
    """Each file of a folder is a document."""
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    data = [f"--data={tmp_path / 'texts'}", f"--data={tmp_path / 'texts' / '1.txt'}"]
    code, out, err = run_command("eval", str(reference), *data, "--json")
    assert (code, err) == (0, "")
    run = normlab.load(reference)
    for row, texts in zip(json.loads(out), (TEXTS, TEXTS[1:2]), strict=True):
        loss = run.evaluate(*texts)
        assert row == {
            "data": row["data"], "loss": loss.loss, "bits_per_byte": loss.bits_per_byte, "tokens": loss.tokens,
            "bytes": loss.bytes, "changed": 0,
        }  # fmt: skip
    code, out, err = run_command("eval", str(reference), *data)
    assert (code, err) == (0, "")
    assert f"{run.evaluate(*TEXTS).loss:.4f}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--data: names no text; add --data FILE"),
        (["--data", "missing.txt"], "missing.txt: no such file or folder"),
        (
            ["--data", "table.parquet"],
            "table.parquet: .parquet is a format of tables, not of text; write its text into a .txt",
        ),
        (["--data", "empty.txt"], "--data empty.txt: has no text; leave it out"),
    ],
)
def test_errors(
    reference: Path,
    tmp_path: Path,
    run_command: Command,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("table.parquet", "empty.txt"):
        (tmp_path / name).write_text("")
    code, out, err = run_command("eval", str(reference), *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
