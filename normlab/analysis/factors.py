"""The factors of some runs: the options in which the runs differ, with their levels, and labels made of them.

The learning rate and the seeds are no factors. The learning rate is tuned: results are at the best one. The seeds are
replicates: results are means over them.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from normlab.analysis.comparability import SIZE_OPTIONS, differences, intact_runs, names_of
from normlab.analysis.conditions import select_where
from normlab.analysis.settings import (
    ARM,
    LR,
    SEEDS,
    arm_conflict,
    differing_settings,
    format_setting,
    is_config_option,
    levels_of,
    setting,
    settings_of,
)
from normlab.base.errors import ConfigError, shorten
from normlab.catalogue import entries as catalogue
from normlab.config.known_options import OF_SITES, is_in
from normlab.store.query import find_sweep, resolve_run, select_runs
from normlab.store.record import RunRecord, Setting
from normlab.store.runs import RunFolder

MAIN_OPTIONS = ("norm", "placement", "model.depth")
"""The options that come first in a label."""
DEFAULT_OPTIONS = ("norm", "placement")
"""The options that define cells if the runs do not differ."""

_NAMES = {"optim.warmup_steps": "warm-up", "optim.lr": "lr", "model.qk_norm": "QK norm", "model.mlp_width": "MLP width"}
"""Names of options in labels, where they are not the option's last part."""
_IMPLIED_GROUPS = ("model", "optim", "train", "")
"""Config groups that a label does not name: `depth 8`, but `norm eps 1e-05`."""
AS_THE_RUN = "as elsewhere"
"""The level of an option of a site where it is not set: the run's norm stands there."""
_ZERO_IS_NONE = ("optim.warmup_steps", "optim.weight_decay", "model.dropout")
"""Options that turn something off at zero: `no warm-up`."""


@dataclass(frozen=True, slots=True)
class Factor:
    option: str
    """The full name of the option, such as `model.depth`."""
    levels: tuple[Setting, ...]
    """The values of the option: arms as in their sweep; numbers by size, then names alphabetically."""
    all_levels: tuple[Setting, ...] = ()
    """The levels of all runs, of which conditions select some; a level's colour does not depend on the conditions."""

    @property
    def name(self) -> str:
        return option_name(self.option)

    @property
    def is_numeric(self) -> bool:
        for level in self.levels:
            # To Python, true and false are numbers.
            if isinstance(level, bool) or not isinstance(level, int | float):
                return False
        return True


def factors_of(
    runs: Sequence[RunRecord], by: Sequence[str] | None = None, among: Sequence[RunRecord] = ()
) -> list[Factor]:
    """Return the factors of some runs, which conditions select `among` all runs.

    `by` has the options; by default those in which the runs differ.
    """
    if by is None:
        by = distinguishing_options(runs)
    factors: list[Factor] = []
    for option in by:
        selected = {setting(run, option) for run in runs}
        all_levels = levels_of(option, among or runs)
        levels: list[Setting] = []
        for level in all_levels:
            if level in selected:
                levels.append(level)
        factors.append(Factor(option, tuple(levels), tuple(all_levels)))
    return factors


def distinguishing_options(runs: Sequence[RunRecord]) -> list[str]:
    """Return the options in which runs differ, without learning rate and seeds.

    The arm, `MAIN_OPTIONS` and `SIZE_OPTIONS` come first: other options, such as the warm-up, follow from them. An
    option that separates no more runs than the options before it is left out, such as an MLP width that follows from
    the model width, or a placement that follows from the arm. The arm is left out if a run has two, or none: it would
    then separate runs of two sweeps with equal settings.
    """
    arms = {run.arm for run in runs}
    has_arms = len(arms) > 1 and all(arms) and not arm_conflict(runs)
    first: Sequence[str] = MAIN_OPTIONS
    if has_arms:
        first = (ARM, *MAIN_OPTIONS)
    options = list(filter(is_config_option, differing_settings(map(settings_of, runs))))
    sizes = [option for option in SIZE_OPTIONS if option in options]
    # A key has a run's levels in the options so far: an option is left out if it makes no two runs differ more.
    keys: list[tuple[Setting, ...]] = [()] * len(runs)
    distinguishing: list[str] = []
    for option in dict.fromkeys([*first, *sizes, *options]):
        values = [setting(run, option) for run in runs]
        if len(set(values)) <= 1:
            continue
        longer_keys = [(*key, value) for key, value in zip(keys, values, strict=True)]
        separates_more = len(set(longer_keys)) > len(set(keys))
        is_main = option in MAIN_OPTIONS and not has_arms
        if separates_more or is_main:
            distinguishing.append(option)
            keys = longer_keys
    return distinguishing


def unexplained_options(runs: Sequence[RunRecord], factors: Sequence[str]) -> list[str]:
    """Return the options besides learning rate and seeds in which runs differ, and that `factors` do not explain."""
    return list(filter(is_config_option, names_of(differences(runs, factors))))


def varying_options(runs: Sequence[RunRecord]) -> list[str]:
    """Return all options in which runs differ, learning rate and seeds last.

    Options that no factor explains, such as those in which two sweeps differ and that no arm sets, follow the factors.
    `data.seed` is left out if it equals `seed` in every run.
    """
    factors = distinguishing_options(runs)
    same_seeds = all(run.replicate[0] == run.replicate[1] for run in runs)
    seeds = SEEDS[:1] if same_seeds else SEEDS
    options = [*factors, *unexplained_options(runs, factors)]
    for option in (LR, *seeds):
        levels = {setting(run, option) for run in runs}
        if len(levels) > 1:
            options.append(option)
    return options


# Labels


_QK_NORM = {"head": "per head", "full": "over all heads"}


def option_name(option: str) -> str:
    """Return the name of an option in labels: `depth` for `model.depth`, `norm eps` for `norm.eps`."""
    if option in _NAMES:
        return _NAMES[option]
    group, _, name = option.rpartition(".")
    if group not in _IMPLIED_GROUPS:
        name = f"{group} {name}"
    return name.replace(".", " ").replace("_", " ")


def level_title(option: str, value: Setting) -> str:
    """Return a level without the name of its option: `DeepNorm`, `8`, `yes`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None and option == ARM:
        return "no arm"
    if value is None and is_in(option, OF_SITES):
        return AS_THE_RUN
    if value is None:
        return "none"
    text = format_setting(value)
    if option == "model.qk_norm":
        return _QK_NORM.get(text, text)
    # norm.at.final is a norm's name, and norm.at.final.eps a number.
    if is_in(option, OF_SITES):
        option = "norm"
    return catalogue.titles(option).get(text, text)


def level_label(option: str, value: Setting) -> str:
    """Return a level with the name of its option: `DeepNorm`, `depth 8`, `no warm-up`."""
    if option in (ARM, *DEFAULT_OPTIONS):
        return level_title(option, value)
    name = option_name(option)
    # `value is False`, because zero is equal to it, and only zero of `_ZERO_IS_NONE` is off.
    if value is None and is_in(option, OF_SITES):
        return f"{name} {AS_THE_RUN}"
    is_off = value is None or value is False or value in ("none", "off")
    if is_off or (option in _ZERO_IS_NONE and value == 0):
        return f"no {name}"
    if value is True:
        return name
    return f"{name} {level_title(option, value)}"


def label(options: Iterable[str], values: Iterable[Setting]) -> str:
    """Return the label of a combination of levels: `DeepNorm, depth 8, no warm-up`."""
    return ", ".join(map(level_label, options, values)) or "all runs"


# Runs by their factors


def find_run(name: str, where: Sequence[str] = (), results_dir: str | os.PathLike[str] = "results") -> RunFolder:
    """Return a run by its name, or by the name of its sweep and conditions that only this run meets.

    The name is that of a run (folder, id, beginning of the id, or name), of a sweep, or of a results folder.

    Raises:
        ConfigError: A condition is invalid, or no run or several runs meet all conditions.
        StoreError: No run matches, or several do.
    """
    if not where and find_sweep(name, results_dir) is None:
        return resolve_run(name, results_dir, or_sweep=True)
    runs = select_where(select_runs([name], results_dir).started, where, name)
    if len(runs) == 1:
        return runs[0].folder
    intact, _ = intact_runs(runs)
    factors = factors_of(intact, varying_options(intact))
    problem = f"{' '.join([name, *where])}: {len(runs)} runs, which differ in "
    if not factors:
        raise ConfigError(f"{problem}no option; give the id of one, for example {runs[0].run_id}")
    lists: list[str] = []
    # The example selects one run, so that it can be copied as it is.
    conditions = list(where)
    for factor in factors:
        levels = list(map(format_setting, factor.levels))
        lists.append(f"{factor.option} {shorten(levels)}")
        level_of_first = format_setting(setting(runs[0], factor.option))
        conditions.append(f"{factor.option}={level_of_first}")
    raise ConfigError(f"{problem}{'; '.join(lists)}; select one, for example with '{','.join(conditions)}'")
