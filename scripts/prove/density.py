#!/usr/bin/env python3
"""Print how densely Python code is written: per room, and of all files, per 1,000 non-blank lines.

    python scripts/prove/density.py [FOLDER]     (default: normlab; any project of Python files)

A room is a folder directly in FOLDER; `.` are the files beside the rooms. Counted are conditional expressions
(`a if c else b`), comprehensions (of lists, sets and dictionaries, and generator expressions), assignments inside an
expression (`:=`), and lines that hold only a comment. Below the table stand the functions of more than 60 lines, from
`def` to their last line, with their docstring, and the statements to write out as an `if`: a conditional expression
inside a comprehension, two of them in one statement, and `:=` inside a condition with another operator. Aims:
`CONTRIBUTING.md`.
"""

import argparse
import ast
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_FUNCTION = 60
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SIMPLE_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert)
COLUMNS = ("conditional", "comprehension", "walrus", "comment")


@dataclass
class Room:
    """What the files of a room hold, in total."""

    files: int = 0
    lines: int = 0
    """Lines that are not blank."""
    counts: Counter[str] = field(default_factory=Counter)
    """The number of each of `COLUMNS`."""
    long_functions: list[tuple[int, str]] = field(default_factory=list)
    """Length in lines, and `file:line name`."""
    packed: list[str] = field(default_factory=list)
    """The statements to write out: `file:line what`."""

    def add_file(self, path: Path, folder: Path) -> None:
        """Add what a file of a folder holds.

        Raises:
            SyntaxError: The file is not valid Python of this version.
        """
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source, filename=str(path))
        self.files += 1
        for line in source.splitlines():
            text = line.strip()
            if text:
                self.lines += 1
            # A line of a multi-line string that begins with `#` counts too: such lines are few.
            if text.startswith("#"):
                self.counts["comment"] += 1
        for node in ast.walk(tree):
            if isinstance(node, ast.IfExp):
                self.counts["conditional"] += 1
            elif isinstance(node, COMPREHENSIONS):
                self.counts["comprehension"] += 1
            elif isinstance(node, ast.NamedExpr):
                self.counts["walrus"] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    self.long_functions.append((length, f"{path.relative_to(folder)}:{node.lineno} {node.name}"))
            if isinstance(node, ast.stmt | ast.expr):
                what = packed_statement(node)
                if what:
                    self.packed.append(f"{path.relative_to(folder)}:{node.lineno} {what}")

    def add_room(self, room: "Room") -> None:
        self.files += room.files
        self.lines += room.lines
        self.counts += room.counts
        self.long_functions += room.long_functions
        self.packed += room.packed

    def row(self, name: str) -> str:
        """Return the line of the table: name, files, lines, and each count per 1,000 lines."""
        rates = "".join(f"{1000 * self.counts[column] / max(self.lines, 1):15.1f}" for column in COLUMNS)
        return f"{name:16}{self.files:6}{self.lines:8}{rates}{len(self.long_functions):8}"


def packed_statement(node: ast.stmt | ast.expr) -> str:
    """Return what of a statement or an expression should be written out; empty if nothing."""
    inside = list(ast.walk(node))
    conditionals = sum(isinstance(part, ast.IfExp) for part in inside)
    if isinstance(node, COMPREHENSIONS) and conditionals:
        return "conditional inside a comprehension"
    if isinstance(node, SIMPLE_STATEMENTS) and conditionals > 1:
        return "several conditionals in a statement"
    if isinstance(node, ast.BoolOp | ast.Compare):
        if any(isinstance(part, ast.NamedExpr) for part in inside):
            return "assignment inside a condition with another operator"
    return ""


def read_rooms(folder: Path) -> dict[str, Room]:
    """Return the rooms of a folder by name, the largest first."""
    rooms: dict[str, Room] = defaultdict(Room)
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        # Virtual environments and caches in other projects are not their code.
        if any(part.startswith(".") for part in parts):
            continue
        name = parts[0] if len(parts) > 1 else "."
        try:
            rooms[name].add_file(path, folder)
        except (SyntaxError, UnicodeDecodeError) as error:
            print(f"left out {path}: {error}", file=sys.stderr)
    return dict(sorted(rooms.items(), key=lambda item: -item[1].lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "normlab", metavar="FOLDER")
    folder = parser.parse_args().folder
    rooms = read_rooms(folder)
    if not rooms:
        print(f"error: {folder}: has no Python files", file=sys.stderr)
        return 2
    total = Room()
    for room in rooms.values():
        total.add_room(room)

    header = "".join(f"{column:>15}" for column in COLUMNS)
    print(f"{'room':16}{'files':>6}{'lines':>8}{header}{f'> {LONGEST_FUNCTION}':>8}")
    for name, room in rooms.items():
        print(room.row(name))
    print(total.row("all"))
    for length, name in sorted(total.long_functions, reverse=True):
        print(f"{length:4} lines  {name}")
    for place in total.packed:
        print(f"write out   {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
