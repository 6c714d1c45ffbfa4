from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from normlab.data import baselines as module
from normlab.data.baselines import baselines, bigram, unigram


def slow_unigram(train: list[int], val: list[int], vocab: int) -> float:
    counts = Counter(train)
    return sum(-math.log((counts[b] + 1) / (len(train) + vocab)) for b in val) / len(val)


def slow_bigram(train: list[int], val: list[int], vocab: int) -> float:
    counts, pairs, firsts = Counter(train), Counter(itertools.pairwise(train)), Counter(train[:-1])
    total = 0.0
    for a, b in itertools.pairwise(val):
        p1 = (counts[b] + 1) / (len(train) + vocab)
        total -= math.log((pairs[a, b] + p1) / (firsts[a] + 1))
    return total / (len(val) - 1)


@pytest.mark.parametrize("vocab", [2, 7, 257, 5000])
@pytest.mark.parametrize("way", ["dense", "sparse"])
@pytest.mark.parametrize("chunk", [1, 13, 1 << 22])
def test_against_counters(vocab: int, way: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    monkeypatch.setattr(module, "DENSE", 1 << 40 if way == "dense" and vocab < 1000 else 0)
    draw = np.random.default_rng(vocab)
    weights = draw.dirichlet(np.full(vocab, 0.1))
    train = draw.choice(vocab, 600, p=weights).astype(np.uint16)
    val = draw.choice(vocab, 101, p=(weights + 1 / vocab) / 2).astype(np.uint16)
    args = train.tolist(), val.tolist(), vocab
    assert unigram(train, val, vocab) == pytest.approx(slow_unigram(*args), rel=1e-12)
    assert bigram(train, val, vocab) == pytest.approx(slow_bigram(*args), rel=1e-12)


@pytest.mark.parametrize("dense", [0, 1 << 22])
def test_both_are_distributions(dense: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probabilities of all tokens sum to one, after any token, seen or not."""
    monkeypatch.setattr(module, "DENSE", dense)
    train, vocab = np.array([0, 1, 0, 2, 0, 1], np.uint16), 5
    one = [unigram(train, np.array([b]), vocab) for b in range(vocab)]
    assert sum(math.exp(-nats) for nats in one) == pytest.approx(1)
    for a in range(vocab):
        two = [bigram(train, np.array([a, b]), vocab) for b in range(vocab)]
        assert sum(math.exp(-nats) for nats in two) == pytest.approx(1)


def test_tokens_without_structure_score_ln_v() -> None:
    draw = np.random.default_rng(0)
    train, val = draw.integers(0, 16, 200_000), draw.integers(0, 16, 20_000)
    scores = baselines(train, val, 16)
    assert scores["uniform"] == math.log(16)
    assert scores["unigram"] == pytest.approx(math.log(16), abs=1e-3)
    assert scores["bigram"] == pytest.approx(math.log(16), abs=1e-2)


def test_what_follows_from_the_last_token_costs_nothing_under_the_bigram() -> None:
    cycle = np.tile(np.arange(16, dtype=np.uint16), 2000)
    assert unigram(cycle, cycle, 16) == pytest.approx(math.log(16), abs=1e-3)
    assert bigram(cycle, cycle, 16) == pytest.approx(0, abs=1e-3)


def test_one_validation_token_has_no_pairs() -> None:
    assert bigram(np.array([0, 1, 1]), np.array([1]), 4) == math.log(4)
