"""Tokenizers: UTF-8 bytes, characters, and subwords; `tokenizer_sources.py` fits, reads or downloads one.

Every tokenizer has a token `end_of_document`, which follows each document of a corpus: a pretrained tokenizer's own
(`END_TOKENS`), or one that no text has. It decodes to a line break, so that each document in generated text starts on a
new line. Subword tokenizers use Hugging Face `tokenizers` and are stored as its JSON, so that a run's tokenizer gives
the same tokens on every machine without a download.

Shapes: T tokens.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from normlab.base.errors import DataError, unknown
from normlab.catalogue.corpora import MAX_VOCAB_SIZE, TOKENIZERS
from normlab.data.tokenizer_limits import call_within, check_definition, library_errors

LARGEST_TOKENIZER = 2**27
"""Most bytes of a tokenizer.json; those with 2^18 tokens have 2^25."""

PIECE = 1 << 20
"""Maximum number of characters that are encoded at once. `tokenizers` needs about 100 bytes of memory per token."""

END_OF_DOCUMENT = "<|end_of_document|>"
"""The end of a document in a tokenizer.json that normlab has written."""
END_TOKENS = (END_OF_DOCUMENT, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Special tokens that end a text, in the order of preference."""

SAMPLED = PIECE // 16
"""Most characters of each `PIECE` of a corpus that are decoded again, to find what the tokenizer changes. Decoding all
of them takes about half as long as encoding them with BPE; the sample takes about a hundredth."""

SEAM = re.compile(r"(?<=\S) ")
"""Position at which a long text is cut: no byte-level token continues across a space, so the tokens stay the same."""

SEAM_WINDOW = 1 << 12
"""Characters at the end of a piece that are searched for a seam; without a seam, the text is cut at the end."""


class Tokenizer(Protocol):
    """Converts text to tokens and back, without a download."""

    name: str
    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, in `token_dtype(vocab_size)`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens_T: np.ndarray | Sequence[int]) -> str:
        """Return the text of any sequence of tokens."""
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
        # Python decodes a command line's invalid UTF-8 to surrogates; encode them to the original bytes.
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype("<u2")

    def decode(self, tokens_T: np.ndarray | Sequence[int]) -> str:
        ids_T = np.asarray(tokens_T, np.int64)
        bytes_T = np.where(ids_T == self.end_of_document, ord("\n"), ids_T).astype(np.uint8)
        return bytes_T.tobytes().decode("utf-8", "replace")

    def state(self) -> dict[str, Any]:
        return {"name": self.name}


class CharsTokenizer(Tokenizer):
    """Characters by code point, then the end of a document, then the unknown character.

    The alphabet is sorted and without repeats; any other character encodes to `unknown`, which decodes to U+FFFD.
    """

    name = "chars"

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self.end_of_document = len(characters)
        self.unknown = len(characters) + 1
        self.vocab_size = len(characters) + 2
        codes = _code_points(characters)
        # The last entry stands for all code points above the largest in the alphabet.
        self._token_of_code = np.full(codes.max(initial=0).astype(int) + 2, self.unknown, token_dtype(self.vocab_size))
        self._token_of_code[codes] = np.arange(len(characters))
        self._code_of_token = np.concatenate([codes, [ord("\n"), 0xFFFD]]).astype("<u4")

    def encode(self, text: str) -> np.ndarray:
        return self._token_of_code[np.minimum(_code_points(text), len(self._token_of_code) - 1)]

    def decode(self, tokens_T: np.ndarray | Sequence[int]) -> str:
        return self._code_of_token[np.asarray(tokens_T, np.int64)].tobytes().decode("utf-32-le")

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "characters": self.characters}


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library, built from `definition`, the content of its tokenizer.json.

    Args:
        end_token: That of its special tokens which ends a document; None: one more token does.

    Raises:
        ValueError: The JSON is not a tokenizer, has too many tokens, has dropout, which makes tokens random, or has
            a part that is too long (`tokenizer_limits`).
    """

    def __init__(self, name: str, definition: str, end_token: str | None = None) -> None:
        from tokenizers import Tokenizer

        self.name, self.definition, self.end_token = name, definition, end_token
        check_definition(definition)
        try:
            with library_errors():
                self._tokenizer = Tokenizer.from_str(definition)
        except ValueError as error:
            raise ValueError(f"not a tokenizer.json ({error})") from error
        # A tokenizer.json may ask for truncation and padding, which would change the text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document may contain the text "<|endoftext|>", which does not end it.
        self._tokenizer.encode_special_tokens = True
        dropout = getattr(self._tokenizer.model, "dropout", None)
        if dropout:
            raise ValueError(f"has dropout {dropout:g}, so its tokens are random")
        tokens = self._tokenizer.get_vocab(with_added_tokens=True)
        count = max(tokens.values(), default=-1) + 1
        if end_token is not None and end_token not in tokens:
            raise ValueError(f"has no token {end_token!r:.60}")
        # Without a token that ends a text, one more than those of the file does.
        if end_token is None:
            self.end_of_document, self.vocab_size = count, count + 1
        else:
            self.end_of_document, self.vocab_size = tokens[end_token], count
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ValueError(f"has a token {count - 1} (at most {MAX_VOCAB_SIZE - 2})")
        # Some models (Unigram, WordLevel) have the special tokens among their words, and find them in a text.
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token for token in added if added[token].special} - {self._unknown_token()}
        self._not_in_text = np.array(sorted(special | {self.end_of_document}))

    def _unknown_token(self) -> int | None:
        """Return the token of unknown characters and words, or None if there is none."""
        model = json.loads(self.definition)["model"]
        if "unk_id" in model:
            return model["unk_id"]
        return self._tokenizer.token_to_id(model.get("unk_token") or "")

    @classmethod
    def pretrained(cls, name: str, definition: str) -> "SubwordTokenizer":
        """Return the tokenizer with the first of `END_TOKENS` that is one of its special tokens; errors as above."""
        tokenizer = cls(name, definition)
        special = {token.content for token in tokenizer._tokenizer.get_added_tokens_decoder().values() if token.special}
        end_token = next((token for token in END_TOKENS if token in special), None)
        if end_token is None:
            return tokenizer
        return cls(name, definition, end_token)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, without special tokens at its start and end."""
        return np.concatenate(self.encode_batch(list(pieces(text))))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, encoded on all cores.

        The text of a special token is encoded as other text.

        Raises:
            DataError: The tokenizer cannot encode a text, or would encode a part of it as a special token.
        """
        # Python decodes a command line's invalid UTF-8 to surrogates, which no tokenizer accepts.
        valid = [text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in texts]
        encode = partial(self._tokenizer.encode_batch_fast, valid, add_special_tokens=False)
        try:
            encodings = call_within(sum(map(len, valid)), encode)
        except ValueError as error:
            raise DataError(f"data.tokenizer={self.name}: cannot encode the text ({error}); choose another") from error
        tokens = [np.array(encoding.ids, token_dtype(self.vocab_size)) for encoding in encodings]
        for tokens_T in tokens:
            special_tokens = tokens_T[np.isin(tokens_T, self._not_in_text)]
            if special_tokens.size:
                special = self._tokenizer.id_to_token(int(special_tokens[0]))
                raise DataError(
                    f"data.tokenizer={self.name}: reads {special!r} in the text as a special token; remove it from the "
                    "text, or choose another tokenizer"
                )
        return tokens

    def decode(self, tokens_T: np.ndarray | Sequence[int]) -> str:
        """Return the text of tokens, with U+FFFD for invalid UTF-8.

        Raises:
            DataError: The tokenizer cannot decode the tokens.
        """
        ids = np.asarray(tokens_T, np.int64).tolist()
        texts: list[str] = []
        for is_end, part in itertools.groupby(ids, self.end_of_document.__eq__):
            tokens = list(part)
            if is_end:
                texts.append("\n" * len(tokens))
                continue
            # Not `decode`: it holds the interpreter's lock, so no other thread could measure its time and memory.
            decode = partial(self._tokenizer.decode_batch, [tokens], skip_special_tokens=False)
            try:
                texts += call_within(len(tokens), decode)
            except ValueError as error:
                message = f"data.tokenizer={self.name}: cannot decode tokens ({error}); choose another"
                raise DataError(message) from error
        return "".join(texts)

    def state(self) -> dict[str, Any]:
        state = {"name": self.name, "definition": self.definition}
        if self.end_token is not None:
            state["end_token"] = self.end_token
        return state


def from_state(state: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer with a given `state()`."""
    name = str(state.get("name"))
    if name == "bytes":
        return BytesTokenizer()
    if name == "chars":
        return CharsTokenizer(state["characters"])
    if "definition" in state:
        return SubwordTokenizer(name, state["definition"], state.get("end_token"))
    raise DataError("data.tokenizer: " + unknown("tokenizer", name, TOKENIZERS))


def changed_characters(text: str, decoded: str) -> int:
    """Return the larger of the numbers of characters lost and gained when a text is encoded and decoded.

    A tokenizer may lower the text, drop blanks, or lack a character. Characters are counted in any order, so the number
    is a lower bound; it is 0 only if both texts are equal, and at most the length of `text`.
    """
    if decoded == text:
        return 0
    before, after = Counter(text), Counter(decoded)
    changed = max((before - after).total(), (after - before).total(), 1)
    return min(changed, len(text))


@dataclass(slots=True)
class RoundTrip:
    """How many characters of a sample of a text its tokenizer changes; counted as in `changed_characters`."""

    characters: int = 0
    """Characters of the sample."""
    changed: int = 0

    def add(self, texts: Sequence[str], tokens: Sequence[np.ndarray], tokenizer: Tokenizer) -> None:
        """Decode the first encoded texts, up to `SAMPLED` characters; if the first is longer, only its beginning."""
        remaining = SAMPLED
        for index, (text, tokens_T) in enumerate(zip(texts, tokens, strict=True)):
            if len(text) > remaining:
                if index > 0:
                    return
                text, tokens_T = text[:SAMPLED], tokenizer.encode(text[:SAMPLED])
            remaining -= len(text)
            self.characters += len(text)
            self.changed += changed_characters(text, tokenizer.decode(tokens_T))

    @property
    def changed_share(self) -> float:
        """Share of the characters of the sample that the tokenizer changes, from 0 to 1."""
        return self.changed / max(1, self.characters)


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the little-endian unsigned dtype, of 16 or 32 bits, that holds every token."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def pieces(text: str) -> Iterator[str]:
    """Yield pieces of at most `PIECE` characters whose tokens together are those of the text.

    This is exact for bytes, characters and byte-level BPE that is cut at a space. A pretrained tokenizer that marks the
    start of its input (SentencePiece) marks the start of each piece.
    """
    start = 0
    while len(text) - start > PIECE:
        end = start + PIECE
        seam = max((match.start() for match in SEAM.finditer(text, end - SEAM_WINDOW, end)), default=end)
        yield text[start:seam]
        start = seam
    yield text[start:]


def _code_points(text: str) -> np.ndarray:
    # surrogatepass: a surrogate for an invalid byte of the command line counts as an unknown character.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
