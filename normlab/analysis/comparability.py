"""Which runs may be compared: those with a record, and the settings in which they differ although no factor says so.

Runs differ in options, which the user sets, and in circumstances: corpus, device, torch version. Only options define
cells.

Factors are the options of a table (`--by`, or those that the runs were swept over). A difference is explained if it is
a factor or follows from one: the options of a norm from the norm, and those that arms set from the arm. Every other
difference is a warning. Cells that differ by it in compute or data are neither ranked nor tested, since a larger model
has a lower loss whatever its norm.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from normlab.analysis.settings import (
    ARM,
    NUMERICS,
    differing_settings,
    is_config_option,
    setting,
    settings_of,
)
from normlab.catalogue.optimizers.options import default_warmup
from normlab.config.schema import RunConfig
from normlab.store.format import DAMAGED
from normlab.store.query import count_not_started
from normlab.store.record import RunEntry, RunRecord, Setting

MAX_VALUES = 6
SIZE_OPTIONS = (
    "model", "model.depth", "model.width", "model.heads", "model.mlp_width", "model.context", "train.steps",
    "train.batch_size",
)  # fmt: skip
"""Options that set the compute of a run; a best cell is one among cells in which these are equal."""
COMPUTE = frozenset((
    *SIZE_OPTIONS, "model.positions", "model.mlp", "model.bias", "model.tie_embeddings", "model.attn_gate",
    "model.value_residual", "model.value_embed", "train.start_from",
))  # fmt: skip
"""Options of the model that change its number of parameters, and options that change the compute of training.

Norms (also model.qk_norm and model.v_norm), placement and optimiser change both, but are what one compares.
"""
DATA = ("corpus", "tokenizer", "eval.sequences")
"""Settings that change the text on which a loss is measured."""
_OPTIONS_AND_GROUPS = {field.name for field in fields(RunConfig)}


def intact_runs(records: Sequence[RunEntry]) -> tuple[list[RunRecord], list[str]]:
    """Return the started runs whose records are intact, and warnings about the other runs."""
    intact: list[RunRecord] = []
    warnings: list[str] = []
    # One line for all of them, since a sweep may have hundreds.
    not_started = count_not_started(records)
    if not_started:
        warnings.append(f"runs that have not started: {not_started} of {len(records)}")
    for record in records:
        if isinstance(record, RunRecord):
            intact.append(record)
        if record.state == DAMAGED:
            warnings.append(f"run {record.run_id} is damaged and is left out: {record.problem}")
    return intact, warnings


# Differences that no factor explains


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting in which runs differ, with its sorted values."""

    name: str
    values: Sequence[str]

    def __str__(self) -> str:
        """Return the name and the values: `model.depth 4 and 8`, `numerics (attention: eager and flash_attention)`."""
        values = list(self.values[:MAX_VALUES])
        if len(self.values) > MAX_VALUES:
            values.append(f"{len(self.values) - MAX_VALUES} more")
        *first, last = values
        text = f"{', '.join(first)} and {last}"
        if self.name.startswith(NUMERICS):
            return f"{self.name.removesuffix(')')}: {text})"
        return f"{self.name} {text}"


def names_of(differences: Iterable[Difference]) -> list[str]:
    return [difference.name for difference in differences]


def differences(runs: Sequence[RunRecord], factors: Iterable[str] = ()) -> list[Difference]:
    """Return the settings besides learning rate and seeds in which runs differ, and that `factors` do not explain."""
    factors = tuple(factors)
    unexplained: list[Difference] = []
    for name, values in differing_settings(map(settings_of, runs)).items():
        if not _is_explained(name, runs, factors):
            unexplained.append(Difference(name, values))
    return unexplained


def _is_explained(name: str, runs: Sequence[RunRecord], factors: Sequence[str]) -> bool:
    """Whether runs are meant to differ in a setting."""
    # A search gives each cell its own best value.
    if all(name in run.design.searched for run in runs):
        return True
    if _follows_from_size(name, runs):
        return True
    for factor in factors:
        if name == factor or name.startswith(f"the {factor}'s"):
            return True
        if name.startswith(f"{factor}.") and _has_one_value(name, factor, runs):
            return True
    return ARM in factors and _follows_from_arm(name, runs)


def _has_one_value(name: str, factor: str, runs: Sequence[RunRecord]) -> bool:
    """Whether a setting has one value at each level of a factor."""
    value_at: dict[Setting, Setting] = {}
    for run in runs:
        level, value = setting(run, factor), _value(run, name)
        if value_at.setdefault(level, value) != value:
            return False
    return True


def _follows_from_size(name: str, runs: Sequence[RunRecord]) -> bool:
    """Whether a setting follows from `train.tokens_per_parameter`, which has one value, and the size of the model."""
    ratios = {run.config.train.tokens_per_parameter for run in runs}
    if None in ratios or len(ratios) > 1:
        return False
    if name == "optim.warmup_steps":
        return all(run.config.optim.warmup_steps == default_warmup(run.config.train.steps) for run in runs)
    return name == "train.steps"


def _follows_from_arm(name: str, runs: Sequence[RunRecord]) -> bool:
    """Whether the arms' own overrides explain a difference, rather than the sweeps that the arms come from.

    In one sweep, arms differ in nothing else. In several sweeps, all runs whose arms do not set the option must have
    the same value.
    """
    if not is_config_option(name) or not _has_one_value(name, ARM, runs):
        return False
    sweeps = {run.run.pack.sweep for run in runs}
    if len(sweeps) == 1:
        return True
    # An option that a sweep sets for all arms overrides an arm's preset, so the preset then explains nothing.
    options_of_sweeps: set[str] = set()
    for run in runs:
        options_of_sweeps.update(run.design.shared)
    is_set_by_sweep = any(_sets(option, name) for option in options_of_sweeps)
    values_without_arm: set[Setting] = set()
    for run in runs:
        options_of_arm = run.design.arms.get(run.arm, ())
        is_set = any(_sets(option, name) for option in options_of_arm)
        if not is_set and not is_set_by_sweep:
            is_set = any(_presets(option, name) for option in options_of_arm)
        if not is_set:
            values_without_arm.add(_value(run, name))
    return len(values_without_arm) <= 1


def _sets(option: str, name: str) -> bool:
    """Whether an override of an option sets a setting: `optim.groups` also sets `optim.groups.embed.lr`."""
    return option == name or ("." in option and name.startswith(f"{option}."))


def _presets(option: str, name: str) -> bool:
    """Whether an override chooses a preset that may set a setting: `model=` or `recipe=`, but not `init=`."""
    return name.startswith(f"{option}.") or ("." not in option and option not in _OPTIONS_AND_GROUPS)


def _value(run: RunRecord, name: str) -> Setting:
    """Return the value of a setting of `differing_settings`, where a norm, placement or optimiser has its name."""
    settings = settings_of(run)
    return settings.get(f"{name}.name", settings.get(name))


def comparability_warnings(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line that names the circumstances in which runs differ, or no line."""
    mixed: list[str] = []
    for difference in differences(runs):
        if not is_config_option(difference.name):
            mixed.append(str(difference))
    if not mixed:
        return []
    return [f"the runs differ in {'; '.join(mixed)}"]


# What must not be compared


def obstacles(groups: Sequence[Sequence[RunRecord]], factors: Iterable[str] = ()) -> list[Difference]:
    """Return the unexplained differences in compute or data for which groups of runs must not be compared.

    Groups may mix sizes if all have the same mixture (each contains both depths). Groups may never mix data.
    """
    runs: list[RunRecord] = []
    for group in groups:
        runs += group
    different: list[Difference] = []
    sizes: list[Difference] = []
    for difference in differences(runs, factors):
        if difference.name in DATA:
            different.append(difference)
        if difference.name in COMPUTE:
            sizes.append(difference)
    # Means over the same sizes differ by no size: a table without depth in --by has both depths in each cell.
    mixtures = [_mixture(group, names_of(sizes)) for group in groups]
    if any(mixture != mixtures[0] for mixture in mixtures):
        different += sizes
    return different


def _mixture(runs: Iterable[RunRecord], names: Sequence[str]) -> set[tuple[Setting, ...]]:
    """Return the combinations of some settings that runs have."""
    mixture: set[tuple[Setting, ...]] = set()
    for run in runs:
        mixture.add(tuple(_value(run, name) for name in names))
    return mixture


def reason_not_comparable(groups: Sequence[Sequence[RunRecord]], factors: Iterable[str] = ()) -> str:
    """Return why the losses of groups of runs must not be compared, or an empty text."""
    different = "; ".join(map(str, obstacles(groups, factors)))
    if not different:
        return ""
    return f"the runs differ in {different}, so their losses are not comparable"
