"""The text of a Python file without its comments and blank lines, whose hash is the version of a plugin.

Gives the same text on all versions of Python. Tokens and syntax trees differ between versions; so comments are cut out
of the text, at the positions that `tokenize` reports. Imports only the standard library.
"""

import io
import tokenize
from collections.abc import Iterator


def code_of(content: bytes) -> str:
    """Return a Python file without comments, blank lines, and blanks at the ends of lines; strings stay as they are.

    Each line ends in a line feed. The file is decoded by the encoding that it declares.

    Raises:
        SyntaxError, tokenize.TokenError, UnicodeDecodeError: The file is not Python.
    """
    text = _decode(content)
    lines = text.split("\n")
    is_inside_string = [False] * len(lines)
    """Whether the end of each line is inside of a string, so that it belongs to the string."""
    for kind, first, column, last in _comments_and_strings(text):
        if kind == "comment":
            lines[first] = lines[first][:column]
        else:
            for number in range(first, last):
                is_inside_string[number] = True
    code_lines: list[str] = []
    for number, line in enumerate(lines):
        if is_inside_string[number]:
            code_lines.append(line)
            continue
        stripped = line.rstrip()
        # After a backslash, a blank line ends the statement.
        is_continued = bool(code_lines) and code_lines[-1].endswith("\\")
        if stripped or is_continued:
            code_lines.append(stripped)
    return "\n".join(code_lines)


def _decode(content: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    return content.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def _comments_and_strings(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield each comment and each string as its kind, its first line, its column there, and its last line, from 0.

    Before Python 3.12 an f-string is one token. Since then it is several, from its start to its end, with strings and
    comments in between.
    """
    starts: list[tuple[int, int]] = []
    """The starts of the f-strings around the token."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name, (line, column), (last_line, _) = tokenize.tok_name[token.type], token.start, token.end
        if name in ("FSTRING_START", "TSTRING_START"):
            starts.append((line, column))
        elif name in ("FSTRING_END", "TSTRING_END"):
            line, column = starts.pop()
            if not starts:
                yield "string", line - 1, column, last_line - 1
        elif name == "STRING" and not starts:
            yield "string", line - 1, column, last_line - 1
        elif name == "COMMENT" and not starts:
            yield "comment", line - 1, column, line - 1
