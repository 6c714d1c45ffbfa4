"""Where a tokenizer comes from: it is fitted to the training text, or read from a file or the hub of Hugging Face."""

import hashlib
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from normlab.base.errors import DataError
from normlab.base.parsing import check_link, read_at_most
from normlab.catalogue.corpora import DEFAULT_VOCAB_SIZE, TOKENIZERS
from normlab.data.documents import first_characters
from normlab.data.hub import TIMEOUT_S, hub_errors
from normlab.data.tokenizers import (
    LARGEST_TOKENIZER,
    BytesTokenizer,
    CharsTokenizer,
    SubwordTokenizer,
    Tokenizer,
    pieces,
)

BPE_CHARACTERS = 1 << 24
"""Characters of training text that BPE is trained on; memory grows with the number of distinct words."""

WORD_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}{1,32}| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,32}|\s{1,32}(?!\S)|\s{1,32}"
"""Words for BPE: the pattern of GPT-2 (Radford et al. 2019) with a limit on the length of every run.

Training time is quadratic in the length of a word, and without the limits a long line without a space would be one
word.
"""


def fit_tokenizer(name: str, training_texts: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """Return bytes, chars or bpe, fitted to the training text; bytes reads no text, bpe only the first."""
    if name == "bytes":
        return BytesTokenizer()
    if name == "chars":
        return CharsTokenizer("".join(sorted(set().union(*training_texts))))
    return train_bpe(training_texts, vocab_size or DEFAULT_VOCAB_SIZE)


def train_bpe(texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> SubwordTokenizer:
    """Train byte-level BPE, which encodes every text exactly, with at most `vocab_size` tokens.

    256 tokens are bytes and one is the end of a document. A pair that occurs once is not merged, so a short text gives
    a smaller vocabulary. Training is deterministic.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The end of a document is one of the tokens, and the file does not have it. The alphabet is sorted because the
    # library returns it in another order in each process.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample = chain.from_iterable(pieces(text) for text in first_characters(texts, BPE_CHARACTERS))
    tokenizer.train_from_iterator(sample, trainer)
    return SubwordTokenizer("bpe", tokenizer.to_str())


def pretrained_tokenizer(name: str) -> SubwordTokenizer:
    """Return a tokenizer by its name on the hub or its path, from tokenizer.json alone.

    The name is gpt2, org/name, a tokenizer.json, or a folder with one. A tokenizer in the cache of the hub's library is
    used without a request.

    Raises:
        DataError: No tokenizer has that name, it has no tokenizer.json, or neither hub nor cache has it.
    """
    path = _local_tokenizer(name) or _download(name)
    try:
        return SubwordTokenizer.pretrained(name, read_at_most(path, LARGEST_TOKENIZER).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer={name}: cannot be read ({error}); choose another") from error


def tokenizer_sha256(name: str) -> str | None:
    """Return the hash of a tokenizer's file, or None if `name` is not a path."""
    path = None if name in TOKENIZERS else _local_tokenizer(name)
    if path is None:
        return None
    try:
        return hashlib.sha256(read_at_most(path, LARGEST_TOKENIZER)).hexdigest()
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer={name}: cannot be read ({error}); choose another") from error


def _local_tokenizer(name: str) -> Path | None:
    """Return the tokenizer.json at the path `name`, or None if there is no such file."""
    path = Path(os.path.expanduser(name))  # Path.expanduser raises for an unknown user
    try:
        if path.is_dir():
            path = path / "tokenizer.json"
            check_link(path, path.parent)
        return path if path.is_file() else None
    except (OSError, ValueError) as error:  # a folder above may not be read
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"data.tokenizer={name}: cannot be read ({reason}); choose another") from error


def _download(name: str) -> Path:
    with hub_errors(f"data.tokenizer={name}"):
        from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.utils import disable_progress_bars

        cached = try_to_load_from_cache(name, "tokenizer.json")
        if isinstance(cached, str):  # else None, or a sign that the repository is known to lack the file
            return Path(cached)
        HfApi().model_info(name, timeout=TIMEOUT_S, expand=["sha"])  # the download would wait longer for the hub
        disable_progress_bars()
        return Path(hf_hub_download(name, "tokenizer.json"))
