"""Read files, JSON and numbers that may be damaged or hostile."""

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_DIGITS = 18
"""The most digits of a whole number in a text: int64 holds every such number."""


def is_whole_number(text: str) -> bool:
    """Return whether a text is a whole number of at most `MOST_DIGITS` digits, without a sign."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


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
    """Return the JSON object in `content`.

    Raises:
        ValueError: The content is not a JSON object, or is nested too deeply.
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
