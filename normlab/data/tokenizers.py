"""Tokenizers: UTF-8 bytes, the characters of the training text, and subwords (`subwords.py`).

Every tokenizer has a token that no text encodes to, `end_of_document`, which follows each document of a corpus. It
decodes to a line break, so that each document in generated text starts on a new line.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from normlab.config.corpora import DEFAULT_VOCAB_SIZE, TOKENIZERS
from normlab.data.subwords import SubwordTokenizer, token_dtype, train_bpe
from normlab.errors import DataError, unknown


class Tokenizer(Protocol):
    """Converts text to tokens and back, without a download."""

    name: str
    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, in `token_dtype(vocab_size)`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens_T: np.ndarray | Iterable[int]) -> str:
        """Return the text of tokens; every sequence of tokens has one."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state that `from_state` needs, as plain JSON values."""
        ...


class BytesTokenizer(Tokenizer):
    """UTF-8 bytes, tokens 0 to 255, and 256 for the end of a document.

    Invalid UTF-8, as a half-trained model writes it, decodes to U+FFFD.
    """

    name = "bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text."""
        # An argument of a command line holds bytes that are not UTF-8 as surrogates; these become the bytes again.
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype("<u2")

    def decode(self, tokens_T: np.ndarray | Iterable[int]) -> str:
        """Return the text of tokens."""
        ids_T = _checked(tokens_T, self.vocab_size)
        bytes_T = np.where(ids_T == self.end_of_document, ord("\n"), ids_T).astype(np.uint8)
        return bytes_T.tobytes().decode("utf-8", "replace")

    def state(self) -> dict[str, Any]:
        """Return the state that `from_state` needs."""
        return {"name": self.name}


class CharsTokenizer(Tokenizer):
    """Characters in the order of their code points, then the end of a document, then the unknown character.

    A character outside the alphabet encodes to `unknown`, which decodes to U+FFFD.

    Args:
        characters: The alphabet, sorted and without repeats.
    """

    name = "chars"

    def __init__(self, characters: str) -> None:
        if list(characters) != sorted(set(characters)):
            raise ValueError("characters must be sorted and distinct")
        self.characters = characters
        self.end_of_document = len(characters)
        self.unknown = len(characters) + 1
        self.vocab_size = len(characters) + 2
        codes = _code_points(characters)
        # The last entry is for all code points beyond the largest in the alphabet.
        self._token_of_code = np.full(codes.max(initial=0).astype(int) + 2, self.unknown, token_dtype(self.vocab_size))
        self._token_of_code[codes] = np.arange(len(characters))
        self._code_of_token = np.concatenate([codes, [ord("\n"), 0xFFFD]]).astype("<u4")

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text."""
        return self._token_of_code[np.minimum(_code_points(text), len(self._token_of_code) - 1)]

    def decode(self, tokens_T: np.ndarray | Iterable[int]) -> str:
        """Return the text of tokens."""
        return self._code_of_token[_checked(tokens_T, self.vocab_size)].tobytes().decode("utf-32-le")

    def state(self) -> dict[str, Any]:
        """Return the state that `from_state` needs."""
        return {"name": self.name, "characters": self.characters}


def characters_for(name: str, tokens: int) -> int:
    """Return how many characters to read for a number of tokens.

    With bytes and chars, a character has at least one token, so the result is exact or more than enough. Subwords have
    three to five characters in most text; the result allows for eight.
    """
    return tokens if name in ("bytes", "chars") else 8 * tokens


def fit(name: str, training_texts: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """Return the tokenizer `name`, fitted to the training text if it depends on the text.

    Args:
        name: bytes, chars or bpe.
        training_texts: The texts; only those that the tokenizer needs are read.
        vocab_size: Largest vocabulary of bpe.

    Raises:
        DataError: No tokenizer has that name.
    """
    if name == "bytes":
        return BytesTokenizer()
    if name == "chars":
        return CharsTokenizer("".join(sorted(set().union(*training_texts))))
    if name == "bpe":
        return train_bpe(training_texts, vocab_size or DEFAULT_VOCAB_SIZE)
    raise DataError("data.tokenizer: " + unknown("tokenizer", name, TOKENIZERS))


def from_state(state: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer with a given `state()`.

    Raises:
        DataError: No tokenizer has that name.
    """
    name = str(state.get("name"))
    if name == "bytes":
        return BytesTokenizer()
    if name == "chars":
        return CharsTokenizer(state["characters"])
    if "definition" in state:
        return SubwordTokenizer(name, state["definition"])
    raise DataError("data.tokenizer: " + unknown("tokenizer", name, TOKENIZERS))


def _code_points(text: str) -> np.ndarray:
    # surrogatepass: an escaped byte of a command line then counts as an unknown character.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _checked(tokens_T: np.ndarray | Iterable[int], vocab_size: int) -> np.ndarray:
    """Return the tokens as int64, after a check of their range, since numpy wraps negative indices around."""
    ids_T = np.asarray(tokens_T if isinstance(tokens_T, np.ndarray) else list(tokens_T), dtype=np.int64)
    if ids_T.size and not (ids_T.min() >= 0 and ids_T.max() < vocab_size):
        raise ValueError(f"tokens must be in 0..{vocab_size - 1}; got {ids_T.min()}..{ids_T.max()}")
    return ids_T
