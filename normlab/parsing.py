"""Reading files and JSON that may be damaged, or made to do damage."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_NESTED = 100
"""Levels of objects and lists in a file of ours. A plugin's options may nest; nothing that is meant goes so deep."""


def read_at_most(path: Path, most: int) -> bytes:
    """Return a file's content, once its size is known to be at most `most` bytes.

    Raises:
        ValueError: The file is larger, or is a pipe or a device.
        OSError: The system refused.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is a pipe or a device, not a file")
        if status.st_size > most:
            raise ValueError(f"has {status.st_size} bytes, of at most {most}")
        return file.read(status.st_size)


def _open_at_once(path: str, flags: int) -> int:
    # Without it, opening a pipe waits for somebody to write into it.
    return os.open(path, flags | os.O_NONBLOCK)


def from_json(content: bytes) -> dict[str, Any]:
    """The JSON object that some bytes are: the one way in which what normlab wrote is read.

    Raises:
        ValueError: They are none, or one that is nested deeper than `MOST_NESTED`.
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    # Fewer brackets than that cannot nest so deep; counting them costs nothing.
    if content.count(b"{") + content.count(b"[") > MOST_NESTED and _is_nested(value, MOST_NESTED):
        # The parser may have a longer breath than what walks through the value afterwards.
        raise ValueError("nested too deeply")
    return value


def _is_nested(value: dict[str, Any] | list[Any], levels: int) -> bool:
    """Whether there are more than so many levels of objects and lists, `value` being the first."""
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_nested(item, levels - 1) for item in items if isinstance(item, dict | list))
