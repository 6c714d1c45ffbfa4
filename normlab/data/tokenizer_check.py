"""Check a tokenizer.json of unknown origin before `tokenizers` loads it in this process.

`tokenizers` has no limits: a few kilobytes can take any time and any memory, and memory that runs out ends the process.
So the sizes are checked first, and then another process, with limits, loads the tokenizer and encodes a text.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from normlab.config.corpora import MAX_VOCAB_SIZE
from normlab.parsing import from_json

LARGEST_TOKENIZER = 2**27
"""Most bytes of a tokenizer.json; those with 2^18 tokens have 2^25."""

MEMORY_BYTES, CPU_SECONDS = 2**31, 30
"""Limits of the other process, which needs 1 GiB and 2 s for 2^20 tokens."""

MAX_GROWTH = 64
"""Largest ratio of the characters or tokens that a tokenizer makes of a text to the characters of the text."""

SAMPLE = "It's a trial, the 1st of 2."
"""Text that a tokenizer encodes when it is loaded, because some tokenizers load and then fail on every text."""

_PROGRAM = """
import json, resource, sys
memory, seconds, growth, definition, text = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
try:
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    sizes = [len(ids), len(tokenizer.decode(ids))]
    if tokenizer.normalizer is not None:
        sizes.append(len(tokenizer.normalizer.normalize_str(text)))
    print(max(sizes) <= growth * len(text))
except MemoryError:
    sys.exit(12)
except BaseException:
    print(True)  # the caller finds the same error, or panic, when it loads the tokenizer
"""


def check_definition(definition: str) -> None:
    """Check that a tokenizer.json can be loaded and used with limited time and memory.

    Raises:
        ValueError: It is no JSON object, has too many tokens, needs too much time or memory, or expands the text.
    """
    tree = from_json(definition.encode())
    model = tree.get("model")
    lists = [model.get("vocab") if isinstance(model, dict) else None, tree.get("added_tokens")]
    tokens = max((len(each) for each in lists if isinstance(each, dict | list)), default=0)
    if tokens >= MAX_VOCAB_SIZE:
        raise ValueError(f"has {tokens} tokens (at most {MAX_VOCAB_SIZE - 1})")
    patterns = _patterns([tree.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")])
    text = " ".join([SAMPLE, *patterns])[: 2**14]
    try:
        done = subprocess.run(
            # -P: a file tokenizers.py in the working folder is not the library.
            [sys.executable, "-P", "-c", _PROGRAM],
            input=json.dumps([MEMORY_BYTES, CPU_SECONDS, MAX_GROWTH, definition, text]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20 * CPU_SECONDS,  # of waiting; another process may use the processor
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"takes more than {CPU_SECONDS} s to load") from error
    if done.returncode == -signal.SIGXCPU:
        raise ValueError(f"takes more than {CPU_SECONDS} s to load and to encode {len(text)} characters")
    if done.returncode:
        raise ValueError(f"takes more than {MEMORY_BYTES / 2**30:g} GiB to load and to encode {len(text)} characters")
    if done.stdout.strip() == b"False":
        raise ValueError(f"makes more than {MAX_GROWTH} times as many characters or tokens as the text has characters")


def _patterns(part: Any) -> Iterator[str]:
    """Yield the patterns in parts of a tokenizer: a text of their characters triggers their replacements."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part if isinstance(part, list) else []):
        if key in ("pattern", "String", "Regex") and isinstance(value, str):
            yield value
        yield from _patterns(value)
