"""BPE and pretrained tokenizers, compared with `tokenizers` and `transformers`."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from normlab.base.errors import DataError
from normlab.catalogue.corpora import MAX_VOCAB_SIZE, FilesData
from normlab.data import tokenizer_limits
from normlab.data import tokenizers as module
from normlab.data.corpus import open_corpus
from normlab.data.tokenizer_sources import pretrained_tokenizer, train_bpe
from normlab.data.tokenizers import SubwordTokenizer, pieces

CODE = Path(__file__).read_text() * 3
ANYTHING = "".join(chr(c) for c in random.Random(0).choices([*range(0xD800), *range(0xE000, 0x110000)], k=20000))
PROSE = "It's 12345 o'clock;   they'll\n\n\tsay \u00e9t\u00e9 \u4e2d\u6587\u5b57 \U0001f600!! " * 50


@pytest.mark.parametrize("text", ["", CODE, ANYTHING, PROSE, "x" * 5000, " " * 5000, "\x00\r\n\ufeff"])
def test_bpe_round_trips_every_text(text: str) -> None:
    tokenizer = train_bpe([CODE], 600)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) <= len(text.encode())
    assert not (tokens == tokenizer.end_of_document).any()


def test_bpe_encodes_as_tokenizers_does() -> None:
    tokenizer = train_bpe([CODE], 600)
    reference = Tokenizer.from_str(tokenizer.definition)
    assert tokenizer.vocab_size == 600 == reference.get_vocab_size() + 1
    assert tokenizer.end_of_document == 599
    for text in (CODE, PROSE, ANYTHING):
        assert tokenizer.encode(text).tolist() == reference.encode(text).ids
    assert len(tokenizer.encode(CODE)) < len(CODE.encode()) / 2


def test_bpe_is_deterministic_across_processes() -> None:
    code = (
        "from pathlib import Path; from normlab.data.tokenizer_sources import train_bpe\n"
        f"print(train_bpe([Path({__file__!r}).read_text() * 3], 600).definition)"
    )
    here = train_bpe([CODE], 600).definition
    for threads in "12":
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"RAYON_NUM_THREADS": threads, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        assert done.stdout == here + "\n"


def test_short_text_gives_a_small_vocabulary() -> None:
    assert train_bpe(["abcabc"], 4096).vocab_size < 270
    assert train_bpe([], 4096).vocab_size == 257
    assert train_bpe([CODE], 257).encode("\u00e9").tolist() != []


def test_encoding_in_pieces_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_bpe([CODE], 600)
    expected = tokenizer.encode(CODE)
    monkeypatch.setattr(module, "PIECE", 500)
    monkeypatch.setattr(module, "SEAM_WINDOW", 200)
    parts = list(pieces(CODE))
    assert len(parts) > 20
    assert "".join(parts) == CODE
    assert all(len(part) <= 500 for part in parts)
    np.testing.assert_array_equal(tokenizer.encode(CODE), expected)
    for text in (ANYTHING, "x" * 5001):  # without spaces
        assert "".join(pieces(text)) == text
        assert tokenizer.decode(tokenizer.encode(text)) == text


# Pretrained

END = "<|endoftext|>"


def gpt2_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(
        [CODE],
        trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=special, show_progress=False),
    )
    return tokenizer


def bert_like() -> Tokenizer:
    """Make a tokenizer that lowers the text, adds special tokens, truncates and pads."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        [CODE], trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    return tokenizer


@pytest.mark.parametrize("make", [gpt2_like, bert_like])
@pytest.mark.parametrize("path_kind", ["file", "folder"])
def test_pretrained_tokenizer_encodes_as_transformers_does(
    make: Callable[[], Tokenizer], path_kind: str, tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "tokenizer.json"
    make().save(str(path))
    tokenizer = pretrained_tokenizer(str(path if path_kind == "file" else tmp_path))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(path), split_special_tokens=True)
    own = make().token_to_id(END)
    for text in (CODE, PROSE, "before<|endoftext|>after"):
        expected = reference(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
        assert tokenizer.encode(text).tolist() == expected
        decoded = reference.decode(expected, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(tokenizer.encode(text)) == decoded
    assert tokenizer.end_of_document == (make().get_vocab_size() if own is None else own)
    assert tokenizer.vocab_size == make().get_vocab_size() + (own is None)
    assert tokenizer.decode([tokenizer.end_of_document, *tokenizer.encode("a"), tokenizer.end_of_document]) == "\na\n"


@pytest.mark.parametrize("text", [END, f"a{END}b", f"{END}\n{END}", f"x{END}y " * 500])
def test_the_text_of_a_special_token_is_text(text: str, tmp_path: Path) -> None:
    """Once it was the end of a document: a page that explains it had fewer tokens and a lower loss."""
    made = gpt2_like()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = pretrained_tokenizer(str(tmp_path))
    assert tokenizer.end_of_document == made.token_to_id(END)
    assert tokenizer.end_of_document not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def unigram() -> Tokenizer:
    """Make a tokenizer whose model has its special tokens as words, as SentencePiece has."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("a", -2.0), ("<", -3.0), ("/", -3.0), ("s", -3.0), (">", -3.0)]
    return Tokenizer(models.Unigram(pieces, unk_id=0))


def whole_words() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "s": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


@pytest.mark.parametrize("make", [unigram, whole_words])
def test_a_tokenizer_that_finds_special_tokens_in_a_text_is_an_error(
    make: Callable[[], Tokenizer], files: Callable[..., FilesData], tmp_path: Path
) -> None:
    made = make()
    made.add_special_tokens(["<unk>", "</s>"])
    made.save(path := str(tmp_path / "tokenizer.json"))
    corpus = open_corpus(files({"a.txt": "a s a ? " * 100}, tokenizer=path))
    assert 0 in corpus.train  # an unknown character is none of the text's special tokens
    with pytest.raises(DataError, match=r"data.tokenizer=.*: reads '</s>' in the text as a special token; remove it"):
        open_corpus(files({"a.txt": "a </s> a " * 100}, tokenizer=path))


def test_state_of_a_pretrained_tokenizer_is_complete(tmp_path: Path) -> None:
    from normlab.data import tokenizers

    gpt2_like().save(str(tmp_path / "tokenizer.json"))
    first = pretrained_tokenizer(str(tmp_path))
    state = json.loads(json.dumps(first.state()))
    (tmp_path / "tokenizer.json").unlink()
    again = tokenizers.from_state(state)
    assert isinstance(again, SubwordTokenizer)
    for name in ("name", "vocab_size", "end_of_document"):
        assert getattr(again, name) == getattr(first, name)
    with pytest.raises(ValueError, match=r"has no token '</s>'"):
        tokenizers.from_state({**state, "end_token": "</s>"})
    del state["end_token"]  # of a run before it could be one of the tokenizer's own
    assert tokenizers.from_state(state).vocab_size == first.vocab_size + 1
    np.testing.assert_array_equal(again.encode(CODE), first.encode(CODE))


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": 3}'])
def test_error_for_an_invalid_tokenizer_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"data.tokenizer=.*cannot be read .*choose another"):
        pretrained_tokenizer(str(tmp_path))


def with_part(**parts: Any) -> str:
    """Return a tokenizer.json of the bytes, with other parts."""
    return json.dumps(json.loads(train_bpe(["a b"], 257).definition) | parts)


def replace_by(content: str, pattern: str = "a", kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def sequence(name: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


LIMITED: dict[str, tuple[str, str]] = {
    "a long replacement": (with_part(normalizer=replace_by("a" * 10**6)), "the content of its Replace has 100"),
    "a nested replacement": (
        with_part(normalizer=sequence("normalizers", sequence("normalizers", replace_by("a" * 10**6)))),
        "the content of its Replace has 1000000 characters",
    ),
    "a prefix": (with_part(normalizer={"type": "Prepend", "prepend": "a" * 10**6}), "the prepend of its Prepend has"),
    "a decoder": (with_part(decoder=replace_by("a" * 10**6)), "the content of its Replace has 1000000 characters"),
    "a damaged table": (
        with_part(normalizer={"type": "Precompiled", "precompiled_charsmap": "/////w=="}), "charsmap is damaged"
    ),
    "many steps": (with_part(normalizer=sequence("normalizers", *[{"type": "NFC"}] * 999)), "more than 256 steps"),
    "a long pattern": (
        with_part(pre_tokenizer={"type": "Split", "pattern": {"Regex": "a" * 10**6}, "behavior": "Isolated",
                                 "invert": False}),
        "has a pattern of 1000000 characters",
    ),
    "a long token": (
        with_part(added_tokens=[{"id": 999, "content": "a" * 10**6, "single_word": False, "lstrip": False,
                                 "rstrip": False, "normalized": False, "special": True}]),
        "has a token of 1000000 characters",
    ),
    "nested lists": ('{"normalizer": ' + "[" * 10**5, "nested too deeply"),
    "another form": ('{"model": [], "normalizer": 3}', "not a tokenizer.json"),
}  # fmt: skip
"""Tokenizers that take all memory or time, and what the error has."""


@pytest.mark.parametrize("name", LIMITED)
def test_a_tokenizer_that_takes_all_memory_is_refused(name: str, tmp_path: Path) -> None:
    definition, message = LIMITED[name]
    (tmp_path / "tokenizer.json").write_text(definition)
    with pytest.raises(DataError, match=message) as caught:
        pretrained_tokenizer(str(tmp_path))
    assert str(caught.value).startswith(f"data.tokenizer={tmp_path}: cannot be read (")
    assert str(caught.value).count("\n") == 0


def test_a_tokenizer_that_fails_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of its library is no Exception, and a regular expression may take exponential time."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    tokenizer = SubwordTokenizer("mine", with_part(pre_tokenizer=split))
    with pytest.raises(DataError, match=r"data.tokenizer=mine: cannot encode the text \(Onig.*; choose another"):
        tokenizer.encode("a" * 40)
    monkeypatch.setattr(tokenizer_limits, "SECONDS", 0.1)
    with pytest.raises(ValueError, match="takes more than 0 s for 7 characters"):
        tokenizer_limits.call_within(7, lambda: time.sleep(5))


def test_a_tokenizer_that_takes_too_much_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """NFKC makes 18 characters of one, which a replacement writes: no step alone makes a text much longer."""
    rounds = [replace_by("\ufdfa", "[^x]", "Regex"), {"type": "NFKC"}] * 3
    growing = with_part(normalizer=sequence("normalizers", *rounds))
    tokenizer = SubwordTokenizer("mine", growing)
    assert len(tokenizer.encode("a" * 10)) > 10_000
    monkeypatch.setattr(tokenizer_limits, "MEMORY", 2**24)
    with pytest.raises(
        DataError, match=r"=mine: cannot encode the text \(takes more than 18 MiB of memory for 2000 char"
    ):
        tokenizer.encode("a" * 2000)


def test_memory_of_a_decoder_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of this decoder doubles the text of a token."""
    steps = [{"type": "BPEDecoder", "suffix": ""}] * 14
    tokenizer = SubwordTokenizer("mine", with_part(decoder=sequence("decoders", *steps)))
    tokens = tokenizer.encode("a" * 2000)
    monkeypatch.setattr(tokenizer_limits, "MEMORY", 2**24)
    with pytest.raises(
        DataError, match=r"data.tokenizer=mine: cannot decode tokens \(takes more than 18 MiB of memory"
    ):
        tokenizer.decode(tokens)


def test_large_tokenizer_file_is_rejected(files: Callable[..., FilesData], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(DataError, match=rf"={path}: cannot be read \(has {2**40} bytes \(at most {2**27}\)\)"):
        open_corpus(files({"a.txt": CODE}, tokenizer=str(path)))


def test_tokenizer_with_dropout_is_rejected(tmp_path: Path) -> None:
    definition = json.loads(gpt2_like().to_str())
    for dropout in (0.5, 0.0):
        definition["model"]["dropout"] = dropout
        (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
        if dropout:
            with pytest.raises(DataError, match=r"has dropout 0\.5, so its tokens are random"):
                pretrained_tokenizer(str(tmp_path))
        else:
            assert len(pretrained_tokenizer(str(tmp_path)).encode(CODE)) > 0


def word_level(**vocab: int) -> str:
    tokenizer = Tokenizer(models.WordLevel(dict.fromkeys(vocab, 0), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    definition = json.loads(tokenizer.to_str())
    definition["model"]["vocab"] = vocab
    return json.dumps(definition)


def test_error_names_a_tokenizer_that_cannot_encode_the_text(files: Callable[..., FilesData], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(word_level(a=0, b=1))
    with pytest.raises(DataError, match=r"data.tokenizer=.*cannot encode the text \(.*\[UNK\].*\); choose another"):
        open_corpus(files({"a.txt": "a b c " * 100}, tokenizer=str(path)))


def test_vocabulary_has_a_maximum(files: Callable[..., FilesData], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    config = files({"a.txt": "a b " * 100}, tokenizer=str(path))
    path.write_text(word_level(a=0, b=MAX_VOCAB_SIZE - 2))
    assert open_corpus(config).tokenizer.vocab_size == MAX_VOCAB_SIZE
    path.write_text(word_level(a=0, b=MAX_VOCAB_SIZE - 1))
    with pytest.raises(
        DataError, match=rf"={path}: cannot be read \(has a token 1048575 \(at most 1048574\)\); choose"
    ):
        open_corpus(config)
