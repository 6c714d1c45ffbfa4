"""What a model that learned little would score: cross entropies of the validation tokens, in nats a token.

A run that does not beat `unigram` has not learned to use its context; one that does not beat `bigram` looks
no further back than one token.

Shapes: N tokens, P pairs of neighbours, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np

CHUNK = 1 << 22
"""Tokens that are widened to 64 bits at once: 32 MiB, however long the corpus."""

DENSE = 1 << 22
"""Most pairs of tokens, V x V, for which a table of all of them is kept: 32 MiB."""

BACKOFF = 1.0
"""How many counts the unigram is worth in the bigram."""


def baselines(train_N: np.ndarray, val_N: np.ndarray, vocab_size: int) -> dict[str, float]:
    """Cross entropies of the validation tokens under three models of the training tokens.

    Returns:
        `uniform`: ln V. `unigram` and `bigram` as below.
    """
    return {
        "uniform": math.log(vocab_size),
        "unigram": unigram(train_N, val_N, vocab_size),
        "bigram": bigram(train_N, val_N, vocab_size),
    }


def unigram(train_N: np.ndarray, val_N: np.ndarray, vocab_size: int) -> float:
    """Mean of -ln p1(x_t) over the validation tokens, with p1(b) = (c(b) + 1) / (N + V), in nats.

    c(b) is how often b occurs among the N training tokens.
    """
    seen_V = _counts(val_N, vocab_size)
    return float(-seen_V @ np.log(_smoothed(_counts(train_N, vocab_size))) / len(val_N))


def bigram(train_N: np.ndarray, val_N: np.ndarray, vocab_size: int) -> float:
    """Mean of -ln p(x_t | x_{t-1}) over the validation tokens but the first, in nats.

    p(b | a) = (c(a, b) + k p1(b)) / (c(a) + k), k = 1: the counts of pairs in the training tokens, with the
    unigram p1 worth k of them; c(a) is the sum of c(a, b) over b. Uniform where there is no second token.
    """
    if len(val_N) < 2:
        return math.log(vocab_size)
    unigram_V = _smoothed(_counts(train_N, vocab_size))
    first_V = _counts(train_N[:-1], vocab_size)
    pairs_P, seen_P = _pair_counts(val_N, vocab_size)
    in_train_P = _counts_of(pairs_P, train_N, vocab_size)
    a_P, b_P = pairs_P // vocab_size, pairs_P % vocab_size
    p_P = (in_train_P + BACKOFF * unigram_V[b_P]) / (first_V[a_P] + BACKOFF)
    return float(-seen_P @ np.log(p_P) / seen_P.sum())


def _counts(tokens_N: np.ndarray, vocab_size: int) -> np.ndarray:
    counts_V = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens_N), CHUNK):
        counts_V += np.bincount(tokens_N[start : start + CHUNK], minlength=vocab_size)
    return counts_V


def _smoothed(counts_V: np.ndarray) -> np.ndarray:
    return (counts_V + 1) / (counts_V.sum() + len(counts_V))


def _pair_chunks(tokens_N: np.ndarray, vocab_size: int):
    """Neighbours (a, b) as a V + b, a chunk at a time."""
    for start in range(0, len(tokens_N) - 1, CHUNK):
        wide_N = tokens_N[start : start + CHUNK + 1].astype(np.int64)
        yield wide_N[:-1] * vocab_size + wide_N[1:]


def _pair_counts(tokens_N: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The different pairs of neighbours, sorted, and how often each occurs."""
    pairs_P, counts_P = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for chunk in _pair_chunks(tokens_N, vocab_size):
        new_P, new_counts_P = np.unique(chunk, return_counts=True)
        pairs_P, where = np.unique(np.concatenate([pairs_P, new_P]), return_inverse=True)
        counts = np.concatenate([counts_P, new_counts_P])
        counts_P = np.bincount(where, weights=counts, minlength=len(pairs_P)).astype(np.int64)
    return pairs_P, counts_P


def _counts_of(pairs_P: np.ndarray, tokens_N: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each of some sorted pairs occurs among tokens.

    A small vocabulary counts every pair in one table. A large one counts only those asked for: what is not in
    the validation text does not matter, and V x V would not fit.
    """
    if vocab_size**2 <= DENSE:
        table = np.zeros(vocab_size**2, np.int64)
        for chunk in _pair_chunks(tokens_N, vocab_size):
            table += np.bincount(chunk, minlength=vocab_size**2)
        return table[pairs_P]
    counts_P = np.zeros(len(pairs_P), np.int64)
    for chunk in _pair_chunks(tokens_N, vocab_size):
        where = np.minimum(np.searchsorted(pairs_P, chunk), len(pairs_P) - 1)
        counts_P += np.bincount(where[pairs_P[where] == chunk], minlength=len(pairs_P))
    return counts_P
