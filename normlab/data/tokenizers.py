"""Text to tokens and back: UTF-8 bytes, the characters of the training text, and pieces of words.

Every tokenizer has a token that no text encodes to, `end_of_document`; corpora put it after each document. It
decodes to a line break, so that documents in generated text start on a line of their own.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from normlab.data.subwords import BpeTokenizer, SubwordTokenizer, token_dtype
from normlab.errors import DataError, unknown


class Tokenizer(Protocol):
    """Text to tokens and back, with nothing to download."""

    name: str
    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text, in `token_dtype(vocab_size)`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of each of some texts."""
        ...

    def decode(self, tokens_T: np.ndarray | Iterable[int]) -> str:
        """Text of tokens; any tokens of the vocabulary have one."""
        ...

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs, as plain JSON values."""
        ...


class BytesTokenizer:
    """UTF-8 bytes, tokens 0 to 255, and 256 for the end of a document.

    Bytes that are not UTF-8, as a half-trained model writes them, decode to U+FFFD.
    """

    name = "bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text: one a byte."""
        # Words from a command line hold bytes that are not UTF-8 as escapes; they come back as those bytes.
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype("<u2")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of each of some texts."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens_T: np.ndarray | Iterable[int]) -> str:
        """Text of tokens."""
        ids_T = _checked(tokens_T, self.vocab_size)
        bytes_T = np.where(ids_T == self.end_of_document, ord("\n"), ids_T).astype(np.uint8)
        return bytes_T.tobytes().decode("utf-8", "replace")

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs."""
        return {"name": self.name}

    @classmethod
    def fit(cls, texts: Iterable[str], vocab_size: int | None = None) -> BytesTokenizer:
        """The tokenizer; bytes are the same in every text, so it is not read."""
        return cls()

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> BytesTokenizer:
        """The tokenizer that `state()` was taken from."""
        return cls()


class CharsTokenizer:
    """Characters, in the order of their code points; then the end of a document, then the unknown character.

    A character that is not among them encodes to `unknown`, which decodes to U+FFFD.

    Args:
        characters: The alphabet, sorted and without repeats.
    """

    name = "chars"

    def __init__(self, characters: str) -> None:
        if list(characters) != sorted(set(characters)):
            raise ValueError("characters must be sorted and differ from each other")
        self.characters = characters
        self.end_of_document = len(characters)
        self.unknown = len(characters) + 1
        self.vocab_size = len(characters) + 2
        codes = _code_points(characters)
        # One slot beyond the largest code point: where every character past it is looked up.
        self._token_of_code = np.full(codes.max(initial=0).astype(int) + 2, self.unknown, token_dtype(self.vocab_size))
        self._token_of_code[codes] = np.arange(len(characters))
        self._code_of_token = np.concatenate([codes, [ord("\n"), 0xFFFD]]).astype("<u4")

    @classmethod
    def fit(cls, texts: Iterable[str], vocab_size: int | None = None) -> CharsTokenizer:
        """The tokenizer of the characters in `texts`, however many."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return cls("".join(sorted(characters)))

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text: one a character."""
        return self._token_of_code[np.minimum(_code_points(text), len(self._token_of_code) - 1)]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokens of each of some texts."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens_T: np.ndarray | Iterable[int]) -> str:
        """Text of tokens."""
        return self._code_of_token[_checked(tokens_T, self.vocab_size)].tobytes().decode("utf-32-le")

    def state(self) -> dict[str, Any]:
        """All that `from_state` needs."""
        return {"name": self.name, "characters": self.characters}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> CharsTokenizer:
        """The tokenizer that `state()` was taken from."""
        return cls(state["characters"])


TOKENIZERS: dict[str, type[BytesTokenizer] | type[CharsTokenizer] | type[BpeTokenizer]] = {
    "bytes": BytesTokenizer,
    "chars": CharsTokenizer,
    "bpe": BpeTokenizer,
}
"""Those that are made here. Any other name is a pretrained one's, which `pretrained.pretrained_tokenizer` finds."""


def characters_for(name: str, tokens: int) -> int:
    """How much text is read for a number of tokens: enough for all of them, wherever that can be known.

    A byte or a character is a token, at least, of each character. Pieces of words are three to five
    characters long in most text; eight are allowed for.
    """
    return tokens if name in ("bytes", "chars") else 8 * tokens


def fit(name: str, training_texts: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer `name`, made from the training text where it depends on text at all.

    Args:
        name: bytes, chars or bpe.
        training_texts: Read only as far as the tokenizer needs it.
        vocab_size: For bpe: the most tokens that it has.

    Raises:
        DataError: No tokenizer has that name.
    """
    if name not in TOKENIZERS:
        raise DataError("data.tokenizer: " + unknown("tokenizer", name, TOKENIZERS))
    return TOKENIZERS[name].fit(training_texts, vocab_size)


def from_state(state: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `state()` was taken from. A pretrained one is whole in its state.

    Raises:
        DataError: No tokenizer has that name.
    """
    name = str(state.get("name"))
    if name not in TOKENIZERS and "definition" not in state:
        raise DataError("data.tokenizer: " + unknown("tokenizer", name, TOKENIZERS))
    return TOKENIZERS.get(name, SubwordTokenizer).from_state(state)


def _code_points(text: str) -> np.ndarray:
    # surrogatepass: an escaped byte of a command line is a character too, if an unknown one.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _checked(tokens_T: np.ndarray | Iterable[int], vocab_size: int) -> np.ndarray:
    """The tokens as int64, all inside the vocabulary; numpy would wrap negative ones around."""
    ids_T = np.asarray(tokens_T if isinstance(tokens_T, np.ndarray) else list(tokens_T), dtype=np.int64)
    if ids_T.size and not (ids_T.min() >= 0 and ids_T.max() < vocab_size):
        raise ValueError(f"tokens must be in 0..{vocab_size - 1}; got {ids_T.min()}..{ids_T.max()}")
    return ids_T
