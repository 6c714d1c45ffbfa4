"""A training run: its id, its folder, its trackers and its progress. A loop trains one, or those of a pack.

The identity of a run holds the config fields that can change the numbers, the corpus, the device kind, the precision,
the compile mode, and the versions of the norm, the placement, the init rule and the optimiser. Its hash is part of the
run id: the same command on the same machine finds the same folder again, and a norm with a new version starts a new
run.

The loop updates the progress and gives the rows to the trackers; the writer's thread writes the record. What it writes
is therefore a copy: the loop may be some steps ahead.
"""

import hashlib
import math
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from normlab.base.errors import StoreError
from normlab.base.parsing import canonical_hash
from normlab.base.plugins import plugin_file, version_of
from normlab.base.version import __version__
from normlab.catalogue.placements.init_rules import INIT_RULE_VERSIONS
from normlab.catalogue.statistics.profiles import Profiles
from normlab.config.schema import RunConfig
from normlab.data.batches import validation_windows
from normlab.data.corpus import Corpus
from normlab.model.flops import flops_per_token
from normlab.store.format import CLIP_FACTOR_KEY, DIVERGED, to_json
from normlab.store.runs import RunFolder
from normlab.store.status import Divergence, RecordedPack, Status, StepNumbers
from normlab.tracking.console import Console, Row
from normlab.training import checkpoint
from normlab.training.machine import RuntimeSettings
from normlab.training.optim import kept_step, learning_rate
from normlab.training.writer import Writer

PLUGINS = "plugins"
"""The folder of the copies of plugins in a run's folder."""
FRESH = "start another run beside it with run.fresh=true"


@dataclass(slots=True)
class Progress:
    """The part of status.json that grows with the run; a checkpoint holds a copy."""

    step: int = 0
    """Updates made."""
    train_loss: float | None = None
    val_loss: float | None = None
    val_loss_batch_statistics: float | None = None
    val_loss_ema: float | None = None
    best_val_loss: float | None = None
    best_val_step: int | None = None
    seconds: float = 0.0
    """Time in steps, without evaluations and checkpoints, over all processes of the run."""
    changes_at_resume: list[str] = field(default_factory=list)
    """Each resume with other code or on another machine: the step, and what differed."""
    graph_problem: str | None = None
    """Why its steps could not be captured as CUDA graphs, where `train.graph` is on; it trains without them."""


@dataclass(slots=True)
class TrainingRun:
    """The state of one run beside its tensors, and its record."""

    config: RunConfig
    folder: RunFolder
    new_run_json: dict[str, Any] = field(default_factory=dict)
    """The run.json that a start today would write."""
    run_json: dict[str, Any] = field(default_factory=dict)
    """The run.json that the folder holds: `new_run_json`, or that of the first start."""
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    """The weights of a new run that does not draw them, by name, until its first checkpoint holds them."""
    trackers: Sequence[Console] = ()
    writer: Writer = field(default_factory=Writer)
    """The writer of all runs of the loop."""
    progress: Progress = field(default_factory=Progress)
    diverged: Divergence | None = None
    divergence_written: bool = False
    """Whether status.json already has the state diverged, which no later state of the pack replaces."""
    saved_step: int | None = None
    """The step of the newest checkpoint that this process wrote or resumed from."""
    last_finite: StepNumbers | None = None
    """The last step with finite loss and gradient norm."""
    recorded: tuple[Progress, Divergence | None] = field(default_factory=lambda: (Progress(), None))
    """`progress` and `diverged` after the rows that were written last."""

    # The record. The loop calls these methods; the writer's thread writes.

    def add_steps(self, first: int, scalars: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
        """Update the progress by some steps and return their rows, up to the step that diverged, if one did.

        Args:
            scalars: For each step the loss, the gradient norm, the clip factor, and whether the run is still trained.
        """
        rows: list[dict[str, Any]] = []
        for step, (loss, grad_norm, clip_factor, alive) in enumerate(scalars, first):
            lr = learning_rate(self.config.optim, self.config.train.steps, step)
            values = {"loss": loss, "grad_norm": grad_norm, CLIP_FACTOR_KEY: clip_factor, "lr": lr}
            rows.append({"kind": "train", "step": step, **values})
            if not alive:
                # The update was not made: the state is that after `step` updates.
                self.diverged = Divergence(step, loss, grad_norm, last_finite=self.last_finite)
                self.progress.step = step
                self.cut_statistics(step + 1)  # passes between later steps measured a run that had diverged
                return rows
            if math.isfinite(grad_norm):  # an overflow in float16 makes no update, and the run goes on
                self.last_finite = StepNumbers(step, loss, grad_norm)
            self.progress.train_loss = loss
        self.progress.step = first + len(scalars)
        return rows

    def record_evaluation(self, losses: Mapping[str, float]) -> None:
        progress = self.progress
        progress.val_loss = losses["loss"]
        progress.val_loss_batch_statistics = losses.get("loss_batch_statistics")
        progress.val_loss_ema = losses.get("loss_ema")
        best = progress.best_val_loss
        if best is None:
            best = math.inf
        if losses["loss"] < best:  # false for NaN
            progress.best_val_loss, progress.best_val_step = losses["loss"], progress.step
        self.record_rows([{"kind": "eval", "step": progress.step, **losses}])

    def record_rows(self, rows: Sequence[Row]) -> None:
        """Add rows to the record, and give them to the trackers."""
        self.writer.add(partial(self.write_rows, rows, replace(self.progress), self.diverged))
        for tracker in self.trackers:
            tracker.log(rows)

    def record_statistics(self, tier: str, profiles: Profiles) -> None:
        self.writer.add(partial(self.write_statistics, self.folder.statistics.append, tier, profiles))

    def cut_statistics(self, step: int) -> None:
        self.writer.add(partial(self.write_statistics, self.folder.statistics.truncate, step))

    def status(self, state: str, peak_memory_bytes: int | None) -> Status:
        progress, train = self.progress, self.config.train
        numbers: dict[str, Any] = asdict(progress) | {"changes_at_resume": tuple(progress.changes_at_resume)}
        tokens = progress.step * train.batch_size * self.config.model.context
        return Status(
            state=state,
            **numbers,
            steps=train.steps,
            tokens=tokens,
            tokens_per_s=tokens / progress.seconds if progress.seconds else None,
            peak_memory_bytes=peak_memory_bytes,
            checkpoint=self.saved_step,
            pack=msgspec.convert(self.new_run_json.get("pack", {}), RecordedPack),
            diverged=self.diverged,
        )

    def meta(self) -> dict[str, Any]:
        """Return the content of meta.json of a checkpoint, but for the length of the record."""
        return {
            "progress": asdict(self.progress),
            "last_finite": None if self.last_finite is None else asdict(self.last_finite),
            "diverged": None if self.diverged is None else asdict(self.diverged),
        }

    def use_recorded(self) -> None:
        """Go back to the progress that the record has: after an error, the loop may be ahead of it."""
        self.progress, self.diverged = self.recorded

    # What the writer's thread does.

    def write_rows(self, rows: Sequence[Row], progress: Progress, diverged: Divergence | None) -> None:
        """Append rows to the record; `progress` and `diverged` are those of the last one."""
        self.folder.append(rows)
        self.recorded = progress, diverged

    def write_statistics(self, write: Callable[..., None], *arguments: Any) -> None:
        self.folder.check_place()
        write(*arguments)

    def write_status(self, status: Status) -> None:
        """Write status.json, with the newest checkpoint that is written by now."""
        self.folder.write_status(asdict(replace(status, checkpoint=self.saved_step)))
        self.divergence_written = status.state == DIVERGED

    def save(self, step: int, meta: Mapping[str, Any], tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        """Write a checkpoint."""
        self.folder.check_place()
        self.folder.sync()
        # The previous checkpoint is intact: this process wrote it, or resumed from it.
        kept: list[int] = []
        for kept_of in (self.saved_step, kept_step(self.config.optim, self.config.train.steps)):
            if kept_of is not None:
                kept.append(kept_of)
        # With the length of the record, a resume cuts off the rows of later steps.
        meta = {**meta, "metrics_bytes": self.folder.size()}
        checkpoint.save(self.folder.path / checkpoint.FOLDER, step, tensors(), meta, keep=kept)
        self.saved_step = step

    def keep(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the weights of a step, beside all those kept before."""
        self.folder.check_place()
        meta = {"diverged": None}
        checkpoint.save(self.folder.path / checkpoint.WEIGHTS_FOLDER, step, tensors, meta, keep=range(step))

    def restore(self, saved: checkpoint.Checkpoint, tensors: Mapping[str, Tensor]) -> None:
        """Restore the progress, and the state into `tensors` in place, from a checkpoint of this run.

        Raises:
            StoreError: The checkpoint belongs to another run.
        """
        meta = saved.meta
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        saved_shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in saved.tensors.items()}
        if shapes != saved_shapes:
            raise StoreError(
                f"the checkpoint of step {saved.step} holds other tensors than this run; restore this run's own, or "
                f"{FRESH}"
            )
        for name, tensor in tensors.items():
            tensor.copy_(saved.tensors[name])
        self.progress = Progress(**meta["progress"])
        self.saved_step = saved.step
        self.last_finite = msgspec.convert(meta["last_finite"], StepNumbers | None)
        self.diverged = msgspec.convert(meta["diverged"], Divergence | None)


# The identity of a run.


def identity(config: RunConfig, resolved: RuntimeSettings, corpus: Corpus) -> dict[str, Any]:
    """Return the config fields, corpus, runtime settings and versions that the run id hashes, as plain values."""
    return {
        "config": config.identity(),
        "corpus": corpus.sha256,
        "device": resolved.device,
        "precision": resolved.precision,
        "compile": resolved.compile,
        "versions": versions(config),
    }


def versions(config: RunConfig) -> dict[str, int | str]:
    """Return the versions of the norm, placement, init rule and optimiser; for a plugin the hash of its code."""
    norm, placement, rule = config.norm, config.placement, config.init_rule
    return {
        "norm": version_of("norm", norm.name, norm.version),
        "placement": version_of("placement", placement.name, placement.version),
        "init": version_of("init rule", rule, INIT_RULE_VERSIONS.get(rule, 1)),
        "optim": config.optim.version,
    }


def plugins_of(config: RunConfig) -> dict[str, str]:
    """Return the file name of the plugin of each part in `versions` that a plugin registered."""
    parts = {
        "norm": ("norm", config.norm.name),
        "placement": ("placement", config.placement.name),
        "init": ("init rule", config.init_rule),
    }
    files: dict[str, str] = {}
    for part, (kind, name) in parts.items():
        file = plugin_file(kind, name)
        if file is not None:
            files[part] = file
    return files


def run_id_of(config: RunConfig, identity: dict[str, Any]) -> str:
    """Return the run id: norm, placement, sizes and the first digits of the identity's hash."""
    model = config.model
    return f"{config.norm.name}-{config.placement.name}-d{model.depth}w{model.width}-{canonical_hash(identity)[:10]}"


def describe(config: RunConfig, resolved: RuntimeSettings, corpus: Corpus) -> dict[str, Any]:
    """Return the content of run.json without the fingerprint of the block, which is expensive for deep models."""
    run_identity = identity(config, resolved, corpus)
    run_id = run_id_of(config, run_identity)
    tokens_NT, targets_NT = validation_windows(corpus.val, config.model.context, config.eval.sequences)
    return {
        "run_id": run_id,
        "name": config.run.name or run_id,
        "config": config.recorded(),
        "resolved": asdict(resolved),
        # The baselines and the run's evaluations use the same targets.
        "corpus": {
            **corpus.description,
            "tokenizer_sha256": hashlib.sha256(to_json(corpus.tokenizer.state())).hexdigest(),
            "baselines": corpus.baselines(tokens_NT.numpy(), targets_NT.numpy()),
        },
        "identity": run_identity,
        "flops_per_token": flops_per_token(config, corpus.tokenizer.vocab_size),
        "warnings": [*config.warnings(), *corpus.warnings()],
        "norm": {name: getattr(config.norm, name) for name in ("formula", "source", "causal", "batch_statistics")},
        "placement": {"name": config.placement.name},
        "versions": {
            "normlab": __version__,
            "python": platform.python_version(),
            **_library_versions(),
        },
        "git": _git_state(),
        "created": time.time(),
    }


@cache
def _library_versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "numpy", "datasets", "wandb")}


@cache
def _git_state() -> dict[str, str] | None:
    """Return the commit and the hash of uncommitted changes; None where normlab is not run from a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        commit, diff = git("rev-parse", "HEAD").strip(), git("diff", "HEAD", "--", "normlab", "conf")
    except (OSError, subprocess.SubprocessError):
        return None
    diff_hash = hashlib.sha256(diff.encode()).hexdigest() if diff else ""
    return {"commit": commit, "diff": diff_hash}
