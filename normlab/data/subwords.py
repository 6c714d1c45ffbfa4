r"""Subword tokenizers: byte-level BPE trained on the training text, and pretrained tokenizers.

Both use Hugging Face `tokenizers` and are stored as its JSON, so that a run's tokenizer gives the same tokens on every
machine, without a download. Documents end with a token of normlab's own, one past the last of the tokenizer, which no
text encodes to.

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

from normlab.config.corpora import DEFAULT_VOCAB_SIZE, MAX_VOCAB_SIZE
from normlab.data.documents import first_characters
from normlab.errors import DataError

PIECE = 1 << 20
"""Most characters that are encoded at once. `tokenizers` needs about 100 bytes of memory per token."""

SEAM = re.compile(r"(?<=\S) ")
"""Where a longer text is cut: no byte-level token continues across a space, so the tokens stay the same."""

SEAM_WINDOW = 1 << 12
"""Characters at the end of a piece in which a seam is searched; without a seam, the text is cut anyway."""

SAMPLE = "It's a trial, the 1st of 2."
"""Text that every tokenizer encodes when it is loaded, because some load and then fail on every text."""

BPE_CHARACTERS = 1 << 24
"""Characters of training text that BPE is trained on; memory grows with the number of distinct words."""

WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}{1,32}| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,32}|\s{1,32}(?!\S)|\s{1,32}"
"""Words for BPE: the pattern of GPT-2 (Radford et al. 2019) with a limit on the length of every run.

Without the limits, a line of 300 MB without a space is one word, and training is quadratic in the length of a word.
"""


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest little-endian unsigned dtype, of 16 or 32 bits, that holds every token."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of at most `PIECE` characters, whose tokens together are those of the text.

    This is exact for bytes, characters and byte-level BPE that is cut at a space. A pretrained tokenizer that marks the
    start of its input (SentencePiece) adds a mark at each piece.
    """
    start = 0
    while len(text) - start > PIECE:
        end = start + PIECE
        seam = max((match.start() for match in SEAM.finditer(text, end - SEAM_WINDOW, end)), default=end)
        yield text[start:seam]
        start = seam
    yield text[start:]


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Convert a Rust panic, a BaseException of a class that cannot be imported, to a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if (type(error).__module__, type(error).__name__) != ("pyo3_runtime", "PanicException"):
            raise
        raise RuntimeError(f"`tokenizers` panicked: {error}") from error


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard the stderr of the process for a moment, because a Rust panic prints a report there."""
    try:
        original = os.dup(2)
    except OSError:  # the process has no stderr
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)
        os.close(null)


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library, built from its JSON.

    Args:
        name: The value of `data.tokenizer`.
        definition: The content of its tokenizer.json.

    Raises:
        ValueError: The JSON is not a tokenizer, has too many tokens, or has dropout, which makes tokens random.
    """

    def __init__(self, name: str, definition: str) -> None:
        from tokenizers import Tokenizer

        self.name, self.definition = name, definition
        try:
            with _silent_stderr(), _panics_as_errors():
                self._tokenizer = Tokenizer.from_str(definition)
                with contextlib.suppress(Exception):  # a small vocabulary may lack tokens for this one text
                    self._tokenizer.decode(self._tokenizer.encode(SAMPLE, add_special_tokens=False).ids)
        except Exception as error:  # `tokenizers` raises no narrower class
            raise ValueError(f"{name}: not a tokenizer.json ({error})") from error
        if dropout := getattr(self._tokenizer.model, "dropout", None):
            raise ValueError(f"{name}: has dropout {dropout:g}, so its tokens are random")
        # Truncation and padding are meant for the inputs of a classifier.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.end_of_document: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size = self.end_of_document + 1
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"{name}: has a token {self.end_of_document - 1}; the largest is {MAX_VOCAB_SIZE - 2}")

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, without the special tokens that some tokenizers add around it."""
        return np.concatenate(self.encode_batch(list(pieces(text))))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, encoded on all cores.

        Raises:
            DataError: The tokenizer cannot encode a text.
        """
        # An argument of a command line holds bytes that are not UTF-8 as surrogates, which no tokenizer accepts.
        valid = [text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in texts]
        try:
            with _panics_as_errors():
                encodings = self._tokenizer.encode_batch_fast(valid, add_special_tokens=False)
        except Exception as error:  # `tokenizers` raises no narrower class
            raise DataError(f"data.tokenizer={self.name}: cannot encode the text ({error}); choose another") from error
        return [np.array(encoding.ids, token_dtype(self.vocab_size)) for encoding in encodings]

    def decode(self, tokens_T: np.ndarray | Iterable[int]) -> str:
        """Return the text of tokens, with U+FFFD for invalid UTF-8."""
        ids = [int(token) for token in tokens_T]
        if invalid := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise ValueError(f"tokens must be in 0..{self.vocab_size - 1}; got {invalid[0]}")
        parts = [list(part) for _, part in itertools.groupby(ids, lambda token: token == self.end_of_document)]
        return "".join(
            "\n" * len(part)
            if part[0] == self.end_of_document
            else self._tokenizer.decode(part, skip_special_tokens=False)
            for part in parts
        )

    def state(self) -> dict[str, Any]:
        """Return the state that `from_state` needs."""
        return {"name": self.name, "definition": self.definition}


def train_bpe(texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> SubwordTokenizer:
    """Train byte-level BPE with at most `vocab_size` tokens. It encodes every text, and decoding is exact.

    256 tokens are bytes and one ends a document. A pair that occurs once is not merged, so a short text gives fewer
    tokens. Training is deterministic.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample = (piece for text in first_characters(texts, BPE_CHARACTERS) for piece in pieces(text))
    tokenizer.train_from_iterator(sample, trainer)
    return SubwordTokenizer("bpe", tokenizer.to_str())
