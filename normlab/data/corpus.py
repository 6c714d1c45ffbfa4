"""A corpus: text as two files of tokens, made once and kept in the cache.

`<cache>/tokens/<key>/` holds `train.bin`, `val.bin` (little-endian unsigned integers, each document followed
by the end-of-document token), `meta.json`, and `counts.npz` for the baselines. The key is a hash of all that the
files depend on. Nothing in the cache is believed: lengths and hashes are compared at every opening, and what does not
fit is made again.

Shapes: N tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normlab.config import canonical_hash
from normlab.corpora import TOKENIZERS, DataConfig, HubData, NamedData
from normlab.data import hub, tokenizers
from normlab.data import split as split_rule
from normlab.data.baselines import baselines, kept_counts
from normlab.data.cache import fresh_folder, locked
from normlab.data.origins import FilesOrigin, Origin, Text
from normlab.data.pretrained import local_tokenizer, pretrained_tokenizer
from normlab.data.subwords import PIECE, pieces, token_dtype
from normlab.data.tokenizers import Tokenizer
from normlab.errors import DataError
from normlab.parsing import from_json
from normlab.paths import cache_dir

FORMAT = 1
"""Number of the cache's format; raised when a folder that an older version made must not be used."""

PARTS = ("train", "val")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as tokens, in two parts, and what is known of it."""

    name: str
    """The word after `data=`, or the dataset's name."""
    train: np.memmap
    """Training tokens (N,), read-only."""
    val: np.memmap
    """Validation tokens (N,), read-only."""
    tokenizer: Tokenizer
    sha256: str
    """Hash of both parts' tokens and of the tokenizer: the corpus's identity."""
    source_sha256: str
    """Hash of what it was made from: files, their names and bytes; or the documents that the hub gave."""
    source: dict[str, Any] | None
    """The dataset of the hub and its commit, where it is from there."""
    split: str
    """What was held out: whole `documents`, or their `tails`."""
    num_documents: int
    """Documents, without empty ones, in both parts together."""
    folder: Path
    """Where the cache keeps it."""

    def baselines(self, tokens: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return the cross entropies of validation targets under uniform, unigram and bigram models (`baselines`)."""
        return baselines(kept_counts(self.folder, self.train, self.val, self.tokenizer.vocab_size), tokens, targets)

    def describe(self) -> dict[str, Any]:
        """Plain JSON values for a run's record."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "tokenizer": self.tokenizer.name,
            "vocab_size": self.tokenizer.vocab_size,
            "train_tokens": len(self.train),
            "val_tokens": len(self.val),
            "documents": self.num_documents,
            "split": self.split,
            **({"source": self.source} if self.source else {}),
        }


def open_corpus(config: DataConfig, cache: Path | None = None) -> Corpus:
    """The corpus that a config names: from the cache, or made now and put there.

    Args:
        config: Where the text is, how it is split and tokenized.
        cache: Folder of the cache; `paths.cache_dir()` unless given.

    Raises:
        DataError: The text cannot be read or is too short to split, or the cache cannot be written.
    """
    cache = (cache or cache_dir()).absolute()
    origin: Origin = hub.HubOrigin(config) if isinstance(config, HubData | NamedData) else FilesOrigin(config)
    parts = {
        "format": FORMAT,
        "split_rule": split_rule.RULE,
        "name": config.name,
        "tokenizer": config.tokenizer,
        "tokenizer_sha256": _tokenizer_sha256(config.tokenizer),
        "vocab_size": config.vocab_size,
        "max_tokens": config.max_tokens,
        "val_fraction": config.val_fraction,
        "origin": origin.key,
    }
    key = canonical_hash(parts)
    folder = cache / "tokens" / key
    if corpus := _read(folder):
        return corpus
    # What the hub has to say comes before any waiting for other processes.
    pretrained = None if config.tokenizer in TOKENIZERS else pretrained_tokenizer(config.tokenizer)
    origin.connect()
    try:
        with locked(cache, key) as making:
            if corpus := _read(folder):  # another process made it while this one waited
                return corpus
            with fresh_folder(folder, making) as new:
                characters = config.max_tokens and tokenizers.characters_for(config.tokenizer, config.max_tokens)
                _write(new, origin.read(making / "datasets", characters), pretrained, config, parts)
                origin.check_unchanged()
    except OSError as error:
        raise DataError(
            f"{cache}: the cache cannot be written ({error.strerror or error}); "
            "set NORMLAB_CACHE to a folder on a disk that can be written and has space"
        ) from error
    if corpus := _read(folder):
        return corpus
    raise DataError(f"{folder}: does not read back as it was written; check the disk, or set NORMLAB_CACHE")


def _tokenizer_sha256(name: str) -> str | None:
    """Hash of the file of a tokenizer that is named by its path."""
    try:
        file = None if name in TOKENIZERS else local_tokenizer(name)
        return hashlib.sha256(file.read_bytes()).hexdigest() if file else None
    except OSError as error:
        raise DataError(
            f"data.tokenizer={name}: cannot be read ({error.strerror}); make it readable or name another"
        ) from error


def _write(folder: Path, text: Text, pretrained: Tokenizer | None, config: DataConfig, parts: dict[str, Any]) -> None:
    digests, lengths = [], []
    for document in text.documents:
        digests.append(hashlib.sha256(document.encode()).digest())
        lengths.append(len(document))
    if not digests:
        raise DataError(f"{config.said}: there is no text in it, every document is empty; give it some")
    held_out = split_rule.held_out_documents(digests, lengths, config.val_fraction)

    def halves() -> Iterator[tuple[str, str]]:
        """Each document's training text and validation text; one of them may be empty."""
        for document, digest in zip(text.documents, digests, strict=True):
            if held_out:
                yield ("", document) if digest in held_out else (document, "")
            else:
                start = split_rule.tail_start(document, config.val_fraction)
                yield document[:start], document[start:]

    tokenizer = pretrained or tokenizers.fit(config.tokenizer, (train for train, _ in halves()), config.vocab_size)
    most: dict[str, int] | None = None
    if config.max_tokens is not None:
        num_val = sum(len(val) for _, val in halves())
        most = {"val": round(config.max_tokens * num_val / sum(lengths))}
        most["train"] = config.max_tokens - most["val"]
    files = _write_tokens(folder, halves, tokenizer, most)
    for part in PARTS:
        if files[part]["tokens"] == 0:
            raise DataError(
                f"{config.said}: {sum(lengths)} characters in {len(lengths)} documents leave nothing "
                f"for {part} with data.val_fraction={config.val_fraction}; give it more text (data.max_tokens, "
                "where that is set)"
            )
    # Here one process counts, while the others wait.
    train_N, val_N = (_memmap(folder, part, tokenizer) for part in PARTS)
    kept_counts(folder, train_N, val_N, tokenizer.vocab_size)
    meta = parts | {
        "split": "documents" if held_out else "tails",
        "num_documents": len(lengths),
        "source_sha256": text.sha256,
        "source": text.source,
        "tokenizer_state": tokenizer.state(),
        "vocab_size": tokenizer.vocab_size,
        "dtype": token_dtype(tokenizer.vocab_size).str,
        "files": files,
    }
    meta["meta_sha256"] = canonical_hash(meta)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _write_tokens(
    folder: Path,
    halves: Callable[[], Iterator[tuple[str, str]]],
    tokenizer: Tokenizer,
    most: dict[str, int] | None,
) -> dict[str, dict[str, Any]]:
    """Write both parts, or so many tokens of each, some pieces in memory at a time; length and hash of each."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype)
    hashes = {part: hashlib.sha256() for part in PARTS}
    sizes: dict[str, int] = dict.fromkeys(PARTS, 0)
    with _bin(folder, "train").open("wb") as train, _bin(folder, "val").open("wb") as val:
        files = {"train": train, "val": val}
        for batch in _batches(_pieces(halves())):
            for (part, _, ends), tokens_T in zip(
                batch, tokenizer.encode_batch([text for _, text, _ in batch]), strict=True
            ):
                content_T = np.concatenate([tokens_T, end]) if ends else tokens_T
                if most is not None:
                    content_T = content_T[: most[part] - sizes[part]]
                content = content_T.astype(dtype, copy=False).tobytes()
                files[part].write(content)
                hashes[part].update(content)
                sizes[part] += len(content_T)
            if most is not None and all(sizes[part] >= most[part] for part in PARTS):
                break
    return {
        part: {
            "tokens": sizes[part],
            "bytes": sizes[part] * dtype.itemsize,
            "sha256": hashes[part].hexdigest(),
        }
        for part in PARTS
    }


Piece = tuple[str, str, bool]
"""Part, text, and whether a document ends with it."""


def _pieces(halves: Iterable[tuple[str, str]]) -> Iterator[Piece]:
    for texts in halves:
        for part, text in zip(PARTS, texts, strict=True):
            if text:
                *before, last = pieces(text)
                yield from ((part, piece, False) for piece in before)
                yield part, last, True


def _batches(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces that are encoded together: about one full one's text, so that memory stays small."""
    batch, characters = [], 0
    for piece in found:
        batch.append(piece)
        characters += len(piece[1])
        if characters >= PIECE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _read(folder: Path) -> Corpus | None:
    """The corpus in a folder of the cache, or None where there is none or it is damaged."""
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
    # Whatever else stands where a corpus should be is a damaged corpus.
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    identity = {part: meta["files"][part]["sha256"] for part in PARTS} | {"tokenizer": tokenizer.state()}
    return Corpus(
        name=meta["name"],
        train=train_N,
        val=val_N,
        tokenizer=tokenizer,
        sha256=canonical_hash(identity),
        source_sha256=meta["source_sha256"],
        source=meta["source"],
        split=meta["split"],
        num_documents=meta["num_documents"],
        folder=folder,
    )


def _memmap(folder: Path, part: str, tokenizer: Tokenizer) -> np.memmap:
    return np.memmap(_bin(folder, part), token_dtype(tokenizer.vocab_size), mode="r")


def _bin(folder: Path, part: str) -> Path:
    return folder / f"{part}.bin"
