"""Read files and JSON that may be damaged or hostile."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MAX_NESTING = 100
"""Most levels of objects and lists in a JSON file of normlab; only options of plugins nest more than a few."""


def read_at_most(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file of at most `max_bytes` bytes.

    Raises:
        ValueError: The file is larger, or is a pipe or a device.
        OSError: The file cannot be opened or read.
    """
    # Without O_NONBLOCK, opening a pipe waits until another process writes to it.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is a pipe or a device, not a file")
        if status.st_size > max_bytes:
            raise ValueError(f"has {status.st_size} bytes (at most {max_bytes})")
        return file.read(status.st_size)


def from_json(content: bytes) -> dict[str, Any]:
    """Return the JSON object in `content`; every JSON file of normlab is read by this function.

    Raises:
        ValueError: The content is not a JSON object, or is nested deeper than `MAX_NESTING`.
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    # The parser may accept deeper nesting than the recursive code that reads the value afterwards.
    # Counting brackets is cheap and skips the walk for almost every file.
    if content.count(b"{") + content.count(b"[") > MAX_NESTING and _is_nested(value, MAX_NESTING):
        raise ValueError("nested too deeply")
    return value


def _is_nested(value: dict[str, Any] | list[Any], levels: int) -> bool:
    """Return whether `value` (included) has more than `levels` levels of objects and lists."""
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_nested(item, levels - 1) for item in items if isinstance(item, dict | list))
