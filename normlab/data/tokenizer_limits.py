"""Limits on a tokenizer.json of a stranger: on the sizes of its parts, and on the time and the memory that it takes.

A chain of small replacements multiplies a text, and a regular expression may take exponential time. Neither can be
read from the definition: NFKC makes 18 characters of one, but only of one that few texts have. So both are measured
while the library works.
"""

import base64
import binascii
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from normlab.system.process_memory import resident_bytes

T = TypeVar("T")

MOST_STEPS = 256
LONGEST_TEXT = 2**10
"""Most characters of a text in a step, such as the content of a replacement."""
LONGEST_PATTERN = 2**14
LONGEST_TOKEN = 2**12
"""Most characters of a token; those of public tokenizers have at most about 200."""
SECONDS, CHARACTERS_PER_S = 60.0, 10_000
"""A call may take this time, and more for a long text; slow public tokenizers take 100,000 characters a second."""
MEMORY, MEMORY_PER_CHARACTER = 2**28, 2**10
"""Most bytes that a call may add to the memory of the process: for any text, and for each character. An ordinary
character takes about 200 bytes."""
_POLL_EVERY_S = 0.02

_STEPS = ("normalizers", "pretokenizers", "decoders")
"""The names of the lists of steps in a sequence."""


def check_definition(definition: str) -> None:
    """Check the lengths of the tokens, the texts and the patterns of a tokenizer.json.

    Raises:
        ValueError: A limit is exceeded; or it is not JSON, or has a part of another form.
    """
    try:
        content = json.loads(definition)
        parts = [content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
        model, added = content["model"], content.get("added_tokens") or []
        tokens: list[str] = []
        # A vocabulary maps tokens to numbers, or is a list of tokens with their scores (Unigram).
        for entry in model.get("vocab") or []:
            tokens.append(entry if isinstance(entry, str) else entry[0])
        tokens += [token["content"] for token in added]
        texts = [value for value in model.values() if isinstance(value, str)]
        longest = max(map(len, [*tokens, *texts]), default=0)
        for part in parts:
            _check_part(part)
    except RecursionError as error:
        raise ValueError("not a tokenizer.json (nested too deeply)") from error
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"not a tokenizer.json (a part of it has another form: {error!s:.60})") from error
    if longest > LONGEST_TOKEN:
        raise ValueError(f"has a token of {longest} characters (at most {LONGEST_TOKEN})")


def _check_part(part: dict[str, Any] | None) -> None:
    """Check a normaliser, a pre-tokenizer or a decoder, whose steps follow one another."""
    for number, step in enumerate(_steps_of(part), start=1):
        if number > MOST_STEPS:
            raise ValueError(f"has more than {MOST_STEPS} steps")
        kind, pattern = step["type"], step.get("pattern")
        # {"Regex": text} or {"String": text}.
        if isinstance(pattern, dict):
            length = len(next(iter(pattern.values())))
            if length > LONGEST_PATTERN:
                raise ValueError(f"its {kind} has a pattern of {length} characters (at most {LONGEST_PATTERN})")
        if kind == "Precompiled":
            _check_charsmap(step["precompiled_charsmap"])
            continue
        for name, value in step.items():
            if isinstance(value, str) and len(value) > LONGEST_TEXT:
                raise ValueError(f"the {name} of its {kind} has {len(value)} characters (at most {LONGEST_TEXT})")


def _steps_of(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of nested sequences, in order."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
    for name in _STEPS:
        for step in part.get(name) or ():
            yield from _steps_of(step)


def _check_charsmap(encoded: str) -> None:
    """Check a table of replacements of SentencePiece: the length of a trie, the trie, and texts that end in a NUL.

    Raises:
        ValueError: It is damaged; the library would end the process.
    """
    try:
        table = base64.b64decode(encoded, validate=True)
        (length,) = struct.unpack_from("<I", table)
        table[4 + length :].decode()
    except (binascii.Error, struct.error, UnicodeDecodeError) as error:
        raise ValueError("its precompiled_charsmap is damaged") from error
    if length % 4 or 4 + length > len(table):
        raise ValueError("its precompiled_charsmap is damaged")


@contextmanager
def library_errors() -> Iterator[None]:
    """Convert every error of `tokenizers` to a ValueError: a panic of Rust is no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(str(error)) from error


def call_within(characters: int, function: Callable[[], T]) -> T:
    """Return what a function of `tokenizers` returns for a text of so many characters.

    Raises:
        ValueError: The function failed, or takes too much time or memory. The call continues in its thread until the
            process ends, because the library cannot be stopped.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            with library_errors():
                future.set_result(function())
        except ValueError as error:
            future.set_exception(error)

    # A daemon, so that a call without an end does not keep the process from ending.
    before, start = resident_bytes(), time.monotonic()
    seconds = SECONDS + characters / CHARACTERS_PER_S
    most_bytes = MEMORY + MEMORY_PER_CHARACTER * characters
    threading.Thread(target=call, name="normlab tokenizer", daemon=True).start()
    while True:
        with suppress(TimeoutError):
            return future.result(timeout=_POLL_EVERY_S)
        if resident_bytes() - before > most_bytes:
            raise ValueError(f"takes more than {most_bytes / 2**20:.0f} MiB of memory for {characters} characters")
        if time.monotonic() - start > seconds:
            raise ValueError(f"takes more than {seconds:.0f} s for {characters} characters")
