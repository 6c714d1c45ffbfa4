"""The resolved values of a run's config: `validate` fills in what depends on other options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normlab.config import config_of_record
from normlab.data.corpus import open_corpus
from normlab.launch import compose_grid, compose_run
from normlab.options import plain_tree
from normlab.store.runs import RunFolder
from normlab.train.loop import Loop
from normlab.train.member import TrainingRun
from normlab.train.resolve import resolve

CORPUS = Path(__file__).with_name("corpus.txt")


def test_the_data_seed_follows_the_seed_unless_it_is_set() -> None:
    """In one run and in a grid; the record holds the resolved number, which reads back."""
    grid = compose_grid(["seed=range(3)"])
    assert [(config.seed, config.data.seed) for config in grid] == [(0, 0), (1, 1), (2, 2)]
    crossed = compose_grid(["seed=1,2", "data.seed=0,1"])
    assert [(config.seed, config.data.seed) for config in crossed] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    fixed = compose_run(["seed=5", "data.seed=0"])
    assert (fixed.seed, fixed.data.seed, config_of_record(plain_tree(fixed)).data.seed) == (5, 0, 0)


def test_the_identity_holds_the_resolved_data_seed() -> None:
    """A run with seed=0 keeps the id that it had when the default was 0; arms of one seed stay pairs."""
    one, other, set_apart = (compose_run(["seed=3", *more]) for more in ((), ("data.seed=3",), ("data.seed=0",)))
    assert one.config_hash == other.config_hash != set_apart.config_hash
    assert compose_run(["seed=0"]).config_hash == compose_run(["data.seed=0"]).config_hash
    assert {
        config.data.seed for config in compose_grid(["norm=rmsnorm,layernorm", "placement=pre,post", "seed=4"])
    } == {4}


def test_the_seed_alone_changes_the_order_of_the_data(tmp_path: Path) -> None:
    def first_batch(*words: str) -> torch.Tensor:
        config = compose_run(["model=gpt2_nano", "device=cpu", "data=files", f"data.path=[{CORPUS}]", *words])
        loop = Loop([TrainingRun(config, RunFolder(tmp_path))], resolve(config), open_corpus(config.data))
        return loop.batches.batch(0)[0]

    assert not torch.equal(first_batch("seed=0"), first_batch("seed=1"))
    assert torch.equal(first_batch("seed=0"), first_batch("seed=1", "data.seed=0"))


@pytest.mark.parametrize("word", ["data.seed=-1", "data.seed=1.5"])
def test_a_data_seed_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(Exception, match=r"data\.seed"):
        compose_run([word])
