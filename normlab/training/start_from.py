"""`train.start_from`: a new run starts from a checkpoint of another run, or from the weights in a folder.

RUN@STEP: the new folder gets RUN's rows, statistics and checkpoint of that step, as if the run had made those steps
itself: its steps, tokens, seconds and FLOPs count from step 0 of RUN, and it needs RUN no longer. All options that
changed the numbers of those steps must be equal, except `train.steps` and those of the optimiser.

FOLDER, as transformers saves a model: the run makes its first update to these weights. Its checkpoint of step 0 holds
them, so that it needs the folder no longer. The run id depends on the SHA-256 of the weights, not on the path. Training
knows nothing of such folders: the module `READER` reads them.
"""

import os
import shutil
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from normlab.base.errors import ConfigError, StoreError
from normlab.base.parsing import is_whole_number
from normlab.config.schema import RunConfig
from normlab.config.train import FOLDER_OF_WEIGHTS
from normlab.data.tokenizers import Tokenizer
from normlab.store.files import write_atomic
from normlab.store.format import RUNS_FOLDER, STATISTICS_FOLDER
from normlab.store.query import find_runs, is_run, resolve_run
from normlab.store.reading import first_line, read_bytes, split_first_line
from normlab.store.record import Setting, flatten
from normlab.store.run_json import Identity, Run
from normlab.store.runs import RunFolder
from normlab.training import checkpoint
from normlab.training.changed_plugins import changed_plugins
from normlab.training.checkpoint import Checkpoint

READER = "normlab.hf.folder"
"""The module that reads folders of weights; it has the names of `WeightsReader`."""


class WeightsReader(Protocol):
    """Reads the weights in a folder of another library."""

    HUB: str
    """How the name of a model begins that is no folder of this machine."""

    def is_model(self, name: str) -> bool:
        """Return whether a name is that of a model, without reading it."""
        ...

    def weights_sha256(self, name: str) -> str:
        """Return the SHA-256 of a model's weights."""
        ...

    def check_weights(self, name: str, config: RunConfig, tokenizer: Tokenizer) -> list[str]:
        """Check that a run can start from a model, and return the warnings about its start."""
        ...

    def read_weights(self, name: str, config: RunConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
        """Return the weights of a run that `check_weights` accepts, by the names of its model."""
        ...


def _reader() -> WeightsReader:
    # By its name and at the call: it imports Hydra, which is slow, and no run without such weights needs it.
    reader: Any = import_module(READER)
    return reader


def resolve_start(config: RunConfig) -> RunConfig:
    """Return the config with `train.start_from` as RUN_ID@STEP or as FOLDER@SHA256.

    A run without a step is given its newest checkpoint. If the folder is gone, its hash is that which a run recorded.

    Raises:
        StoreError: There is no such run in the results folder and no such folder, or it has no checkpoint or weights.
    """
    text = config.train.start_from
    if text is None or FOLDER_OF_WEIGHTS.fullmatch(text):
        return config
    reader = _reader()
    place = text
    if not text.startswith(reader.HUB):
        place = os.path.abspath(os.path.expanduser(text))
    if reader.is_model(text):
        return _with_start(config, f"{place}@{reader.weights_sha256(text)}")
    name, _, step = text.rpartition("@")
    if is_whole_number(step) and reader.is_model(name):
        raise ConfigError(f"train.start_from={text}: a folder of weights has no steps; leave out @{step}")
    if not is_whole_number(step):
        name, step = text, ""
    runs = Path(config.results_dir) / RUNS_FOLDER
    try:
        folder = resolve_run(name, config.results_dir)
    except StoreError as error:
        known = _recorded_starts(place, config.results_dir)
        if len(known) == 1:
            return _with_start(config, known[0])
        if os.path.isdir(place) and not is_run(Path(place)):
            raise StoreError(
                f"train.start_from={text}: the folder has no config.json; name one that transformers saved, or a run"
            ) from error
        raise StoreError(f"train.start_from={text}: {error}") from error
    if folder.path.resolve().parent != runs.resolve():
        raise StoreError(f"train.start_from={text}: is in another results folder; copy it to {runs}")
    steps = [int(step)] if step else checkpoint.steps(folder.path / checkpoint.FOLDER)
    if not steps:
        raise StoreError(
            f"train.start_from={text}: has no checkpoint (yet, or `normlab rm --checkpoints` deleted them, or "
            "`normlab share` left them out, which takes them with --checkpoints); wait for one, or choose another run"
        )
    return _with_start(config, f"{folder.run_id}@{steps[-1]}")


def _recorded_starts(place: str, results_dir: str) -> list[str]:
    """Return FOLDER@SHA256 of the different weights from which runs have started that were in a folder."""
    recorded = {str(run.options.get("train.start_from")) for run in find_runs(results_dir)}
    starts: list[str] = []
    for start in recorded:
        match = FOLDER_OF_WEIGHTS.fullmatch(start)
        if match is not None and match[1] == place:
            starts.append(start)
    return starts


def _with_start(config: RunConfig, start: str) -> RunConfig:
    return replace(config, train=replace(config.train, start_from=start))


def check_start(config: RunConfig, identity: Identity, tokenizer: Tokenizer) -> list[str]:
    """Check that a new run can start from what its resolved `train.start_from` names, and return the warnings about it.

    Raises:
        ConfigError: The other run differs in an option that must be equal, or has made all the steps of this one. Or
            the folder holds another model.
        StoreError: The other run has no checkpoint of that step, or its record or the folder cannot be read.
    """
    if config.train.start_from is None:
        return []
    weights = FOLDER_OF_WEIGHTS.fullmatch(config.train.start_from)
    if weights is not None:
        warnings = _reader().check_weights(weights[1], config, tokenizer)
        if _reader().weights_sha256(weights[1]) != weights[2]:
            raise StoreError(
                f"train.start_from={weights[1]}: its weights have changed since the run was planned; restore them, or "
                "plan the run again"
            )
        return warnings
    parent, step = _start(config)
    option = f"train.start_from={config.train.start_from}"
    steps = checkpoint.steps(parent.path / checkpoint.FOLDER)
    if step not in steps:
        raise StoreError(
            f"{option}: the run has no checkpoint of step {step}; choose one of {', '.join(map(str, steps)) or 'none'} "
            "(a run keeps its two newest, and with optim.schedule=wsd the one at the start of its decay)"
        )
    if step >= config.train.steps:
        raise ConfigError(f"train.steps={config.train.steps}: must be greater than the step of {option}")
    parent_identity = parent.run(Run).identity
    ours, theirs = _fixed_settings(identity), _fixed_settings(parent_identity)
    different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    # A changed plugin first: its version would be among the options that differ.
    files = changed_plugins(config, parent_identity.versions)
    if files:
        raise ConfigError(f"{option}: {' and '.join(files)} has changed since that run started; undo the change")
    if different:
        values = ", ".join(f"{name}={ours.get(name)} (there {theirs.get(name)})" for name in different[:3])
        raise ConfigError(
            f"{option}: differs in {values}; set it as there (only train.steps and options of an optimiser may differ)"
        )
    return []


def read_weights(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Return the weights in the folder that a resolved `train.start_from` names, by name; none if it names a run.

    Raises:
        StoreError: A file cannot be read.
    """
    weights = FOLDER_OF_WEIGHTS.fullmatch(config.train.start_from or "")
    if weights is None:
        return {}
    return _reader().read_weights(weights[1], config, tokenizer)


def read_start(config: RunConfig) -> Checkpoint:
    """Return the checkpoint that a resolved `train.start_from` names.

    Raises:
        StoreError: The checkpoint is damaged or that of a diverged run, or rows before it are missing.
    """
    parent, step = _start(config)
    saved = checkpoint.read(parent.path / checkpoint.FOLDER, step)
    problem = parent.metrics_problem() or parent.statistics_problem()
    if saved.meta["diverged"] is not None:
        problem = f"run {parent.run_id} diverged at step {step}; choose an earlier checkpoint"
    elif parent.size() < saved.meta["metrics_bytes"]:
        problem = f"{parent.metrics_path}: rows before step {step} are missing; restore a copy"
    if problem:
        raise StoreError(f"train.start_from={config.train.start_from}: {problem}")
    return saved


def copy_start(config: RunConfig, folder: RunFolder) -> None:
    """Copy the record and the checkpoint that a resolved `train.start_from` names into a new run's folder.

    Raises:
        StoreError: As `read_start`, or a file cannot be written.
    """
    parent, step = _start(config)
    saved = read_start(config)
    shutil.rmtree(folder.path / STATISTICS_FOLDER, ignore_errors=True)  # a killed process may have copied a part
    parent.statistics.copy(folder.path, before=step)
    _, rows = split_first_line(read_bytes(parent.metrics_path)[: saved.meta["metrics_bytes"]])
    metrics = first_line(folder.run_id) + rows
    meta = {**saved.meta, "metrics_bytes": len(metrics)}
    checkpoint.save(folder.path / checkpoint.FOLDER, step, saved.tensors, meta)
    # Last: a folder without rows has not started.
    write_atomic(folder.metrics_path, metrics)


def _start(config: RunConfig) -> tuple[RunFolder, int]:
    """Return the folder and the step of a resolved `train.start_from`."""
    run_id, _, step = str(config.train.start_from).rpartition("@")
    return RunFolder(Path(config.results_dir) / RUNS_FOLDER / run_id), int(step)


def _fixed_settings(identity: Identity) -> dict[str, Setting]:
    """Return the parts of an identity that both runs must share, by option."""
    free = ("config.optim.", "config.train.steps", "config.train.start_from")
    return {
        name.removeprefix("config."): value
        for name, value in flatten(asdict(identity)).items()
        if name == "config.optim.name" or not name.startswith(free)
    }
