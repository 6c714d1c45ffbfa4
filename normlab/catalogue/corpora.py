"""The corpora that a run can train on, and their options. Imports no torch."""

import os
import re
import shlex
from dataclasses import dataclass
from typing import Any, ClassVar

from normlab.base.errors import ConfigError, did_you_mean, unknown
from normlab.base.options import option

TOKENIZERS = ("bytes", "chars", "bpe")
"""The tokenizers that normlab builds; any other name is a pretrained tokenizer."""

TABLE_SUFFIXES = {".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".arrow"}
"""Suffixes of files with a document per row, which `data=hub` reads."""

_TEXT = (
    ".txt .text .md .markdown .rst .tex .org .adoc .srt .log .xml .css .yaml .yml .toml .ini .cfg .sql "
    ".py .pyi .c .h .cc .cpp .hpp .cu .cs .java .js .jsx .ts .tsx .go .rs .rb .php .pl .lua .sh .swift .kt .scala "
    ".hs .ml .lisp .el .clj .erl .ex .r .f90 .m"
)
TEXT_SUFFIXES = {"", *_TEXT.split()}
"""Suffixes of prose, markup and source code; a file without a suffix is text too. Any other suffix may be a page, a
table, a backup or an archive, whose syntax would become text."""

DEFAULT_VOCAB_SIZE = 4096

MOST_PATHS = 4
"""Paths that a message names."""

MAX_VOCAB_SIZE = 2**20
"""Largest vocabulary, also of a pretrained tokenizer: embeddings and counts have a row per token."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Options that all corpora share. A subclass adds the options of its source of text.

    An end-of-document token follows each document. A training window may have the end of one document and the start of
    the next one, and attention does not stop at the end of a document.
    """

    title: ClassVar[str] = ""
    """The name in papers; a subclass does not inherit it."""
    counts_documents: ClassVar[bool] = True
    """Whether the number of documents is printed when a run starts; it is no news where all have the same text."""

    name: str
    """Name of the corpus; chosen by `data=`."""
    tokenizer: str = option(
        "bytes",
        help="bytes (UTF-8), chars or bpe (fitted to the training text), or pretrained: gpt2, org/name, a "
        "tokenizer.json.",
    )  # fmt: skip
    vocab_size: int | None = option(
        None, at_least=257, at_most=MAX_VOCAB_SIZE,
        help="Largest vocabulary of bpe, including the end-of-document token; 4096 unless set. Only with "
        "tokenizer=bpe.",
    )  # fmt: skip
    max_tokens: int | None = option(
        None, at_least=2,
        help="Most tokens of training and validation together; the rest of the text is not read. null for no limit.",
    )  # fmt: skip
    seed: int | None = option(
        None, at_least=0, at_most=2**63 - 1,
        help="Seed of the order of the training windows; the value of `seed` unless set.",
    )  # fmt: skip
    val_fraction: float = option(0.05, "Fraction of the text that is held out for validation.", above=0, at_most=0.5)

    @property
    def override(self) -> str:
        """The override that selects this corpus, for messages."""
        return f"data={self.name}"

    def resolve(self) -> None:
        """Set the options that depend on others, and reject those without effect."""
        if self.tokenizer == "bpe":
            if self.vocab_size is None:
                self.vocab_size = DEFAULT_VOCAB_SIZE
        elif self.vocab_size is not None:
            raise ConfigError(
                f"data.vocab_size={self.vocab_size}: has no effect with data.tokenizer={self.tokenizer}; "
                "leave it out or set data.tokenizer=bpe"
            )
        # A name close to bytes, chars or bpe is a typing error; any other, such as gpt2, may be a name on the hub.
        if self.tokenizer not in TOKENIZERS and (not self.tokenizer or did_you_mean(self.tokenizer, TOKENIZERS)):
            raise ConfigError(
                "data.tokenizer: " + unknown("tokenizer", self.tokenizer, TOKENIZERS) + "; or name a pretrained one"
            )


@dataclass(kw_only=True, slots=True)
class StdlibData(DataConfig):
    """The source of Python's standard library without its tests: real text on every machine."""

    title: ClassVar[str] = "Python standard library"
    counts_documents: ClassVar[bool] = False
    name: str = "stdlib"


@dataclass(kw_only=True, slots=True)
class ReferenceData(DataConfig):
    """Python's language reference, which comes with Python: prose on every machine, 0.5 MB; a topic is one document."""

    title: ClassVar[str] = "Python language reference"
    name: str = "reference"


@dataclass(kw_only=True, slots=True)
class FilesData(DataConfig):
    """Your own text: a file of prose, markup or source code, several files, or a folder; a file is one document.

    `data=hub data.name=FOLDER` reads a folder of JSON Lines, Parquet or CSV, with one document per row.
    """

    title: ClassVar[str] = "own files"
    name: str = "files"
    path: Any = option(
        None, identity=False,
        help="A file, a folder, or a list of files and folders. The run id depends on the text, not on its path.",
    )  # fmt: skip

    @property
    def override(self) -> str:
        """The paths, of many only the first ones."""
        if not isinstance(self.path, list):
            return f"data.path={self.path}"
        if len(self.path) == 1:
            return f"data.path={self.path[0]}"
        paths = ", ".join(self.path[:MOST_PATHS])
        if len(self.path) > MOST_PATHS:
            paths += f", and {len(self.path) - MOST_PATHS} more"
        return f"data.path=[{paths}]"

    def resolve(self) -> None:
        """Also require a path, and make it a list."""
        super(FilesData, self).resolve()
        paths = self.path
        if isinstance(paths, str):
            paths = [paths]
        if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
            raise ConfigError("data.path: data=files needs a file, a folder, or a list; set data.path=my.txt")
        self.path = paths


@dataclass(kw_only=True, slots=True)
class HubData(DataConfig):
    """Any text dataset of the Hugging Face hub by its name, or a folder with the layout of one."""

    title: ClassVar[str] = "Hugging Face hub"
    name: str = option("hub", "The dataset, org/name, or the path of a folder.")
    column: str = option("text", "The column of the dataset that holds the text. Rows without a text are left out.")
    subset: str | None = option(None, "The dataset's configuration, if it has several.")
    split: str = option(
        "train", "The split to read, or several: train+test. val_fraction of it is held out for validation."
    )
    revision: str | None = option(
        None, "A commit, branch or tag of the dataset's repository; the newest of main unless set."
    )

    @property
    def override(self) -> str:
        return f"data.name={self.name}"

    def resolve(self) -> None:
        """Also require a dataset, and resolve the path of a folder."""
        super(HubData, self).resolve()
        if not self.name or self.name == "hub":
            raise ConfigError("data.name: data=hub needs a dataset's name; set data.name=roneneldan/TinyStories")
        if os.path.isdir(os.path.expanduser(self.name)):
            self.name = os.path.realpath(os.path.expanduser(self.name))  # every spelling of a path gives one run id


@dataclass(kw_only=True, slots=True)
class NamedData(DataConfig):
    """A dataset of the hub with a short name; public code commonly reads this repository."""

    hub: ClassVar[dict[str, Any]]
    """The options of data=hub that select this dataset."""
    article: ClassVar[str] = ""
    """Regular expression of the first line of a document, if the rows of the dataset are lines."""


@dataclass(kw_only=True, slots=True)
class Shakespeare(NamedData):
    """Karpathy's tiny Shakespeare, 1.1 MB, from the hub."""

    title: ClassVar[str] = "Tiny Shakespeare"
    # The main branch has only a loading script, which `datasets` no longer runs; this branch has the text as Parquet.
    hub: ClassVar[dict[str, Any]] = {
        "name": "karpathy/tiny_shakespeare", "split": "train+validation+test", "revision": "refs/convert/parquet",
    }  # fmt: skip
    source: ClassVar[str] = "Karpathy 2015, github.com/karpathy/char-rnn"

    name: str = "shakespeare"


@dataclass(kw_only=True, slots=True)
class TinyStories(NamedData):
    """TinyStories: two million short stories in simple words, 1.9 GB, from the hub; 100 M tokens unless set."""

    title: ClassVar[str] = "TinyStories"
    hub: ClassVar[dict[str, Any]] = {"name": "roneneldan/TinyStories"}
    source: ClassVar[str] = "Eldan & Li 2023, arXiv:2305.07759"

    name: str = "tinystories"
    max_tokens: int | None = option(100_000_000, at_least=2)


@dataclass(kw_only=True, slots=True)
class WikiText103(NamedData):
    """WikiText-103, raw: the training split, 28,000 articles of Wikipedia, 540 MB, from the hub."""

    title: ClassVar[str] = "WikiText-103"
    hub: ClassVar[dict[str, Any]] = {"name": "Salesforce/wikitext", "subset": "wikitext-103-raw-v1"}
    article: ClassVar[str] = r" = [^=].*[^=] = \n| = [^=] = \n"
    source: ClassVar[str] = "Merity et al. 2016, arXiv:1609.07843"

    name: str = "wikitext103"


@dataclass(kw_only=True, slots=True)
class FineWebEdu(NamedData):
    """FineWeb-Edu: educational web pages, the 10-billion-token sample, from the hub; 100 M tokens unless set."""

    title: ClassVar[str] = "FineWeb-Edu"
    hub: ClassVar[dict[str, Any]] = {"name": "HuggingFaceFW/fineweb-edu", "subset": "sample-10BT"}
    source: ClassVar[str] = "Penedo et al. 2024, arXiv:2406.17557"

    name: str = "fineweb_edu"
    max_tokens: int | None = option(100_000_000, at_least=2)


DATA: dict[str, type[DataConfig]] = {
    "stdlib": StdlibData, "reference": ReferenceData, "files": FilesData, "hub": HubData, "shakespeare": Shakespeare,
    "tinystories": TinyStories, "wikitext103": WikiText103, "fineweb_edu": FineWebEdu,
}  # fmt: skip


def corpus_hint(name: str) -> str:
    """Return what to do to train on a file, a folder or a dataset of the hub; empty for any other name."""
    path = os.path.expanduser(name)
    suffix = os.path.splitext(name)[1].lower()
    if suffix in TABLE_SUFFIXES:
        # Its own folder may have other files, and data=hub would read all of them.
        return "put the file alone into a folder, and set data=hub data.name=FOLDER"
    if os.path.isdir(path) or (suffix in TEXT_SUFFIXES and (suffix or os.path.exists(path))):
        return f"set {files_overrides(name)}"
    if suffix or os.path.exists(path):
        return no_text_hint(suffix)
    # Not a path, as tests above know, so OWNER/NAME is a dataset of the hub.
    if re.fullmatch(r"[\w-]+/[\w-]+", name):
        return f"set data=hub data.name={name}"
    return ""


def no_text_hint(suffix: str) -> str:
    """Return what to do with a file that is neither text nor a table."""
    action = f"{suffix} is no suffix of text: put text into a .txt file or a folder, and set data=files data.path=FILE"
    if suffix == ".zip":
        action += " (`normlab open FILE` unpacks a zip file of `normlab share`)"
    return action


def files_overrides(path: str) -> str:
    """Return the overrides for a file of text or a folder, quoted for Hydra and for the shell."""
    if re.fullmatch(r"[\w./-]+", path, re.ASCII):
        return f"data=files data.path={path}"
    path = re.sub(r"(\\*)\$\{", r"\1\1\\${", path)  # for OmegaConf ${x} is a reference
    # In a quoted text of Hydra, a backslash is doubled only before a quote or at the end.
    quoted = re.sub(r'(\\*)"', r'\1\1\\"', path)
    quoted = re.sub(r"(\\+)\Z", r"\1\1", quoted)
    override = f'data.path="{quoted}"'
    return f"data=files {shlex.quote(override)}"
