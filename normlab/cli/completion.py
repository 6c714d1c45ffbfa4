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

DEFAULTS = {"norm": "rmsnorm", "placement": "pre", "data": "stdlib", "optim": "adamw"}
"""The defaults list of conf/train.yaml; a test compares both. Options of these choices are completed by default."""


def complete_override(context: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the candidates for an override, each with its help; none for a path."""
    before, last, hidden = list(context.params.get("overrides") or ()), incomplete, ""
    if "COMP_WORDS" in os.environ:  # of bash, in lines: norm, =, rms
        words = os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
        *before, last = "\n".join(words).replace("\n=\n", "=").replace("\n=", "=").split("\n")
        hidden = last[: last.rfind("=") + 1]
    chosen = DEFAULTS | dict(text.split("=", 1) for text in before if "=" in text)
    name, equals, value = last.partition("=")
    options = {
        entry["name"]: entry
        for entry in _entries(chosen)
        if entry["name"].startswith(name) and (context.info_name == "sweep" or not entry["name"].startswith("sweep."))
    }
    if equals:
        options = {option: entry for option, entry in options.items() if option == name}
    about = {option: shorten(entry["about"], 70, placeholder=" ...") for option, entry in options.items()}
    if len(options) != 1:
        yield from ((f"{option}=", about[option]) for option in options)
        return
    ((name, entry),) = options.items()
    typed = value[: value.rfind(",") + 1]  # the last value of a grid is completed
    choices = entry.get("choices") or (["true", "false"] if isinstance(entry["default"], bool) else [])
    if not (equals or choices):
        choices = ["", "null" if entry["default"] is None else str(entry["default"])]
    for choice in choices:
        if choice.startswith(value.removeprefix(typed)):
            yield f"{name}={typed}{choice}".removeprefix(hidden), about[name]


def _entries(chosen: dict[str, str]) -> Iterator[catalogue.Entry]:
    """Yield each option with its choices: the config groups, the options of the chosen entries, and the others."""
    for group, list_entries in GROUPS.items():
        entries = {entry["name"]: entry for entry in list_entries()}
        yield {"name": group, "default": chosen.get(group), "choices": list(entries), "about": ""}
        entry = entries.get(chosen.get(group, ""), {})
        for option in entries.get(entry.get("preset_of", ""), entry).get("options", ()):
            yield option | {"name": f"{group}.{option['option']}"}
    for option in catalogue.options():
        rules = ["auto", *(rule["name"] for rule in catalogue.init())] if option["name"] == "init" else None
        yield option | ({"choices": rules} if rules else {})
