"""Baselines: the cross entropy of the evaluated targets under models that learned little, in nats/token.

A run that does not beat `unigram` has not learned to use its context; one that does not beat `bigram` looks no
further back than one token. Counting takes a pass over the whole corpus, so the counts are kept in the corpus's folder;
scoring the targets of one evaluation with them takes milliseconds.

Shapes: N tokens or windows, T time, P pairs of neighbours, V vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CHUNK = 1 << 22
"""Tokens that are widened to 64 bits at once: 32 MiB, however long the corpus."""

DENSE = 1 << 22
"""Most pairs of tokens, V x V, for which a table of all of them is kept: 32 MiB."""

BACKOFF = 1.0
"""How many counts the unigram is worth in the bigram."""

FILE = "counts.npz"
"""Name of the file of counts in a corpus's folder."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the training tokens: all that the baselines of any validation window need."""

    tokens_V: np.ndarray
    """How often each token occurs."""
    firsts_V: np.ndarray
    """How often each token is followed by another: c(a), the sum of c(a, b) over b."""
    pairs_P: np.ndarray
    """The different pairs of neighbours (a, b) of the validation text, as a V + b, sorted."""
    counts_P: np.ndarray
    """How often each of these pairs occurs in the training tokens: c(a, b)."""


def count(train_N: np.ndarray, val_N: np.ndarray, vocab_size: int) -> Counts:
    """Count the training tokens, and those of their pairs that the validation text holds."""
    pairs_P = _distinct_pairs(val_N, vocab_size)
    return Counts(
        tokens_V=_counts(train_N, vocab_size),
        firsts_V=_counts(train_N[:-1], vocab_size),
        pairs_P=pairs_P,
        counts_P=_counts_of(pairs_P, train_N, vocab_size),
    )


def kept_counts(folder: Path, train_N: np.ndarray, val_N: np.ndarray, vocab_size: int) -> Counts:
    """Return `count(...)`, from its file in the corpus's folder; a missing or damaged file is written again.

    A folder that cannot be written costs the counting each time, and no error.
    """
    path = folder / FILE
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        with path.open("rb") as content, np.load(content, allow_pickle=False) as arrays:
            # Reading verifies the zip's checksums.
            found = Counts(**{name: arrays[name] for name in Counts.__slots__})
        if found.tokens_V.shape == (vocab_size,) and found.tokens_V.sum() == len(train_N):
            return found
    counts = count(train_N, val_N, vocab_size)
    temporary = folder / f".{FILE}.{os.getpid()}"
    try:
        with temporary.open("wb") as file:
            np.savez(file, **{name: getattr(counts, name) for name in Counts.__slots__})
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return counts


def baselines(counts: Counts, tokens: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return the mean of -ln p(target), in nats/token, over targets that each follow a token of the validation text.

    Args:
        counts: Counts of the corpus.
        tokens: The token before each target, (N, T) or any other shape.
        targets: The targets, of the same shape.

    Returns:
        `uniform`: ln V. `unigram`: p1(b) = (c(b) + 1) / (N + V). `bigram`: p(b | a) = (c(a, b) + k p1(b)) /
        (c(a) + k), k = 1: the unigram is worth k counts. `targets`: how many targets these are means over.
    """
    vocab_size = len(counts.tokens_V)
    a, b = tokens.ravel().astype(np.int64), targets.ravel().astype(np.int64)
    p1 = ((counts.tokens_V + 1) / (counts.tokens_V.sum() + vocab_size))[b]
    pairs = counts.counts_P[np.searchsorted(counts.pairs_P, a * vocab_size + b)]
    p = (pairs + BACKOFF * p1) / (counts.firsts_V[a] + BACKOFF)
    return {
        "uniform": math.log(vocab_size),
        "unigram": float(-np.log(p1).mean()),
        "bigram": float(-np.log(p).mean()),
        "targets": len(b),
    }


def _counts(tokens_N: np.ndarray, vocab_size: int) -> np.ndarray:
    counts_V = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens_N), CHUNK):
        counts_V += np.bincount(tokens_N[start : start + CHUNK], minlength=vocab_size)
    return counts_V


def _pair_chunks(tokens_N: np.ndarray, vocab_size: int):
    """Neighbours (a, b) as a V + b, a chunk at a time."""
    for start in range(0, len(tokens_N) - 1, CHUNK):
        wide_N = tokens_N[start : start + CHUNK + 1].astype(np.int64)
        yield wide_N[:-1] * vocab_size + wide_N[1:]


def _distinct_pairs(tokens_N: np.ndarray, vocab_size: int) -> np.ndarray:
    """The different pairs of neighbours, sorted."""
    pairs_P = np.zeros(0, np.int64)
    for chunk in _pair_chunks(tokens_N, vocab_size):
        pairs_P = np.union1d(pairs_P, chunk)
    return pairs_P


def _counts_of(pairs_P: np.ndarray, tokens_N: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each of some sorted pairs occurs among tokens.

    A small vocabulary counts every pair in one table. A large one counts only those asked for: what is not in
    the validation text does not matter, and V x V would not fit.
    """
    if not len(pairs_P):
        return np.zeros(0, np.int64)
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
