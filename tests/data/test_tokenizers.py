import json
import random

import numpy as np
import pytest

from normlab.base.errors import DataError
from normlab.catalogue.corpora import TOKENIZERS
from normlab.data import tokenizers
from normlab.data.tokenizer_sources import fit_tokenizer
from normlab.data.tokenizers import BytesTokenizer, token_dtype

SAMPLES = [
    "",
    "plain ascii\n",
    "\u00e9\u00df \u4e2d\u6587 \U0001f600\U0001f601",
    "a\x00b\r\n\ufeff\u2028",
    "".join(chr(c) for c in random.Random(0).choices([*range(0xD800), *range(0xE000, 0x110000)], k=5000)),
]


@pytest.mark.parametrize("text", SAMPLES)
def test_bytes_are_utf8(text: str) -> None:
    tokenizer = BytesTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == list(text.encode())
    assert tokens.dtype == np.uint16
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokens.tolist()) == text


def test_bytes_decode_invalid_utf8() -> None:
    tokenizer = BytesTokenizer()
    assert tokenizer.decode([104, 256, 105]) == "h\ni"
    assert tokenizer.decode([0xC3, 256, 0xA9]) == "\ufffd\n\ufffd"  # the end of a document inside a character
    assert tokenizer.decode(np.arange(257)).endswith("\n")


def test_bytes_encode_arguments_that_are_not_utf8() -> None:
    argument = b"a\xff".decode("utf-8", "surrogateescape")
    assert BytesTokenizer().encode(argument).tolist() == [97, 255]


@pytest.mark.parametrize("text", SAMPLES)
def test_chars_are_positions_in_the_sorted_alphabet(text: str) -> None:
    tokenizer = fit_tokenizer("chars", ["hello", text, "w\U0010ffff"])
    alphabet = sorted(set("hellow\U0010ffff" + text))
    assert tokenizer.vocab_size == len(alphabet) + 2
    assert tokenizer.encode(text).tolist() == [alphabet.index(c) for c in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_characters_outside_the_alphabet_are_unknown() -> None:
    tokenizer = fit_tokenizer("chars", ["cab"])
    assert tokenizer.encode("a?d\U0001f600b\udcffc").tolist() == [0, 4, 4, 4, 1, 4, 2]
    assert tokenizer.decode([0, 3, 4, 2]) == "a\n\ufffdc"
    assert tokenizer.end_of_document == 3


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_state_survives_json(name: str) -> None:
    text = "the \u00e9 \U0001f600\n"
    tokenizer = fit_tokenizer(name, [text])
    again = tokenizers.from_state(json.loads(json.dumps(tokenizer.state())))
    assert type(again) is type(tokenizer)
    assert again.name == name
    assert again.vocab_size == tokenizer.vocab_size
    assert again.end_of_document == tokenizer.end_of_document < tokenizer.vocab_size
    np.testing.assert_array_equal(again.encode(text + "?"), tokenizer.encode(text + "?"))


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_encode_batch_equals_encode_of_each_text(name: str) -> None:
    tokenizer = fit_tokenizer(name, SAMPLES)
    for text, tokens in zip(SAMPLES, tokenizer.encode_batch(SAMPLES), strict=True):
        assert tokens.dtype == token_dtype(tokenizer.vocab_size)
        np.testing.assert_array_equal(tokens, tokenizer.encode(text))
        assert tokenizer.decode(tokens) == text
        assert not (tokens == tokenizer.end_of_document).any()


@pytest.mark.parametrize(
    ("text", "decoded", "changed"),
    [
        ("", "", 0),
        ("as it is", "as it is", 0),
        ("Upper CASE", "upper case", 5),
        ("two  blanks\n", "two blanks", 2),
        ("don't", "don ' t", 2),
        ("a\u4e00b", "a\ufffdb", 1),
        ("ab", "ba", 1),
        ("a", "a b c d", 1),
    ],
)
def test_changed_characters(text: str, decoded: str, changed: int) -> None:
    assert tokenizers.changed_characters(text, decoded) == changed


def test_state_without_a_known_name_is_an_error() -> None:
    with pytest.raises(DataError, match="bytes, chars"):
        tokenizers.from_state({})


def test_token_dtype_is_the_narrowest_that_fits() -> None:
    for vocab_size in (2, 257, 65535, 65536, 65537, 1 << 20):
        dtype = token_dtype(vocab_size)
        assert np.iinfo(dtype).max >= vocab_size - 1
        assert (dtype.itemsize == 2) == (vocab_size <= 65536)
