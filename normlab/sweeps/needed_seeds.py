"""How many seeds a difference of losses needs to be found, by the noise of runs on record."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.analysis.comparability import intact_runs
from normlab.analysis.factors import label
from normlab.analysis.intervals import Replicate
from normlab.base.errors import ConfigError, StoreError, counted
from normlab.base.parsing import canonical_hash
from normlab.store.query import select_runs
from normlab.store.record import RunRecord

Size = dict[str, Any]
"""The options on which the noise of a loss depends most: those of the compute and of the text."""
LEVEL = 0.05
"""The significance level of the t test."""
MOST = 1000
"""No larger number of seeds is looked for."""
UNKNOWN = "not known, since no run of this size is on record with two seeds"


@dataclass(frozen=True, slots=True)
class Noise:
    """The standard deviation over seeds of the final loss of models of one size, nats/token."""

    deviation: float
    low: float
    high: float
    """The ends of its interval of 80 %, for normal losses."""
    runs: int


def size_of(identity: Mapping[str, Any]) -> Size:
    """Return the size of a run by its options, as `RunConfig.identity` returns them and records have them."""
    data = dict(identity["data"])
    data.pop("seed", None)
    size: Size = {}
    for option in ("model.depth", "model.width", "model.context", "train.steps", "train.batch_size"):
        group, name = option.split(".")
        size[option] = identity[group][name]
    return size | {"data": canonical_hash(data)}


def noise_on_record(results_dir: str | Path) -> dict[str, Noise]:
    """Return the noise of each size of which runs are on record that differ in their seeds only, by `canonical_hash`.

    Of runs that differ in the learning rate, too, those at the rate with the lowest mean loss count. The variance is
    pooled over all norms, placements and other options: sum of squares over sum of degrees of freedom.
    """
    from scipy.special import chdtri

    try:
        records = select_runs((), results_dir).records
    except StoreError:  # there is no run yet
        return {}
    runs, _ = intact_runs(records)
    cells: dict[str, list[list[float]]] = defaultdict(list)
    for size, losses in _losses_of_cells(runs):
        cells[size].append(losses)
    noise: dict[str, Noise] = {}
    for size, cells_of_size in cells.items():
        squares, freedom, count = 0.0, 0, 0
        for losses in cells_of_size:
            mean = math.fsum(losses) / len(losses)
            squares += math.fsum((loss - mean) ** 2 for loss in losses)
            freedom += len(losses) - 1
            count += len(losses)
        # The chi-squared quantiles of 90 % and 10 %; `chdtri` takes the probability above.
        low, high = (math.sqrt(squares / float(chdtri(freedom, above))) for above in (0.1, 0.9))
        if squares:
            noise[size] = Noise(math.sqrt(squares / freedom), low, high, count)
    return noise


def _losses_of_cells(runs: Iterable[RunRecord]) -> Iterator[tuple[str, list[float]]]:
    """Yield the size of each cell with two seeds or more, and its losses at its best learning rate."""
    cells: dict[tuple[str, str], dict[float, dict[Replicate, float]]] = {}
    for run in runs:
        if not run.has_learned:
            continue
        identity = deepcopy(run.run.identity.config)
        size = canonical_hash(size_of(identity))
        del identity["seed"], identity["data"]["seed"], identity["optim"]["lr"]
        cell = cells.setdefault((size, canonical_hash(identity)), {})
        cell.setdefault(run.lr, {})[run.replicate] = run.loss
    for (size, _), losses_of_rates in cells.items():
        candidates = [list(losses.values()) for losses in losses_of_rates.values() if len(losses) > 1]
        if candidates:
            yield size, min(candidates, key=lambda losses: math.fsum(losses) / len(losses))


def needed_seeds(effect: float, deviation: float, power: float) -> int | None:
    """Return the fewest seeds with which a paired t test finds a difference; None for more than `MOST`.

    Each arm has normal losses with this standard deviation, and the two losses of a seed are independent, so that their
    difference has sqrt(2) times it. The power of the two-sided test at 5 % is the probability of a significant
    difference of the right sign, P(T > t_crit), where T has Student's non-central t distribution with n - 1 degrees of
    freedom and the shift sqrt(n / 2) effect / deviation.
    """
    from scipy.special import nctdtr, stdtrit

    for n in range(2, MOST + 1):
        critical = float(stdtrit(n - 1, 1 - LEVEL / 2))
        shift = math.sqrt(n / 2) * abs(effect) / deviation
        if 1 - float(nctdtr(n - 1, shift, critical)) >= power:
            return n
    return None


def needed_seeds_lines(
    identities: Sequence[Mapping[str, Any]], results_dir: str | Path, effect: float, power: float
) -> Iterator[str]:
    """Yield how many seeds each size of a plan needs to find a difference, by the noise on record.

    Args:
        identities: Of each run of the plan, `RunConfig.identity`.

    Raises:
        ConfigError: The effect or the power is out of range.
    """
    if not (math.isfinite(effect) and effect > 0):
        raise ConfigError(f"--effect {effect:g}: must be a difference of losses above 0, in nats/token")
    if not LEVEL < power < 1:
        raise ConfigError(f"--power {power:g}: must be between {LEVEL:g} and 1")
    noise = noise_on_record(results_dir)
    yield (
        f"seeds   to find a difference of {effect:g} nats/token with a probability of {power:.0%} (paired t test at "
        f"{LEVEL:.0%})"
    )
    for key, name in _names_of_sizes(identities).items():
        if key not in noise:
            yield f"        {name}: {UNKNOWN}"
            continue
        yield f"        {name}: {_seeds_text(effect, noise[key], power)}"


def noise_lines(identities: Sequence[Mapping[str, Any]], results_dir: str | Path) -> Iterator[str]:
    """Yield the noise on record of each size of some runs, whose identities are as for `needed_seeds_lines`."""
    noise = noise_on_record(results_dir)
    for key, name in _names_of_sizes(identities).items():
        if key not in noise:
            yield f"noise of {name}: {UNKNOWN}"
            continue
        found = noise[key]
        interval = f"{found.low:.2g} to {found.high:.2g}"
        runs = counted(found.runs, "run")
        yield f"noise of {name}: {found.deviation:.2g} ({interval}) nats/token over seeds, in {runs} on record"


def _names_of_sizes(identities: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a name of each size of some runs, by `canonical_hash`: the options in which the sizes differ."""
    sizes: dict[str, Size] = {}
    for identity in identities:
        size = size_of(identity)
        sizes[canonical_hash(size)] = size
    first = next(iter(sizes.values()))
    varying = [name for name in first if name != "data" and any(size[name] != first[name] for size in sizes.values())]
    return {key: label(varying, [size[option] for option in varying]) for key, size in sizes.items()}


def _seeds_text(effect: float, noise: Noise, power: float) -> str:
    texts: list[str] = []
    for deviation in (noise.deviation, noise.low, noise.high):
        n = needed_seeds(effect, deviation, power)
        texts.append(f"more than {MOST}" if n is None else f"{n}")
    number, least, most = texts
    return f"{number} seeds ({least} to {most}), by a noise of {noise.deviation:.3g} in {noise.runs} runs on record"
