"""The settings of a run, and the settings in which runs differ.

A setting is the value of a config option, or a fact about the machine, the corpus or the code (the device, the version
of torch). Both kinds have names, and `is_config_option` distinguishes them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from normlab.base.errors import ConfigError
from normlab.catalogue.sites import SITES
from normlab.config.known_options import OF_SITES, is_in
from normlab.config.option_names import hint, meanings
from normlab.store.record import ArmConflict, RunEntry, RunRecord, Setting, flatten_groups

ARM = "arm"
"""The arm of a sweep, a named set of overrides; a setting like an option."""
LR = "optim.lr"
SEEDS = ("seed", "data.seed")
"""The options in which replicates differ: the seeds of the initial weights and of the data order."""

_OF_CONFIG: dict[str, Callable[[Mapping[str, Setting]], Setting]] = {
    "norm": lambda options: options.get("norm.preset") or options.get("norm.name"),
    "placement": lambda options: options.get("placement.name"),
    "model": lambda options: options.get("model.preset"),
    "optim": lambda options: options.get("optim.name"),
}
_READERS: dict[str, Callable[[RunRecord], Setting]] = {
    # Two texts can have one name.
    "corpus": lambda run: _join(run.corpus.name, run.corpus.sha256[:8]),
    "device": lambda run: run.machine.device,
    "precision": lambda run: run.machine.precision,
    "compile": lambda run: run.machine.compile,
    "train.graph": lambda run: "off" if run.status.graph_problem else run.machine.graph,
    "deterministic": lambda run: run.machine.deterministic,
    "init": lambda run: run.machine.init,
}
"""Options that are not a config field, or whose value `auto` the run resolves; no value before a run has started."""

NUMERICS = "numerics ("
"""Prefix of the names of settings that change the last bits."""
RESOLVED: dict[str, Callable[[RunRecord], Setting]] = {
    "init": _READERS["init"],
    "weight decay": lambda run: run.machine.decayed,
    "compile": _READERS["compile"],
    "CUDA graphs": _READERS["train.graph"],
    "threads": lambda run: run.machine.threads,
    "precision": _READERS["precision"],
    "pack size": lambda run: len(run.status.pack.runs or run.run.pack.runs) or 1,
    "device": lambda run: _join(run.machine.device, run.machine.device_name),
    "deterministic": _READERS["deterministic"],
    "devices": lambda run: run.machine.devices,
    "instructions": lambda run: run.machine.instructions,
    "attention": lambda run: run.machine.attention,
}
"""Settings that a run resolves from other options or from the machine, most important first; None if unknown."""
_ENVIRONMENT: dict[str, Callable[[RunRecord], Setting]] = {
    "corpus": _READERS["corpus"],
    "tokenizer": lambda run: f"{run.corpus.tokenizer} {run.corpus.vocab_size}",
    "device": RESOLVED["device"],
    "precision": RESOLVED["precision"],
    **{
        f"{NUMERICS}{name})": RESOLVED[name]
        for name in ("compile", "deterministic", "devices", "threads", "instructions", "attention")
    },
    f"{NUMERICS}torch)": lambda run: run.run.versions["torch"],
}
"""Settings outside the config that the loss depends on. The plan of a sweep lists the sizes of its packs."""

_CODE = {"norm": "the norm's code", "placement": "the placement's code", "optim": "the optimiser's code"}
"""Parts of the code with a version in a run's identity, and the name of the version as a setting."""
_INIT_RULE = "init rule"
"""The rule that `init=auto` resolves to."""


def setting(run: RunEntry, option: str) -> Setting:
    """Return a run's value of an option by its dotted name; None if it has no such option, or no value yet."""
    if option == ARM:
        return run.arm or None
    if option in _OF_CONFIG:
        return _OF_CONFIG[option](run.options)
    if option in _READERS:
        if isinstance(run, RunRecord):
            return _READERS[option](run)
        return None
    if is_in(option, OF_SITES):
        return _of_site(run.options, option.removeprefix(f"{OF_SITES}."))
    return run.options.get(option)


def _of_site(options: Mapping[str, Setting], key: str) -> Setting:
    """Return the norm of a site, or an option of it there: of the narrowest site that sets it, or else of the run.

    So a run that sets nothing for the site is in one cell with a run that names the run's norm there.
    """
    site, _, name = key.partition(".")
    owners = [site]
    if site in SITES:
        owners.append(SITES[site].within)
    for owner in owners:
        norm_of_owner = f"{OF_SITES}.{owner}"
        wanted = f"{norm_of_owner}.{name}" if name else norm_of_owner
        value = options.get(wanted)
        if value is not None:
            return value
        # Another norm has its own defaults, which the record does not have.
        if name and options.get(norm_of_owner) not in (None, options.get("norm.name")):
            return None
    return options.get(f"norm.{name or 'name'}")


def format_setting(value: Setting) -> str:
    """Return a setting as on the command line; `null` for None. Different numbers have different texts."""
    if value is None:
        return "null"
    if isinstance(value, float):
        short = f"{value:g}"
        if float(short) == value:
            return short
        return repr(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def sort_key(value: Setting) -> tuple[int, float, str]:
    """Return the key that sorts values: numbers by size, then names alphabetically, then None."""
    if isinstance(value, bool | int | float):
        # Not as float, which cannot distinguish adjacent integers from 2**53 on.
        return 0, value, ""
    if value is None:
        return 2, 0.0, ""
    return 1, 0.0, value


def levels_of(option: str, runs: Iterable[RunEntry]) -> list[Setting]:
    """Return the values of an option: arms in the order of their sweep, which its runs have, others by `sort_key`."""
    levels = list(dict.fromkeys(setting(run, option) for run in runs))
    if option == ARM:
        return sorted(levels, key=lambda level: level is None)
    return sorted(levels, key=sort_key)


def arm_conflict(runs: Iterable[RunEntry]) -> ArmConflict | None:
    """Return the first conflict between the arms of a run; None if each run has one arm or none."""
    for run in runs:
        if run.arm_conflict is not None:
            return run.arm_conflict
    return None


def resolve_options(names: Iterable[str], runs: Sequence[RunEntry], flag: str) -> list[str]:
    """Return the full name of each option; accept an unambiguous short name such as `depth`.

    Raises:
        ConfigError: No run has an option, or a short name is ambiguous; the message suggests the nearest options. Or
            the option is the arm, and a run has two.
    """
    named = [*_OF_CONFIG, *_READERS]
    if any(run.arm for run in runs):
        named.insert(0, ARM)
    known = set(named).union(*(run.options for run in runs))
    resolved: list[str] = []
    for name in names:
        # A run with two arms would belong to two cells.
        conflict = arm_conflict(runs) if name == ARM else None
        if conflict:
            raise ConfigError(f"{flag} {name}: {conflict.text}; name options instead, such as norm and placement")
        options: list[str] = []
        if name in known:
            options = [name]
        elif "." not in name:
            options = meanings(name, known)
        if len(options) > 1:
            raise ConfigError(f"{flag} {name}: is ambiguous; write {' or '.join(options)}")
        if not options:
            raise ConfigError(
                f"{flag} {name}: no run has this option{hint(name, known)}; "
                f"choose one of {', '.join(named)} or a config option such as model.depth"
            )
        resolved += options
    return resolved


# Settings that differ


class Settings(dict[str, Setting]):
    """All settings that a run's loss depends on, by name. Runs with equal settings share one object: do not change it.

    A dict has no weak references, and its subclass has.
    """


# Every warning about a table compares the settings of all runs.
_settings_of_runs = WeakKeyDictionary[RunRecord, Settings]()
_different_settings = WeakValueDictionary[str, Settings]()


def settings_of(run: RunRecord) -> Settings:
    """Return all settings that a run's loss depends on, except learning rate and seeds.

    The config options are those of the run's identity, which excludes options that cannot change a number. The corpus
    replaces the `data` options that selected it.
    """
    settings = _settings_of_runs.get(run)
    if settings is None:
        settings = read_settings(run)
        # The representation, because 1 and true are equal keys.
        settings = _different_settings.setdefault(repr(settings), settings)
        _settings_of_runs[run] = settings
    return settings


def read_settings(run: RunRecord) -> Settings:
    options: dict[str, Setting] = {}
    for option, value in flatten_groups(run.run.identity.config).items():
        if option not in (LR, *SEEDS) and not option.startswith("data."):
            options[option] = value
    # The default width follows from other options: runs that differ in these would seem to differ in it too.
    if run.config.model.mlp_width == run.config.model.default_mlp_width:
        options["model.mlp_width"] = None
    settings = Settings()
    for name, read in _ENVIRONMENT.items():
        settings[name] = read(run)
    settings.update(options)
    for part, name in _CODE.items():
        settings[name] = str(run.run.identity.versions[part])[:8]
    settings["init"] = run.config.init
    settings[_INIT_RULE] = run.machine.init
    return settings


def is_config_option(name: str) -> bool:
    return name not in (*_ENVIRONMENT, _INIT_RULE, *_CODE.values())


def differing_settings(runs: Iterable[Mapping[str, Setting]]) -> dict[str, list[str]]:
    """Return the settings (of `settings_of`) in which runs differ, each with its sorted values.

    Different norms, placements or optimisers are reported by name, and of their options only those in which runs of one
    name differ. Different init rules are reported if the option `init` differs, not if they follow from the placement.
    Different code is reported if no option explains the difference.
    """
    # Most runs have equal settings, which are one object (`settings_of`).
    runs = list({id(settings): settings for settings in runs}.values())
    names: dict[str, None] = {}
    for settings in runs:
        names |= dict.fromkeys(settings)
    different: dict[str, list[str]] = {}
    for name in names:
        first, *others = [settings.get(name) for settings in runs]
        if any(value != first for value in others):
            different[name] = _sorted_values([first, *others])
    # The option `init` may be auto in one run, and the rule of `auto` in another: then the runs do not differ.
    if different.pop(_INIT_RULE, None) is None:
        different.pop("init", None)
    for group in ("norm", "placement", "optim"):
        entries = different.pop(f"{group}.name", None)
        if entries is None:
            continue
        # Options of different norms differ, or are missing: the names of the norms say so already.
        options = [name for name in different if name.startswith(f"{group}.")]
        different[group] = entries
        for option in options:
            values = different.pop(option)
            if _differs_within(option, f"{group}.name", runs):
                different[option] = values
    groups = {name.partition(".")[0] for name in different}
    for part, name in _CODE.items():
        # Another norm, init or model runs other code, and the option says so.
        if {part, "init", "model"} & groups:
            different.pop(name, None)
    return different


def _differs_within(name: str, kind: str, runs: Sequence[Mapping[str, Setting]]) -> bool:
    """Return whether runs with the same value of `kind` differ in a setting."""
    kinds: set[Setting] = set()
    pairs: set[tuple[Setting, Setting]] = set()
    for settings in runs:
        kinds.add(settings.get(kind))
        pairs.add((settings.get(kind), settings.get(name)))
    return len(pairs) > len(kinds)


def _sorted_values(values: Iterable[Setting]) -> list[str]:
    # Sorted as numbers if they are: the texts would put 16 before 4.
    by_text: dict[str, Any] = {}
    for value in values:
        by_text.setdefault(format_setting(value), value)
    if all(isinstance(value, int | float) for value in by_text.values()):
        return sorted(by_text, key=by_text.__getitem__)
    return sorted(by_text)


def _join(*parts: str | None) -> str | None:
    return " ".join(dict.fromkeys(filter(None, parts))) or None
