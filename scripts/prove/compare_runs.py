"""Compare two runs bit for bit, except ids, times and memory."""

import itertools
import json
from pathlib import Path
from typing import Any

from normlab.catalogue.statistics.statistic import TIERS
from normlab.store.runs import RunFolder
from normlab.training import checkpoint

TIMES = {"seconds", "tokens_per_s", "peak_memory_bytes", "updated", "metrics", "statistics", "run_id"}
"""Keys that differ between any two runs; the digests of files with times and ids are among them."""


def checkpoints(folder: Path) -> list[int]:
    return checkpoint.steps(folder / "checkpoints")


def differences(reference: Path, other: Path) -> list[str]:
    """Return the differences between two runs' folders, except ids, times and memory."""
    names, other_names = ({str(path.relative_to(f)) for path in f.rglob("*")} for f in (reference, other))
    if names != other_names:
        return [f"files {sorted(names ^ other_names)} of {reference.name} and {other.name}"]
    problems = [line for step in checkpoints(reference) for line in differing_state(reference, other, step)]
    for one, two in itertools.zip_longest(rows(reference), rows(other)):
        if one != two:
            problems.append(f"record: {one} and {two}")
            break
    problems += [f"statistics: {tier}" for tier in TIERS if statistics(reference, tier) != statistics(other, tier)]
    status, other_status = (timeless(RunFolder(f).status()) for f in (reference, other))
    if status != other_status or status["state"] not in ("finished", "diverged"):
        problems.append(f"status: {status} and {other_status}")
    return problems


def differing_state(reference: Path, other: Path, step: int) -> list[str]:
    """Return the differences between two checkpoints of a step."""
    one, two = (checkpoint.read(folder / "checkpoints", step) for folder in (reference, other))
    problems = [
        f"step {step}: {name}"
        for name in sorted({*one.tensors, *two.tensors})
        if bits(one.tensors.get(name)) != bits(two.tensors.get(name))
    ]
    # The record's length varies with the digits of its times.
    metas = [timeless(saved.meta["progress"]) | {"last": saved.meta["last_finite"]} for saved in (one, two)]
    return problems + ([f"step {step}: {metas[0]} and {metas[1]}"] if metas[0] != metas[1] else [])


def bits(tensor: Any) -> Any:
    """Return a tensor as bytes, so that NaN equals NaN and 0 differs from -0."""
    return tensor if tensor is None else (tensor.dtype, tensor.shape, tensor.contiguous().numpy().tobytes())


def rows(folder: Path) -> list[str]:
    """Return the record's lines without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if json.loads(line)["kind"] not in ("run", "pace")]


def statistics(folder: Path, tier: str) -> list[Any]:
    """Return the columns and the bytes of the numbers of a tier, part by part, and the number of damaged rows."""
    parts, damaged = RunFolder(folder).statistics.read(tier)
    return [damaged, *((part.layout, part.steps.tolist(), part.values.tobytes()) for part in parts)]


def timeless(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers without times and memory."""
    return {name: value for name, value in numbers.items() if name not in TIMES}
