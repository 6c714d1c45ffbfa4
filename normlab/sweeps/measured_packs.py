"""What a pack has cost, measured when its process has trained it; the plan of an equal pack says what it will cost.

A measurement is a part of the pack's outcome (`files.PackOutcome`), and `cost.py` reads it there.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any, Protocol

import msgspec

from normlab.base.parsing import canonical_hash
from normlab.base.version import __version__
from normlab.config.schema import RunConfig
from normlab.store.files import size_of
from normlab.store.format import DIVERGED, STATISTICS_FOLDER
from normlab.store.reading import Count
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.sweeps.packs import pack_key

NOT_IN_A_STEP = ("steps", "log_every", "checkpoint_every", "keep", "start_from")
"""Options of `train` on which the time of a step does not depend."""
FORWARD_SHARE = 1 / 3
"""The assumed time of a token in an evaluation, relative to a step: a forward pass without a backward pass."""

LARGEST = 1e15
Amount = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]
"""A number of seconds or bytes. The files may be a stranger's, and sums of these numbers stay finite."""


class Settings(Protocol):
    """What the time of a step depends on, besides the config: of a plan, or of the record of a run."""

    @property
    def device(self) -> str | None: ...
    @property
    def device_name(self) -> str | None: ...
    @property
    def precision(self) -> str: ...
    @property
    def compile(self) -> str: ...
    @property
    def graph(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PackMeasurement:
    """The time, the memory and the disk of a pack whose process trained it from its first step to its end."""

    kind: str
    """`kind_of` the pack; of a pack on record, `kind_beside` others."""
    seconds: Amount
    """In its process, without the start of the process."""
    fixed_seconds: Amount
    """The part of them outside of steps and evaluations: data, model, compilation, checkpoints."""
    seconds_per_step: Amount
    """Without the first steps, which take longer."""
    checkpoint_bytes: Amount
    """Of one checkpoint of one run."""
    fixed_bytes: Amount
    """The files of one run that do not grow with its steps, without checkpoints."""
    bytes_per_step: Amount
    """The growth of the record of one run."""
    start_seconds: Amount = 0.0
    """The start of the process; 0 if it had trained another pack before."""
    memory_bytes: Count | None = None
    """Peak memory, as status.json has it."""


def kind_of(config: RunConfig, settings: Settings, threads: int | None, runs: int) -> str:
    """Return a hash of all that the time of a step depends on: the computation, the runs, the machine, the code.

    Args:
        config: The config of a run of the pack.
        settings: Those of the run on this machine, with every `auto` resolved.
        threads: The threads of the process.
        runs: The runs of the pack.
    """
    tree: dict[str, Any] = json.loads(pack_key(config))
    del tree["results_dir"], tree["eval"]["every"]
    for option in NOT_IN_A_STEP:
        del tree["train"][option]
    # What `auto` becomes may depend on the number of steps.
    tree["train"]["graph"] = settings.graph
    for option in ("device", "precision", "compile", "deterministic"):
        tree[option] = getattr(settings, option)
    code = __version__, version("torch")
    return canonical_hash([tree, settings.device_name, threads, runs, platform.node(), code])[:16]


def kind_beside(kind: str, packs_at_once: int) -> str:
    """Return the kind of a pack that shares the machine: with the number of packs that train at once."""
    return f"{kind}.{packs_at_once}"


def evaluations(steps: int, every: int) -> int:
    """Return the number of evaluations of a run: before the first step, every `every` steps, and after the last."""
    if not every:
        return min(steps, 1) + 1
    return 1 + -(-steps // every)


def evaluation_steps(config: RunConfig) -> float:
    """Return the assumed time of one evaluation, in steps."""
    return FORWARD_SHARE * config.eval.sequences / config.train.batch_size


def measure(config: RunConfig, runs: Sequence[RunFolder], seconds: float) -> PackMeasurement | None:
    """Return the measurement of a pack that was just trained; None if its steps cannot be timed.

    They cannot if there are too few, if all runs diverged, or if the record begins with that of another run.

    Args:
        config: The config of a run of the pack.
        runs: The folders of the pack's runs.
        seconds: The time that the process needed for the pack.

    Raises:
        StoreError: A record cannot be read.
    """
    from normlab.training import checkpoint

    # A run that diverged stopped early, and the others trained on.
    records = [RunRecord.load(folder) for folder in runs]
    trained = [record for record in records if record.state != DIVERGED]
    if not trained or config.train.start_from is not None:
        return None
    folder, machine = trained[0].folder, trained[0].machine
    paces = folder.rows("pace").rows
    if len(paces) < 2:
        return None
    first, last = paces[0], paces[-1]
    seconds_per_step = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    counted = last["step"] + evaluations(last["step"], config.eval.every) * evaluation_steps(config)
    checkpoints = folder.path / checkpoint.FOLDER
    growing = folder.metrics_path.stat().st_size + size_of(folder.path / STATISTICS_FOLDER)
    return PackMeasurement(
        kind=kind_of(config, machine, machine.threads, len(runs)),
        seconds=seconds,
        fixed_seconds=max(0.0, seconds - seconds_per_step * counted),
        seconds_per_step=seconds_per_step,
        memory_bytes=trained[0].status.peak_memory_bytes,
        checkpoint_bytes=size_of(checkpoints) / max(1, len(checkpoint.steps(checkpoints))),
        fixed_bytes=sum(path.stat().st_size for path in folder.path.iterdir() if path.is_file())
        - folder.metrics_path.stat().st_size,
        bytes_per_step=growing / last["step"],
    )
