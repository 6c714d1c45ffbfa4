"""A corpus: text as two files of tokens, built once and cached.

`<cache>/tokens/<key>/` holds `train.bin` and `val.bin` (little-endian unsigned integers, each document followed by the
end-of-document token), `meta.json`, and `counts.npz` for the baselines. The key is a hash of the text's source and of
all options that change the files. Opening a corpus verifies the lengths and hashes of its files, and builds a damaged
corpus again.

Shapes: N tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normlab.config.corpora import TOKENIZERS, DataConfig, HubData, NamedData, StdlibData
from normlab.config.schema import canonical_hash
from normlab.data import tokenizers
from normlab.data.baselines import baselines, load_or_count
from normlab.data.cache import atomic_folder, locked
from normlab.data.corpus_files import FilesText
from normlab.data.documents import (
    MIN_DOCUMENTS,
    SPLIT_VERSION,
    SourceCounts,
    Spool,
    first_characters,
    held_out_documents,
    tail_start,
)
from normlab.data.hub import HubText
from normlab.data.tokenizer_check import LARGEST_TOKENIZER
from normlab.data.tokenizers import PIECE, Tokenizer, local_tokenizer, pieces, pretrained_tokenizer, token_dtype
from normlab.errors import DataError, notify
from normlab.parsing import from_json, read_at_most
from normlab.paths import cache_dir

FORMAT = 2
"""Version of the cache format; raise it when folders of an older version must not be used any more."""

PARTS = ("train", "val")

MAX_LISTED = 200
"""Most files that the record of each run lists; their names and content are part of the hash of the text."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and validation tokens, and their tokenizer."""

    train: np.memmap
    """Training tokens (N,), read-only."""
    val: np.memmap
    """Validation tokens (N,), read-only."""
    tokenizer: Tokenizer
    sha256: str
    """Identity of the corpus: hash of the tokens of both parts and of the tokenizer."""
    description: dict[str, Any]
    """For the record of a run, as plain JSON values: name, sizes, the kind of validation split (complete `documents` or
    their `tails`), what was `read` (sums, and each of the files), and the `source` of a dataset of the hub."""
    folder: Path
    """Folder in the cache."""

    def baselines(self, tokens: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return the loss of each baseline model on validation targets, in nats/token."""
        return baselines(load_or_count(self.folder, self.train, self.val, self.tokenizer.vocab_size), tokens, targets)


def open_corpus(config: DataConfig, cache: Path | None = None) -> Corpus:
    """Return the corpus of a config from the cache; build it first if the cache has none.

    Args:
        config: The source of the text, its split and its tokenizer.
        cache: Folder of the cache; `paths.cache_dir()` unless given.

    Raises:
        DataError: The text cannot be read or is too short to split, or the cache cannot be written.
    """
    cache = (cache or cache_dir()).absolute()
    text = _text(config)
    for output in text.left_out:
        notify(f"{config.override}: leaving out {output}, which normlab wrote")
    key_parts = {
        "format": FORMAT,
        "split_rule": SPLIT_VERSION,
        "name": config.name,
        "tokenizer": config.tokenizer,
        "tokenizer_sha256": _tokenizer_sha256(config.tokenizer),
        "vocab_size": config.vocab_size,
        "max_tokens": config.max_tokens,
        "val_fraction": config.val_fraction,
        "origin": text.key,
    }
    key = canonical_hash(key_parts)
    folder = cache / "tokens" / key
    if corpus := _read(folder, text.left_out):
        return corpus
    # Ask the hub before waiting for the lock, so that errors of the hub are raised at once.
    pretrained = None if config.tokenizer in TOKENIZERS else pretrained_tokenizer(config.tokenizer)
    text.connect()
    try:
        with locked(cache, key) as temporary:
            if corpus := _read(folder, text.left_out):  # another process has built the corpus while this one waited
                return corpus
            with atomic_folder(folder, temporary) as new:
                with closing(text.documents(temporary / "scratch")) as stream:
                    documents = Spool(temporary / "documents", _limited(stream, config))
                meta = _write(new, documents, pretrained, config)
                if _text(config).key != text.key:
                    raise DataError(f"{config.override}: the text changed while it was read; try again")
                meta |= key_parts | {"source": text.provenance, "read": _read_text(text.counts, config)}
                meta["meta_sha256"] = canonical_hash(meta)
                (new / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{cache}: the cache cannot be written ({error.strerror or error}); "
            "set NORMLAB_CACHE to a writable folder on a disk with free space"
        ) from error
    if corpus := _read(folder, text.left_out):
        return corpus
    raise DataError(f"{folder}: the disk returned other bytes than were written; check it, or set NORMLAB_CACHE")


def _text(config: DataConfig) -> FilesText | HubText:
    return HubText(config) if isinstance(config, HubData | NamedData) else FilesText(config)


def _read_text(counts: Sequence[SourceCounts], config: DataConfig) -> dict[str, Any]:
    """Return what was read of all files, or of a dataset, and of each of the first `MAX_LISTED` files."""
    each = [asdict(source) for source in counts]
    formats = Counter(source["format"] for source in each)
    amounts = ("bytes", "documents", "empty", "null", "byte_order_marks")
    listed = [] if isinstance(config, StdlibData) else each[:MAX_LISTED]
    return {
        "formats": dict(sorted(formats.items())),
        **{amount: sum(source[amount] or 0 for source in each) for amount in amounts},
        "files": listed,
    }


def _limited(documents: Iterable[str], config: DataConfig) -> Iterable[str]:
    if config.max_tokens is None:
        return documents
    return first_characters(documents, tokenizers.characters_for(config.tokenizer, config.max_tokens))


def _tokenizer_sha256(name: str) -> str | None:
    """Return the hash of a tokenizer's file, or None if `name` is not a path."""
    try:
        file = None if name in TOKENIZERS else local_tokenizer(name)
        return hashlib.sha256(read_at_most(file, LARGEST_TOKENIZER)).hexdigest() if file else None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"data.tokenizer={name}: cannot be read ({reason}); make it readable or choose another"
        ) from error


def _write(folder: Path, documents: Spool, pretrained: Tokenizer | None, config: DataConfig) -> dict[str, Any]:
    """Write the tokens and the counts of a corpus; return what `_read` needs."""
    digests, lengths = [], []
    for document in documents:
        digests.append(hashlib.sha256(document.encode()).digest())
        lengths.append(len(document))
    if not digests:
        raise DataError(f"{config.override}: every document is empty; add text")
    held_out = held_out_documents(digests, lengths, config.val_fraction)

    def split() -> Iterator[tuple[str, str]]:
        """Yield the training and the validation text of each document; one may be empty."""
        for document, digest in zip(documents, digests, strict=True):
            if held_out:
                yield ("", document) if digest in held_out else (document, "")
            else:
                start = tail_start(document, config.val_fraction)
                yield document[:start], document[start:]

    tokenizer = pretrained or tokenizers.fit(config.tokenizer, (train for train, _ in split()), config.vocab_size)
    max_tokens: dict[str, int] | None = None
    if config.max_tokens is not None:
        num_val = round(config.max_tokens * sum(len(val) for _, val in split()) / sum(lengths))
        max_tokens = {"train": config.max_tokens - num_val, "val": num_val}
    files = _write_tokens(folder, split(), tokenizer, max_tokens)
    for part in PARTS:
        if max_tokens is not None and max_tokens[part] == 0:
            raise DataError(f"data.max_tokens={config.max_tokens}: leaves no tokens for {part}; raise it")
    if files["val"]["tokens"] == 0:
        longest, distinct = max(lengths), len(set(digests))
        needed = math.ceil(1000 / longest) / 1000
        raise DataError(
            f"{config.override}: no text is held out: documents are held out whole if {MIN_DOCUMENTS} or more are "
            f"distinct ({distinct} of {len(digests)} are), else the last data.val_fraction={config.val_fraction} of "
            f"each, which is less than a character of the longest ({longest}); add distinct documents"
            + (f", or set data.val_fraction={needed}" if needed <= 0.5 else "")
        )
    # Counting under the lock lets one process count for all that wait.
    train_N, val_N = (_memmap(folder, part, tokenizer) for part in PARTS)
    load_or_count(folder, train_N, val_N, tokenizer.vocab_size)
    return {
        "split": "documents" if held_out else "tails",
        "num_documents": len(lengths),
        "tokenizer_state": tokenizer.state(),
        "files": files,
    }


def _write_tokens(
    folder: Path, split_texts: Iterable[tuple[str, str]], tokenizer: Tokenizer, max_tokens: dict[str, int] | None
) -> dict[str, dict[str, Any]]:
    """Write the tokens of both parts; return the length and the hash of each file."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype)
    hashes = {part: hashlib.sha256() for part in PARTS}
    sizes: dict[str, int] = dict.fromkeys(PARTS, 0)
    with _bin(folder, "train").open("wb") as train, _bin(folder, "val").open("wb") as val:
        files = {"train": train, "val": val}
        for batch in _batches(split_texts):
            encoded = tokenizer.encode_batch([text for _, text, _ in batch])
            for (part, _, is_last), tokens_T in zip(batch, encoded, strict=True):
                content_T = np.concatenate([tokens_T, end]) if is_last else tokens_T
                if max_tokens is not None:
                    content_T = content_T[: max_tokens[part] - sizes[part]]
                content = content_T.astype(dtype, copy=False).tobytes()
                files[part].write(content)
                hashes[part].update(content)
                sizes[part] += len(content_T)
            if sizes == max_tokens:
                break
    return {
        part: {"tokens": sizes[part], "bytes": sizes[part] * dtype.itemsize, "sha256": hashes[part].hexdigest()}
        for part in PARTS
    }


def _batches(split_texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str, bool]]]:
    """Yield batches of about `PIECE` characters, as (part, text, whether it ends a document)."""
    batch, characters = [], 0
    for texts in split_texts:
        for part, text in zip(PARTS, texts, strict=True):
            remaining = len(text)
            for piece in pieces(text) if text else ():
                remaining -= len(piece)
                batch.append((part, piece, remaining == 0))
                characters += len(piece)
                if characters >= PIECE:
                    yield batch
                    batch, characters = [], 0
    if batch:
        yield batch


def _read(folder: Path, left_out: Sequence[str]) -> Corpus | None:
    """Return the corpus in a folder of the cache, or None if it is missing or damaged."""
    try:
        meta = from_json((folder / "meta.json").read_bytes())
        if meta.pop("meta_sha256") != canonical_hash(meta):
            return None
        for part in PARTS:
            file = meta["files"][part]
            if _bin(folder, part).stat().st_size != file["bytes"]:
                return None
            with _bin(folder, part).open("rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != file["sha256"]:
                    return None
        tokenizer = tokenizers.from_state(meta["tokenizer_state"])
        train_N, val_N = (_memmap(folder, part, tokenizer) for part in PARTS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing or damaged
        return None
    sha256 = canonical_hash({part: meta["files"][part]["sha256"] for part in PARTS} | {"tokenizer": tokenizer.state()})
    description = {
        "name": meta["name"],
        "sha256": sha256,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "train_tokens": len(train_N),
        "val_tokens": len(val_N),
        "documents": meta["num_documents"],
        "split": meta["split"],
        "read": meta["read"] | {"left_out": [*left_out]},
        **({"source": meta["source"]} if meta["source"] else {}),
    }
    return Corpus(train_N, val_N, tokenizer, sha256, description, folder)


def _memmap(folder: Path, part: str, tokenizer: Tokenizer) -> np.memmap:
    return np.memmap(_bin(folder, part), token_dtype(tokenizer.vocab_size), mode="r")


def _bin(folder: Path, part: str) -> Path:
    return folder / f"{part}.bin"
