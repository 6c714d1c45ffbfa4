"""Tab completion: candidates from the catalogue, without loading torch or Hydra, and the scripts of the shells.

A script passes the line up to the cursor to `normlab complete`, which prints one candidate per line. A candidate is a
complete argument; the script handles the way in which its shell splits arguments.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from normlab import catalogue
from normlab.cli.app import app
from normlab.config.flags import FLAGS
from normlab.errors import ConfigError
from normlab.options import option_fields
from normlab.report.entries import ENTRIES
from normlab.report.tables import FORMATS

GROUPS = {
    "norm": catalogue.norms,
    "placement": catalogue.placements,
    "model": catalogue.models,
    "data": catalogue.data,
    "optim": catalogue.optim,
    "stats": catalogue.stats,
}
"""Config groups, and the functions that list their choices."""

DEFAULTS = {"norm": "rmsnorm", "placement": "pre", "data": "stdlib", "optim": "adamw"}
"""The defaults list of conf/train.yaml; a test compares both. Options of these choices are completed by default."""

BASH = """\
# Tab completion of normlab for bash. Add to ~/.bashrc:  eval "$(normlab completion bash)"
_normlab() {
    local IFS=$'\\n' argument line=${COMP_LINE:0:COMP_POINT}
    COMPREPLY=($(normlab complete -- "$line" 2>/dev/null))
    compopt +o nospace
    for argument in "${COMPREPLY[@]}"; do
        [[ $argument == *[=.] ]] && compopt -o nospace
    done
    # Readline replaces the text behind the last word break, and = is a word break.
    argument=${line##*[[:space:]]}
    if [[ $argument == *=* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${argument%=*}"=}")
    fi
}
complete -o default -F _normlab normlab
"""

ZSH = """\
#compdef normlab
# Tab completion of normlab for zsh. Add to ~/.zshrc, after compinit:  eval "$(normlab completion zsh)"
_normlab() {
    local -a candidates partial whole
    candidates=("${(@f)$(normlab complete -- "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    candidates=(${candidates:#})
    if (( ! $#candidates )); then
        compset -P '*='
        _files
        return
    fi
    partial=(${(M)candidates:#*[=.]})
    whole=(${candidates:#*[=.]})
    (( $#partial )) && compadd -Q -S '' -- $partial
    (( $#whole )) && compadd -Q -- $whole
}
compdef _normlab normlab
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH}
"""The scripts that `normlab completion SHELL` prints."""


def candidates(line: str, flags: dict[str, list[str]]) -> list[str]:
    """Return the sorted completions of the last argument of a line; none for a path.

    Args:
        line: The command line up to the cursor, with `normlab` at its start.
        flags: The flags of each command.
    """
    arguments = line.split(" ")[1:]
    *before, last = [text for text in arguments[:-1] if text not in ("", "--debug")] + arguments[-1:]
    if not before:
        choices = [*flags, "--help", "--version"]
    elif before[0] == "train" or (before[0] == "sweep" and not last.startswith("-")):
        choices = _overrides(before[0], before[1:], last)
    elif before[0] == "list" and len(before) == 1:
        choices = [*ENTRIES, "runs"]
    elif before[0] == "completion":
        choices = list(SCRIPTS)
    elif before[-1] == "--format" and "--format" in flags.get(before[0], ()):
        choices = FORMATS
    else:
        choices = flags.get(before[0], [])
    return sorted({choice for choice in choices if choice.startswith(last)})


def _overrides(command: str, before: list[str], last: str) -> list[str]:
    if last.startswith("-"):
        return ["--debug", *(names[0] for names in FLAGS)]
    if before[-1:] in (["--cfg"], ["-c"]):
        return ["job", "hydra", "all"]
    chosen = DEFAULTS | {key: value for key, _, value in (text.partition("=") for text in before) if value}
    values = _values(command, chosen)
    key, equals, value = last.partition("=")
    if not equals:
        # Complete one level of a dotted name at a time, as a shell does with folders.
        section = last[: last.rfind(".") + 1]
        names = [name.removeprefix(section) for name in values if name.startswith(section)]
        return [section + (name.split(".")[0] + "." if "." in name else name + "=") for name in names]
    # In a grid, complete the value after the last comma.
    start = key + equals + value[: value.rfind(",") + 1]
    return [start + choice for choice in values.get(key, ())]


def _values(command: str, chosen: dict[str, str]) -> dict[str, list[str]]:
    """Return the possible values of each option, for the chosen norm, placement and so on.

    Args:
        command: train or sweep.
        chosen: The choice from each config group.
    """
    from normlab.config.corpora import DATA
    from normlab.config.optim import OPTIMIZERS
    from normlab.config.schema import RunConfig
    from normlab.config.sweep_options import SweepOptions
    from normlab.placements.init_rules import INIT_RULES

    values: dict[str, list[str]] = {}
    kinds: list[tuple[str, Any]] = [("", RunConfig), *([("sweep.", SweepOptions)] if command == "sweep" else [])]
    for group, classes in (("data.", DATA), ("optim.", OPTIMIZERS)):
        kinds += [(group, classes[name]) for name in (chosen[group[:-1]],) if name in classes]
    for prefix, kind in kinds:
        for option, field in option_fields(kind, prefix):
            values[option] = ["true", "false"] if "bool" in str(field.type) else list(field.metadata.get("choices", ()))
    for group in ("norm", "placement"):  # importing their classes imports torch, so the catalogue parses their source
        entries = {entry["name"]: entry for entry in GROUPS[group]()}
        entry = entries.get(chosen[group], {})
        for option in entries.get(entry.get("preset_of", ""), entry).get("options", ()):
            is_bool = isinstance(option["default"], bool)
            values[f"{group}.{option['option']}"] = ["true", "false"] if is_bool else list(option.get("choices", ()))
    values["init"] = ["auto", *INIT_RULES]
    for option in [f"{group}.{name}" for group in GROUPS for name in ("name", "preset")]:
        if (option, chosen["data"]) != ("data.name", "hub"):  # norm=... sets norm.name; only data.name of hub is free
            values.pop(option, None)
    return values | {group: [entry["name"] for entry in entries()] for group, entries in GROUPS.items()}


@app.command()
def completion(shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash or zsh.")]) -> None:
    """Print a script for tab completion.

    For bash, add to ~/.bashrc: eval "$(normlab completion bash)". For zsh, add to ~/.zshrc: eval "$(normlab completion
    zsh)".
    """
    if shell not in SCRIPTS:
        raise ConfigError(f"completion {shell}: no script for this shell; choose {' or '.join(SCRIPTS)}")
    typer.echo(SCRIPTS[shell], nl=False)


@app.command(hidden=True)
def complete(line: str) -> None:
    """Print the completions of a command line, for the scripts of `normlab completion`."""
    command = typer.main.get_command(app)
    flags = {
        name: [flag for parameter in subcommand.params for flag in parameter.opts if flag.startswith("--")]
        for name, subcommand in command.commands.items()  # pyright: ignore[reportAttributeAccessIssue]
        if not subcommand.hidden
    }
    typer.echo("\n".join(candidates(line, flags)))
