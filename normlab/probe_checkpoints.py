"""Probe statistics of a run's checkpoints, measured after the run (`normlab inspect RUN --probe`)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from normlab.data.batches import validation_windows
from normlab.data.corpus import open_corpus
from normlab.errors import StoreError, notify, warn
from normlab.loaded_run import LoadedRun
from normlab.stats.measure.core import parameter_families
from normlab.stats.measure.probe import Probe, adam_preconditioner
from normlab.stats.measure.schedule import probe_examples
from normlab.stats.profiles import Layout, Profiles
from normlab.stats.registry import STATISTICS
from normlab.stats.statistic import PROBE
from normlab.training import checkpoint


def probe_checkpoints(run: LoadedRun, only: str | None = None) -> Iterator[Profiles]:
    """Yield the probe statistics of each intact checkpoint of a run, oldest first; print the time of each.

    Args:
        run: The run.
        only: One statistic to measure; None for all of the probe's.

    Raises:
        StoreError: There is no checkpoint.
        ConfigError, DataError: The run's config or its corpus cannot be read.
    """
    folder, config = run.folder.path / checkpoint.FOLDER, run.config
    steps = sorted(checkpoint.steps(folder))
    if not steps:
        raise StoreError(f"run {run.folder.run_id} has no checkpoint to probe; the same `normlab train` makes one")
    corpus = open_corpus(config.data)
    tokens, targets = validation_windows(corpus.val, config.model.context, config.eval.sequences)
    count = probe_examples(config.train.batch_size)
    names = frozenset(name for name, entry in STATISTICS.items() if entry.tier == PROBE and only in (None, name))
    for step in steps:
        start = time.perf_counter()
        try:
            saved = checkpoint.read(folder, step)
        except checkpoint.DamagedCheckpoint as error:
            warn(f"{error}; left out")
            continue
        model = run.model_at(saved)
        prefix = "square/"
        squares = {n.removeprefix(prefix): tensor for n, tensor in saved.tensors.items() if n.startswith(prefix)}
        preconditioner = adam_preconditioner(config.optim, squares, saved.tensors["count"])
        measurement = Probe(model, names, tokens[:count], targets[:count], preconditioner)()
        layout, order = Layout.of(measurement.columns, config.model.depth, parameter_families(model))
        notify(f"probe of step {step} took {time.perf_counter() - start:.1f} s")
        yield Profiles(layout, np.array([step]), measurement.values.numpy()[None, order])
