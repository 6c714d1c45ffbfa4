"""The record of a run, typed: `RunRecord`. Readers use its attributes, `record.config.model.depth`, and never its JSON.

run.json and status.json parse completely, into the types of `run_json.py` and `status.py` and those that composed the
config, or the run is damaged: it is then only a `RunEntry` with the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from normlab.base.errors import ConfigError, StoreError
from normlab.base.parsing import from_json, key_of
from normlab.config.arms import NO_DESIGN, SweepDesign
from normlab.config.recorded import parse_config
from normlab.config.schema import RunConfig
from normlab.store.files import io_error
from normlab.store.format import DAMAGED, DIVERGED, FAILED, FINISHED, KILLED, RUN_FILE, RUNNING, STATUS_FILE
from normlab.store.outcome import OUTCOMES, References
from normlab.store.reading import RESTORES_STATUS, damaged
from normlab.store.run_json import Baselines, Identity, Machine, NormFacts, RecordedCorpus, Run, TextRead
from normlab.store.runs import RunFolder
from normlab.store.status import RecordedPack, Status
from normlab.store.throughput import Compute

UNFINISHED = "unfinished"
RESULTS = (*OUTCOMES, FAILED, UNFINISHED)
"""The outcomes of completed runs, and the results of runs without an outcome."""

Setting = str | int | float | bool | None


def as_setting(value: Any) -> Setting:
    """Return the value of an option: a list or a mapping as JSON."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return json.dumps(value)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Setting]:
    """Return the values of nested mappings by dotted name."""
    flat: dict[str, Setting] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = as_setting(value)
    return flat


def flatten_groups(tree: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the same as `flatten`, but flatten equal groups of many configs once."""
    flat: dict[str, Setting] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flatten_group(key, key_of(value)))
        else:
            flat[key] = as_setting(value)
    return flat


@lru_cache(maxsize=4096)  # the configs of a sweep's runs have few different groups
def _flatten_group(group: str, content: bytes) -> dict[str, Setting]:
    return flatten(from_json(content), f"{group}.")


@dataclass(frozen=True, slots=True)
class ArmConflict:
    """Different arms of one run in several sweeps."""

    text: str
    """The run, its arms and their sweeps."""
    command: str
    """The command that summarizes the same selection, without options."""


@dataclass(frozen=True, eq=False)
class RunEntry:
    """A run without a record that parses: a sweep has planned it, or it is damaged."""

    folder: RunFolder
    state: str
    """One of `format.STATES`; killed, damaged or not started."""
    problem: str = field(default="", kw_only=True)
    """What cannot be read, or why there is no run; empty for a `RunRecord`."""
    options: Mapping[str, Setting] = field(default_factory=dict, kw_only=True)
    """Every option of the config, by dotted name; none for a damaged run."""
    arm: str = field(default="", kw_only=True)
    """The arm of the sweep by whose name it was selected; empty without one, and with a conflict."""
    arm_conflict: ArmConflict | None = field(default=None, kw_only=True)
    """Why the run has no single arm: sweeps that were selected together name it differently."""
    design: SweepDesign = field(default=NO_DESIGN, kw_only=True)
    """The design of that sweep; empty without one."""

    @property
    def run_id(self) -> str:
        return self.folder.run_id

    @property
    def name(self) -> str:
        return self.run_id


@dataclass(frozen=True, eq=False, kw_only=True)
class RunRecord(RunEntry):
    run: Run
    config: RunConfig
    """The config; its norm and placement have only the options that all norms and all placements have."""
    status: Status

    @classmethod
    def planned(cls, folder: RunFolder, config: RunConfig, machine: Machine, pack: RecordedPack) -> RunRecord:
        """Return a record with the settings that a planned run will have, and without its corpus."""
        # The corpus is read when the run starts, so that a plan has no baselines yet.
        nothing = TextRead(rows=0, documents=0, empty=0, null=0)
        baselines = Baselines(uniform=0.0, unigram=0.0, bigram=0.0)
        run = Run(
            run_id=folder.run_id,
            name=folder.run_id,
            config=config.recorded(),
            resolved=machine,
            corpus=RecordedCorpus(name="", sha256="", tokenizer="", vocab_size=0, read=nothing, baselines=baselines),
            identity=Identity(
                config=config.identity(),
                corpus="",
                device=machine.device,
                precision=machine.precision,
                compile=machine.compile,
                versions={"norm": 1, "placement": 1, "optim": 1},
            ),
            flops_per_token=0.0,
            norm=NormFacts(formula="", causal=True, batch_statistics=False),
            versions={"torch": ""},
            git=None,
            created=0.0,
            pack=pack,
            fingerprint="",
        )
        parsed = parse_config(run.config)
        return cls(folder, RUNNING, options=flatten(run.config), run=run, config=parsed, status=Status(RUNNING))

    @classmethod
    def load(cls, folder: RunFolder, *, allow_lost_status: bool = False) -> RunRecord:
        """Return the record of a run.

        Args:
            folder: The folder of the run.
            allow_lost_status: Accept a run whose status.json is lost, as a run killed at step 0; resuming writes the
                file again.

        Raises:
            StoreError: It is damaged, or has another format.
        """
        try:
            run = folder.run(Run)
            state, status = folder.state_and_status()
            # Without its status, a run that has taken steps would seem to have been killed at step 0.
            if state == KILLED and folder.has_lost_status() and not allow_lost_status:
                raise StoreError(f"{folder.path / STATUS_FILE}: is missing; {RESTORES_STATUS}")
            config = parse_config(run.config)  # checks the type and the limits of every value
            # The folder may have been moved or copied since the run started.
            config.results_dir = str(folder.path.parent.parent)
            return cls(folder, state, options=flatten_groups(run.config), run=run, config=config, status=status)
        except ConfigError as error:
            raise damaged(folder.path / RUN_FILE, error) from error
        except OSError as error:
            raise io_error(Path(error.filename or folder.path), "read", error) from error

    @classmethod
    def read(cls, folder: RunFolder) -> RunEntry:
        """Return the record of a run, or the entry of a damaged run."""
        try:
            return cls.load(folder)
        except StoreError as error:
            return RunEntry(folder, DAMAGED, problem=str(error))

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def machine(self) -> Machine:
        return self.run.resolved

    @property
    def corpus(self) -> RecordedCorpus:
        return self.run.corpus

    @property
    def references(self) -> References:
        return self.corpus.references(self.status.initial_val_loss)

    @property
    def outcome(self) -> str | None:
        """The run's outcome; None if it is not completed."""
        if self.state == DIVERGED:
            return DIVERGED
        if self.state == FINISHED:
            return self.status.outcome
        return None

    @property
    def result(self) -> str:
        """One of `RESULTS`: the outcome of a completed run, else failed or unfinished."""
        outcome = self.outcome
        if outcome is not None:
            return outcome
        if self.state == FAILED:
            return FAILED
        return UNFINISHED

    @property
    def has_loss(self) -> bool:
        """Whether the run is completed."""
        return self.result in OUTCOMES

    @property
    def loss(self) -> float:
        """Final validation loss, nats/token; infinite if the run diverged, NaN if it has no outcome."""
        # A diverged run has a last finite loss, too; in a mean over seeds it must not count as that.
        if self.result == DIVERGED:
            return math.inf
        if not self.has_loss or self.status.val_loss is None:
            return math.nan
        return self.status.val_loss

    @property
    def has_learned(self) -> bool:
        """Whether the run finished with a loss below the band around the unigram entropy."""
        return self.result == FINISHED and self.references.level(self.loss) == 0

    @property
    def lr(self) -> float:
        return self.config.optim.lr

    @property
    def replicate(self) -> tuple[Setting, Setting]:
        """The seeds of the weights and of the data order; equal replicates of two cells form a pair."""
        return self.config.seed, self.config.data.seed

    @property
    def compute(self) -> Compute:
        machine = self.machine
        return Compute.of(
            self.run.flops_per_token, machine.device_name, machine.precision, machine.devices, self.status.pack_size
        )

    @property
    def flops_per_s(self) -> float | None:
        """Model FLOP/s of this run alone, over the whole run; None before its first step."""
        return self.compute.flops(self.status.tokens_per_s)

    @property
    def mfu(self) -> float | None:
        """MFU of the devices, from 0 to 1, with all runs of the pack.

        None if the peak is not known, or if the run resumed on other devices: its speed is the average over all.
        """
        if any(name in change for change in self.status.changes_at_resume for name in ("devices", "device_name")):
            return None
        return self.compute.mfu(self.status.tokens_per_s)
