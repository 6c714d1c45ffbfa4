"""Corpora of the hub, read by the Hugging Face libraries from folders and from a server on loopback."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from normlab.config.compose import compose_run
from normlab.config.corpora import DATA, TOKENIZERS, HubData, NamedData, StdlibData, WikiText103
from normlab.data import hub as module
from normlab.data import hub_access
from normlab.data.corpus import open_corpus
from normlab.data.tokenizers import train_bpe
from normlab.errors import DataError
from support.hub_server import COMMIT, Hub, Repositories

TEXTS = [f"Story {i}: \u00e9t\u00e9 \U0001f600\n" + f"word {i} " * (20 + i % 7) for i in range(120)]
OFFLINE_CHOICES = "without a network, use data=stdlib, or data=files"


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
from normlab.config.corpora import HubData
from normlab.data.corpus import open_corpus
from normlab.errors import DataError
from normlab.config.compose import compose_run
for options in json.loads(sys.argv[1]):
    start = time.monotonic()
    try:
        corpus = open_corpus(HubData(**options))
        result = corpus.description | {{"train": corpus.train.tolist(), "val": corpus.val.tolist()}}
    except DataError as error:
        result = {{"error": str(error)}}
    print(json.dumps(result | {{"seconds": time.monotonic() - start, "datasets": "datasets" in sys.modules}}))
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
    assert {path.name for path in cache.iterdir()} == {"normlab.locks", "tokens"}
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
        r"data.name=org/none: no repository .*/datasets/org/none.*org/name": {"name": "org/none"},
        r"data.name=a/b/c: no repository .*no such path on this machine": {"name": "a/b/c"},
        r"data.name=org/jsonl: .* has no such commit, .*data.revision": {"name": "org/jsonl", "revision": "old"},
        r"no column 'text'; it has number, body; set data.column": {"name": "org/jsonl"},
        r"data.split=trian: .*did you mean 'train'.*it has train": {"name": "org/parquet", "split": "trian"},
        r"available configs: \['one', 'two'\]; set data.subset": {"name": "org/subsets"},
        r"'tow' not found. Available: \['one', 'two'\]; set data.subset": {"name": "org/subsets", "subset": "tow"},
        r"row 2 of column 'text' is None, not text; set data.skip=null": {"name": "org/numbers"},
        r"data.name=org/gated: .*hf auth login, or HF_TOKEN": {"name": "org/gated"},
        r"data.tokenizer=org/none: no repository .*/org/none.*org/name": {
            "name": "org/jsonl",
            "column": "body",
            "tokenizer": "org/none",
        },
    }
    results = opened(served.endpoint, *cases.values())
    for pattern, result in zip(cases, results, strict=True):
        assert re.search(pattern, result["error"]), result["error"]
        assert "\n" not in result["error"]
    assert list((cache / "tokens").iterdir()) == []


@pytest.mark.network
def test_tokenizer_is_downloaded_once(hub: Any, opened: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    definition = train_bpe(TEXTS, 300).definition
    served = hub({"models/org/fast": {"tokenizer.json": definition.encode()}, "models/org/slow": {"vocab.txt": b"a"}})
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    fast, slow = {"name": str(tmp_path), "tokenizer": "org/fast"}, {"name": str(tmp_path), "tokenizer": "org/slow"}
    first, refused = opened(served.endpoint, fast, slow)
    assert re.search(r"data.tokenizer=org/slow: .* has no tokenizer.json; choose another", refused["error"])
    reference = Tokenizer.from_str(definition)
    expected = [[*reference.encode(text).ids, reference.get_vocab_size()] for text in TEXTS]
    assert sorted(first["train"] + first["val"]) == sorted(token for document in expected for token in document)
    assert first["train"][: len(expected[0])] in expected
    served.close()
    again, other = opened(served.endpoint, fast, {**fast, "val_fraction": 0.2})  # both caches are used
    assert again["sha256"] == first["sha256"]
    assert len(other["val"]) > len(first["val"])


@pytest.mark.parametrize(
    "name", ["{}/nosuch.json", "./x", "../x/y", "~/x", "~nobody-at-all/x", "nosuch.json", "x/", "/dev/null", "{}"]
)
def test_missing_path_of_a_tokenizer_sends_no_request(name: str, tmp_path: Path) -> None:
    name = name.format(tmp_path)
    with pytest.raises(DataError) as caught:
        open_corpus(StdlibData(tokenizer=name))
    missing = "no such file, and no folder with a tokenizer.json; choose a tokenizer.json"
    assert str(caught.value).startswith(f"data.tokenizer={name}: {missing}")


def test_folder_without_tokenizer_json_may_be_a_name_on_the_hub(
    hub: Any, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    before = f"import normlab, os; os.chdir({str(tmp_path)!r})"
    (result,) = opened(hub().endpoint, {"name": ".", "tokenizer": "a-folder"}, before=before)
    assert re.search(r"data.tokenizer=a-folder: no repository .*, and no such path on this machine", result["error"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data.tokenizer=a-folder: HF_HUB_OFFLINE is set, .* nor a path on"):
        open_corpus(StdlibData(tokenizer="a-folder"))


# No hub


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent_endpoint() -> Iterator[str]:
    """Run a server that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.network
@pytest.mark.parametrize("failure", ["refused", "silent", "no such name", "offline", "portal", "in trouble"])
@pytest.mark.parametrize("options", [{}, {"tokenizer": "org/pretrained"}], ids=["dataset", "tokenizer"])
def test_error_without_hub_and_cache(
    failure: str, options: dict[str, str], silent_endpoint: str, hub: Any, opened: Any
) -> None:
    responses = {"portal": (200, b"<html>Pay here</html>"), "in trouble": (503, b"")}
    endpoint = {"refused": closed_port(), "silent": silent_endpoint}.get(failure, "http://hub.invalid")
    if failure in responses:
        endpoint = hub(response=responses[failure]).endpoint
    (result,) = opened(
        endpoint, {"name": "org/parquet", **options}, HF_HUB_OFFLINE="1" if failure == "offline" else "0"
    )
    if options:
        assert result["error"].startswith("data.tokenizer=org/pretrained: ")
        assert "data.tokenizer=bytes" in result["error"]
    else:
        assert result["error"].startswith("data.name=org/parquet: ")
        assert OFFLINE_CHOICES in result["error"]
    assert ("HF_HUB_OFFLINE is set" if failure == "offline" else f"no answer from {endpoint}") in result["error"]
    assert "is neither in the local cache nor a path on this machine;" in result["error"]


@pytest.mark.network
def test_silent_hub_fails_within_five_seconds(silent_endpoint: str, tmp_path: Path) -> None:
    """The error is one line that names the timeout."""
    overrides = ["train", "data=tinystories", "tracking.wandb=off", f"results_dir={tmp_path / 'results'}"]
    done = subprocess.run(
        [sys.executable, "-m", "normlab", *overrides], capture_output=True, text=True,
        env=os.environ | {"HF_ENDPOINT": silent_endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    found = re.match(
        rf"error: data=tinystories: no answer from {re.escape(silent_endpoint)} within ([0-9.]+) s ", done.stderr
    )
    assert found, done.stderr
    assert float(found[1]) < 5
    assert done.stderr.count("\n") == 1


def test_other_datasets_in_the_cache_are_ignored(opened: Any, tmp_path: Path) -> None:
    for name in ("org___other", "other", "org___parquet/default/0.0.0"):  # the last download did not finish
        (tmp_path / "datasets" / name).mkdir(parents=True)
    (tmp_path / "datasets" / "org___other" / "default" / "0.0.0" / "hash").mkdir(parents=True)
    (result,) = opened(closed_port(), {"name": "org/parquet"}, HF_HOME=str(tmp_path))
    assert "org/parquet is neither in the local cache" in result["error"]
    assert not result["datasets"]


@pytest.mark.parametrize("name", ["roneneldan/TinyStories", "a/fineweb-edu", "A/HTMLPage2X_y", "squad"])
def test_dataset_in_the_cache_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.naming import camelcase_to_snakecase

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    *owner, last = name.split("/")
    (tmp_path / "___".join([*owner, camelcase_to_snakecase(last)]) / "default" / "0.0.0" / "hash").mkdir(parents=True)
    module.HubText(HubData(name=name)).connect()
    with pytest.raises(DataError, match=r"neither in the local cache"):
        module.HubText(HubData(name=f"{name}s")).connect()


def test_request_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No timeout of a library limits a name server that does not answer."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NORMLAB_HUB_PATIENCE", "0.2")
    never = threading.Event()
    try:
        with pytest.raises(hub_access.NoAnswer, match=r"within 0.2 s \(NORMLAB_HUB_PATIENCE=30 waits longer\)"):
            hub_access.query_hub(lambda seconds: never.wait())
    finally:
        never.set()


@pytest.mark.parametrize("seconds", ["abc", "nan", "inf", "-1", "0", "1e300", "1,5"])
@pytest.mark.parametrize("what", ["dataset", "tokenizer"])
def test_timeout_must_be_a_positive_number(what: str, seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", closed_port())
    monkeypatch.setenv("NORMLAB_HUB_PATIENCE", seconds)
    config = HubData(name="org/x") if what == "dataset" else StdlibData(tokenizer="org/x")
    with pytest.raises(DataError, match=rf"^NORMLAB_HUB_PATIENCE={seconds}: must be a positive number of seconds"):
        open_corpus(config)


@pytest.mark.network
def test_timeout_is_as_long_as_it_is_set(silent_endpoint: str, opened: Any) -> None:
    """It does not depend on the variable of the libraries."""
    (result,) = opened(silent_endpoint, {"name": "org/x"}, NORMLAB_HUB_PATIENCE="2.5", HF_HUB_ETAG_TIMEOUT="7")
    assert "within 2.5 s (NORMLAB_HUB_PATIENCE=30 waits longer)" in result["error"]
    assert result["seconds"] >= 2.5


@pytest.mark.parametrize("overrides", [{"name": "org/x"}, {"name": "org/x", "tokenizer": "org/y"}, {"name": "."}])
def test_error_for_a_variable_that_huggingface_hub_cannot_parse(overrides: dict[str, str], opened: Any) -> None:
    (result,) = opened(closed_port(), overrides, HF_HUB_ETAG_TIMEOUT="2.5")
    assert "huggingface_hub cannot be imported" in result["error"]
    assert "'2.5'" in result["error"]


def test_timeout_is_not_read_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMLAB_HUB_PATIENCE", "abc")
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "abc")
    assert len(open_corpus(StdlibData(max_tokens=5000)).train) > 0


@pytest.mark.parametrize("name", sorted(name for name, kind in DATA.items() if issubclass(kind, NamedData)))
def test_error_of_a_named_corpus_has_its_override(name: str) -> None:
    """The tests run with HF_HUB_OFFLINE."""
    with pytest.raises(DataError, match=rf"^data={name}: HF_HUB_OFFLINE is set, and .*/.* {OFFLINE_CHOICES}"):
        open_corpus(DATA[name]())  # pyright: ignore[reportCallIssue]


@pytest.mark.network
def test_cache_of_datasets_is_read_without_hub(hub: Any, opened: Any) -> None:
    served = hub()
    load = "import datasets; datasets.load_dataset('org/subsets', 'two'); datasets.load_dataset('org/parquet')"
    subprocess.run(
        [sys.executable, "-c", load], check=True, capture_output=True,
        env=os.environ | {"HF_ENDPOINT": served.endpoint, "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    served.close()
    overrides = [{"name": "org/parquet"}, {"name": "org/subsets", "subset": "two", "split": "train+test"}]
    missing = [{"name": "org/jsonl"}, {"name": "org/subsets", "subset": "one"}]
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        tables, subset, *others = opened(served.endpoint, *overrides, *missing, **env)
        assert sorted(decode_documents(tables)) == sorted(decode_documents(subset)) == sorted(TEXTS)
        assert OFFLINE_CHOICES in others[0]["error"]
        assert "'two'" in others[1]["error"]


QUICK = "time.sleep = lambda seconds: None\n"
"""Skips the 58 seconds that the libraries wait between their retries."""


@pytest.mark.network
@pytest.mark.parametrize("name", ["jsonl", "parquet"])
@pytest.mark.parametrize("before", [QUICK, ""], ids=["quick", "real"])
def test_hub_that_fails_within_a_file(name: str, before: str, hub: Any, opened: Any, cache: Path) -> None:
    overrides = {"name": f"org/{name}"} | ({"column": "body"} if name == "jsonl" else {})
    size = sum(map(len, DATASETS[f"datasets/org/{name}"].values()))
    failing = hub(fails_after=size // 2)
    (result,) = opened(failing.endpoint, overrides, before=before)
    assert f"data.name=org/{name}: reading from {failing.endpoint} failed" in result["error"]
    assert OFFLINE_CHOICES in result["error"]
    assert len(failing.requests) < 60
    assert list((cache / "tokens").iterdir()) == []
    assert {path.name for path in cache.iterdir()} == {"normlab.locks", "tokens"}
    (complete,) = opened(hub().endpoint, overrides)
    assert sorted(decode_documents(complete)) == sorted(TEXTS)


# A folder


def test_folder_is_a_dataset(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    config = HubData(name=str(tmp_path))
    first = open_corpus(config)
    result = {"train": first.train.tolist(), "val": first.val.tolist()}
    assert sorted(decode_documents(result)) == sorted(TEXTS)
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS[:-1]))
    assert open_corpus(config).sha256 != first.sha256


def test_revision_of_a_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    with pytest.raises(DataError, match=r"data.revision=main: has no effect on a folder"):
        open_corpus(HubData(name=str(tmp_path), revision="main"))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_error_names_a_null_line_in_a_folder(pack: Callable[[bytes], bytes], tmp_path: Path, cache: Path) -> None:
    """pyarrow crashes on such a line."""
    (tmp_path / ("train.jsonl.gz" if pack is gzip.compress else "train.jsonl")).write_bytes(
        pack(b'null\n{"text": "a"}\n')
    )
    with pytest.raises(DataError, match=r"row 1 of column 'text' is None, not text; set data\.skip=null"):
        open_corpus(HubData(name=str(tmp_path)))


def test_rows_without_text_and_byte_order_marks_are_counted(tmp_path: Path) -> None:
    rows = [
        "null",
        '{"text": null}',
        '{"text": ""}',
        '{"text": "\\ufeffone \\ufefftwo"}',
        '{"text": "%s"}' % ("a" * 99),
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(rows), encoding="utf-8-sig")
    corpus = open_corpus(HubData(name=str(tmp_path), skip="null", tokenizer="chars"))
    assert corpus.tokenizer.state()["characters"] == " aenotw"
    read = corpus.description["read"]
    assert (read["documents"], read["null"], read["empty"], read["byte_order_marks"]) == (2, 2, 1, 2)
    assert read["formats"] == {"dataset": 1}


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("train.csv", b"text,text\na,b\n", "has more than one column 'text'; remove all but one"),
        ("train.tsv", b"1\ttext\t2\ttext\n3\ta\t4\tb\n", "has more than one column 'text'; remove all but one"),
        ("train.jsonl", b'{"text": "a", "text": "b"}\n', "has more than one 'text'; remove all but one"),
        ("train.json", b'[{"text": "a"}, {"text": "b", "text": "c"}]', "has more than one 'text'; remove all but one"),
        ("train.json", b' [{"text": "a", "text": "b"}]\n', "has more than one 'text'; remove all but one"),
        ("train.json", b'{"text": ["a"],\n"text": ["b"]}\n', "has more than one 'text'; remove all but one"),
    ],
)
def test_repeated_column_of_a_folder_is_rejected(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=problem):
        open_corpus(HubData(name=str(tmp_path)))
    gc.collect()  # `datasets` does not close a CSV file that is not read to its end


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl", "train.parquet"])
def test_column_with_the_name_of_a_repeated_one_is_read(name: str, tmp_path: Path) -> None:
    rows = pd.DataFrame({"text": ["abc" * 20] * 9, "text.1": ["def" * 20] * 9, "NA": 1})
    if name.endswith("csv"):
        rows.to_csv(tmp_path / name, index=False)
    elif name.endswith("jsonl"):
        rows.to_json(tmp_path / name, orient="records", lines=True)
    else:
        rows.to_parquet(tmp_path / name)
    for column, characters in (("text", "abc"), ("text.1", "def")):
        corpus = open_corpus(HubData(name=str(tmp_path), column=column, tokenizer="chars"))
        assert characters in corpus.tokenizer.decode(corpus.train.tolist())


@pytest.mark.parametrize(
    ("name", "content"),
    [("train.jsonl", '{"id": 1, "\ufefftext": "abcabc"}\n'), ("train.csv", 'id,"\ufefftext"\n1,abcabc\n')],
)
def test_byte_order_mark_in_the_name_of_the_column_is_removed(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    corpus = open_corpus(HubData(name=str(tmp_path), val_fraction=0.5))
    assert corpus.tokenizer.decode(corpus.train[:3].tolist()) == "abc"


def test_folder_with_results_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "results" / "runs" / "x").mkdir(parents=True)
    (tmp_path / "results" / "runs" / "x" / "lock").touch()
    with pytest.raises(DataError, match=r"has .*/results/runs/x, which normlab wrote; choose a folder without results"):
        open_corpus(HubData(name=str(tmp_path)))


@pytest.mark.parametrize("name", [None, ".hidden.jsonl", "README.md"])
def test_folder_without_data_is_rejected(name: str | None, tmp_path: Path) -> None:
    if name:
        (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r": cannot be read \(.* data files.*\); fix it, or use data=files"):
        open_corpus(HubData(name=str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "half \\ud800"}\n', r".*JSON parse error: The surrogate pair in string is invalid"),
        (b'{"text": "half \xff"}\n', r"UnicodeDecodeError: .* byte 0xff"),
        (b'{"text": "half', r".*JSON parse error: Missing a closing quotation mark"),
    ],
)
def test_error_for_an_unreadable_file_of_a_folder(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "b.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=rf"={tmp_path}: cannot be read \({reason}.*; fix it, or use data=files"):
        open_corpus(HubData(name=str(tmp_path)))


@pytest.mark.parametrize(("name", "content"), [("a.parquet", b"PAR1 and no more"), ("a.jsonl", b"")])
def test_error_for_a_damaged_or_empty_file_of_a_folder(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"={tmp_path}: cannot be read \(.*; fix it, or use data=files"):
        open_corpus(HubData(name=str(tmp_path)))


def test_lines_are_joined_into_articles() -> None:
    """In WikiText, a heading of the first level starts an article."""
    lines = [" = A Title = \n", "Text . \n", " = = A Section = = \n", "More , 1 = 1 . \n", " = B = \n", "End \n"]
    assert list(module.join_articles(lines, WikiText103.article)) == ["".join(lines[:4]), "".join(lines[4:])]
    assert next(module.join_articles(["before \n", *lines], WikiText103.article)) == "before \n"


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
        (["data=hub", "data.name=stdlib"], r"data.name=stdlib: is a corpus.*use data=stdlib"),
        (["data=stdlib", "data.name=org/x"], r"data.name=org/x: cannot be set;.*data=hub"),
        (["data=hub", "data.nam=org/x"], r"did you mean 'data.name'.*name"),
        (["data=tinystorys"], r"did you mean 'tinystories'"),
        (["data=tinystories"], r"data=tinystories: HF_HUB_OFFLINE is set.*data=stdlib.*data=files"),
    ],
)
def test_config_errors_are_one_line(overrides: list[str], pattern: str, run_command: Any, tmp_path: Path) -> None:
    code, out, err = run_command("train", *overrides, "tracking.wandb=off", f"results_dir={tmp_path / 'results'}")
    assert (code, out) == (2, "")
    assert re.search(pattern, err), err
    assert err.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "name", ["gpt2", "distilgpt2", "bert-base-uncased", "t5-small", "EleutherAI/pythia-70m", "xlnet"]
)
def test_names_on_the_hub_are_accepted_as_tokenizers(name: str) -> None:
    assert compose_run([f"data.tokenizer={name}"]).data.tokenizer == name


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
