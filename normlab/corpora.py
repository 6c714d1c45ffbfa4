"""What a run can train on: corpora and their options. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from normlab.errors import ConfigError, nearest, unknown
from normlab.options import option

TOKENIZERS = ("bytes", "chars", "bpe")
"""The tokenizers that are made here; any other word names a pretrained one."""

DEFAULT_VOCAB_SIZE = 4096

MAX_VOCAB_SIZE = 2**20
"""Most tokens of any tokenizer, of a pretrained one too: tables of one row a token are made of them."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Options of every corpus. A subclass names where its text comes from."""

    name: str
    """Which corpus; the word after `data=`."""
    tokenizer: str = "bytes"
    """bytes (UTF-8), chars or bpe (of the training text), or a pretrained one: gpt2, org/name, a tokenizer.json."""
    vocab_size: int | None = option(None, at_least=257, at_most=MAX_VOCAB_SIZE, absent=None)
    """Most tokens that bpe has, the end of a document included; 4096 unless set. Only with tokenizer=bpe."""
    max_tokens: int | None = option(None, at_least=2, absent=None)
    """Most tokens of training and validation together; no more is read than they need. null for all."""
    seed: int | None = option(None, at_least=0, at_most=2**63 - 1)
    """Draws the order of the training windows, and nothing else does; the value of `seed` unless set."""
    val_fraction: float = option(0.05, above=0, at_most=0.5)
    """Share of the text that is held out for validation."""

    @property
    def said(self) -> str:
        """The word that chose it, for messages."""
        return f"data={self.name}"

    def resolve(self) -> None:
        """Fill in what depends on other options, and refuse what has no effect.

        Raises:
            ConfigError: A name that is not to be set, a misspelt tokenizer, or a vocab_size that nothing reads.
        """
        if not isinstance(self, HubData) and DATA.get(self.name) is not type(self):
            raise ConfigError(
                f"data.name={self.name}: is not to be set; data=... chooses another, data=hub takes a dataset's name"
            )
        if self.tokenizer == "bpe":
            self.vocab_size = DEFAULT_VOCAB_SIZE if self.vocab_size is None else self.vocab_size
        elif self.vocab_size is not None:
            raise ConfigError(
                f"data.vocab_size={self.vocab_size}: has no effect with data.tokenizer={self.tokenizer}; "
                "leave it out or set data.tokenizer=bpe"
            )
        # A name of the hub without an owner, such as gpt2, is looked for there; not one that is nearly ours.
        if self.tokenizer not in TOKENIZERS and (not self.tokenizer or nearest(self.tokenizer, TOKENIZERS)):
            raise ConfigError(
                "data.tokenizer: " + unknown("tokenizer", self.tokenizer, TOKENIZERS) + "; or name a pretrained one"
            )


@dataclass(kw_only=True, slots=True)
class StdlibData(DataConfig):
    """The source of Python's own standard library, without its tests: real text on every machine."""

    name: str = "stdlib"


@dataclass(kw_only=True, slots=True)
class FilesData(DataConfig):
    """Your own text: .txt (or any text), .jsonl/.json and .parquet; a file, several, or a folder."""

    name: str = "files"
    path: Any = option(None, identity=False)
    """A file, a folder, or a list of them. The corpus's hash, not its path, is part of a run's identity."""
    column: str = "text"
    """The column of JSONL and Parquet files that holds the text."""

    def resolve(self) -> None:
        """As the base, and a path there must be."""
        super(FilesData, self).resolve()
        paths = [self.path] if isinstance(self.path, str) else self.path
        if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
            raise ConfigError("data.path: data=files needs a file, a folder, or a list; give data.path=my.txt")
        self.path = paths


@dataclass(kw_only=True, slots=True)
class HubData(DataConfig):
    """Any text dataset of the Hugging Face hub by its name, or a folder that is laid out like one."""

    name: str = "hub"
    """The dataset, org/name, or the folder's path. Here alone `name` is to be set."""
    column: str = "text"
    """The column that holds the text."""
    subset: str | None = None
    """The dataset's configuration, where it has several."""
    split: str = "train"
    """The part that is read, or several: train+test. What is held out is ours to choose, by val_fraction."""
    revision: str | None = None
    """A commit, branch or tag of the dataset's repository; the newest of main unless set."""

    @property
    def said(self) -> str:
        """The word that chose it, for messages."""
        return f"data.name={self.name}"

    def resolve(self) -> None:
        """As the base, and a dataset must be named."""
        super(HubData, self).resolve()
        if not self.name or self.name == "hub":
            raise ConfigError("data.name: data=hub needs a dataset's name; give data.name=roneneldan/TinyStories")
        if os.path.isdir(os.path.expanduser(self.name)):
            self.name = os.path.realpath(os.path.expanduser(self.name))  # however it was spelt, the same corpus
        if self.name in DATA:
            raise ConfigError(f"data.name={self.name}: is a corpus, not a dataset of the hub; use data={self.name}")


@dataclass(kw_only=True, slots=True)
class NamedData(DataConfig):
    """A dataset of the hub that has a word of its own.

    The repositories are those that others' public code reads; none of them was reachable where this was written.
    """

    hub: ClassVar[dict[str, Any]]
    """The words of data=hub that it stands for."""
    article: ClassVar[str] = ""
    """Where rows are lines of longer documents: what the first line of one looks like, a regular expression."""


@dataclass(kw_only=True, slots=True)
class Shakespeare(NamedData):
    """Karpathy's tiny Shakespeare, 1.1 MB, from the hub."""

    # Its main branch is a script, which `datasets` no longer runs; the hub's own conversion is beside it.
    hub: ClassVar[dict[str, Any]] = {
        "name": "karpathy/tiny_shakespeare", "split": "train+validation+test", "revision": "refs/convert/parquet",
    }  # fmt: skip
    source: ClassVar[str] = "Karpathy 2015, github.com/karpathy/char-rnn"

    name: str = "shakespeare"


@dataclass(kw_only=True, slots=True)
class TinyStories(NamedData):
    """Two million stories in the words of a four-year-old, 1.9 GB, from the hub; 100 M tokens unless said."""

    hub: ClassVar[dict[str, Any]] = {"name": "roneneldan/TinyStories"}
    source: ClassVar[str] = "Eldan & Li 2023, arXiv:2305.07759"

    name: str = "tinystories"
    max_tokens: int | None = option(100_000_000, at_least=2)


@dataclass(kw_only=True, slots=True)
class WikiText103(NamedData):
    """WikiText-103, raw: 28,000 good articles of Wikipedia, 540 MB, from the hub; its training part."""

    hub: ClassVar[dict[str, Any]] = {"name": "Salesforce/wikitext", "subset": "wikitext-103-raw-v1"}
    article: ClassVar[str] = r" = [^=].*[^=] = \n| = [^=] = \n"
    source: ClassVar[str] = "Merity et al. 2016, arXiv:1609.07843"

    name: str = "wikitext103"


@dataclass(kw_only=True, slots=True)
class FineWebEdu(NamedData):
    """FineWeb-Edu, its sample of 10 billion tokens: pages that teach, from the hub; 100 M tokens unless said."""

    hub: ClassVar[dict[str, Any]] = {"name": "HuggingFaceFW/fineweb-edu", "subset": "sample-10BT"}
    source: ClassVar[str] = "Penedo et al. 2024, arXiv:2406.17557"

    name: str = "fineweb_edu"
    max_tokens: int | None = option(100_000_000, at_least=2)


DATA: dict[str, type[DataConfig]] = {
    "stdlib": StdlibData, "files": FilesData, "hub": HubData, "shakespeare": Shakespeare, "tinystories": TinyStories,
    "wikitext103": WikiText103, "fineweb_edu": FineWebEdu,
}  # fmt: skip
