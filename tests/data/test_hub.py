"""Corpora of the hub, read by the Hugging Face libraries from folders and from a server on loopback."""

import gzip
import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from normlab.base.errors import DataError
from normlab.catalogue.corpora import (
    DATA,
    TOKENIZERS,
    FilesData,
    HubData,
    NamedData,
    StdlibData,
    WikiText103,
    files_overrides,
)
from normlab.config.compose import compose_run
from normlab.data import hub as module
from normlab.data.corpus import open_corpus
from normlab.data.documents import SourceRow, TextCounts
from normlab.data.tokenizer_sources import train_bpe
from support.hub_server import COMMIT, Hub, Repositories

TEXTS = [f"Story {i}: \u00e9t\u00e9 \U0001f600\n" + f"word {i} " * (20 + i % 7) for i in range(120)]
REMEDY = "run the command again; without a network, use data=stdlib, or data=files with data.path"


def parquet(texts: list[str], column: str = "text") -> bytes:
    buffer = io.BytesIO()
    pd.DataFrame({"number": range(len(texts)), column: texts}).to_parquet(buffer, row_group_size=10)
    return buffer.getvalue()


def jsonl(texts: list[str], column: str = "text") -> bytes:
    return "".join(json.dumps({"number": i, column: text}) + "\n" for i, text in enumerate(texts)).encode()


SUBSETS = b"""---
configs:
- {config_name: one, data_files: [{split: train, path: one.jsonl}]}
- {config_name: two, data_files: [{split: train, path: two.jsonl}, {split: test, path: one.jsonl}]}
---
"""
DATASETS: Repositories = {
    "datasets/org/parquet": {
        "data/train-00000-of-00002.parquet": parquet(TEXTS[:60]),
        "data/train-00001-of-00002.parquet": parquet(TEXTS[60:]),
    },
    "datasets/org/jsonl": {"train.jsonl": jsonl(TEXTS, "body")},
    "datasets/org/subsets": {"README.md": SUBSETS, "one.jsonl": jsonl(TEXTS[:50]), "two.jsonl": jsonl(TEXTS[50:])},
    "datasets/org/numbers": {"train.jsonl": b'{"text": "a"}\n{"text": null}\n'},
    "datasets/org/gated": {"train.jsonl": jsonl(TEXTS)},
}

OPEN = """
import json, sys, time
{before}
from normlab.catalogue.corpora import HubData
from normlab.data.corpus import open_corpus
from normlab.base.errors import DataError
for options in json.loads(sys.argv[1]):
    try:
        corpus = open_corpus(HubData(**options))
        result = corpus.description | {{"train": corpus.train.tolist(), "val": corpus.val.tolist()}}
    except DataError as error:
        result = {{"error": str(error)}}
    print(json.dumps(result | {{"datasets": "datasets" in sys.modules}}))
"""


@pytest.fixture
def opened(cache: Path) -> Callable[..., list[dict[str, Any]]]:
    """Open corpora of data=hub in a new process that uses an endpoint and raises warnings as errors."""

    def call(endpoint: str, *corpora: dict[str, Any], before: str = "", **env: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", OPEN.format(before=before), json.dumps(corpora)],
            env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"} | env,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert all(line.startswith("normlab: reading org/") for line in done.stderr.splitlines()), done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return call


@pytest.fixture
def hub() -> Iterator[Callable[..., Hub]]:
    """Serve repositories until the end of the test."""
    with ExitStack() as stack:

        def serve(repositories: Repositories = DATASETS, **options: Any) -> Hub:
            server = Hub(repositories, **options)
            stack.callback(server.close)
            return server

        yield serve


def decode_documents(result: dict[str, Any]) -> list[str]:
    """Decode the documents of both parts with the bytes tokenizer."""
    found: list[str] = []
    for part in ("train", "val"):
        text = bytes(255 if token == 256 else token for token in result[part])  # UTF-8 has no byte 255
        found += [document.decode() for document in text.split(b"\xff")[:-1]]
    return found


@pytest.mark.network
def test_streamed_documents_equal_those_on_the_hub(hub: Any, opened: Any, cache: Path, tmp_path: Path) -> None:
    """This holds for Parquet in two files, JSONL, and several splits of a subset."""
    served = hub()
    lines, tables, subset = opened(
        served.endpoint,
        {"name": "org/jsonl", "column": "body"},
        {"name": "org/parquet"},
        {"name": "org/subsets", "subset": "two", "split": "test+train"},
        HF_HOME=str(tmp_path),
    )
    for result in (lines, tables, subset):
        assert sorted(decode_documents(result)) == sorted(TEXTS)
    assert lines["sha256"] == tables["sha256"]
    assert tables["name"] == "org/parquet"
    assert tables["source"] == {"dataset": "org/parquet", "subset": None, "split": "train", "commit": COMMIT}
    assert {path.name for path in cache.iterdir()} == {".normlab-making", "normlab.locks", "tokens"}
    assert not list(tmp_path.rglob("*.arrow")), "a copy of the dataset was kept"


@pytest.mark.network
def test_second_open_sends_no_request(hub: Any, opened: Any) -> None:
    served = hub()
    overrides = {"name": "org/jsonl", "column": "body", "tokenizer": "bpe", "vocab_size": 300}
    (first,) = opened(served.endpoint, overrides)
    num_requests = len(served.requests)
    served.close()
    (second,) = opened(served.endpoint, overrides)
    assert second["sha256"] == first["sha256"]
    assert second["train"] == first["train"]
    assert len(served.requests) == num_requests
    assert first["datasets"]
    assert not second["datasets"]


@pytest.mark.network
def test_max_tokens_limits_the_download(hub: Any, opened: Any) -> None:
    served = hub()
    _, some = opened(served.endpoint, {"name": "org/parquet"}, {"name": "org/parquet", "max_tokens": 2000})
    assert len(some["train"]) + len(some["val"]) == 2000
    documents = decode_documents(some)
    assert documents
    assert all(any(document in text for text in TEXTS) for document in documents)
    first, second = DATASETS["datasets/org/parquet"]
    gets = [request for request in served.requests if request.startswith("GET") and "/resolve/" in request]
    assert sum(second in request for request in gets) == 1, "only the complete corpus needs the second file"
    assert sum(first in request for request in gets) >= 2


@pytest.mark.network
def test_errors_of_datasets_say_what_to_do(hub: Any, opened: Any, cache: Path) -> None:
    served = hub(gated=("datasets/org/gated",))
    cases: dict[str, dict[str, Any]] = {
        r"data.name=org/none: RepositoryNotFoundError: .*; choose another org/name, or log in": {"name": "org/none"},
        r"data.name=a/b/c: HFValidationError: .*; choose another org/name, or a path that exists": {"name": "a/b/c"},
        r"data.name=org/jsonl: RevisionNotFoundError: .*; choose another data.revision": {
            "name": "org/jsonl", "revision": "old",
        },
        r"data.name=org/jsonl: train.jsonl: no column 'text'; it has number, body; set data.column": {
            "name": "org/jsonl",
        },
        r"data.name=org/parquet: no split 'trian' \(did you mean 'train'\?\); it has train; set data.split": {
            "name": "org/parquet", "split": "trian",
        },
        r"available configs: \['one', 'two'\]; set data.subset": {"name": "org/subsets"},
        r"'tow' not found. Available: \['one', 'two'\]; set data.subset": {"name": "org/subsets", "subset": "tow"},
        r"data.name=org/gated: .*; log in \(hf auth login, or HF_TOKEN\), and accept the terms": {"name": "org/gated"},
        r"data.tokenizer=org/none: RepositoryNotFoundError: .*; choose another org/name": {
            "name": "org/jsonl", "column": "body", "tokenizer": "org/none",
        },
    }  # fmt: skip
    results = opened(served.endpoint, *cases.values())
    for pattern, result in zip(cases, results, strict=True):
        assert re.search(pattern, result["error"]), result["error"]
        assert "\n" not in result["error"]
    assert not (cache / "tokens").exists()


@pytest.mark.network
def test_tokenizer_is_downloaded_once(hub: Any, opened: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    definition = train_bpe(TEXTS, 300).definition
    served = hub({"models/org/fast": {"tokenizer.json": definition.encode()}, "models/org/slow": {"vocab.txt": b"a"}})
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    fast, slow = {"name": str(tmp_path), "tokenizer": "org/fast"}, {"name": str(tmp_path), "tokenizer": "org/slow"}
    first, refused = opened(served.endpoint, fast, slow)
    assert re.search(r"data.tokenizer=org/slow: .*; choose a model that has a tokenizer.json", refused["error"])
    reference = Tokenizer.from_str(definition)
    expected = [[*reference.encode(text).ids, reference.get_vocab_size()] for text in TEXTS]
    assert sorted(first["train"] + first["val"]) == sorted(token for document in expected for token in document)
    assert first["train"][: len(expected[0])] in expected
    served.close()
    again, other = opened(served.endpoint, fast, {**fast, "val_fraction": 0.2})  # both caches are used
    assert again["sha256"] == first["sha256"]
    assert len(other["val"]) > len(first["val"])


@pytest.mark.parametrize("name", ["{}/nosuch.json", "./x", "~nobody-at-all/x", "/dev/null", "{}"])
def test_missing_path_of_a_tokenizer_sends_no_request(name: str, tmp_path: Path) -> None:
    name = name.format(tmp_path)
    with pytest.raises(DataError) as caught:
        open_corpus(StdlibData(tokenizer=name))
    assert str(caught.value).startswith(f"data.tokenizer={name}: HFValidationError")
    assert str(caught.value).endswith("; choose another org/name, or a path that exists")


# No hub


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.network
@pytest.mark.parametrize("failure", ["refused", "silent", "offline", "portal", "in trouble"])
def test_error_without_hub_and_cache(failure: str, hub: Any, opened: Any) -> None:
    responses = {"portal": (200, b"<html>Pay here</html>"), "in trouble": (503, b"")}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never responds
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}" if failure == "silent" else closed_port()
        if failure in responses:
            endpoint = hub(response=responses[failure]).endpoint
        corpora = {"name": "org/parquet"}, {"name": "org/parquet", "tokenizer": "org/pretrained"}
        results = opened(endpoint, *corpora, HF_HUB_OFFLINE="1" if failure == "offline" else "0")
    for result, override in zip(results, ("data.name=org/parquet", "data.tokenizer=org/pretrained"), strict=True):
        assert result["error"].startswith(f"{override}: ")
        assert result["error"].endswith(f"; {REMEDY}")
        assert not result["datasets"]  # whose import takes seconds


@pytest.mark.parametrize("name", sorted(name for name, kind in DATA.items() if issubclass(kind, NamedData)))
def test_error_of_a_named_corpus_has_its_override(name: str) -> None:
    """The tests run with HF_HUB_OFFLINE."""
    with pytest.raises(DataError, match=rf"^data={name}: OfflineModeIsEnabled: .*{REMEDY}"):
        open_corpus(DATA[name]())  # pyright: ignore[reportCallIssue]


@pytest.mark.network
@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_hub_that_fails_within_a_file(name: str, hub: Any, opened: Any, cache: Path) -> None:
    overrides = {"name": f"org/{name}"} | ({"column": "body"} if name == "jsonl" else {})
    size = sum(map(len, DATASETS[f"datasets/org/{name}"].values()))
    failing = hub(fails_after=size // 2)
    # The libraries wait for 58 seconds between their retries.
    (result,) = opened(failing.endpoint, overrides, before="time.sleep = lambda seconds: None")
    assert result["error"].startswith(f"data.name=org/{name}: ")
    assert result["error"].endswith(REMEDY)
    assert len(failing.requests) < 60
    assert not (cache / "tokens").exists()
    (complete,) = opened(hub().endpoint, overrides)
    assert sorted(decode_documents(complete)) == sorted(TEXTS)


# A folder


@pytest.mark.parametrize(("suffix", "write"), [("jsonl", jsonl), ("parquet", parquet)])
def test_folder_of_tables_is_one_corpus(suffix: str, write: Callable[..., bytes], tmp_path: Path) -> None:
    """`data=files` names this folder in its error for such files."""
    for name, texts in (("a", TEXTS[:60]), ("b", TEXTS[60:])):
        (tmp_path / f"{name}.{suffix}").write_bytes(write(texts, "body"))
    corpus = open_corpus(HubData(name=str(tmp_path), column="body"))
    assert sorted(decode_documents({"train": corpus.train.tolist(), "val": corpus.val.tolist()})) == sorted(TEXTS)


@pytest.mark.parametrize("other", ["b.csv", "b.txt", "sub/b.parquet"])
def test_folder_of_two_formats_is_rejected(other: str, tmp_path: Path) -> None:
    """`datasets` would read one of them only."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "c.json").write_bytes(jsonl(TEXTS))
    open_corpus(HubData(name=str(tmp_path)))
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).write_bytes(b"text\n")
    with pytest.raises(DataError, match=r"^data.name=.*: put files of one format into a folder; this one has \.\w+, "):
        open_corpus(HubData(name=str(tmp_path)))


def test_error_for_the_name_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    hint = r"put it alone into a folder, and set data.name=FOLDER$"  # data=files refuses it too
    with pytest.raises(DataError, match=rf"^data.name=.*/a\.jsonl: is a file; {hint}"):
        open_corpus(HubData(name=str(tmp_path / "a.jsonl")))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"/a\.txt: is a file; for a file of text, set data=files data.path=.*/a\.txt$"):
        open_corpus(HubData(name=str(tmp_path / "a.txt")))


@pytest.mark.parametrize(
    "path",
    [
        "my.txt",
        "my text.txt",
        'a\'s "b", c=[d].txt',
        "back\\slash {x}.txt",
        "[1].txt",
        "a\\",
        "é.txt",
        "a${b",
        "a\\${b}.txt",
        "a,b.txt",
        "a=b.txt",
    ],
)
def test_a_suggested_path_can_be_pasted(path: str) -> None:
    data = compose_run(shlex.split(files_overrides(path))).data
    assert isinstance(data, FilesData)
    assert data.path == [path]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_folder_is_a_dataset(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / ("train.jsonl.gz" if pack is gzip.compress else "train.jsonl")
    path.write_bytes(pack(jsonl(TEXTS)))
    config = HubData(name=str(tmp_path))
    first = open_corpus(config)
    result = {"train": first.train.tolist(), "val": first.val.tolist()}
    assert sorted(decode_documents(result)) == sorted(TEXTS)
    path.write_bytes(pack(jsonl(TEXTS[:-1])))
    assert open_corpus(config).sha256 != first.sha256
    with pytest.raises(DataError, match=r"data.revision=main: has no effect on a folder"):
        open_corpus(HubData(name=str(tmp_path), revision="main"))


def test_rows_without_text_are_counted(tmp_path: Path) -> None:
    rows = ['{"text": "%s"}' % ("a" * 99), '{"text": null}', '{"text": ""}', '{"text": "\\ufeffone \\ufefftwo"}']
    (tmp_path / "train.jsonl").write_text("\n".join(rows))
    corpus = open_corpus(HubData(name=str(tmp_path), tokenizer="chars"))
    assert corpus.tokenizer.state()["characters"] == " aenotw"
    assert corpus.description["read"] == {"rows": 4, "documents": 2, "empty": 1, "null": 1}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "half \xff"}\n', ".*"),
        ("a.jsonl", b'{"text": "half', r"a\.jsonl: line 1, column 10: is not JSON"),
        ("a.parquet", b"PAR1 and no more", r"a\.parquet: ArrowInvalid: .*; check the file, or leave it out"),
        ("README.md", b"no data", ".* data files"),
    ],
)
def test_error_for_an_unreadable_folder(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"^data.name={tmp_path}: {reason}") as caught:
        open_corpus(HubData(name=str(tmp_path)))
    assert "\n" not in str(caught.value)


def card(**config: Any) -> bytes:
    return f"---\n{json.dumps({'configs': [{'config_name': 'default', **config}]})}\n---\n".encode()


OUTSIDE: dict[str, tuple[dict[str, Any], str]] = {
    "a folder above": ({"data_files": "../outside.jsonl"}, "names '../outside.jsonl', which is outside of"),
    "an absolute path": ({"data_files": "{outside}"}, "data_files names '/.*, which is outside of"),
    "of a split": ({"data_files": [{"split": "train", "path": ["a.jsonl", "{outside}"]}]}, "which is outside of"),
    "of splits": ({"data_files": {"train": "../*.jsonl"}}, r"'../\*.jsonl', which is outside of"),
    "a folder of files": ({"data_dir": "sub/../.."}, "data_dir names 'sub/../..', which is outside of"),
    "an address": ({"data_files": "http://127.0.0.1:1/x.jsonl"}, "names 'http://127.0.0.1:1/x.jsonl', which is outs"),
    "of the hub": ({"data_files": "hf://datasets/org/x/a.jsonl"}, "names 'hf://datasets/org/x/a.jsonl', which is out"),
    "in an archive": ({"data_files": "zip://a.jsonl::../x.zip"}, "names 'zip://a.jsonl::../x.zip', which is outside"),
    "a hidden file": ({"data_files": ".hidden.jsonl"}, r"/\.hidden\.jsonl: is hidden"),
    "a link to a folder": (
        {"data_files": "linked/*.jsonl"},
        r"/linked: is a link to .*, outside of",
    ),
}
"""Cards of a stranger's dataset, and what the error says; {outside} is the path of a file outside."""


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_card_that_names_files_outside_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    config, message = OUTSIDE[name]
    outside, folder = tmp_path / "o" / "outside.jsonl", tmp_path / "o" / "dataset"
    (folder / "sub").mkdir(parents=True)
    for path in (outside, folder / "a.jsonl", folder / ".hidden.jsonl"):
        path.write_bytes(jsonl(TEXTS))
    if name == "a link to a folder":
        (folder / "linked").symlink_to(outside.parent)
    (folder / "README.md").write_bytes(card(**config).replace(b"{outside}", bytes(outside)))
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(HubData(name=str(folder)))
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_card_that_names_files_of_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a:b.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "other.csv").write_bytes(b"text\n1\n")
    (tmp_path / "README.md").write_bytes(card(data_files="data/*.jsonl"))
    corpus = open_corpus(HubData(name=str(tmp_path)))
    assert sorted(decode_documents({"train": corpus.train.tolist(), "val": corpus.val.tolist()})) == sorted(TEXTS)


BOMB = "\n".join(
    ["a: &a [x]", *(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdef", "bcdefg", strict=True))]
)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("README.md", f"---\n{BOMB}\n---\n", "README.md: cannot be read .has more than 131072 values"),
        ("README.md", "---\na: &a [*a]\n---\n", "README.md: cannot be read .a part of it refers to itself"),
        ("README.md", f"---\na: {'[' * 5000}\n---\n", "README.md: cannot be read .nested too deeply"),
        ("README.md", f"---\n{' ' * 2**22}\n---\n", "README.md: cannot be read .has 4194313 bytes"),
        (".huggingface.yaml", "configs: []", "huggingface.yaml: says which files are read, and is hidden"),
        ("dataset.py", "open('MARKER', 'w')", "RuntimeError: Dataset scripts are no longer supported"),
    ],
)
def test_a_strangers_folder_is_neither_executed_nor_takes_all_memory(
    name: str, content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "dataset").mkdir()
    (folder / "a.jsonl").write_bytes(jsonl(TEXTS))
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(HubData(name=str(folder)))
    assert "\n" not in str(caught.value)
    assert not Path("MARKER").exists()


def test_a_column_of_images_opens_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card may call a column of paths one of images, which `datasets` would open."""
    import PIL.Image

    monkeypatch.setattr(PIL.Image, "open", lambda *_: pytest.fail("a file was opened"))
    (folder := tmp_path / "dataset").mkdir()
    (folder / "a.parquet").write_bytes(parquet([str(tmp_path / "secret.png")] * 9))
    info = {"dataset_info": {"features": [{"name": "number", "dtype": "int64"}, {"name": "text", "dtype": "image"}]}}
    (folder / "README.md").write_text(f"---\n{json.dumps(info)}\n---\n")
    (tmp_path / "secret.png").write_bytes(b"mine")
    with pytest.raises(DataError, match="text"):
        open_corpus(HubData(name=str(folder)))


@pytest.mark.parametrize("kind", ["files", "hub"])
def test_only_links_of_the_cache_of_the_hub_may_leave_a_folder(kind: str, tmp_path: Path) -> None:
    """In this cache the files of `snapshots/COMMIT` are links to `blobs`."""
    suffix = "txt" if kind == "files" else "jsonl"
    make = {"files": lambda path: FilesData(path=[str(path)]), "hub": lambda path: HubData(name=str(path))}[kind]
    snapshot, blobs = tmp_path / "datasets--org--x" / "snapshots" / COMMIT, tmp_path / "datasets--org--x" / "blobs"
    (snapshot / "data").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0123").write_bytes(jsonl(TEXTS))
    (link := snapshot / "data" / f"a.{suffix}").symlink_to("../../../blobs/0123")
    first = open_corpus(make(snapshot)).sha256
    (blobs / "0123").write_bytes(jsonl(TEXTS[1:]))
    assert open_corpus(make(snapshot)).sha256 != first
    (tmp_path / "secret").write_bytes(jsonl(TEXTS))
    (blobs / "0123").unlink()
    (blobs / "0123").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=rf"{link}: is a link to {tmp_path / 'secret'}, outside of"):
        open_corpus(make(snapshot))


def test_lines_are_joined_into_articles() -> None:
    """In WikiText, a heading of the first level starts an article."""
    lines = [" = A Title = \n", "Text . \n", " = = A Section = = \n", "More , 1 = 1 . \n", " = B = \n", "End \n"]
    rows = [SourceRow(f"row {number}", line) for number, line in enumerate(lines, start=1)]
    first, second = SourceRow("row 1", "".join(lines[:4]), joined=4), SourceRow("row 5", "".join(lines[4:]), joined=2)
    assert list(module.join_articles(rows, WikiText103.article)) == [first, second]
    before = SourceRow("row 0", "before \n")
    assert next(module.join_articles([before, *rows], WikiText103.article)) == before
    counts = TextCounts()
    assert list(counts.documents_of([first, second])) == [first.text, second.text]
    assert (counts.rows, counts.documents) == (len(lines), 2)


@pytest.mark.parametrize("tokenizer", ["bpe", "pretrained"])
def test_finished_run_needs_neither_text_nor_tokenizer(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], run_command: Any
) -> None:
    """Sampling works after the text, the file of the tokenizer and the cache are deleted."""
    monkeypatch.chdir(tmp_path)
    Path("a_dataset").mkdir()
    Path("a_dataset", "train.jsonl").write_bytes(jsonl(TEXTS, "body"))
    if tokenizer == "pretrained":
        tokenizer = "./tokenizer.json"
        Path(tokenizer).write_text(train_bpe(TEXTS, 280).definition)
    overrides = [override for override in overrides if not override.startswith("data")]
    overrides += ["data=hub", "data.name=a_dataset", "data.column=body", f"data.tokenizer={tokenizer}", "train.steps=2"]
    code, out, err = run_command("train", *overrides)
    assert code == 0, err
    assert run_command("train", *overrides)[1].startswith("finished at step 2")  # the run exists
    for path in ("a_dataset", os.environ["NORMLAB_CACHE"], "tokenizer.json"):
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)
    code, out, err = run_command("sample", "rmsnorm", "--prompt", "word", "--tokens", "5", "--results-dir", "results")
    assert code == 0, err
    assert out.startswith("word")


@pytest.mark.parametrize(
    ("overrides", "pattern"),
    [
        (["data.tokenizer=byts"], r"unknown tokenizer 'byts' .*did you mean 'bytes'.*pretrained"),
        (["data.tokenizer=bpee"], r"did you mean 'bpe'"),
        (["data.vocab_size=500"], r"has no effect with data.tokenizer=bytes; .*data.tokenizer=bpe"),
        (["data.vocab_size=256", "data.tokenizer=bpe"], r"data.vocab_size=256: must be at least 257"),
        (["data.vocab_size=100000000000", "data.tokenizer=bpe"], r"vocab_size=100000000000: must be at most 1048576"),
        (["data.max_tokens=1"], r"data.max_tokens=1: must be at least 2"),
        (["data=hub"], r"data=hub needs a dataset's name; set data.name=roneneldan/TinyStories"),
        (["data=hub", "data.name=stdlib"], r"data.name=stdlib: cannot be set; data=\.\.\. chooses"),
        (["data=stdlib", "data.name=org/x"], r"data.name=org/x: cannot be set; data=\.\.\. chooses"),
        (["data=hub", "data.nam=org/x"], r"did you mean 'data.name'.*name"),
        (
            ["data=my.txt"],
            r"^error: data=my.txt: names no corpus; set data=files data.path=my.txt, or choose one of files",
        ),
        (["data=texts/my.txt"], r"data=texts/my.txt: names no corpus; set data=files data.path=texts/my.txt, or"),
        (
            ["data=rows/a.csv"],
            r"data=rows/a.csv: names no corpus; put the file alone into a folder, and set data=hub data.",
        ),
        (
            ["data=a.zip"],
            r"data=a.zip: names no corpus; .zip is no suffix of text: .*`normlab open FILE` unpacks a zip file",
        ),
        (["data=a.pdf"], r"data=a.pdf: names no corpus; .pdf is no suffix of text: put text .*data.path=FILE, or"),
        (["data=org/x"], r"data=org/x: names no corpus; set data=hub data.name=org/x, or choose"),
        (["data=tinystorys"], r"did you mean 'tinystories'"),
        (["data=tinystories"], r"data=tinystories: OfflineModeIsEnabled: .*data=stdlib.*data=files"),
    ],
)
def test_config_errors_are_one_line(overrides: list[str], pattern: str, run_command: Any, tmp_path: Path) -> None:
    code, out, err = run_command("train", *overrides, "tracking.wandb=off", f"results_dir={tmp_path / 'results'}")
    assert (code, out) == (2, "")
    assert re.search(pattern, err), err
    assert err.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_max_tokens_is_exact_for_every_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    for tokenizer in TOKENIZERS:
        complete = open_corpus(HubData(name=str(tmp_path), tokenizer=tokenizer))
        some = open_corpus(HubData(name=str(tmp_path), tokenizer=tokenizer, max_tokens=3000))
        assert len(some.train) + len(some.val) == 3000
        assert len(some.val) > 30
        assert some.sha256 != complete.sha256
        more = open_corpus(HubData(name=str(tmp_path), tokenizer=tokenizer, max_tokens=10**7))
        assert more.sha256 == complete.sha256
