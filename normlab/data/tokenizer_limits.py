"""Limits on a tokenizer.json of a stranger: how much longer it may make a text, and for how long it may run.

A normaliser that replaces one character by a million takes all memory, and so does a chain of small ones. Their
growth is bounded from the definition, before a text is encoded. What cannot be read from it, such as the time that a
regular expression takes, is bounded while it runs.
"""

import base64
import binascii
import json
import re
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST_GROWTH = 64
"""Most characters that a normaliser, a pre-tokenizer or a decoder may make of one. XLNet's has a bound of 18."""
MOST_STEPS = 256
LONGEST_TEXT = 2**10
"""Most characters of a text in a step, such as what it prepends; longer contents of `Replace` are refused as growth."""
LONGEST_PATTERN = 2**14
LONGEST_TOKEN = 2**12
"""Most characters of a token; those of public tokenizers have at most about 200."""
SECONDS, CHARACTERS_PER_S = 60.0, 10_000
"""Encoding may take this time, and more for a long text; slow public tokenizers take 100,000 characters a second."""

_GROWS = {"ByteLevel": 4, "Metaspace": 2}
"""Characters that a step makes of one at most: a byte of UTF-8 becomes a character, and a word gets one before it."""
_STEPS = ("normalizers", "pretokenizers", "decoders")
"""The names of the lists of steps in a sequence."""
_MATCHES_A_CHARACTER = re.compile(
    r"""(?: (?: \\[sSdDwWntr] | \\p\{\w+\} | \[\^?(?:\\[sSdDwWntr]|[^\\\[\]&^])+\] | [^\\\[\](){}*?+|^$] )
            (?: \+ | \{[1-9]\d*,?\} )? )+""",
    re.VERBOSE,
)
"""Regular expressions that are known not to match the empty text: characters and sets, each once or more often."""


@dataclass(frozen=True)
class _Step:
    """What is known of a step of a normaliser, a pre-tokenizer or a decoder."""

    growth: int
    """A bound on the characters that it makes of one."""
    reads: frozenset[str] | None = None
    """The characters that it changes; None for any."""
    writes: frozenset[str] | None = None
    """The characters that it makes of them; None for any."""

    def may_change_what(self, earlier: "_Step") -> bool:
        """Return whether it may change what an earlier step has written."""
        if self.reads is None:
            return earlier.writes is None or bool(earlier.writes)
        return earlier.writes is None or bool(self.reads & earlier.writes)


def check_definition(definition: str) -> None:
    """Check the growth of a text by a tokenizer.json, and the lengths of its tokens.

    Raises:
        ValueError: A limit is exceeded; or it is not JSON, or has a part of another form.
    """
    try:
        content = json.loads(definition)
        parts = [content.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
        model, added = content["model"], content.get("added_tokens") or []
        vocab = model.get("vocab") or []
        tokens = [*(each if isinstance(each, str) else each[0] for each in vocab), *(each["content"] for each in added)]
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
    """Check a normaliser, a pre-tokenizer or a decoder, whose steps follow one another.

    A character grows by a step, and what the step has written grows by every later step that may change it. So the
    growth G_j of what step j writes is g_j * max(1, G_i for each earlier i whose text j may change).
    """
    earlier: list[tuple[_Step, int]] = []
    for definition in _steps_of(part):
        step = _step(definition)
        growth = step.growth * max([1, *(before for other, before in earlier if step.may_change_what(other))])
        if growth > LARGEST_GROWTH:
            raise ValueError(
                f"its {definition['type']} may make {growth} characters of one, with the steps before it (at most "
                f"{LARGEST_GROWTH})"
            )
        earlier.append((step, growth))
        if len(earlier) > MOST_STEPS:
            raise ValueError(f"has more than {MOST_STEPS} steps")


def _steps_of(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of nested sequences, in order."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
    for name in _STEPS:
        for step in part.get(name) or ():
            yield from _steps_of(step)


def _step(definition: dict[str, Any]) -> _Step:
    """Return what is known of a step.

    Raises:
        ValueError: One of its texts is too long.
    """
    kind, pattern = definition["type"], definition.get("pattern")
    found = next(iter(pattern.values())) if isinstance(pattern, dict) else ""
    if len(found) > LONGEST_PATTERN:
        raise ValueError(f"its {kind} has a pattern of {len(found)} characters (at most {LONGEST_PATTERN})")
    if kind == "Replace":
        content = definition["content"]
        writes = frozenset(content)
        if isinstance(pattern, dict) and "String" in pattern and found:
            return _Step(max(1, -(-len(content) // len(found))), reads=frozenset(found), writes=writes)
        if _MATCHES_A_CHARACTER.fullmatch(found):
            return _Step(max(1, len(content)), writes=writes)
        return _Step(1 + len(content), writes=writes)  # it may match the empty text before each character
    if kind == "Precompiled":
        return _Step(_longest_in_charsmap(definition["precompiled_charsmap"]))
    for name, value in definition.items():
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise ValueError(f"the {name} of its {kind} has {len(value)} characters (at most {LONGEST_TEXT})")
    return _Step(_GROWS.get(kind, 1))


def _longest_in_charsmap(encoded: str) -> int:
    """Return the characters of the longest replacement in a table of SentencePiece.

    The table is the length of a trie, the trie, and the replacements, each with a NUL at its end.

    Raises:
        ValueError: It is damaged; the library would end the process.
    """
    try:
        table = base64.b64decode(encoded, validate=True)
        (length,) = struct.unpack_from("<I", table)
        replacements = table[4 + length :].decode()
    except (binascii.Error, struct.error, UnicodeDecodeError) as error:
        raise ValueError("its precompiled_charsmap is damaged") from error
    if length % 4 or 4 + length > len(table):
        raise ValueError("its precompiled_charsmap is damaged")
    return max(1, *map(len, replacements.split("\0")))


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
        ValueError: The function failed, or takes too long. The call continues in its thread until the process
            ends, because the library cannot be stopped.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            with library_errors():
                future.set_result(function())
        except ValueError as error:
            future.set_exception(error)

    threading.Thread(target=call, name="normlab tokenizer", daemon=True).start()
    seconds = SECONDS + characters / CHARACTERS_PER_S
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        raise ValueError(f"takes more than {seconds:.0f} s for {characters} characters") from None
