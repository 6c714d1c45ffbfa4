"""Tab completion of overrides, for Typer's completion (`normlab --install-completion`), without torch and Hydra.

The shim for `option=value`: bash takes `=` for the end of a word, and every shell adds a space behind a single
candidate. So bash gets the values alone, and an option that is the only candidate is offered with values, too. Help is
cut to one line, because Typer folds it, and fish takes each line for a candidate.
"""

import os
from collections.abc import Iterator
from textwrap import shorten

import typer

from normlab.catalogue import entries as catalogue

GROUPS = {
    "norm": catalogue.norms, "placement": catalogue.placements, "model": catalogue.models, "data": catalogue.data,
    "optim": catalogue.optim, "stats": catalogue.stats,
}  # fmt: skip
"""Config groups, and the functions that list their choices."""


def complete_override(context: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the candidates for an override, each with its help; none for a path."""
    before, last, hidden = list(context.params.get("overrides") or ()), incomplete, ""
    if "COMP_WORDS" in os.environ:
        # Bash splits at "=", and gives the words in lines: norm, =, rms.
        words = os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
        *before, last = "\n".join(words).replace("\n=\n", "=").replace("\n=", "=").split("\n")
        hidden = last[: last.rfind("=") + 1]
    # Without an override of a group, the options of its default are completed.
    chosen: dict[str, str] = {entry["group"]: entry["name"] for entry in catalogue.defaults()}
    for text in before:
        if "=" in text:
            group, choice = text.split("=", 1)
            chosen[group] = choice
    name, equals, value = last.partition("=")
    options: dict[str, catalogue.Entry] = {}
    for entry in _entries(chosen):
        is_match = entry["name"].startswith(name)
        if equals:
            is_match = entry["name"] == name
        if is_match and (context.info_name == "sweep" or not entry["name"].startswith("sweep.")):
            options[entry["name"]] = entry
    if len(options) != 1:
        for option, entry in options.items():
            yield f"{option}=", _help_of(entry)
        return
    ((name, entry),) = options.items()
    typed = value[: value.rfind(",") + 1]  # the last value of a grid is completed
    for choice in _choices_of(entry, with_default=not equals):
        if choice.startswith(value.removeprefix(typed)):
            yield f"{name}={typed}{choice}".removeprefix(hidden), _help_of(entry)


def _help_of(entry: catalogue.Entry) -> str:
    return shorten(entry["about"], 70, placeholder=" ...")


def _choices_of(entry: catalogue.Entry, *, with_default: bool) -> list[str]:
    """Return the values of an option; one without choices has none, or the empty text and its default."""
    if entry.get("choices"):
        return entry["choices"]
    if isinstance(entry["default"], bool):
        return ["true", "false"]
    if not with_default:
        return []
    # Two candidates, because a shell adds a space behind a single one.
    return ["", "null" if entry["default"] is None else str(entry["default"])]


def _entries(chosen: dict[str, str]) -> Iterator[catalogue.Entry]:
    """Yield each option with its choices: the config groups, the options of the chosen entries, and the others."""
    for group, list_entries in GROUPS.items():
        entries = {entry["name"]: entry for entry in list_entries()}
        yield {"name": group, "default": chosen.get(group), "choices": list(entries), "about": ""}
        entry = entries.get(chosen.get(group, ""), {})
        # A preset has the options of its norm.
        entry = entries.get(entry.get("preset_of", ""), entry)
        for option in entry.get("options", ()):
            yield option | {"name": f"{group}.{option['option']}"}
    for option in catalogue.options():
        if option["name"] == "init":
            option = option | {"choices": ["auto", *(rule["name"] for rule in catalogue.init())]}
        yield option
