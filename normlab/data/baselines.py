"""Baselines: the cross entropy of the evaluated targets under uniform, unigram and bigram models, in nats/token.

A run with a loss above `unigram` has not learned to use its context. A run with a loss above `bigram` uses at most the
last token. Counting takes a pass over the complete corpus, so the counts are a file of the corpus.

Shapes: N tokens or windows, T time, P pairs of neighbours, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHUNK = 1 << 22
"""Tokens that are converted to 64 bits at once; takes 32 MiB."""

BACKOFF = 1.0
"""Pseudo-count k of the unigram model in the bigram model."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts of tokens and pairs in the training text, for the baselines of any window."""

    tokens_V: np.ndarray
    """c(b): count of each token."""
    firsts_V: np.ndarray
    """c(a): count of each token as the first of a pair, the sum of c(a, b) over b."""
    pairs_P: np.ndarray
    """The distinct pairs of neighbours (a, b) in the validation text, as a V + b, sorted."""
    counts_P: np.ndarray
    """c(a, b): count of each of these pairs in the training text."""

    def save(self, path: Path) -> None:
        np.savez(path, **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, path: Path) -> TokenCounts:
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{name: arrays[name] for name in cls.__slots__})


def count_tokens(train_N: np.ndarray, val_N: np.ndarray, vocab_size: int) -> TokenCounts:
    """Count the training tokens, and the training pairs that occur in the validation text."""
    pairs_P = np.zeros(0, np.int64)
    for chunk in _pair_chunks(val_N, vocab_size):
        pairs_P = np.union1d(pairs_P, chunk)
    tokens_V = np.zeros(vocab_size, np.int64)
    for start in range(0, len(train_N), CHUNK):
        tokens_V += np.bincount(train_N[start : start + CHUNK], minlength=vocab_size)
    firsts_V = tokens_V.copy()
    firsts_V[train_N[-1]] -= 1  # the last token has no successor
    # Only the pairs of the validation text are counted: all V^2 pairs of a large vocabulary do not fit into memory.
    counts_P = np.zeros(len(pairs_P), np.int64)
    if len(pairs_P):
        for chunk in _pair_chunks(train_N, vocab_size):
            # The place of each pair, if it is among them; beyond the last one there is none to compare with.
            index = np.minimum(np.searchsorted(pairs_P, chunk), len(pairs_P) - 1)
            counts_P += np.bincount(index[pairs_P[index] == chunk], minlength=len(pairs_P))
    return TokenCounts(tokens_V, firsts_V, pairs_P, counts_P)


def baselines(counts: TokenCounts, tokens: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return the mean of -ln p(target), in nats/token, over targets of the validation text.

    Args:
        tokens: The token before each target, (N, T) or any other shape.
        targets: The targets, of the same shape.

    Returns:
        `uniform`: ln V. `unigram`: p1(b) = (c(b) + 1) / (N + V). `bigram`: p(b | a) = (c(a, b) + k p1(b)) /
        (c(a) + k), with k = `BACKOFF`. `targets`: the number of targets.
    """
    vocab_size = len(counts.tokens_V)
    a, b = tokens.ravel().astype(np.int64), targets.ravel().astype(np.int64)
    # Add-one smoothing: a token that the training text lacks has a finite loss.
    p1 = ((counts.tokens_V + 1) / (counts.tokens_V.sum() + vocab_size))[b]
    pairs = counts.counts_P[np.searchsorted(counts.pairs_P, a * vocab_size + b)]
    p = (pairs + BACKOFF * p1) / (counts.firsts_V[a] + BACKOFF)
    return {
        "uniform": math.log(vocab_size),
        "unigram": float(-np.log(p1).mean()),
        "bigram": float(-np.log(p).mean()),
        "targets": len(b),
    }


def _pair_chunks(tokens_N: np.ndarray, vocab_size: int) -> Iterator[np.ndarray]:
    """Yield the pairs of neighbours (a, b) as a V + b, a chunk at a time."""
    for start in range(0, len(tokens_N) - 1, CHUNK):
        # One token more than the chunk, which is the second of its last pair; 64 bits, because V^2 overflows 32.
        wide_N = tokens_N[start : start + CHUNK + 1].astype(np.int64)
        yield wide_N[:-1] * vocab_size + wide_N[1:]
