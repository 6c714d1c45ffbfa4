"""Tab completion: what a word of the command line could go on as. Reads the catalogue; loads no torch, no Hydra.

The shells' scripts hand the line up to the cursor to `normlab complete` and show what it prints, a candidate
a line. A candidate is the whole word, so that this file does not know how a shell splits one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from normlab import catalogue
from normlab.report.catalogue import ENTRIES

FLAGS = (
    "--multirun",
    "--cfg",
    "--info",
    "--config-dir",
    "--config-name",
    "--resolve",
    "--package",
    "--help",
    "--debug",
)
"""Of `train`: Hydra's, and our own."""

GROUPS = {
    "norm": catalogue.norms,
    "placement": catalogue.placements,
    "model": catalogue.models,
    "data": catalogue.data,
    "optim": catalogue.optim,
    "stats": catalogue.stats,
}
"""What the words without a dot choose from."""

DEFAULTS = {"norm": "rmsnorm", "placement": "pre", "data": "stdlib", "optim": "adamw"}
"""Whose options are offered where no word has chosen: conf/train.yaml's, as a test holds."""

BASH = """\
# Tab completion of normlab for bash. Put into ~/.bashrc:  eval "$(normlab completion bash)"
_normlab() {
    local IFS=$'\\n' word line=${COMP_LINE:0:COMP_POINT}
    COMPREPLY=($(normlab complete -- "$line" 2>/dev/null))
    compopt +o nospace
    for word in "${COMPREPLY[@]}"; do
        [[ $word == *[=.] ]] && compopt -o nospace
    done
    # Readline replaces what follows the last of its word breaks, and = is one of them.
    word=${line##*[[:space:]]}
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%=*}"=}")
    fi
}
complete -o default -F _normlab normlab
"""

ZSH = """\
#compdef normlab
# Tab completion of normlab for zsh. Put into ~/.zshrc, after compinit:  eval "$(normlab completion zsh)"
_normlab() {
    local -a found open whole
    found=("${(@f)$(normlab complete -- "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    found=(${found:#})
    if (( ! $#found )); then
        compset -P '*='
        _files
        return
    fi
    open=(${(M)found:#*[=.]})
    whole=(${found:#*[=.]})
    (( $#open )) && compadd -Q -S '' -- $open
    (( $#whole )) && compadd -Q -- $whole
}
compdef _normlab normlab
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH}
"""What `normlab completion SHELL` prints."""


def candidates(line: str, commands: dict[str, list[str]]) -> list[str]:
    """The words that the last word of a line could go on as, sorted; none where it is a path or anything else.

    Args:
        line: The command line up to the cursor, the program's name included.
        commands: The flags of each command.
    """
    words = line.split(" ")[1:]
    *before, last = [word for word in words[:-1] if word not in ("", "--debug")] + words[-1:]
    if not before:
        found = [*commands, "--help", "--version"]
    elif before[0] == "train":
        found = _train(before[1:], last)
    elif before[0] == "sweep" and not last.startswith("-"):
        found = _train(before[1:], last, catalogue.sweep())
    elif before[0] == "list" and len(before) == 1:
        found = [*ENTRIES, "runs"]
    elif before[0] == "completion":
        found = list(SCRIPTS)
    elif before[-1] == "--format":
        found = ["html", "png"] if before[0] == "compare" else ["table", "json", "csv", "markdown"]
    else:
        found = commands.get(before[0], [])
    return sorted({word for word in found if word.startswith(last)})


def _train(before: list[str], last: str, more: Sequence[dict[str, Any]] = ()) -> list[str]:
    """The words of a run, and `more` options beside its own."""
    if last.startswith("-"):
        return list(FLAGS)
    if before[-1:] in (["--cfg"], ["-c"]):
        return ["job", "hydra", "all"]
    chosen = DEFAULTS | {word: value for word, _, value in (word.partition("=") for word in before) if value}
    options = {option["option"]: option for option in [*_options(chosen), *more]}
    word, equals, value = last.partition("=")
    if not equals:
        # One level at a time, as a shell does with folders.
        head, dot, _ = last.rpartition(".")
        below = [name.removeprefix(head + dot) for name in [*options, *GROUPS] if name.startswith(head + dot)]
        return [head + dot + (name.split(".")[0] + "." if "." in name else name + "=") for name in below]
    # --multirun and sweep take several, with commas between them.
    start = word + equals + value.rpartition(",")[0] + ("," if "," in value else "")
    return [start + choice for choice in _values(word, options)]


def _options(chosen: dict[str, str]) -> list[dict[str, Any]]:
    """The options of a run, those of its norm, placement, corpus and optimiser among them."""
    found = catalogue.options()
    for group, name in chosen.items():
        if group in GROUPS and group not in ("model", "stats"):
            entries = {entry["name"]: entry for entry in GROUPS[group]()}
            entry = entries.get(name, {})
            entry = entries.get(entry.get("preset_of", ""), entry)
            found += [option | {"option": f"{group}.{option['option']}"} for option in entry.get("options", [])]
    return found


def _values(word: str, options: dict[str, dict[str, Any]]) -> list[str]:
    if word in GROUPS:
        return [entry["name"] for entry in GROUPS[word]()]
    if word == "init":
        from normlab.init_rules import INIT_RULES

        return ["auto", *INIT_RULES]
    option = options.get(word, {})
    if isinstance(option.get("default"), bool) or word == "deterministic":
        return ["true", "false"]
    return list(option.get("choices", ()))
