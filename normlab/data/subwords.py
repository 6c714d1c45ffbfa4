r"""Tokens that are pieces of words: byte-level BPE made from the training text, and pretrained tokenizers.

Both are Hugging Face `tokenizers`, kept as their JSON, so that what was trained once reads the same text the
same way everywhere, with nothing to download. No special token of theirs ends a document: that is one of ours,
past their last, which no text encodes to.

Shapes: T tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from normlab.corpora import DEFAULT_VOCAB_SIZE, MAX_VOCAB_SIZE
from normlab.errors import DataError

PIECE = 1 << 20
"""Most characters that are encoded at once. A `tokenizers` encoding takes some 100 bytes a token."""

SEAM = re.compile(r"(?<=\S) ")
"""Where a longer text is cut: byte-level tokens begin with a space or end before it, so they are the same."""

SEARCHED = 1 << 12
"""Characters before the end of a piece in which a seam is looked for; else it is cut where it ends."""

TRIAL = "It's a trial, the 1st of 2."
"""What every tokenizer encodes once: some can be read and fail at any text."""

FITTED = 1 << 24
"""Characters of training text that BPE learns from, the first ones: memory grows with their different words."""

WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}{1,32}| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,32}|\s{1,32}(?!\S)|\s{1,32}"
"""What BPE merges within. GPT-2's (Radford et al. 2019), with an end to every run: a line of 300 MB without a
space would be one word otherwise, and learning from it takes the square of its length."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest little-endian unsigned integer, of 16 or 32 bits, that holds every token."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def pieces(text: str) -> Iterator[str]:
    """A text in pieces of at most 2^20 characters, whose tokens in a row are the text's.

    Exactly so for bytes, characters and byte-level BPE that is cut at a space. A pretrained tokenizer that marks
    the beginning of its input (SentencePiece's) has another mark every 2^20 characters of one document.
    """
    start = 0
    while len(text) - start > PIECE:
        end = start + PIECE
        seam = max((match.start() for match in SEAM.finditer(text, end - SEARCHED, end)), default=end)
        yield text[start:seam]
        start = seam
    yield text[start:]


@contextlib.contextmanager
def _panics_raised() -> Iterator[None]:
    """Make an ordinary error of a Rust panic, which comes as a BaseException of a class that cannot be imported."""
    try:
        yield
    except BaseException as error:
        if (type(error).__module__, type(error).__name__) != ("pyo3_runtime", "PanicException"):
            raise
        raise RuntimeError(f"`tokenizers` gave up: {error}") from error


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Keep what is written to the process's stderr to itself: a panic's own report. For moments only."""
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class SubwordTokenizer:
    """A tokenizer of `tokenizers`, from its JSON: `data.tokenizer` names it.

    Args:
        name: What the user called it.
        definition: The content of its tokenizer.json.

    Raises:
        ValueError: It is no such JSON, or one with too many tokens, or one that draws its tokens by chance.
    """

    def __init__(self, name: str, definition: str) -> None:
        from tokenizers import Tokenizer

        self.name, self.definition = name, definition
        try:
            with _no_stderr(), _panics_raised():
                self._tokenizer = Tokenizer.from_str(definition)
                with contextlib.suppress(Exception):  # whether it has tokens for a text is for that text to show
                    self._tokenizer.decode(self._tokenizer.encode(TRIAL, add_special_tokens=False).ids)
        except Exception as error:  # that is the class that it raises
            raise ValueError(f"{name}: no tokenizer.json ({error})") from error
        if dropout := getattr(self._tokenizer.model, "dropout", None):
            raise ValueError(
                f"{name}: skips merges by chance (dropout {dropout:g}), its tokens are not to be had twice"
            )
        # Some say how a classifier's input is cut and filled up; a corpus is neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end_of_document: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size = self.end_of_document + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"{name}: has a token {self.end_of_document - 1}; the most is {MAX_VOCAB_SIZE - 2}")

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, without those that some put around it."""
        return np.concatenate(self.encode_batch(list(pieces(text))))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of each of some texts, on all cores.

        Raises:
            DataError: The tokenizer has none for one of them.
        """
        # Words from a command line hold bytes that are not UTF-8 as escapes; no tokenizer takes those.
        whole = [text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in texts]
        try:
            with _panics_raised():
                encoded = self._tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        except Exception as error:  # that is the class that it raises
            raise DataError(f"data.tokenizer={self.name}: cannot encode the text ({error}); choose another") from error
        return [np.array(one.ids, token_dtype(self.vocab_size)) for one in encoded]

    def decode(self, tokens_T: np.ndarray | Iterable[int]) -> str:
        """Text of tokens; what is no UTF-8 becomes U+FFFD."""
        ids = [int(token) for token in tokens_T]
        if wrong := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ValueError(f"tokens must be in 0..{self.vocab_size - 1}; got {wrong[0]}")
        parts = [list(part) for is_end, part in itertools.groupby(ids, lambda token: token == self.end_of_document)]
        return "".join(
            "\n" * len(part)
            if part[0] == self.end_of_document
            else self._tokenizer.decode(part, skip_special_tokens=False)
            for part in parts
        )

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs."""
        return {"name": self.name, "definition": self.definition}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SubwordTokenizer:
        """The tokenizer that `state()` was taken from."""
        return cls(state["name"], state["definition"])


class BpeTokenizer(SubwordTokenizer):
    """Byte-level BPE of the training text: every text has tokens, and they decode to it exactly."""

    @classmethod
    def fit(cls, texts: Iterable[str], vocab_size: int | None = None) -> BpeTokenizer:
        """The tokenizer of at most `vocab_size` tokens, the end of a document included.

        256 are bytes; merges that occur only once are not made, so a short text has fewer. The same text
        gives the same tokenizer.
        """
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=(vocab_size or DEFAULT_VOCAB_SIZE) - 1,
            min_frequency=2,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_first(texts, FITTED), trainer)
        return cls("bpe", tokenizer.to_str())


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first characters of some texts, in pieces."""
    for text in texts:
        yield from pieces(text[:characters])
        characters -= len(text)
        if characters <= 0:
            return
