"""Read the settings of a run from its run.json by option (`norm`, `model.depth`, `corpus`), and find what differs.

A setting is the value of a config option, or a value that the machine, the corpus or the code decides (the device, the
version of torch). The latter have option names too, and `is_config_option` tells the two apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from normlab.config.option_names import ALIASES, hint, meanings
from normlab.errors import ConfigError

Run = Mapping[str, Any]
"""The content of a run.json."""
Setting = str | int | float | bool | None

LR = "optim.lr"
SEEDS = ("seed", "data.seed")
"""The options in which replicates differ: the seeds of the initial weights and of the data order."""

_READERS: dict[str, Callable[[Run], Any]] = {
    "norm": lambda run: get_nested(run, "config.norm.preset") or get_nested(run, "config.norm.name"),
    "placement": lambda run: get_nested(run, "config.placement.name"),
    "model": lambda run: get_nested(run, "config.model.preset"),
    "optim": lambda run: get_nested(run, "config.optim.name"),
    "corpus": lambda run: _corpus(run),
    **{
        option: lambda run, option=option: get_nested(run, f"resolved.{option}")
        for option in ("device", "precision", "compile", "deterministic", "init")
    },
}
"""Options that are no field of the config, or whose `auto` is resolved by the run."""

_PACK_SIZE = "numerics (pack size)"
_ENVIRONMENT: dict[str, Callable[[Run], Any]] = {
    "corpus": _READERS["corpus"],
    "device": lambda run: _device(run),
    "precision": _READERS["precision"],
    **{
        f"numerics ({key})": lambda run, key=key: get_nested(run, f"resolved.{key}")
        for key in ("compile", "deterministic", "threads", "instructions")
    },
    "numerics (torch)": lambda run: get_nested(run, "versions.torch"),
    _PACK_SIZE: lambda run: _pack_size(run),
    "sweep": lambda run: get_nested(run, "pack.sweep"),
}
"""What the loss depends on besides the config, and the sweep, whose plan fixes the sizes of its packs."""

_CODE = {"norm": "the norm's code", "placement": "the placement's code"}
"""Parts whose version is part of a run's identity, and the name of that version as a setting."""
_INIT_RULE = "init rule"
"""The rule that `init=auto` resolves to."""


def get_nested(tree: Any, path: str) -> Any:
    """Return the value at a dotted path; None where a level is missing or is not a mapping."""
    for key in path.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted path; a list is given as JSON."""
    flat: dict[str, Any] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def setting(run: Run, option: str) -> Setting:
    """Return a run's value of an option; None where its record has no such option."""
    read = _READERS.get(option)
    return _as_setting(read(run) if read else get_nested(run, f"config.{option}"))


def _as_setting(value: Any) -> Setting:
    return value if isinstance(value, str | int | float | bool) or value is None else json.dumps(value)


def format_setting(value: Setting) -> str:
    """Return a setting as it is typed on the command line; `-` for None."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def check_options(options: Iterable[str], runs: Iterable[Run], flag: str) -> None:
    """Reject an option that no run has.

    Raises:
        ConfigError: The option is unknown; the message suggests the nearest one.
    """
    runs = list(runs)
    for option in options:
        if option not in _READERS and not any(option in flatten(run.get("config")) for run in runs):
            raise ConfigError(
                f"{flag} {option}: no run has such an option{hint(option, options_of(runs))}; "
                f"choose one of {', '.join(_READERS)} or a config option such as model.depth"
            )


def options_of(runs: Iterable[Run]) -> set[str]:
    """Return the options by which runs can be selected."""
    return set(_READERS).union(*(flatten(run.get("config")) for run in runs))


def short_names(options: Iterable[str]) -> dict[str, list[str]]:
    """Return the options that each short or foreign name means: `depth` and `n_layer` mean `model.depth`."""
    options = set(options)
    names = {option.rpartition(".")[2] for option in options} | ALIASES.keys()
    return {name: found for name in sorted(names - options) if (found := meanings(name, options))}


def settings_of(run: Run) -> dict[str, Any]:
    """Return everything that a run's loss depends on, except learning rate and seeds, for `differing_settings`.

    The config options are those of the run's identity, which leaves out what cannot change a number. The corpus
    replaces the `data` options that selected it.
    """
    options = flatten(get_nested(run, "identity.config") or run.get("config"))
    has_corpus = bool(get_nested(run, "corpus.sha256"))
    options = {
        option: value
        for option, value in options.items()
        if option not in (LR, *SEEDS) and not (has_corpus and option.startswith("data."))
    }
    environment = {name: _as_setting(read(run)) for name, read in _ENVIRONMENT.items()}
    # Older records have a hash of the part's source code.
    versions = get_nested(run, "identity.versions") or get_nested(run, "identity.sources")
    code = {name: str(get_nested(versions, part))[:8] for part, name in _CODE.items()}
    rules = {
        "init": _as_setting(get_nested(run, "config.init")),
        _INIT_RULE: _as_setting(get_nested(run, "resolved.init")),
    }
    return environment | options | code | rules


def is_config_option(name: str) -> bool:
    """Whether a setting of `settings_of` is chosen on the command line, not by the machine, the corpus or the code."""
    return name not in (*_ENVIRONMENT, _INIT_RULE, *_CODE.values())


def differing_settings(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the settings in which runs differ, each with its sorted values.

    Two norms, placements or optimisers are reported by name, without their options. An init rule is reported where
    runs asked for different ones, not where it follows from the placement. Code that differs is reported where no
    option explains it. Pack sizes are reported across sweeps only, because the plan of one sweep lists them.

    Args:
        runs: The `settings_of` each run.
    """
    runs = list({tuple(run.items()): run for run in runs}.values())  # most runs are alike, and hashing is fast
    different: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run.get(name) for run in runs]
        if any(value != values[0] for value in values[1:]):
            different[name] = _sorted_values(values)
    if different.pop(_INIT_RULE, None) is None:
        different.pop("init", None)
    if different.pop("sweep", None) is None:
        different.pop(_PACK_SIZE, None)
    for group in ("norm", "placement", "optim"):
        if names := different.pop(f"{group}.name", None):
            different = {name: values for name, values in different.items() if not name.startswith(f"{group}.")}
            different[group] = names
    for part, name in _CODE.items():
        if {part, "init", "model"} & {other.partition(".")[0] for other in different}:
            different.pop(name, None)
    return different


def _sorted_values(values: Iterable[Any]) -> list[str]:
    by_text: dict[str, Any] = {}
    for value in values:
        by_text.setdefault(format_setting(value), value)
    is_numeric = all(isinstance(value, int | float) for value in by_text.values())
    return sorted(by_text, key=by_text.__getitem__) if is_numeric else sorted(by_text)


def _pack_size(run: Run) -> int:
    members = get_nested(run, "pack.runs")
    return len(members) or 1 if isinstance(members, list) else 1


def _corpus(run: Run) -> str | None:
    """The corpus's name with the beginning of its hash: two texts can have the same name."""
    name, sha256 = get_nested(run, "corpus.name"), get_nested(run, "corpus.sha256")
    return " ".join(str(part) for part in (name, str(sha256)[:8] if sha256 else None) if part) or None


def _device(run: Run) -> str | None:
    """The kind of device, and its model name where one is recorded."""
    parts = [get_nested(run, f"resolved.{key}") for key in ("device", "device_name")]
    return " ".join(dict.fromkeys(str(part) for part in parts if part)) or None
