import hashlib
import random

import pytest

from normlab.data.documents import MIN_DOCUMENTS, held_out_documents, tail_start


def split(texts: list[str], val_fraction: float) -> set[str]:
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    held_out = held_out_documents(digests, [len(text) for text in texts], val_fraction)
    return {text for text, digest in zip(texts, digests, strict=True) if digest in held_out}


def some_texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return [f"{i}:" + "x" * draw.randrange(1, 400) for i in range(count)]


@pytest.mark.parametrize("val_fraction", [0.01, 0.05, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_held_out_share_is_between_val_fraction_and_its_limit(seed: int, val_fraction: float) -> None:
    texts = some_texts(seed, 500)
    held_out, total = split(texts, val_fraction), sum(map(len, texts))
    assert val_fraction * total <= sum(map(len, held_out)) <= 1.5 * val_fraction * total


def test_documents_are_held_out_in_the_order_of_their_hash() -> None:
    texts = [f"{i:04d}" for i in range(100)]  # of equal length, so none is skipped
    by_hash = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    assert split(texts, 0.1) == set(by_hash[:10])


def test_equal_documents_stay_together() -> None:
    # Two hundred documents, of which many are equal.
    texts = [text for text in some_texts(0, 40) for _ in range(5)]
    held_out, total = split(texts, 0.2), sum(map(len, texts))
    chars = sum(len(text) for text in texts if text in held_out)
    assert 0.2 * total <= chars <= 0.3 * total


def test_too_few_documents_give_no_held_out_documents() -> None:
    texts = [f"{i:04d}" for i in range(MIN_DOCUMENTS)]
    assert len(split(texts, 0.05)) == 1
    assert split(texts[1:], 0.05) == set()
    assert split(texts[1:] + texts[1:], 0.05) == set()  # repeats do not count
    assert split([*texts, "x" * 10**6], 0.05) == set()  # the small documents are less than 5 % of the text


def test_tail_starts_at_a_line() -> None:
    text = "".join(f"line {i}\n" for i in range(1000))
    start = tail_start(text, 0.05)
    assert text[start - 1] == "\n"
    assert 0.05 * len(text) - 10 < len(text) - start <= 0.05 * len(text)


@pytest.mark.parametrize(
    ("text", "val_fraction", "tail"),
    [
        ("x" * 100, 0.05, "x" * 5),  # a single line is cut
        ("a" * 95 + "\n" + "b" * 4, 0.05, "bbbb"),  # the line ends in the tail
        ("a" * 94 + "\n" + "b" * 5, 0.05, "bbbbb"),  # the line ends just before it
        ("a" * 98 + "\nb", 0.05, "aaa\nb"),  # moving to the next line would leave too little
        ("a" * 89 + "\nb\n" + "c" * 8, 0.1, "b\ncccccccc"),  # the tail starts at a line
        ("a" * 99 + "\n", 0.05, "aaaa\n"),
        ("abc", 0.05, ""),
        ("", 0.5, ""),
        ("a", 0.5, ""),
        ("ab", 0.5, "b"),
    ],
)
def test_tail_of_one_document(text: str, val_fraction: float, tail: str) -> None:
    assert text[tail_start(text, val_fraction) :] == tail
