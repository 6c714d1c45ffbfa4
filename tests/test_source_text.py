"""The version of a plugin: its code without comments and blank lines, equal on all versions of Python."""

import ast
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

import normlab.base.source_text
from normlab.base.plugins import Plugin
from normlab.base.source_text import code_of

TEXT = r'''#!/usr/bin/env python
# -*- coding: utf-8 -*-
"""A docstring.

# This line belongs to it, and so does the blank line.
"""

from math import pi  # a comment

x = 1
y = f"{x!r:>{x + 3}} # no comment, {pi:.2f} {{}}"  # "a comment"
z = f"""{x}

    # of the string {y}

""" + "#"  # a comment


def f(a, b="#", *, c="\"#\""):
    # Only a comment.

    if a:  # one

        return rf"\d#{a}" \
            "#"
    return (
        # inside brackets

        a,

        b"#",
    )


w = (1) \

(2)
match x:
    case 1 if (n := 3):  # é
        é = "é # é"
lines = """

end"""; after = 1  # comment
'''
"""A file with strings that hold `#` and blank lines, f-strings of several lines, and comments at all places."""
CODE = r'''"""A docstring.

# This line belongs to it, and so does the blank line.
"""
from math import pi
x = 1
y = f"{x!r:>{x + 3}} # no comment, {pi:.2f} {{}}"
z = f"""{x}

    # of the string {y}

""" + "#"
def f(a, b="#", *, c="\"#\""):
    if a:
        return rf"\d#{a}" \
            "#"
    return (
        a,
        b"#",
    )
w = (1) \

(2)
match x:
    case 1 if (n := 3):
        é = "é # é"
lines = """

end"""; after = 1'''
SHA256 = "2bd05c8bd182c51ebbfdd715c8f542087170bf28d2adf48321314f6df9be1afd"
"""That of `CODE`: it must not change, since the ids of runs with plugins depend on it."""
PYTHONS = [name for minor in range(11, 15) if (name := shutil.which(f"python3.{minor}"))]


def test_comments_and_blank_lines_are_left_out_of_a_fixed_text() -> None:
    assert code_of(TEXT.encode()) == CODE
    assert Plugin(Path("mine.py"), TEXT.encode()).version == hashlib.sha256(CODE.encode()).hexdigest() == SHA256


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).name)
def test_the_hash_is_the_same_on_other_versions_of_python(python: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_bytes(TEXT.encode())
    shutil.copy(normlab.base.source_text.__file__, tmp_path / "source_text.py")
    script = (
        "import hashlib, pathlib, source_text; "
        "print(hashlib.sha256(source_text.code_of(pathlib.Path('mine.py').read_bytes()).encode()).hexdigest())"
    )
    done = subprocess.run([python, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    if "command not found" in done.stderr:
        pytest.skip(f"{python} is a link to a version that is not installed")
    assert done.stdout.strip() == SHA256, done.stderr


@pytest.mark.parametrize(
    ("before", "after", "is_same_code"),
    [
        pytest.param("after = 1  # comment\n", "after = 1\n# another comment\n\n", True, id="comment at the end"),
        pytest.param("x = 1\n", "x = 1  # one\n\n\n", True, id="comment and blank lines"),
        pytest.param("    # Only a comment.\n", "", True, id="comment removed"),
        pytest.param("        # inside brackets\n", "", True, id="comment in brackets removed"),
        pytest.param("\n", "\r\n", True, id="line ends"),
        pytest.param("#!/usr/bin", "\ufeff#!/usr/bin", True, id="byte order mark"),
        pytest.param("x = 1\n", "x = 1    \n", True, id="blanks at the end of a line"),
        ("x = 1", "x = 2", False),
        ("# no comment", "# no  comment", False),
        ("    # of the string {y}\n", "", False),
        ('lines = """\n\n', 'lines = """\n', False),
        ("# This line belongs to it", "# That line belongs to it", False),
        ("w = (1) \\\n\n(2)", "w = (1) \\\n(2)", False),
        ("        return rf", "            return rf", False),
    ],
)
def test_only_an_edit_of_code_or_of_a_string_changes_the_text(before: str, after: str, is_same_code: bool) -> None:
    assert before in TEXT
    edited = TEXT.replace(before, after)
    assert (code_of(edited.encode()) == CODE) is is_same_code


def test_the_declared_encoding_is_applied() -> None:
    text = "# coding: latin-1\nx = 'é'\n"
    assert code_of(text.encode("latin-1")) == "x = 'é'"


def test_the_norms_of_the_package_have_the_same_syntax_tree_without_comments() -> None:
    for path in sorted((Path(normlab.__file__).parent / "catalogue" / "norms").glob("*.py")):
        content = path.read_bytes()
        assert ast.dump(ast.parse(code_of(content))) == ast.dump(ast.parse(content)), path
