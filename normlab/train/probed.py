"""The probe of a run that has ended, or stands still: of each checkpoint that it has."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np

from normlab.data.batches import validation_windows
from normlab.data.corpus import open_corpus
from normlab.errors import StoreError
from normlab.stats.profiles import Layout, Profiles
from normlab.stats.statistic import PROBE, STATISTICS
from normlab.train import checkpoint
from normlab.train.columns import families
from normlab.train.load import LoadedRun
from normlab.train.probing import Probe, adam_measure, examples


def probe_checkpoints(run: LoadedRun, only: str | None = None) -> Iterator[Profiles]:
    """What a probe sees of each whole checkpoint, oldest first; each one's seconds are said.

    Args:
        run: Whose checkpoints.
        only: The one statistic that is asked for; all of the probe's unless given.

    Raises:
        StoreError: There is no checkpoint, or none that is whole. ConfigError, DataError: The run's config or its
        corpus cannot be had.
    """
    folder, config = run.folder.path / checkpoint.FOLDER, run.config
    steps = sorted(checkpoint.steps(folder))
    if not steps:
        raise StoreError(f"run {run.folder.run_id} has no checkpoint to probe; the same `normlab train` makes one")
    corpus = open_corpus(config.data)
    tokens, targets = validation_windows(corpus.val, config.model.context, config.eval.sequences)
    count = examples(config.train.batch_size)
    names = frozenset(name for name, one in STATISTICS.items() if one.tier == PROBE and only in (None, name))
    for step in steps:
        since = time.perf_counter()
        try:
            saved = checkpoint.read(folder, step)
        except checkpoint.Damaged as error:
            print(f"normlab: {error}; left out", file=sys.stderr)
            continue
        model = run.model_at(saved)
        kept = [(name.partition("/"), tensor) for name, tensor in saved.tensors.items()]
        squares = {name: tensor for (kind, _, name), tensor in kept if kind == "square"}
        measure = adam_measure(config.optim, squares, saved.tensors["count"])
        seen = Probe(model, names, tokens[:count], targets[:count], measure)()
        layout, order = Layout.of(seen.columns, config.model.depth, families(model))
        print(f"normlab: probed step {step}, in {time.perf_counter() - since:.1f} s", file=sys.stderr)
        yield Profiles(layout, np.array([step]), seen.values.numpy()[None, order])
