"""The record of a run, typed: `RunRecord`. Readers use its attributes, `record.config.model.depth`, and never its JSON.

run.json and status.json are parsed here only, and the parser accepts any content (see `parts`). A file that cannot be
read at all makes the run damaged, and `problem` gives the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from normlab.errors import StoreError
from normlab.store.files import io_error
from normlab.store.format import DAMAGED, DIVERGED, FINISHED
from normlab.store.outcome import References, loss_of
from normlab.store.parts import (
    Setting,
    as_setting,
    finite,
    flatten,
    json_field,
    json_part,
    mapping,
    number,
    parse_part,
    text,
    texts,
)
from normlab.store.reading import OtherFormat
from normlab.store.runs import RunFolder
from normlab.store.status import RecordedPack, Status
from normlab.store.throughput import Compute


@dataclass(frozen=True, slots=True)
class NormPart:
    """Config of the norm."""

    preset: str | None = json_field(text)
    name: str | None = json_field(text)


@dataclass(frozen=True, slots=True)
class PlacementPart:
    """Config of the placement."""

    name: str | None = json_field(text)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Config of the model."""

    preset: str | None = json_field(text)
    depth: float | None = json_field(finite)
    width: float | None = json_field(finite)
    context: float | None = json_field(finite)


@dataclass(frozen=True, slots=True)
class OptimPart:
    """Config of the optimiser."""

    name: str | None = json_field(text)
    lr: float | None = json_field(finite)
    warmup_steps: float | None = json_field(finite)


@dataclass(frozen=True, slots=True)
class TrainPart:
    """Config of training."""

    steps: float | None = json_field(finite)
    batch_size: float | None = json_field(finite)


@dataclass(frozen=True, slots=True)
class CadencePart:
    """Config of evaluations or of statistics."""

    every: float | None = json_field(finite)


@dataclass(frozen=True, slots=True)
class Config:
    """The options that readers use by attribute; `RunRecord.options` has all of them, by dotted name."""

    norm: NormPart = json_part(NormPart)
    placement: PlacementPart = json_part(PlacementPart)
    model: ModelPart = json_part(ModelPart)
    optim: OptimPart = json_part(OptimPart)
    train: TrainPart = json_part(TrainPart)
    eval: CadencePart = json_part(CadencePart)
    stats: CadencePart = json_part(CadencePart)
    seed: float | None = json_field(finite)
    plugins: tuple[str, ...] = json_field(texts)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine decided, and the values of the options that were `auto`."""

    device: str | None = json_field(text)
    device_name: str | None = json_field(text)
    devices: Setting = json_field(as_setting)
    precision: str | None = json_field(text)
    compile: Setting = json_field(as_setting)
    graph: Setting = json_field(as_setting)
    """Whether steps were replayed as CUDA graphs."""
    deterministic: Setting = json_field(as_setting)
    init: str | None = json_field(text)
    decayed: str | None = json_field(text)
    """The parameters with weight decay."""
    threads: Setting = json_field(as_setting)
    instructions: Setting = json_field(as_setting)


@dataclass(frozen=True, slots=True)
class Baselines:
    """Losses of models that know no context, in nats/token."""

    uniform: float | None = json_field(number)
    unigram: float | None = json_field(number)
    bigram: float | None = json_field(number)


@dataclass(frozen=True, slots=True)
class TextRead:
    """Sums over the files of a corpus, or over the rows of its dataset."""

    formats: Mapping[str, Any] = json_field(mapping)
    """Number of files of each format."""
    documents: float | None = json_field(finite)
    empty: float | None = json_field(finite)
    """Texts of no characters, which were left out."""
    null: float | None = json_field(finite)
    """Rows without a text, which were left out."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The corpus."""

    name: str | None = json_field(text)
    sha256: str | None = json_field(text)
    tokenizer: Setting = json_field(as_setting)
    vocab_size: Setting = json_field(as_setting)
    read: TextRead = json_part(TextRead)
    baselines: Baselines = json_part(Baselines)

    def references(self, initial_loss: Any = None) -> References:
        """Return the reference losses of a run, given its validation loss before the first update."""
        recorded = (self.baselines.uniform, self.baselines.unigram, self.baselines.bigram, initial_loss)
        return References(*(finite(loss_of(loss)) for loss in recorded))


@dataclass(frozen=True, slots=True)
class Git:
    """The checkout that the run was started from; empty where there was none."""

    commit: str | None = json_field(text)
    diff: str | None = json_field(text)
    """SHA-256 of the uncommitted changes; empty without any."""

    @property
    def label(self) -> str:
        """The beginnings of the commit and of the hash of its changes, as text."""
        changes = f" with changes {self.diff[:10]}" if self.diff else ""
        return f"{self.commit[:10]}{changes}" if self.commit else "unknown"


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run: its folder, its record and its state."""

    folder: RunFolder
    state: str
    """One of `format.STATES`; killed or damaged; or one of `query.NO_RUN_STATES`."""
    problem: str
    """What cannot be read; empty if nothing is damaged."""
    options: Mapping[str, Setting]
    """Every option of the config, by dotted name."""
    config: Config
    machine: Machine
    corpus: Corpus
    identity: Mapping[str, Setting]
    """The options that the numbers depend on, by dotted name."""
    code_versions: Mapping[str, Any]
    """Versions of the norm, the placement, the init rule and the optimiser."""
    versions: Mapping[str, Any]
    """Versions of normlab, Python and the libraries."""
    git: Git
    fingerprint: Setting
    """Hash of what the block computes."""
    pack: RecordedPack
    compute: Compute
    created: float | None
    """Unix time, seconds."""
    given_name: str | None
    status: Status

    @classmethod
    def parse(
        cls, folder: RunFolder, run: Mapping[str, Any], status: Mapping[str, Any], state: str, problem: str = ""
    ) -> RunRecord:
        """Return the record in the content of run.json and status.json; either may be empty."""
        identity = mapping(run.get("identity"))
        return cls(
            folder=folder,
            state=state,
            problem=problem,
            options=flatten(run.get("config")),
            config=parse_part(Config, run.get("config")),
            machine=parse_part(Machine, run.get("resolved")),
            corpus=parse_part(Corpus, run.get("corpus")),
            identity=flatten(identity.get("config")),
            code_versions=mapping(identity.get("versions")),
            versions=mapping(run.get("versions")),
            git=parse_part(Git, run.get("git")),
            fingerprint=as_setting(run.get("fingerprint")),
            pack=parse_part(RecordedPack, run.get("pack")),
            compute=Compute.parse({**run, "pack": status.get("pack")}),
            created=finite(run.get("created")),
            given_name=text(run.get("name")),
            status=parse_part(Status, status),
        )

    @classmethod
    def read(cls, folder: RunFolder) -> RunRecord:
        """Return the record of a run; never raises for a damaged one."""
        run: dict[str, Any] = {}
        status: dict[str, Any] = {}
        state = DAMAGED
        problems: list[str] = []
        try:
            run = folder.run()
        except OtherFormat as error:  # status.json has that format too
            return cls.parse(folder, {}, {}, DAMAGED, str(error))
        except StoreError as error:
            problems.append(str(error))
        try:
            state, status = folder.state_and_status()
        except StoreError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(str(io_error(Path(error.filename or folder.path), "read", error)))
        return cls.parse(folder, run, status, DAMAGED if problems else state, ". ".join(problems))

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.folder.run_id

    @property
    def name(self) -> str:
        """The run's name, or its id if it has none."""
        return self.given_name or self.run_id

    @cached_property
    def references(self) -> References:
        """The run's reference losses."""
        return self.corpus.references(self.status.initial_val_loss)

    @property
    def outcome(self) -> str | None:
        """The run's outcome; None if it is not completed."""
        return DIVERGED if self.state == DIVERGED else self.status.outcome if self.state == FINISHED else None

    @property
    def flops_per_s(self) -> float | None:
        """Model FLOP/s of this run alone, over the whole run; None if the record has no FLOPs or no speed."""
        return self.compute.flops(self.status.tokens_per_s)

    @property
    def mfu(self) -> float | None:
        """MFU of the devices, from 0 to 1, with all runs of the pack.

        None if the peak is not known, or if the run resumed on other devices: its speed is the average over all.
        """
        if any(name in change for change in self.status.changes_at_resume for name in ("devices", "device_name")):
            return None
        return self.compute.mfu(self.status.tokens_per_s)
