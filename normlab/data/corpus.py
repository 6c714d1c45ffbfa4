"""A corpus: text as two files of tokens, built once and cached.

`<cache>/tokens/<key>/` holds `train.bin` and `val.bin` (little-endian unsigned integers, each document followed by the
end-of-document token), `meta.json`, and `counts.npz` for the baselines. The key is a hash of the text's source and of
all options that change the files. Opening a corpus verifies the hashes of its files, and builds a damaged corpus again.

Shapes: N tokens.
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normlab.base.errors import DataError, notify
from normlab.base.parsing import canonical_hash, from_json
from normlab.base.paths import cache_dir
from normlab.catalogue.corpora import TOKENIZERS, DataConfig, HubData, NamedData, ReferenceData
from normlab.data.baselines import TokenCounts, baselines, count_tokens
from normlab.data.documents import (
    MIN_DOCUMENTS,
    SPLIT_VERSION,
    Spool,
    first_characters,
    held_out_documents,
    tail_start,
)
from normlab.data.files import FilesText, ReferenceText
from normlab.data.hub import HubText
from normlab.data.tokenizer_sources import fit_tokenizer, pretrained_tokenizer, tokenizer_sha256
from normlab.data.tokenizers import END_TOKENS, PIECE, RoundTrip, Tokenizer, from_state, pieces, token_dtype

FORMAT = 5
"""Version of the cache format; raise it when folders of an older version must not be used any more."""

PARTS = ("train", "val")
FILES = {"train": "train.bin", "val": "val.bin", "counts": "counts.npz"}
"""Files of a corpus, whose hashes are in meta.json."""

LOCKS = "normlab.locks"
BUILDING = ".normlab-making"
"""Folders of the cache. Their names carry a prefix because a user may point the cache at a folder with other files."""


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
    their `tails`), the counts of what was `read`, the `changed_share` of the characters of a sample of the text that
    the tokenizer changes (missing in older folders of the cache), and the `source` of a dataset of the hub."""
    folder: Path

    def warnings(self) -> list[str]:
        """Return a line about what the tokenizer changes, or no line."""
        share = self.description.get("changed_share", 0)
        if share == 0:
            return []
        percent = f"{share:.2%}"
        if share < 1e-4:
            percent = "less than 0.01%"
        return [
            f"data.tokenizer={self.tokenizer.name}: changes {percent} of the characters of a sample of the text "
            "(case, blanks, unknown ones), so the run's bits/byte cannot be compared with those of another "
            "tokenizer; choose a tokenizer that keeps the text, such as bytes, to compare them"
        ]

    def baselines(self, tokens: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return the loss of each baseline model on validation targets, in nats/token."""
        return baselines(TokenCounts.load(self.folder / FILES["counts"]), tokens, targets)


def open_corpus(config: DataConfig, cache: Path | None = None) -> Corpus:
    """Return the corpus of a config from the cache, `paths.cache_dir()` unless given; build it if the cache has none.

    Raises:
        DataError: The text cannot be read or is too short to split, or the cache cannot be written.
    """
    cache = (cache or cache_dir()).absolute()
    text = _text(config)
    key_parts: dict[str, Any] = {
        "format": FORMAT,
        "split_rule": SPLIT_VERSION,
        "name": config.name,
        "tokenizer": config.tokenizer,
        "tokenizer_sha256": tokenizer_sha256(config.tokenizer),
        "vocab_size": config.vocab_size,
        "max_tokens": config.max_tokens,
        "val_fraction": config.val_fraction,
        "origin": text.key,
    }
    if config.tokenizer not in TOKENIZERS:
        key_parts["end_tokens"] = END_TOKENS
    key = canonical_hash(key_parts)
    folder = cache / "tokens" / key
    corpus = _read(folder)
    if corpus is not None:
        return corpus
    # Ask the hub before waiting for the lock, so that errors of the hub are raised at once.
    pretrained = None if config.tokenizer in TOKENIZERS else pretrained_tokenizer(config.tokenizer)
    if isinstance(text, HubText):
        text.connect()
    try:
        with locked(cache, key) as temporary:
            corpus = _read(folder)
            if corpus is not None:  # another process has built the corpus while this one waited
                return corpus
            # The text is read once, since the hub is slow; the copy is read as often as needed.
            with closing(text.documents(temporary / "scratch")) as stream:
                documents = Spool(temporary / "documents", _limited(stream, config))
            new = temporary / "new"
            new.mkdir()
            meta = _write(new, documents, pretrained, config)
            # Files may have been edited meanwhile: the key must be that of the text whose tokens were written.
            if _text(config).key != text.key:
                raise DataError(f"{config.override}: the text changed while it was read; try again")
            meta["description"]["read"] = asdict(text.counts)
            if isinstance(text, HubText):
                meta["description"]["source"] = text.provenance
            meta["meta_sha256"] = canonical_hash(meta)
            (new / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
            replace_folder(folder, new)
    except OSError as error:
        raise DataError(
            f"{cache}: the cache cannot be written ({error.strerror or error}); "
            "set NORMLAB_CACHE to a writable folder on a disk with free space"
        ) from error
    corpus = _read(folder)
    if corpus is not None:
        return corpus
    raise DataError(f"{folder}: the disk returned other bytes than were written; check it, or set NORMLAB_CACHE")


def _text(config: DataConfig) -> FilesText | HubText | ReferenceText:
    if isinstance(config, ReferenceData):
        return ReferenceText()
    if isinstance(config, HubData | NamedData):
        return HubText(config)
    return FilesText(config)


def _limited(documents: Iterable[str], config: DataConfig) -> Iterable[str]:
    """Yield enough text for `max_tokens`: a subword has three to five characters in most text, and may have eight."""
    if config.max_tokens is None:
        return documents
    characters_per_token = 1 if config.tokenizer in ("bytes", "chars") else 8
    return first_characters(documents, config.max_tokens * characters_per_token)


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
            if not held_out:
                start = tail_start(document, config.val_fraction)
                yield document[:start], document[start:]
            elif digest in held_out:
                yield "", document
            else:
                yield document, ""

    tokenizer = pretrained or fit_tokenizer(config.tokenizer, (train for train, _ in split()), config.vocab_size)
    # Both parts are cut in the proportion of their characters, so that a limit leaves the validation share as it is.
    max_tokens: dict[str, int] | None = None
    if config.max_tokens is not None:
        num_val = round(config.max_tokens * sum(len(val) for _, val in split()) / sum(lengths))
        max_tokens = {"train": config.max_tokens - num_val, "val": num_val}
    round_trip = RoundTrip()
    sizes = _write_tokens(folder, split(), tokenizer, max_tokens, round_trip)
    for part in PARTS:
        if max_tokens is not None and max_tokens[part] == 0:
            raise DataError(f"data.max_tokens={config.max_tokens}: leaves no tokens for {part}; raise it")
    if sizes["val"] == 0:
        raise DataError(
            f"{config.override}: no text is held out: the corpus has fewer than {MIN_DOCUMENTS} distinct documents, "
            f"and data.val_fraction={config.val_fraction} of the longest ({max(lengths)}) is less than a character; "
            "add documents, or raise data.val_fraction"
        )
    train_N, val_N = (_memmap(folder, part, tokenizer) for part in PARTS)
    count_tokens(train_N, val_N, tokenizer.vocab_size).save(folder / FILES["counts"])
    hashes = {part: _sha256(folder / name) for part, name in FILES.items()}
    sha256 = canonical_hash({part: hashes[part] for part in PARTS} | {"tokenizer": tokenizer.state()})
    description = {
        "name": config.name,
        "sha256": sha256,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "train_tokens": sizes["train"],
        "val_tokens": sizes["val"],
        "documents": len(lengths),
        "split": "documents" if held_out else "tails",
        "changed_share": round_trip.changed_share,
    }
    return {"description": description, "tokenizer": tokenizer.state(), "files": hashes}


def _write_tokens(
    folder: Path,
    split_texts: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    max_tokens: dict[str, int] | None,
    round_trip: RoundTrip,
) -> dict[str, int]:
    """Write the tokens of both parts, and add to their round trip; return the numbers of tokens."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document], dtype)
    sizes: dict[str, int] = dict.fromkeys(PARTS, 0)
    with (folder / FILES["train"]).open("wb") as train, (folder / FILES["val"]).open("wb") as val:
        files = {"train": train, "val": val}
        for batch in _batches(split_texts):
            texts = [text for _, text, _ in batch]
            encoded = tokenizer.encode_batch(texts)
            round_trip.add(texts, encoded, tokenizer)
            for (part, _, is_last), tokens_T in zip(batch, encoded, strict=True):
                content_T = tokens_T
                if is_last:
                    content_T = np.concatenate([tokens_T, end])
                if max_tokens is not None:
                    content_T = content_T[: max_tokens[part] - sizes[part]]
                files[part].write(content_T.astype(dtype, copy=False).tobytes())
                sizes[part] += len(content_T)
            if sizes == max_tokens:
                break
    return sizes


def _batches(split_texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str, bool]]]:
    """Yield batches of about `PIECE` characters, as (part, text, whether it ends a document)."""
    batch, characters = [], 0
    for texts in split_texts:
        for part, text in zip(PARTS, texts, strict=True):
            if not text:  # a document without a tail, or one that is held out
                continue
            remaining = len(text)
            for piece in pieces(text):
                remaining -= len(piece)
                batch.append((part, piece, remaining == 0))
                characters += len(piece)
                if characters >= PIECE:
                    yield batch
                    batch, characters = [], 0
    if batch:
        yield batch


def _read(folder: Path) -> Corpus | None:
    """Return the corpus in a folder of the cache, or None if it is missing or damaged."""
    try:
        meta = from_json((folder / "meta.json").read_bytes())
        if meta.pop("meta_sha256") != canonical_hash(meta):
            return None
        # A damaged file would train other numbers under the same key, so that all bytes are read.
        if any(_sha256(folder / name) != meta["files"][part] for part, name in FILES.items()):
            return None
        tokenizer = from_state(meta["tokenizer"])
        train_N, val_N = (_memmap(folder, part, tokenizer) for part in PARTS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing or damaged
        return None
    return Corpus(train_N, val_N, tokenizer, meta["description"]["sha256"], meta["description"], folder)


def _memmap(folder: Path, part: str, tokenizer: Tokenizer) -> np.memmap:
    return np.memmap(folder / FILES[part], token_dtype(tokenizer.vocab_size), mode="r")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# The cache: each folder is built by one process, and appears atomically.


@contextmanager
def locked(cache: Path, key: str) -> Iterator[Path]:
    """Hold the lock for building one folder of a cache; yield an empty temporary folder, which is deleted at the end.

    The kernel releases the lock of a killed process; the next holder deletes its temporary folder.

    Raises:
        OSError: The cache cannot be written, or its disk does not support locks.
    """
    (cache / LOCKS).mkdir(parents=True, exist_ok=True)
    # Lock files are never deleted, because another process may have opened the file to wait for its lock.
    with (cache / LOCKS / key).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            notify("waiting for another process, which is building this corpus")
            fcntl.flock(file, fcntl.LOCK_EX)
        temporary = cache / BUILDING / key
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def replace_folder(folder: Path, new: Path) -> None:
    """Rename a complete folder to `folder`; the open files of a previous folder stay readable."""
    folder.parent.mkdir(exist_ok=True)
    # A crash here leaves no folder, or one whose hashes tell that it is damaged: it is built again.
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
