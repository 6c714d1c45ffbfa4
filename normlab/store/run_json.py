"""The content of run.json: what a run is. `training/identity.py` writes it once, when the model is built.

Readers meet it as `RunRecord.run`. A file that does not fill these types is damaged.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from normlab.base.parsing import canonical_hash
from normlab.store.files import is_file_name
from normlab.store.outcome import References
from normlab.store.reading import Count
from normlab.store.status import YEAR_10000, RecordedPack
from normlab.store.throughput import Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the machine decided, and the values of the options that were `auto`; None in a plan, where not known yet."""

    device: str | None
    precision: str
    compile: str
    graph: str
    """Whether steps were replayed as CUDA graphs."""
    deterministic: bool
    init: str
    device_name: str | None
    devices: Count
    device_uuid: str | None = None
    """UUID of the GPU; None on a CPU."""
    threads: Count | None
    wait_policy: str | None = None
    """How the threads waited for each other, which changes the speed and never bits."""
    instructions: str | None
    attention: str | None
    """The backend of attention: eager, or the name of torch's, such as flash_attention."""
    decayed: str | None
    """The parameters with weight decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """Losses of models that know no context, in nats/token."""

    uniform: float
    unigram: float
    bigram: float
    targets: Count = 0
    """Number of validation targets whose mean losses these are."""

    def __post_init__(self) -> None:
        # Levels and outcomes compare losses with these, and a comparison with NaN is always false.
        if not all(map(math.isfinite, (self.uniform, self.unigram, self.bigram))):
            raise ValueError(f"{self} is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRead:
    """Sums over the files of a corpus, or over the rows of its dataset."""

    rows: Count
    """Files or rows read: each became a document, was left out (counted below), or was joined with others to an
    article."""
    documents: Count
    empty: Count
    """Texts of no characters, which were left out."""
    null: Count
    """Rows without a text, which were left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCorpus:
    name: str
    sha256: str
    tokenizer: str
    vocab_size: Count
    train_tokens: Count = 0
    val_tokens: Count = 0
    documents: Count = 0
    split: str = ""
    """What is held out for validation: complete `documents`, or their `tails`."""
    changed_share: float | None = None
    """Share of the characters of a sample of the text that the tokenizer changes; None if it is not known."""
    read: TextRead
    source: dict[str, str | None] | None = None
    """A dataset of the hub: its name, subset, split and commit."""
    tokenizer_sha256: str = ""
    """SHA-256 of the run's tokenizer.json; empty in a plan."""
    baselines: Baselines

    def references(self, initial_loss: float | None = None) -> References:
        """Return the reference losses of a run, given its validation loss before the first update."""
        return References(self.baselines.uniform, self.baselines.unigram, self.baselines.bigram, initial_loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """The checkout that the run was started from."""

    commit: str
    diff: str
    """SHA-256 of the uncommitted changes; empty without any."""

    @property
    def label(self) -> str:
        """The beginnings of the commit and of the hash of its changes, as text."""
        if not self.diff:
            return self.commit[:10]
        return f"{self.commit[:10]} with changes {self.diff[:10]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the run id hashes: all that the numbers depend on."""

    config: dict[str, Any]
    """The options that the numbers depend on, as `RunConfig.identity`."""
    corpus: str
    """The SHA-256 of the corpus."""
    device: str | None
    """The kind of device; None in a plan."""
    precision: str
    compile: str
    versions: dict[str, int | str]
    """Versions of the norm, the placement, the init rule and the optimiser; for a plugin the hash of its code."""

    @property
    def sha256(self) -> str:
        return canonical_hash(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFacts:
    """What the norm computes, for readers that cannot load its plugin."""

    formula: str
    source: str = ""
    causal: bool
    batch_statistics: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The content of run.json, in the order of the file."""

    run_id: str
    name: str
    config: dict[str, Any]
    """Every option, as `RunConfig.recorded`."""
    resolved: Machine
    corpus: RecordedCorpus
    identity: Identity
    flops_per_token: float
    """Of the forward and the backward pass."""
    warnings: list[str] = field(default_factory=list)
    """What its start warned of."""
    norm: NormFacts
    versions: dict[str, str]
    """Versions of normlab, Python and the libraries."""
    git: Git | None
    """None where normlab was not run from a checkout."""
    created: float
    """Unix time, seconds."""
    pack: RecordedPack = RecordedPack()
    fingerprint: str
    """Hash of what the block computes."""
    parameters: list[dict[str, str]] = field(default_factory=list)
    """The table of the parameters: group, shape, options of the optimiser and initial values of each."""

    def __post_init__(self) -> None:
        # The record may be a stranger's: its id becomes the name of a folder, and its times become dates.
        if not is_file_name(self.run_id):
            raise ValueError(f"{self.run_id!r:.40} is not a run id")
        if not (math.isfinite(self.flops_per_token) and 0 <= self.created < YEAR_10000):
            raise ValueError("a number is not finite, or no time")

    @property
    def compute(self) -> Compute:
        """What the run computes for each token, and where it started."""
        machine, runs = self.resolved, len(self.pack.runs) or 1
        return Compute.of(self.flops_per_token, machine.device_name, machine.precision, machine.devices, runs)
