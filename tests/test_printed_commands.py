"""Each command in backticks in a text of the package has a name and flags that `normlab` takes."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import normlab
from normlab.cli import app

PACKAGE = Path(normlab.__file__).parent
COMMAND = re.compile(r"`normlab ([^`]+)`")


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield each text of a module; the expressions in an f-string are `x`."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def printed_commands() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        # Most files print no command, and parsing all of them takes seconds in each process of the tests.
        if "`normlab " not in source:
            continue
        for text in texts(ast.parse(source)):
            yield from (" ".join(command.split()) for command in COMMAND.findall(text))


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command of typer that the first words name, and the other words."""
    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "commands") and not words[0].startswith("-") and not words[0].isupper():
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("printed", sorted(set(printed_commands())))
def test_a_printed_command_exists(printed: str) -> None:
    command, words = command_of(shlex.split(printed))
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        assert not word.startswith("-") or word.partition("=")[0] in {*flags, "--help"}


def test_commands_are_found() -> None:
    found = {printed.split()[0] for printed in printed_commands()}
    assert {"list", "summarize", "share", "study", "doctor", "verify"} <= found
