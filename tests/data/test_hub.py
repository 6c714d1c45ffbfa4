"""The hub's code, run for real: Hugging Face's libraries against a folder, and against a server on loopback."""

from __future__ import annotations

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
from hub_server import COMMIT, Hub, Repositories

from normlab.corpora import DATA, TOKENIZERS, HubData, NamedData, StdlibData, WikiText103
from normlab.data import hub as module
from normlab.data import hub_access
from normlab.data.corpus import open_corpus
from normlab.data.subwords import BpeTokenizer
from normlab.errors import DataError
from normlab.launch import compose_run

ROOT = Path(__file__).parents[2]
TEXTS = [f"Story {i}: \u00e9t\u00e9 \U0001f600\n" + f"word {i} " * (20 + i % 7) for i in range(120)]
NO_HUB = "data=stdlib is text that is always there, data=files"


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
from normlab.corpora import HubData
from normlab.data.corpus import open_corpus
from normlab.errors import DataError
from normlab.launch import compose_run
for words in json.loads(sys.argv[1]):
    start = time.monotonic()
    try:
        corpus = open_corpus(HubData(**words))
        told = corpus.describe() | {{"train": corpus.train.tolist(), "val": corpus.val.tolist()}}
    except DataError as error:
        told = {{"error": str(error)}}
    print(json.dumps(told | {{"seconds": time.monotonic() - start, "datasets": "datasets" in sys.modules}}))
"""


@pytest.fixture
def opened(cache: Path) -> Callable[..., list[dict[str, Any]]]:
    """Open corpora of data=hub in a process of their own, with an endpoint, and warnings that are errors."""

    def call(endpoint: str, *words: dict[str, Any], before: str = "", **env: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", OPEN.format(before=before), json.dumps(words)],
            env=os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"} | env,
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert all(line.startswith("normlab: reading org/") for line in done.stderr.splitlines()), done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return call


@pytest.fixture
def hub() -> Iterator[Callable[..., Hub]]:
    """Serve repositories until the test has ended."""
    with ExitStack() as stack:

        def serve(repositories: Repositories = DATASETS, **how: Any) -> Hub:
            made = Hub(repositories, **how)
            stack.callback(made.close)
            return made

        yield serve


def documents_of(told: dict[str, Any]) -> list[str]:
    """The documents of both parts under the bytes tokenizer."""
    found: list[str] = []
    for part in ("train", "val"):
        text = bytes(255 if token == 256 else token for token in told[part])  # no UTF-8 has a byte 255
        found += [document.decode() for document in text.split(b"\xff")[:-1]]
    return found


@pytest.mark.slow
def test_what_is_streamed_is_what_is_there(hub: Any, opened: Any, cache: Path, tmp_path: Path) -> None:
    """Parquet in two files, JSONL, several splits of a subset; each as the texts that were put there."""
    served = hub()
    lines, tables, subset = opened(
        served.endpoint,
        {"name": "org/jsonl", "column": "body"},
        {"name": "org/parquet"},
        {"name": "org/subsets", "subset": "two", "split": "test+train"},
        HF_HOME=str(tmp_path),
    )
    for told in (lines, tables, subset):
        assert sorted(documents_of(told)) == sorted(TEXTS)
    assert lines["sha256"] == tables["sha256"]
    assert tables["name"] == "org/parquet"
    assert tables["source"] == {"dataset": "org/parquet", "subset": None, "split": "train", "commit": COMMIT}
    assert {path.name for path in cache.iterdir()} == {"normlab.locks", "tokens"}
    assert not list(tmp_path.rglob("*.arrow")), "a copy of the dataset was kept"


@pytest.mark.slow
def test_the_second_time_asks_nobody(hub: Any, opened: Any) -> None:
    served = hub()
    words = {"name": "org/jsonl", "column": "body", "tokenizer": "bpe", "vocab_size": 300}
    (first,) = opened(served.endpoint, words)
    asked = len(served.requests)
    served.close()
    (second,) = opened(served.endpoint, words)
    assert second["sha256"] == first["sha256"]
    assert second["train"] == first["train"]
    assert len(served.requests) == asked
    assert first["datasets"]
    assert not second["datasets"]


@pytest.mark.slow
def test_no_more_is_downloaded_than_max_tokens_need(hub: Any, opened: Any) -> None:
    served = hub()
    _, some = opened(served.endpoint, {"name": "org/parquet"}, {"name": "org/parquet", "max_tokens": 2000})
    assert len(some["train"]) + len(some["val"]) == 2000
    documents = documents_of(some)
    assert documents
    assert all(any(document in text for text in TEXTS) for document in documents)
    first, second = DATASETS["datasets/org/parquet"]
    gets = [request for request in served.requests if request.startswith("GET") and "/resolve/" in request]
    assert sum(second in request for request in gets) == 1, "only the one that wants all needs the second file"
    assert sum(first in request for request in gets) >= 2


@pytest.mark.slow
def test_what_is_wrong_with_a_dataset_is_said(hub: Any, opened: Any, cache: Path) -> None:
    served = hub(gated=("datasets/org/gated",))
    asked: dict[str, dict[str, Any]] = {
        r"data.name=org/none: no such dataset at .*/datasets/org/none.*org/name": {"name": "org/none"},
        r"data.name=a/b/c: no such dataset .*no such folder": {"name": "a/b/c"},
        r"data.revision=old: no commit, branch or tag": {"name": "org/jsonl", "revision": "old"},
        r"no column 'text'; it has number, body; set data.column": {"name": "org/jsonl"},
        r"data.split=trian: .*did you mean 'train'.*it has train": {"name": "org/parquet", "split": "trian"},
        r"several subsets; .*data.subset: one, two": {"name": "org/subsets"},
        r"data.subset=tow: .*did you mean 'two'.*it has one, two": {"name": "org/subsets", "subset": "tow"},
        r"row 2 of column 'text' is None, not text": {"name": "org/numbers"},
        r"data.name=org/gated: .*hf auth login, or HF_TOKEN": {"name": "org/gated"},
        r"data.tokenizer=org/none: no such model": {"name": "org/jsonl", "column": "body", "tokenizer": "org/none"},
    }
    told = opened(served.endpoint, *asked.values())
    for pattern, seen in zip(asked, told, strict=True):
        assert re.search(pattern, seen["error"]), seen["error"]
        assert "\n" not in seen["error"]
    assert list((cache / "tokens").iterdir()) == []


@pytest.mark.slow
def test_a_tokenizer_comes_from_the_hub_once(hub: Any, opened: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    definition = BpeTokenizer.fit(TEXTS, 300).definition
    served = hub({"models/org/fast": {"tokenizer.json": definition.encode()}, "models/org/slow": {"vocab.txt": b"a"}})
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    fast, slow = {"name": str(tmp_path), "tokenizer": "org/fast"}, {"name": str(tmp_path), "tokenizer": "org/slow"}
    first, refused = opened(served.endpoint, fast, slow)
    assert re.search(r"data.tokenizer=org/slow: .* has no tokenizer.json; choose another", refused["error"])
    theirs = Tokenizer.from_str(definition)
    expected = [[*theirs.encode(text).ids, theirs.get_vocab_size()] for text in TEXTS]
    assert sorted(first["train"] + first["val"]) == sorted(token for document in expected for token in document)
    assert first["train"][: len(expected[0])] in expected
    served.close()
    again, other = opened(served.endpoint, fast, {**fast, "val_fraction": 0.2})  # ours, and Hugging Face's cache
    assert again["sha256"] == first["sha256"]
    assert len(other["val"]) > len(first["val"])


@pytest.mark.parametrize("name", ["{}/nosuch.json", "./x", "../x/y", "~/x", "~nobody-at-all/x", "nosuch.json", "x/"])
def test_a_path_that_is_not_there_is_not_asked_for(name: str, tmp_path: Path) -> None:
    name = name.format(tmp_path)
    with pytest.raises(DataError) as caught:
        open_corpus(StdlibData(tokenizer=name))
    assert str(caught.value).startswith(f"data.tokenizer={name}: there is no such file here; name a tokenizer.json")


def test_a_device_is_no_tokenizer() -> None:
    with pytest.raises(DataError, match=r"data.tokenizer=/dev/null: what has that name is no regular file; name a"):
        open_corpus(StdlibData(tokenizer="/dev/null"))


def test_a_folder_without_a_tokenizer_says_what_it_lacks(
    hub: Any, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    lacks = r"the folder of that name has no tokenizer\.json; "
    with pytest.raises(DataError, match=rf"data.tokenizer={tmp_path}/a-folder: {lacks}name a tokenizer\.json"):
        open_corpus(StdlibData(tokenizer=f"{tmp_path}/a-folder"))
    before = f"import normlab, os; os.chdir({str(tmp_path)!r})"  # where the name might be the hub's too
    (told,) = opened(hub().endpoint, {"name": ".", "tokenizer": "a-folder"}, before=before)
    assert re.search(rf"data.tokenizer=a-folder: no such model at .*, and {lacks}", told["error"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"data.tokenizer=a-folder: HF_HUB_OFFLINE is set, .* {lacks}"):
        open_corpus(StdlibData(tokenizer="a-folder"))


# No hub


def refused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refused", "silent", "no such name", "offline", "portal", "in trouble"])
@pytest.mark.parametrize("what", [{}, {"tokenizer": "org/pretrained"}], ids=["dataset", "tokenizer"])
def test_no_hub_and_no_cache_is_said(how: str, what: dict[str, str], silent: str, hub: Any, opened: Any) -> None:
    says = {"portal": (200, b"<html>Pay here</html>"), "in trouble": (503, b"")}
    endpoint = {"refused": refused(), "silent": silent}.get(how, "http://hub.invalid")
    if how in says:
        endpoint = hub(says=says[how]).endpoint
    (told,) = opened(endpoint, {"name": "org/parquet", **what}, HF_HUB_OFFLINE="1" if how == "offline" else "0")
    if what:
        assert told["error"].startswith("data.tokenizer=org/pretrained: ")
        assert "data.tokenizer=bytes" in told["error"]
    else:
        assert told["error"].startswith("data.name=org/parquet: ")
        assert NO_HUB in told["error"]
    assert ("HF_HUB_OFFLINE is set" if how == "offline" else f"no answer from {endpoint}") in told["error"]
    assert re.search(r"in no cache( here;|, and there is no such file here;)", told["error"])


@pytest.mark.slow
def test_a_silent_hub_ends_the_command_in_one_line(silent: str, tmp_path: Path) -> None:
    """The patience that the line states is less than five seconds, and is spent once."""
    words = ["train", "data=tinystories", "tracking.wandb=off", f"results_dir={tmp_path / 'results'}"]
    done = subprocess.run(
        [sys.executable, "-m", "normlab", *words], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"HF_ENDPOINT": silent, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    found = re.match(rf"error: data=tinystories: no answer from {re.escape(silent)} within ([0-9.]+) s ", done.stderr)
    assert found, done.stderr
    assert float(found[1]) < 5
    assert done.stderr.count("\n") == 1


def test_another_dataset_in_the_cache_is_not_this_one(opened: Any, tmp_path: Path) -> None:
    for name in ("org___other", "other", "org___parquet/default/0.0.0"):  # the last one was never finished
        (tmp_path / "datasets" / name).mkdir(parents=True)
    (tmp_path / "datasets" / "org___other" / "default" / "0.0.0" / "hash").mkdir(parents=True)
    (told,) = opened(refused(), {"name": "org/parquet"}, HF_HOME=str(tmp_path))
    assert "org/parquet is in no cache here" in told["error"]
    assert not told["datasets"]


@pytest.mark.parametrize("name", ["roneneldan/TinyStories", "a/fineweb-edu", "A/HTMLPage2X_y", "squad"])
def test_a_dataset_in_the_cache_is_called_as_datasets_calls_it(name: str) -> None:
    from datasets.naming import camelcase_to_snakecase

    *owner, last = name.split("/")
    assert module.cached_name(name) == "___".join([*owner, camelcase_to_snakecase(last)])


def test_a_question_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the name server does not answer, which no timeout of a library bounds."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NORMLAB_HUB_PATIENCE", "0.2")
    never = threading.Event()
    try:
        with pytest.raises(hub_access.NoAnswer, match=r"within 0.2 s \(NORMLAB_HUB_PATIENCE=30 waits longer\)"):
            hub_access.answer(lambda seconds: never.wait())
    finally:
        never.set()


@pytest.mark.parametrize("seconds", ["abc", "nan", "inf", "-1", "0", "1e300", "1,5"])
@pytest.mark.parametrize("what", ["dataset", "tokenizer"])
def test_a_patience_that_is_no_positive_number_is_refused(
    what: str, seconds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", refused())
    monkeypatch.setenv("NORMLAB_HUB_PATIENCE", seconds)
    config = HubData(name="org/x") if what == "dataset" else StdlibData(tokenizer="org/x")
    with pytest.raises(DataError, match=rf"^NORMLAB_HUB_PATIENCE={seconds}: must be a positive number of seconds"):
        open_corpus(config)


@pytest.mark.slow
def test_the_patience_is_as_long_as_it_is_set(silent: str, opened: Any) -> None:
    """What the libraries make of their own variable is theirs."""
    (told,) = opened(silent, {"name": "org/x"}, NORMLAB_HUB_PATIENCE="2.5", HF_HUB_ETAG_TIMEOUT="7")
    assert "within 2.5 s (NORMLAB_HUB_PATIENCE=30 waits longer)" in told["error"]
    assert told["seconds"] >= 2.5


@pytest.mark.parametrize("words", [{"name": "org/x"}, {"name": "org/x", "tokenizer": "org/y"}, {"name": "."}])
def test_a_variable_that_the_library_cannot_read_is_said(words: dict[str, str], opened: Any) -> None:
    (told,) = opened(refused(), words, HF_HUB_ETAG_TIMEOUT="2.5")
    assert "huggingface_hub cannot be imported" in told["error"]
    assert "'2.5'" in told["error"]


def test_what_needs_no_hub_looks_at_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMLAB_HUB_PATIENCE", "abc")
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "abc")
    assert len(open_corpus(StdlibData(max_tokens=5000)).train) > 0


@pytest.mark.parametrize("name", sorted(name for name, kind in DATA.items() if issubclass(kind, NamedData)))
def test_a_corpus_with_a_word_says_so_too(name: str) -> None:
    """By its own word; conftest has HF_HUB_OFFLINE set."""
    with pytest.raises(DataError, match=rf"^data={name}: HF_HUB_OFFLINE is set, and .*/.* {NO_HUB}"):
        open_corpus(DATA[name]())  # pyright: ignore[reportCallIssue]


@pytest.mark.slow
def test_the_cache_of_datasets_is_read_where_there_is_no_hub(hub: Any, opened: Any) -> None:
    served = hub()
    load = "import datasets; datasets.load_dataset('org/subsets', 'two'); datasets.load_dataset('org/parquet')"
    subprocess.run(
        [sys.executable, "-c", load], check=True, capture_output=True,
        env=os.environ | {"HF_ENDPOINT": served.endpoint, "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    served.close()
    words = [{"name": "org/parquet"}, {"name": "org/subsets", "subset": "two", "split": "train+test"}]
    missing = [{"name": "org/jsonl"}, {"name": "org/subsets", "subset": "one"}]
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        tables, subset, *others = opened(served.endpoint, *words, *missing, **env)
        assert sorted(documents_of(tables)) == sorted(documents_of(subset)) == sorted(TEXTS)
        assert NO_HUB in others[0]["error"]
        assert "'two'" in others[1]["error"]


QUICK = "time.sleep = lambda seconds: None\n"
"""The libraries wait for 58 seconds in all before they give up; what they do is the same."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jsonl", "parquet"])
@pytest.mark.parametrize("before", [QUICK, pytest.param("", marks=pytest.mark.slow)], ids=["quick", "real"])
def test_a_hub_that_dies_in_the_middle(name: str, before: str, hub: Any, opened: Any, cache: Path) -> None:
    words = {"name": f"org/{name}"} | ({"column": "body"} if name == "jsonl" else {})
    size = sum(map(len, DATASETS[f"datasets/org/{name}"].values()))
    dying = hub(dies_after=size // 2)
    (told,) = opened(dying.endpoint, words, before=before)
    assert f"data.name=org/{name}: reading from {dying.endpoint} failed" in told["error"]
    assert NO_HUB in told["error"]
    assert len(dying.requests) < 60
    assert list((cache / "tokens").iterdir()) == []
    assert {path.name for path in cache.iterdir()} == {"normlab.locks", "tokens"}
    (whole,) = opened(hub().endpoint, words)
    assert sorted(documents_of(whole)) == sorted(TEXTS)


# A folder


def test_a_folder_is_a_dataset(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    config = HubData(name=str(tmp_path))
    first = open_corpus(config)
    told = {"train": first.train.tolist(), "val": first.val.tolist()}
    assert sorted(documents_of(told)) == sorted(TEXTS)
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS[:-1]))
    assert open_corpus(config).sha256 != first.sha256


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    with pytest.raises(DataError, match=r"data.revision=main: has no effect on a folder"):
        open_corpus(HubData(name=str(tmp_path), revision="main"))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gz"])
def test_a_line_that_is_null_in_a_folder_is_said(pack: Callable[[bytes], bytes], tmp_path: Path, cache: Path) -> None:
    """pyarrow dies of it."""
    (tmp_path / ("train.jsonl.gz" if pack is gzip.compress else "train.jsonl")).write_bytes(
        pack(b'null\n{"text": "a"}\n')
    )
    with pytest.raises(DataError, match=r"row 1 of column 'text' is None, not text; set data\.column"):
        open_corpus(HubData(name=str(tmp_path)))


@pytest.mark.parametrize("name", [None, ".hidden.jsonl", "README.md"])
def test_a_folder_without_data_is_said(name: str | None, tmp_path: Path) -> None:
    if name:
        (tmp_path / name).write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r": holds no data; put JSONL or Parquet there, or use data=files$"):
        open_corpus(HubData(name=str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"text": "half \\ud800"}\n', r"JSON parse error: The surrogate pair in string is invalid"),
        (b'{"text": "half \xff"}\n', r"not UTF-8\)"),
        (b'{"text": "half', r"JSON parse error: Missing a closing quotation mark"),
    ],
)
def test_the_file_of_a_folder_that_cannot_be_read_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS))
    (tmp_path / "b.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=rf"{tmp_path}/b\.jsonl cannot be read \({says}.*; mend it, or use data=files"):
        open_corpus(HubData(name=str(tmp_path)))


def test_a_damaged_parquet_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=rf"{tmp_path}/a\.parquet cannot be read \(.*; mend it, or use data=files"):
        open_corpus(HubData(name=str(tmp_path)))


def test_an_empty_file_in_a_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match=r": has no rows \(empty: a\.jsonl\); put some there, or use data=files$"):
        open_corpus(HubData(name=str(tmp_path)))


def test_lines_are_joined_into_articles() -> None:
    """The layout of WikiText: a heading of one level opens an article, those of more do not."""
    lines = [" = A Title = \n", "Text . \n", " = = A Section = = \n", "More , 1 = 1 . \n", " = B = \n", "End \n"]
    assert list(module.articles(lines, WikiText103.article)) == ["".join(lines[:4]), "".join(lines[4:])]
    assert next(module.articles(["before \n", *lines], WikiText103.article)) == "before \n"


@pytest.mark.parametrize("tokenizer", ["bpe", "pretrained"])
def test_a_run_needs_neither_text_nor_tokenizer_once_it_is_made(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], run_command: Any
) -> None:
    """The command of the issue, on a folder; then the text, the tokenizer's file and the cache go away."""
    monkeypatch.chdir(tmp_path)
    Path("a_dataset").mkdir()
    Path("a_dataset", "train.jsonl").write_bytes(jsonl(TEXTS, "body"))
    if tokenizer == "pretrained":
        tokenizer = "./tokenizer.json"
        Path(tokenizer).write_text(BpeTokenizer.fit(TEXTS, 280).definition)
    words = [word for word in words if not word.startswith("data")]
    words += ["data=hub", "data.name=a_dataset", "data.column=body", f"data.tokenizer={tokenizer}", "train.steps=2"]
    code, out, err = run_command("train", *words)
    assert code == 0, err
    assert run_command("train", *words)[1].startswith("finished at step 2")  # found again
    for path in ("a_dataset", os.environ["NORMLAB_CACHE"], "tokenizer.json"):
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)
    code, out, err = run_command("sample", "rmsnorm", "--prompt", "word", "--tokens", "5", "--results-dir", "results")
    assert code == 0, err
    assert out.startswith("word")


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["data.tokenizer=byts"], r"unknown tokenizer 'byts': .*did you mean 'bytes'.*pretrained"),
        (["data.tokenizer=bpee"], r"did you mean 'bpe'"),
        (["data.vocab_size=500"], r"has no effect with data.tokenizer=bytes; .*data.tokenizer=bpe"),
        (["data.vocab_size=256", "data.tokenizer=bpe"], r"data.vocab_size=256: must be at least 257"),
        (["data.vocab_size=100000000000", "data.tokenizer=bpe"], r"vocab_size=100000000000: must be at most 1048576"),
        (["data.max_tokens=1"], r"data.max_tokens=1: must be at least 2"),
        (["data=hub"], r"data=hub needs a dataset's name; give data.name=roneneldan/TinyStories"),
        (["data=hub", "data.name=stdlib"], r"data.name=stdlib: is a corpus.*use data=stdlib"),
        (["data=stdlib", "data.name=org/x"], r"data.name=org/x: is not to be set;.*data=hub"),
        (["data=hub", "data.nam=org/x"], r"did you mean 'name'"),
        (["data=tinystorys"], r"did you mean 'tinystories'"),
        (["data=tinystories"], r"data=tinystories: HF_HUB_OFFLINE is set.*data=stdlib.*data=files"),
    ],
)
def test_mistakes_are_one_line(words: list[str], pattern: str, run_command: Any, tmp_path: Path) -> None:
    code, out, err = run_command("train", *words, "tracking.wandb=off", f"results_dir={tmp_path / 'results'}")
    assert (code, out) == (2, "")
    assert re.search(pattern, err), err
    assert err.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "name", ["gpt2", "distilgpt2", "bert-base-uncased", "t5-small", "EleutherAI/pythia-70m", "xlnet"]
)
def test_names_of_the_hub_are_no_misspellings(name: str) -> None:
    assert compose_run([f"data.tokenizer={name}"]).data.tokenizer == name


def test_max_tokens_are_exact_for_every_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(jsonl(TEXTS))
    for tokenizer in TOKENIZERS:
        whole = open_corpus(HubData(name=str(tmp_path), tokenizer=tokenizer))
        some = open_corpus(HubData(name=str(tmp_path), tokenizer=tokenizer, max_tokens=3000))
        assert len(some.train) + len(some.val) == 3000
        assert len(some.val) > 30
        assert some.sha256 != whole.sha256
        more = open_corpus(HubData(name=str(tmp_path), tokenizer=tokenizer, max_tokens=10**7))
        assert more.sha256 == whole.sha256
