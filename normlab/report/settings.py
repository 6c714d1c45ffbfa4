"""What a run was told and where it ran, by word: `norm`, `model.depth`, `corpus`; and which words runs differ in.

The words are those of the command line, read from run.json, and a few that the machine or the text decided.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from normlab.errors import ConfigError
from normlab.option_names import ALIASES, hint, meanings

Run = Mapping[str, Any]
"""The content of a run.json."""
Setting = str | int | float | bool | None

LR = "optim.lr"
REPLICATE = ("seed", "data.seed")
"""What tells runs of one choice apart: the initial weights, and the order of the data."""

_NAMED: dict[str, Callable[[Run], Any]] = {
    "norm": lambda run: dig(run, "config.norm.preset") or dig(run, "config.norm.name"),
    "placement": lambda run: dig(run, "config.placement.name"),
    "model": lambda run: dig(run, "config.model.preset"),
    "optim": lambda run: dig(run, "config.optim.name"),
    "corpus": lambda run: _corpus(run),
    "device": lambda run: dig(run, "resolved.device"),
    "precision": lambda run: dig(run, "resolved.precision"),
    "compile": lambda run: dig(run, "resolved.compile"),
    "deterministic": lambda run: dig(run, "resolved.deterministic"),
    "init": lambda run: dig(run, "resolved.init"),
}
"""Words that are no leaf of the config, or are read where what `auto` came to be is written."""

_CIRCUMSTANCES: dict[str, Callable[[Run], Any]] = {
    "corpus": _NAMED["corpus"],
    "device": lambda run: _device(run),
    "precision": _NAMED["precision"],
    **{
        f"numerics ({key})": lambda run, key=key: dig(run, f"resolved.{key}")
        for key in ("compile", "deterministic", "threads", "instructions")
    },
    "numerics (torch)": lambda run: dig(run, "versions.torch"),
    # Its speed and memory too are shared with them.
    "numerics (runs in its pack)": lambda run: len(_list(dig(run, "pack.runs")) or [None]),
    "sweep": lambda run: dig(run, "pack.sweep"),
}
"""What a loss depends on beside its config, and the sweep whose plan names the sizes of its packs."""
_PACK, _SWEEP = list(_CIRCUMSTANCES)[-2:]

_PARTS = ("norm", "placement")
"""Parts whose version is part of a run's identity."""
_RULE = "init rule"
"""The rule that `init=auto` came to be."""


def dig(tree: Any, words: str) -> Any:
    """A leaf by its dotted words, or None where a level is missing or no mapping."""
    for word in words.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(word)
    return tree


def setting(run: Run, word: str) -> Setting:
    """What a run was told by a word; None where its record has no such word."""
    read = _NAMED.get(word)
    value = read(run) if read else dig(run, f"config.{word}")
    return _plain(value)


def _plain(value: Any) -> Setting:
    """A leaf as it is; the JSON of what is none, as a list."""
    return value if isinstance(value, str | int | float | bool) or value is None else json.dumps(value)


def _code_of(part: str) -> str:
    return f"the {part}'s code"


def shown(value: Setting) -> str:
    """A setting as it is typed."""
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def check_words(words: Iterable[str], runs: Iterable[Run], option: str) -> None:
    """Refuse a word that no run has.

    Raises:
        ConfigError: With the nearest of the words that there are.
    """
    runs = list(runs)
    for word in words:
        if word not in _NAMED and not any(_has(run, word) for run in runs):
            known = options_of(runs)
            raise ConfigError(
                f"{option} {word}: no run has such an option{hint(word, known)}; "
                f"name one of {', '.join(_NAMED)}, or an option of a run, as model.depth"
            )


def options_of(runs: Iterable[Run]) -> set[str]:
    """Return the names by which runs can be chosen: the options of their configs, and what the machine decided."""
    return set(_NAMED).union(*(leaves(run.get("config")) for run in runs))


def short_names(options: Iterable[str]) -> dict[str, list[str]]:
    """Return the options that each short or foreign name means: `depth` and `n_layer` mean `model.depth`."""
    options = set(options)
    names = {option.rpartition(".")[2] for option in options} | ALIASES.keys()
    return {name: found for name in sorted(names - options) if (found := meanings(name, options))}


def _has(run: Run, word: str) -> bool:
    """Whether a run's config has a leaf of that name, if only to say null."""
    part, _, leaf = f"config.{word}".rpartition(".")
    above = dig(run, part)
    return isinstance(above, Mapping) and leaf in above and not isinstance(above[leaf], Mapping)


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a record's mapping by its dotted word; a list is its JSON."""
    flat: dict[str, Any] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(value, Mapping):
            flat |= leaves(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def told(run: Run) -> dict[str, Any]:
    """Everything that a run's loss depends on, but for its learning rate and its seeds, by word: for `differing`.

    Options are those of the run's identity, which leaves out what cannot change a number. The corpus stands for
    what chose it.
    """
    options = leaves(dig(run, "identity.config") or run.get("config"))
    of_corpus = {word for word in options if word.startswith("data.")} if dig(run, "corpus.sha256") else set()
    for word in {LR, *REPLICATE} | of_corpus:
        options.pop(word, None)
    circumstances = {word: _plain(read(run)) for word, read in _CIRCUMSTANCES.items()}
    # Runs that were recorded before versions have the hash of the part's source code.
    recorded = dig(run, "identity.versions") or dig(run, "identity.sources")
    code = {_code_of(part): str(dig(recorded, part))[:8] for part in _PARTS}
    rules = {"init": _plain(dig(run, "config.init")), _RULE: _plain(dig(run, "resolved.init"))}
    return circumstances | options | code | rules


def is_circumstance(word: str) -> bool:
    """Whether a word of `told` is none of the command line: what the machine, the text or the code decided."""
    return word in _CIRCUMSTANCES or word == _RULE or word in map(_code_of, _PARTS)


def differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The words in which runs are not all alike, with the values that there are, in order.

    Of two norms, two placements or two optimisers the name says enough. Of an init rule, it matters if it is
    another and was asked for: else it is the placement's own. Code that differs is listed where no option says why.

    Args:
        runs: What `told` says of each.
    """
    runs = list({tuple(run.items()): run for run in runs}.values())  # most are alike, and hashing is quick
    found: dict[str, list[str]] = {}
    for word in dict.fromkeys(word for run in runs for word in run):
        values = [run.get(word) for run in runs]
        if any(value != values[0] for value in values[1:]):
            found[word] = _listed(values)
    if found.pop(_RULE, None) is None:
        found.pop("init", None)
    if found.pop(_SWEEP, None) is None:  # the plan of the one sweep has said it
        found.pop(_PACK, None)
    for group in ("norm", "placement", "optim"):
        if names := found.pop(f"{group}.name", None):
            found = {word: values for word, values in found.items() if not word.startswith(f"{group}.")}
            found[group] = names
    for part in _PARTS:
        if {part, "init", "model"} & {word.partition(".")[0] for word in found}:
            found.pop(_code_of(part), None)
    return found


def _listed(values: Iterable[Any]) -> list[str]:
    different: dict[str, Any] = {}
    for value in values:
        different.setdefault(shown(value), value)
    numbers = all(isinstance(value, int | float) for value in different.values())
    return sorted(different, key=different.__getitem__) if numbers else sorted(different)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _corpus(run: Run) -> str | None:
    """The corpus by its name and the beginning of its hash: a name alone does not tell two texts apart."""
    name, sha256 = dig(run, "corpus.name"), dig(run, "corpus.sha256")
    return " ".join(str(part) for part in (name, str(sha256)[:8] if sha256 else None) if part) or None


def _device(run: Run) -> str | None:
    """The device, and which one it is where there are several kinds."""
    parts = [dig(run, f"resolved.{key}") for key in ("device", "device_name")]
    return " ".join(dict.fromkeys(str(part) for part in parts if part)) or None
