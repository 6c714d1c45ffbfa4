"""Read files, JSON and numbers that may be damaged or hostile; give JSON a key and a hash."""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

MOST_DIGITS = 18
"""The most digits of a whole number in a text: int64 holds every such number."""

MOST_NODES = 2**17
"""Most values and keys of a YAML file after its references are replaced by what they name."""
LARGEST_YAML = 2**22
"""Most bytes of a YAML file."""

LARGEST_SPARSE, MOST_SPARSE = 2**30, 64
"""A sparse file, which has holes in place of content, is refused if it has more bytes than the first number, and more
than the second times what the disk holds.
"""


def is_whole_number(text: str) -> bool:
    """Return whether a text is a whole number of at most `MOST_DIGITS` digits, without a sign."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


def open_to_read(path: Path, max_bytes: int | None = None) -> BufferedReader:
    """Open a file that someone else may have made.

    Raises:
        ValueError: It has more bytes, or is a pipe, a device or a sparse file: reading it may take forever.
        OSError: The file cannot be opened, or is a folder.
    """
    # Without O_NONBLOCK, opening a pipe waits until another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    on_disk = 512 * status.st_blocks
    problem = ""
    if not stat.S_ISREG(status.st_mode):
        problem = "is a pipe or a device, not a file"
    elif max_bytes is not None and status.st_size > max_bytes:
        problem = f"has {status.st_size} bytes (at most {max_bytes})"
    elif status.st_size > max(LARGEST_SPARSE, MOST_SPARSE * on_disk) and _has_hole(descriptor, status.st_size):
        problem = f"has {status.st_size} bytes, of which the disk holds {on_disk}; a copy without holes is needed"
    if problem:
        os.close(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise ValueError(problem)
    return os.fdopen(descriptor, "rb")


def _has_hole(descriptor: int, size: int) -> bool:
    """Return whether a file has a hole; false on a disk that knows of none, such as one that compresses."""
    try:
        return os.lseek(descriptor, 0, os.SEEK_HOLE) < size
    except OSError:
        return False
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)


def read_at_most(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file of at most `max_bytes` bytes.

    Raises:
        ValueError: The file is larger, or as for `open_to_read`.
        OSError: The file cannot be opened or read.
    """
    with open_to_read(path, max_bytes) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def check_link(path: Path, folder: Path) -> None:
    """Check that a file is in a folder after its links are followed: a link of a stranger may lead anywhere.

    The cache of the Hugging Face libraries is an exception: the links in `snapshots/COMMIT` lead to `blobs` beside it.

    Raises:
        ValueError: It is a link that leads out of the folder.
    """
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if target.is_relative_to(root):
        return
    # The folder may lie deeper than the snapshot: `snapshots/COMMIT/onnx`.
    for snapshot in (root, *root.parents):
        if snapshot.parent.name == "snapshots":
            if target.parent == snapshot.parent.parent / "blobs":
                return
            break
    raise ValueError(f"is a link to {target}, outside of {folder}; replace the link with a copy of that file")


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


def key_of(tree: dict[str, Any]) -> bytes:
    """Return the JSON of an object of plain values, which differs if a value or its type does: a key of a cache."""
    import msgspec  # every command imports this file, and its help needs no msgspec

    try:
        return msgspec.json.encode(tree)
    except UnicodeEncodeError:
        # It has half of a surrogate pair, as Python has in a path that is no UTF-8.
        return json.dumps(tree).encode()


def canonical_hash(tree: Any) -> str:
    """Return the SHA-256, in hex, of JSON with sorted keys, no spaces, shortest exact floats."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def leaves(value: object) -> Iterator[object]:
    """Yield each value in nested lists and mappings that is neither."""
    if isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def check_expanded_size(text: str) -> None:
    """Check how many values a text of YAML has if each reference is replaced by what it names.

    Raises:
        ValueError: It has more than `MOST_NODES`, is nested too deeply, or a part of it refers to itself.
    """
    # The import takes a while, and most commands read no YAML.
    import yaml

    size = 0
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            size = _expanded_size(node)
    except yaml.YAMLError:
        # The caller parses the text, too, and names the line.
        return
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if size > MOST_NODES:
        raise ValueError(f"has more than {MOST_NODES} values, with its references replaced by what they name")


def read_front_matter(path: Path) -> Any:
    """Return the YAML between lines `---` at the start of a Markdown file, or None if it has none.

    Raises:
        ValueError: The file is larger than `LARGEST_YAML`, or has no valid YAML in UTF-8; or as `check_expanded_size`.
        OSError: The file cannot be read.
    """
    import yaml

    match = _FRONT_MATTER.match(read_at_most(path, LARGEST_YAML).decode("utf-8-sig"))
    if match is None:
        return None
    check_expanded_size(match[1])
    try:
        return yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise ValueError("not valid YAML") from error


_FRONT_MATTER = re.compile(r"\s*---[ \t]*(?:\r\n|\r|\n)([\s\S]*?)(?:\r\n|\r|\n)---[ \t]*(?:\r|\n|$)")


def _expanded_size(node: Any) -> int:
    """Return the number of values and keys below a node of YAML, counting those below an alias each time.

    Raises:
        ValueError: A node is below itself.
    """
    sizes: dict[int, int | None] = {}

    def size(node: Any) -> int:
        if not isinstance(node.value, list):
            return 1
        if id(node) not in sizes:
            # None while its parts are counted: a part that finds it is an alias of the whole.
            sizes[id(node)] = None
            below = 0
            for part in node.value:
                if isinstance(part, tuple):
                    key, value = part
                    below += size(key) + size(value)
                else:
                    below += size(part)
            sizes[id(node)] = 1 + below
        total = sizes[id(node)]
        if total is None:
            raise ValueError("a part of it refers to itself")
        return total

    return size(node)
