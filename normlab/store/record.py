"""The record of a run, typed: `RunRecord`. Readers use its attributes, `record.config.model.depth`, and never its JSON.

Training writes a `Status`, and everything else reads run.json and status.json through the parser below. The parser
accepts any content: a field that is missing, as in an older record, or of another type has its default, which is None
where no other is given. A file that cannot be read at all makes the run damaged, and `problem` gives the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from normlab.errors import StoreError
from normlab.store.files import io_error
from normlab.store.outcome import MARGIN, References, format_loss, loss_of, outcome
from normlab.store.runs import RunFolder
from normlab.store.schema import DAMAGED, DIVERGED, FINISHED, number

T = TypeVar("T")
Setting = str | int | float | bool | None
"""The value of an option."""


def as_setting(value: Any) -> Setting:
    """Return the value of an option: a list or a mapping as JSON."""
    return value if isinstance(value, str | int | float | bool) or value is None else json.dumps(value)


def flatten(tree: Any, prefix: str = "") -> dict[str, Setting]:
    """Return the values of nested mappings by dotted name."""
    flat: dict[str, Setting] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = as_setting(value)
    return flat


def finite(value: Any) -> float | None:
    """Return a finite number of the record; None for anything else."""
    known = number(value)
    return known if known is not None and math.isfinite(known) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mapping_or_none(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def _field(parse: Callable[[Any], Any], *, optional: bool = False) -> Any:
    """Declare a field that holds `parse` of the JSON value with the field's name, or of None without one.

    Args:
        parse: Parses the value.
        optional: Whether `to_json` leaves the field out while it has its default.
    """
    return field(default_factory=lambda: parse(None), metadata={"parse": parse, "optional": optional})


def _part(cls: type[Any], *, optional: bool = False) -> Any:
    return _field(lambda tree: parse_part(cls, tree), optional=optional)


def parse_part(cls: type[T], tree: Any) -> T:
    """Return a part of the record from JSON, in which any field may be missing or of another type."""
    declared = fields(cls)  # pyright: ignore[reportArgumentType]
    return cls(**{each.name: each.metadata["parse"](_mapping(tree).get(each.name)) for each in declared})


def to_json(part: Any) -> dict[str, Any]:
    """Return a part of the record as JSON values, the inverse of `parse_part`."""
    tree: dict[str, Any] = {}
    for each in fields(part):
        value = getattr(part, each.name)
        if each.metadata["optional"] and value == each.metadata["parse"](None):
            continue
        tree[each.name] = to_json(value) if is_dataclass(value) else list(value) if isinstance(value, tuple) else value
    return tree


# run.json

RUN_FIELDS = frozenset({
    "command", "config", "continued_from", "corpus", "created", "fingerprint", "git", "identity", "name", "norm",
    "pack", "placement", "prefix_hash", "resolved", "run_id", "version", "versions", "warnings",
})  # fmt: skip
"""Fields of run.json. Readers report fields that a newer normlab added under the same record version."""


@dataclass(frozen=True, slots=True)
class NormPart:
    """Config of the norm."""

    preset: str | None = _field(_text)
    name: str | None = _field(_text)


@dataclass(frozen=True, slots=True)
class PlacementPart:
    """Config of the placement."""

    name: str | None = _field(_text)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """Config of the model."""

    preset: str | None = _field(_text)
    depth: float | None = _field(finite)
    width: float | None = _field(finite)
    context: float | None = _field(finite)


@dataclass(frozen=True, slots=True)
class OptimPart:
    """Config of the optimiser."""

    name: str | None = _field(_text)
    lr: float | None = _field(finite)
    warmup_steps: float | None = _field(finite)


@dataclass(frozen=True, slots=True)
class TrainPart:
    """Config of training."""

    steps: float | None = _field(finite)
    batch_size: float | None = _field(finite)


@dataclass(frozen=True, slots=True)
class CadencePart:
    """Config of evaluations or of statistics."""

    every: float | None = _field(finite)


@dataclass(frozen=True, slots=True)
class Config:
    """The options that readers use by attribute; `RunRecord.options` has all of them, by dotted name."""

    norm: NormPart = _part(NormPart)
    placement: PlacementPart = _part(PlacementPart)
    model: ModelPart = _part(ModelPart)
    optim: OptimPart = _part(OptimPart)
    train: TrainPart = _part(TrainPart)
    eval: CadencePart = _part(CadencePart)
    stats: CadencePart = _part(CadencePart)
    seed: float | None = _field(finite)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the machine decided, and the values of the options that were `auto`."""

    device: str | None = _field(_text)
    device_name: str | None = _field(_text)
    precision: str | None = _field(_text)
    compile: Setting = _field(as_setting)
    deterministic: Setting = _field(as_setting)
    init: str | None = _field(_text)
    threads: Setting = _field(as_setting)
    instructions: Setting = _field(as_setting)


@dataclass(frozen=True, slots=True)
class Baselines:
    """Losses of models that know no context, in nats/token."""

    uniform: float | None = _field(number)
    unigram: float | None = _field(number)
    bigram: float | None = _field(number)
    targets: float | None = _field(finite)
    """Number of evaluated tokens; None in an older record, whose baselines are of the whole validation text."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The corpus."""

    name: str | None = _field(_text)
    sha256: str | None = _field(_text)
    tokenizer: Setting = _field(as_setting)
    vocab_size: Setting = _field(as_setting)
    baselines: Baselines = _part(Baselines)

    def references(self, initial_loss: Any = None) -> References:
        """Return the reference losses of a run, given its validation loss before the first update."""
        recorded = (self.baselines.uniform, self.baselines.unigram, self.baselines.bigram, initial_loss)
        losses = [finite(loss_of(loss)) for loss in recorded]
        return References(*losses, whole_text=losses[1] is not None and self.baselines.targets is None)


@dataclass(frozen=True, slots=True)
class Pack:
    """The pack in which the run trained."""

    sweep: str | None = _field(_text)
    number: float | None = _field(finite)
    runs: tuple[str, ...] = _field(_texts)
    """The ids of its runs; empty for a run that trained alone."""


@dataclass(frozen=True, slots=True)
class Git:
    """The checkout that the run was started from; empty where there was none."""

    commit: str | None = _field(_text)
    diff: str | None = _field(_text)
    """SHA-256 of the uncommitted changes; empty without any."""

    @property
    def label(self) -> str:
        """The beginnings of the commit and of the hash of its changes, as text."""
        changes = f" with changes {self.diff[:10]}" if self.diff else ""
        return f"{self.commit[:10]}{changes}" if self.commit else "unknown"


# status.json


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """A training step."""

    step: float | None = _field(finite)
    loss: float | None = _field(number)
    grad_norm: float | None = _field(number)

    def __str__(self) -> str:
        grad_norm = "?" if self.grad_norm is None else f"{self.grad_norm:.4g}"
        return f"loss {format_loss(self.loss)}, gradient norm {grad_norm}"


@dataclass(frozen=True, slots=True)
class Divergence(StepNumbers):
    """The step that diverged."""

    reason: str | None = _field(_text, optional=True)
    """None where the loss or the gradient was NaN or infinite."""
    last_finite: StepNumbers | None = _field(lambda tree: parse_part(StepNumbers, tree) if tree else None)
    """The last step with finite loss and gradient norm."""

    def __str__(self) -> str:
        text = self.reason or StepNumbers.__str__(self)
        last = self.last_finite
        return text if last is None else f"{text}; last finite at step {or_unknown(last.step)}: {last}"


@dataclass(frozen=True, slots=True)
class Status:
    """The content of status.json. Losses are in nats/token."""

    state: str | None = _field(_text)
    """One of `schema.STATES`; a reader uses `RunRecord.state`, which knows killed runs too."""
    step: float | None = _field(finite)
    """Updates made."""
    train_loss: float | None = _field(number)
    val_loss: float | None = _field(number)
    val_loss_batch_statistics: float | None = _field(number)
    """Validation loss in training mode, for a norm that computes something else in that mode."""
    best_val_loss: float | None = _field(number)
    best_val_step: float | None = _field(finite)
    seconds: float | None = _field(finite)
    """Time in steps, without evaluations and checkpoints, over all processes of the run."""
    changes_at_resume: tuple[str, ...] = _field(_texts)
    """Each resume with other code or on another machine: the step, and what differed."""
    steps: float | None = _field(finite)
    tokens: float | None = _field(finite)
    tokens_per_s: float | None = _field(finite)
    peak_memory_bytes: float | None = _field(finite)
    checkpoint: float | None = _field(finite)
    """Step of the newest checkpoint."""
    pack: Pack = _part(Pack, optional=True)
    """The pack in which the run last trained."""
    diverged: Divergence = _part(Divergence, optional=True)
    error: str | None = _field(_text, optional=True)
    initial_val_loss: float | None = _field(number, optional=True)
    """Validation loss before the first update; None before the run is completed, and in an older record."""
    outcome: str | None = _field(_text, optional=True)
    """None before the run is completed, and in an older record, whose outcome is `RunRecord.outcome`."""
    metrics: Mapping[str, Any] | None = _field(_mapping_or_none, optional=True)
    """Number of rows and SHA-256 of the metrics of a completed run, by which readers notice a changed file."""
    spikes: Mapping[str, Any] | None = _field(_mapping_or_none, optional=True)
    """Spikes by rule; None in an older record."""
    updated: float | None = _field(finite, optional=True)
    """Unix time of the file, seconds."""

    def completed(self, references: References, last_finite: StepNumbers | None) -> Status:
        """Return the last status of a run with its outcome; a final loss that is a divergence makes it diverged.

        Args:
            references: The run's reference losses.
            last_finite: The last training step with finite loss and gradient norm.
        """
        name = outcome_of(self.state, self, references)
        if name is None:
            return self
        result = replace(self, initial_val_loss=references.initial, outcome=name)
        if name == DIVERGED and self.state != DIVERGED:
            divergence = replace(_divergence_at_end(self, references), last_finite=last_finite)
            result = replace(result, state=DIVERGED, diverged=divergence)
        return result


@dataclass(frozen=True, eq=False)
class RunRecord:
    """A run: its folder, its record and its state."""

    folder: RunFolder
    state: str
    """One of `schema.STATES`; killed or damaged; or one of `query.NO_RUN_STATES`."""
    problem: str
    """What cannot be read; empty if nothing is damaged."""
    options: Mapping[str, Setting]
    """Every option of the config, by dotted name."""
    config: Config
    machine: Machine
    corpus: Corpus
    identity: Mapping[str, Setting]
    """The options that the numbers depend on, by dotted name; empty in an older record."""
    code_versions: Mapping[str, Any]
    """Versions of the norm, the placement and the init rule; in an older record the hashes of their source code."""
    versions: Mapping[str, Any]
    """Versions of normlab, Python and the libraries."""
    git: Git
    fingerprint: Setting
    """Hash of what the block computes; None in an older record."""
    pack: Pack
    created: Setting
    """Unix time, seconds; a text in an older record."""
    given_name: str | None
    prefix_hash: str | None
    """Hash that runs of other lengths with the same first steps share; None where the schedule depends on length."""
    is_branch: bool
    """Whether its first steps were copied from a parent run."""
    status: Status
    unknown_fields: tuple[str, ...]
    """Fields that this normlab does not know."""

    @classmethod
    def parse(
        cls, folder: RunFolder, run: Mapping[str, Any], status: Mapping[str, Any], state: str, problem: str = ""
    ) -> RunRecord:
        """Return the record in the content of run.json and status.json; either may be empty."""
        identity = _mapping(run.get("identity"))
        return cls(
            folder=folder,
            state=state,
            problem=problem,
            options=flatten(run.get("config")),
            config=parse_part(Config, run.get("config")),
            machine=parse_part(Machine, run.get("resolved")),
            corpus=parse_part(Corpus, run.get("corpus")),
            identity=flatten(identity.get("config")),
            code_versions=_mapping(identity.get("versions")) or _mapping(identity.get("sources")),
            versions=_mapping(run.get("versions")),
            git=parse_part(Git, run.get("git")),
            fingerprint=as_setting(run.get("fingerprint")),
            pack=parse_part(Pack, run.get("pack")),
            created=as_setting(run.get("created")),
            given_name=_text(run.get("name")),
            prefix_hash=_text(run.get("prefix_hash")),
            is_branch="continued_from" in run,
            status=parse_part(Status, status),
            unknown_fields=tuple(sorted({*run, *status} - RUN_FIELDS - {each.name for each in fields(Status)})),
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

    @cached_property
    def outcome(self) -> str | None:
        """The run's outcome; None if it is not completed, or its record has no final loss."""
        return outcome_of(self.state, self.status, self.references)

    @property
    def divergence(self) -> Divergence:
        """How the run diverged, for a run whose outcome is diverged."""
        # An older record may be called finished although its final loss is a divergence.
        return self.status.diverged if self.state == DIVERGED else _divergence_at_end(self.status, self.references)


def outcome_of(state: str | None, status: Status, references: References) -> str | None:
    """Return the outcome of a run; None if it is not completed, or its status has no final loss."""
    final, best = loss_of(status.val_loss), loss_of(status.best_val_loss)
    if state == DIVERGED:
        return DIVERGED
    if state != FINISHED or final is None:
        return None
    return outcome(final, final if best is None else min(best, final), references)


def _divergence_at_end(status: Status, references: References) -> Divergence:
    """Return the step, the training loss and the reason of a final validation loss that is a divergence."""
    final = status.val_loss
    reason = f"its final validation loss is {format_loss(final)}"
    if final is not None and math.isfinite(final):
        losses = {"ln V": references.uniform, "the initial loss": references.initial}
        start = " and ".join(f"{name} {value:.4f}" for name, value in losses.items() if value is not None)
        reason += f", more than {MARGIN:g} nat above {start}: worse than a uniform guess"
    return Divergence(status.step, status.train_loss, reason=reason)


def or_unknown(value: float | None) -> str:
    """Return a number as text, and a question mark for None."""
    return "?" if value is None else f"{value}"
