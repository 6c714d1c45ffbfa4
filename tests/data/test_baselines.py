import itertools
import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from normlab.catalogue.corpora import FilesData
from normlab.data import baselines as module
from normlab.data.baselines import baselines, count_tokens
from normlab.data.batches import validation_windows
from normlab.data.corpus import open_corpus
from normlab.training.evaluate import Validation

CORPUS = Path(__file__).parent.with_name("corpus.txt")


def reference_unigram(train: list[int], targets: list[int], vocab: int) -> float:
    counts = Counter(train)
    return sum(-math.log((counts[b] + 1) / (len(train) + vocab)) for b in targets) / len(targets)


def reference_bigram(train: list[int], tokens: list[int], targets: list[int], vocab: int) -> float:
    counts, pairs, firsts = Counter(train), Counter(itertools.pairwise(train)), Counter(train[:-1])
    total = 0.0
    for a, b in zip(tokens, targets, strict=True):
        p1 = (counts[b] + 1) / (len(train) + vocab)
        total -= math.log((pairs[a, b] + p1) / (firsts[a] + 1))
    return total / len(targets)


def baselines_of_text(train: np.ndarray, val: np.ndarray, vocab: int) -> dict[str, float]:
    """Return the baselines of all validation tokens but the first."""
    return baselines(count_tokens(train, val, vocab), val[:-1], val[1:])


@pytest.mark.parametrize("vocab", [2, 7, 257, 5000])
@pytest.mark.parametrize("chunk", [1, 13, 1 << 22])
def test_baselines_equal_the_reference_on_windows(vocab: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    draw = np.random.default_rng(vocab)
    weights = draw.dirichlet(np.full(vocab, 0.1))
    train = draw.choice(vocab, 600, p=weights).astype(np.uint16)
    val = draw.choice(vocab, 101, p=(weights + 1 / vocab) / 2).astype(np.uint16)
    tokens, targets = (windows.numpy() for windows in validation_windows(val, context=7, sequences=5))
    scores = baselines(count_tokens(train, val, vocab), tokens, targets)
    inputs, outputs = tokens.ravel().tolist(), targets.ravel().tolist()
    assert scores["unigram"] == pytest.approx(reference_unigram(train.tolist(), outputs, vocab), rel=1e-12)
    assert scores["bigram"] == pytest.approx(reference_bigram(train.tolist(), inputs, outputs, vocab), rel=1e-12)
    assert (scores["uniform"], scores["targets"]) == (math.log(vocab), 35)


class Bigram:
    """A model runner that computes the bigram, with torch's cross entropy."""

    run_shape = ()

    def __init__(self, train: np.ndarray, vocab: int) -> None:
        pairs = Counter(itertools.pairwise(train.tolist()))
        p1 = (np.bincount(train, minlength=vocab) + 1) / (len(train) + vocab)
        table = np.array([[pairs[a, b] + p1[b] for b in range(vocab)] for a in range(vocab)])
        self.logits_VV = torch.from_numpy(np.log(table / table.sum(1, keepdims=True)))

    def train(self, training: bool) -> None:
        pass

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> SimpleNamespace:
        logits = self.logits_VV[tokens.flatten()]
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits, targets.flatten()))


def test_bigram_model_scores_the_bigram_baseline(tmp_path: Path) -> None:
    """`vs_bigram` is 0 for any evaluation windows."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "corpus.txt").write_bytes(CORPUS.read_bytes())
    corpus = open_corpus(FilesData(path=[str(tmp_path / "text")]), tmp_path / "cache")
    model: Any = Bigram(corpus.train, corpus.tokenizer.vocab_size)
    for context, sequences in ((64, 8), (128, 3)):
        tokens, targets = validation_windows(corpus.val, context, sequences)
        loss = Validation(tokens, targets, 2, nullcontext, batch_statistics=False)(model)["loss"][0]
        scores = corpus.baselines(tokens.numpy(), targets.numpy())
        assert loss - scores["bigram"] == pytest.approx(0, abs=1e-12)
        assert scores["targets"] == targets.numel()
        # The baseline of the complete text differs clearly.
        assert abs(loss - baselines_of_text(corpus.train, corpus.val, 257)["bigram"]) > 1e-3


def test_unigram_and_bigram_are_distributions() -> None:
    """The probabilities of all next tokens sum to one, also after a token that the training text lacks."""
    train, vocab = np.array([0, 1, 0, 2, 0, 1], np.uint16), 5
    unigram = [baselines_of_text(train, np.array([0, b]), vocab)["unigram"] for b in range(vocab)]
    assert sum(math.exp(-nats) for nats in unigram) == pytest.approx(1)
    for a in range(vocab):
        bigram = [baselines_of_text(train, np.array([a, b]), vocab)["bigram"] for b in range(vocab)]
        assert sum(math.exp(-nats) for nats in bigram) == pytest.approx(1)
