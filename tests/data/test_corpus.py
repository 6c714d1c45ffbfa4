from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from normlab.corpora import FilesData, StdlibData
from normlab.data import corpus as module
from normlab.data import origins
from normlab.data.corpus import Corpus, open_corpus
from normlab.data.sources import find_sources
from normlab.errors import DataError

Files = Callable[..., FilesData]

END = 256


def some_texts(count: int, seed: int = 0) -> dict[str, str]:
    draw = random.Random(seed)
    words = ["def", "return", "\u00e9t\u00e9", "x", "\n", "    ", "\U0001f600"]
    return {f"{i:03d}.txt": f"# {i}\n" + " ".join(draw.choices(words, k=60)) for i in range(count)}


def some_rows(count: int) -> dict[str, str]:
    return {"a.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in some_texts(count).values())}


def documents_of(tokens: np.ndarray) -> list[str]:
    """The documents of a part under the bytes tokenizer, found by another way than the package's."""
    ends = np.flatnonzero(tokens == END)
    assert len(tokens) == 0 or ends[-1] == len(tokens) - 1
    return [bytes(part[:-1].tolist()).decode() for part in np.split(tokens, ends + 1)[:-1]]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def folder_of(cache: Path) -> Path:
    (folder,) = (cache / "tokens").iterdir()
    return folder


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    built: list[object] = []
    read = origins.read_documents
    monkeypatch.setattr(origins, "read_documents", lambda *args: built.append(args) or read(*args))
    return built


def assert_same(one: Corpus, other: Corpus) -> None:
    np.testing.assert_array_equal(one.train, other.train)
    np.testing.assert_array_equal(one.val, other.val)
    assert one.describe() == other.describe()
    assert one.source_sha256 == other.source_sha256


# What is in it


def test_whole_documents_are_held_out_where_there_are_enough(files: Files) -> None:
    texts = some_texts(100)
    corpus = open_corpus(files(texts, val_fraction=0.1))
    train, val = documents_of(corpus.train), documents_of(corpus.val)
    assert corpus.split == "documents"
    assert corpus.num_documents == 100
    assert Counter(train + val) == Counter(texts.values())
    assert train == [text for text in texts.values() if text in set(train)]  # in the files' order
    total = sum(map(len, texts.values()))
    assert 0.1 * total <= sum(map(len, val)) <= 0.15 * total
    assert max(digests(val)) < min(digests(train))


def digests(texts: list[str]) -> list[str]:
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def test_what_is_held_out_does_not_depend_on_names_or_order(files: Files, tmp_path: Path) -> None:
    texts = list(some_texts(40).values())
    held_out = []
    for order in (texts, texts[::-1]):
        shutil.rmtree(tmp_path / "text", ignore_errors=True)
        corpus = open_corpus(files({f"{hash(text)}/{i:02d}": text for i, text in enumerate(order)}))
        held_out.append(set(documents_of(corpus.val)))
    assert held_out[0] == held_out[1] != set()


def test_few_documents_have_their_tails_held_out(files: Files) -> None:
    texts = some_texts(3)
    corpus = open_corpus(files(texts, val_fraction=0.2))
    assert corpus.split == "tails"
    assert corpus.num_documents == 3
    rejoined = map("".join, zip(documents_of(corpus.train), documents_of(corpus.val), strict=True))
    assert list(rejoined) == list(texts.values())
    for text, tail in zip(texts.values(), documents_of(corpus.val), strict=True):
        assert 0.1 * len(text) - 1 <= len(tail) <= 0.2 * len(text)


def test_chars_are_those_of_the_training_text_alone(files: Files) -> None:
    text = "abcabcab\n" * 100 + "\u00e9\u00e9"  # the last two are held out
    corpus = open_corpus(files({"a.txt": text}, tokenizer="chars"))
    assert corpus.tokenizer.state()["characters"] == "\nabc"
    assert corpus.tokenizer.vocab_size == 6
    assert corpus.val[-3:].tolist() == [5, 5, 4]  # unknown, unknown, end
    assert corpus.tokenizer.decode(corpus.val[:-1]).endswith("\nabcabcab\n\ufffd\ufffd")
    assert corpus.train[-1] == 4
    assert corpus.tokenizer.decode(corpus.train[:-1]) + corpus.tokenizer.decode(corpus.val[:-3]) == text[:-2]


def test_a_large_vocabulary_takes_wider_tokens(files: Files) -> None:
    characters = [chr(c) for c in itertools.chain(range(0x20, 0xD800), range(0xE000, 0x13000))]
    config = files({f"{i}.txt": "".join(characters) * 2 for i in range(2)}, tokenizer="chars")
    corpus = open_corpus(config)
    assert corpus.train.dtype == np.uint32
    assert corpus.tokenizer.vocab_size == len(characters) + 2 > 1 << 16
    assert corpus.tokenizer.decode(corpus.train[: len(characters)]) == "".join(characters)
    scores = corpus.baselines(corpus.val[:-1], corpus.val[1:])
    assert scores["targets"] == len(corpus.val) - 1
    assert all(0 < score < math.inf for score in scores.values())


def test_description_is_plain_json(files: Files) -> None:
    corpus = open_corpus(files(some_texts(30)))
    told = corpus.describe()
    assert json.loads(json.dumps(told)) == told
    assert told["name"] == "files"
    assert told["tokenizer"] == "bytes"
    assert told["vocab_size"] == 257
    assert told["train_tokens"] == len(corpus.train)
    assert told["val_tokens"] == len(corpus.val)
    assert told["documents"] == 30
    assert told["split"] == "documents"
    assert len(told["sha256"]) == 64


def test_tokens_cannot_be_written_to(files: Files) -> None:
    corpus = open_corpus(files(some_texts(3)))
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


def test_identity_is_of_the_tokens_not_of_the_files(files: Files, tmp_path: Path) -> None:
    config = files({"a.txt": "one\n" * 50, "b.txt": "two\n" * 50})
    first = open_corpus(config)
    (tmp_path / "text" / "a.txt").rename(tmp_path / "text" / "0.txt")
    renamed = open_corpus(config)
    assert renamed.source_sha256 != first.source_sha256
    assert renamed.sha256 == first.sha256
    others = [
        open_corpus(replace(config, val_fraction=0.3)),
        open_corpus(replace(config, tokenizer="chars")),
        open_corpus(files({"b.txt": "twp\n" * 50})),
    ]
    assert len({first.sha256, *(other.sha256 for other in others)}) == 4


# Too little text


def test_no_text_says_so(files: Files) -> None:
    with pytest.raises(DataError, match="data=files: there is no text in it, every document is empty"):
        open_corpus(files({"a.txt": "", "b.jsonl": '{"text": ""}\n'}))


def test_nothing_to_hold_out_says_so(files: Files, cache: Path) -> None:
    with pytest.raises(DataError, match=r"3 characters in 1 documents leave nothing for val .*more text"):
        open_corpus(files({"a.txt": "abc"}))
    assert names_in(cache / "tokens") == set()


# The cache


def test_the_second_time_comes_from_the_cache(files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = count_builds(monkeypatch)
    config = files(some_texts(30))
    first, second = open_corpus(config), open_corpus(config)
    assert len(built) == 1
    assert_same(first, second)
    elsewhere = open_corpus(config, cache / "other")
    assert len(built) == 2
    assert_same(first, elsewhere)


def test_only_tokens_are_kept(files: Files, cache: Path) -> None:
    open_corpus(files(some_texts(30)))
    assert names_in(cache) == {"normlab.locks", "tokens"}
    assert names_in(folder_of(cache)) == {"counts.npz", "meta.json", "train.bin", "val.bin"}


def test_what_others_keep_in_the_same_folder_stays(files: Files, cache: Path) -> None:
    for name in ("datasets/mine", "making/mine", "tokens/mine", ".making/mine"):
        (cache / name).mkdir(parents=True)
    before = names_in(cache)
    open_corpus(files(some_texts(30)))
    assert names_in(cache) == before | {"normlab.locks"}
    for name in before:
        assert "mine" in names_in(cache / name)


def test_any_option_that_matters_has_a_place_of_its_own(files: Files, cache: Path) -> None:
    config = files({"a.jsonl": "".join(json.dumps({"text": f"x{i}", "body": f"y{i}"}) + "\n" for i in range(99))})
    corpora = [
        open_corpus(config),
        open_corpus(replace(config, tokenizer="chars")),
        open_corpus(replace(config, val_fraction=0.2)),
        open_corpus(replace(config, column="body")),
    ]
    assert len({corpus.sha256 for corpus in corpora}) == 4
    assert len(names_in(cache / "tokens")) == 4
    open_corpus(replace(config, seed=7))  # only draws windows
    assert len(names_in(cache / "tokens")) == 4


def test_changed_text_is_another_corpus(files: Files, tmp_path: Path) -> None:
    config = files({"a.txt": "one\n" * 100})
    first = open_corpus(config)
    times = (tmp_path / "text" / "a.txt").stat()
    files({"a.txt": "two\n" * 100})
    os.utime(tmp_path / "text" / "a.txt", ns=(times.st_atime_ns, times.st_mtime_ns))  # as if untouched
    second = open_corpus(config)
    assert documents_of(first.train)[0].startswith("one")
    assert documents_of(second.train)[0].startswith("two")


def test_text_that_changes_while_it_is_read_is_refused(
    files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = files(some_texts(30))
    read = origins.read_documents

    def read_then_change(*args: object) -> object:
        documents = read(*args)  # pyright: ignore[reportArgumentType]
        files({"000.txt": "other"})
        return documents

    monkeypatch.setattr(origins, "read_documents", read_then_change)
    with pytest.raises(DataError, match="changed while it was read; try again"):
        open_corpus(config)
    monkeypatch.setattr(origins, "read_documents", read)
    assert "other" in documents_of(open_corpus(config).train) + documents_of(open_corpus(config).val)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0\0")


@pytest.mark.parametrize("damage", [flip, truncate, empty, Path.unlink, make_folder, grow])
@pytest.mark.parametrize("name", ["train.bin", "val.bin", "meta.json"])
def test_a_damaged_file_is_made_again(
    name: str, damage: Callable[[Path], None], files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = files(some_texts(30))
    first = open_corpus(config)
    kept = first.train.copy(), first.val.copy()
    (folder_of(cache) / name).rename(folder_of(cache) / "x")  # what was opened stays as it was
    shutil.copy(folder_of(cache) / "x", folder_of(cache) / name)
    damage(folder_of(cache) / name)
    built = count_builds(monkeypatch)
    again = open_corpus(config)
    assert len(built) == 1
    assert_same(first, again)
    np.testing.assert_array_equal(first.train, kept[0])
    np.testing.assert_array_equal(first.val, kept[1])
    open_corpus(config)
    assert len(built) == 1


@pytest.mark.parametrize("meta", ["null", "[]", "3", "{}", '{"meta_sha256": 1, "x": [[[]]]}', "[" * 200_000])
def test_meta_that_means_nothing_is_made_again(meta: str, files: Files, cache: Path) -> None:
    config = files(some_texts(3))
    first = open_corpus(config)
    (folder_of(cache) / "meta.json").write_text(meta)
    assert_same(first, open_corpus(config))


@pytest.mark.parametrize("part", ["num_documents", "tokenizer_state", "split"])
def test_meta_that_was_edited_is_made_again(part: str, files: Files, cache: Path) -> None:
    config = files(some_texts(3), tokenizer="chars")
    first = open_corpus(config)
    path = folder_of(cache) / "meta.json"
    meta = json.loads(path.read_text())
    meta[part] = {
        "num_documents": 4,
        "tokenizer_state": {"name": "chars", "characters": "abc"},
        "split": "documents",
    }[part]
    path.write_text(json.dumps(meta))
    assert_same(first, open_corpus(config))


def test_a_file_where_the_folder_should_be(files: Files, cache: Path) -> None:
    config = files(some_texts(3))
    first = open_corpus(config)
    folder = folder_of(cache)
    shutil.rmtree(folder)
    folder.write_text("in the way")
    assert_same(first, open_corpus(config))


def test_a_cache_that_cannot_be_written_names_the_variable(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        DataError, match=r"file/cache: the cache cannot be written \(Not a directory\); set NORMLAB_CACHE"
    ):
        open_corpus(files(some_texts(3)))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_nothing_behind(files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = files(some_texts(3))
    monkeypatch.setattr(module, "_bin", lambda folder, part: Path("/dev/full"))
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); set NORMLAB_CACHE .*space"):
        open_corpus(config)
    assert names_in(cache) == {"normlab.locks", "tokens"}
    assert names_in(cache / "tokens") == set()
    monkeypatch.undo()
    assert len(open_corpus(config, cache).train) > 0


def test_a_corpus_that_is_there_needs_no_writing(files: Files, cache: Path) -> None:
    config = files(some_texts(3))
    first = open_corpus(config)
    shutil.rmtree(cache / "normlab.locks")
    times = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert_same(first, open_corpus(config))
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == times


# Several processes

ROOT = Path(__file__).parents[2]

OPEN = """
import os, signal, sys, time
from pathlib import Path
from normlab.corpora import FilesData
from normlab.data import cache, corpus, tokenizers

def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def kill_at_call(number, function):
    calls = []
    def counting(*args):
        calls.append(args)
        return kill() if len(calls) == number else function(*args)
    return counting

{before}
opened = corpus.open_corpus(FilesData(path=[sys.argv[1]]))
print(opened.sha256, "datasets" in sys.modules)
"""


def start(config: FilesData, before: str = "", **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN.format(before=before), *config.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | env,
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=100)
    # On a busy machine the other one takes long enough to be waited for aloud.
    assert process.returncode == 0, err
    assert re.fullmatch(r"(normlab: waiting for process \d+, which makes this corpus\n)?", err)
    return out.split()


def test_two_processes_want_the_same(files: Files, tmp_path: Path) -> None:
    """One makes it, the other waits and uses it; neither writes outside the cache."""
    config, home, meeting = files(some_rows(30)), tmp_path / "home", tmp_path / "meeting"
    home.mkdir()
    meeting.mkdir()
    # Each has found the cache empty before either takes the lock.
    meet = f"""
locked, meeting = corpus.locked, Path({str(meeting)!r})
def meet(*args):
    (meeting / str(os.getpid())).touch()
    while len(list(meeting.iterdir())) < 2:
        time.sleep(0.01)
    return locked(*args)
corpus.locked = meet
"""
    processes = [start(config, meet, HOME=str(home), HF_HUB_OFFLINE=offline) for offline in "01"]
    (one, one_read), (other, other_read) = map(finish, processes)
    assert {one_read, other_read} == {"True", "False"}
    assert one == other == open_corpus(config).sha256
    assert list(home.rglob("*")) == []


STOP = """
write = corpus._write
def stop(*args):
    os.kill(os.getpid(), signal.SIGSTOP)
    write(*args)
corpus._write = stop
"""


def test_a_stopped_process_holds_up_nobody_but_who_wants_the_same(files: Files, cache: Path) -> None:
    config = files(some_texts(30))
    owner = start(config, STOP)
    try:
        assert os.WIFSTOPPED(os.waitpid(owner.pid, os.WUNTRACED)[1])
        half_made = set(cache.glob(".normlab-making/*/*"))
        other = open_corpus(replace(config, val_fraction=0.3))
        assert set(cache.glob(".normlab-making/*/*")) == half_made != set()
        waiting = [start(config) for _ in range(2)]
        for process in waiting:
            assert process.stderr is not None
            assert process.stderr.readline() == f"normlab: waiting for process {owner.pid}, which makes this corpus\n"
        waiting[0].send_signal(signal.SIGINT)
        waiting[0].communicate(timeout=5)
        assert waiting[0].returncode == -signal.SIGINT
    finally:
        owner.send_signal(signal.SIGCONT)
    assert finish(owner)[0] == finish(waiting[1])[0] != other.sha256
    assert names_in(cache) == {"normlab.locks", "tokens"}


def test_the_second_time_does_not_import_datasets(files: Files) -> None:
    config = files(some_rows(30))
    corpus = open_corpus(config)
    assert finish(start(config)) == [corpus.sha256, "False"]


KILLS = {
    "once the text is read": "corpus._write = kill",
    "in the middle of the tokens": "encode = tokenizers.BytesTokenizer.encode\n"
    "tokenizers.BytesTokenizer.encode = kill_at_call(9, encode)",
    "before the meta": "corpus.kept_counts = kill",
    "before anything is on the disk": "cache._sync = kill",
    "before the old one is moved": "Path.rename = kill",
    "between the old one and the new": "Path.rename = kill_at_call(2, Path.rename)",
    "before the old one is deleted": "cache._sync = kill_at_call(5, cache._sync)",
}


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [False, True])
def test_killed_while_it_is_made(damaged: bool, files: Files, cache: Path) -> None:
    """Whenever it is killed, the next to come makes the same corpus, and the next to make any clears up."""
    config = files(some_texts(30))
    whole = open_corpus(config)
    caches = {when: cache / str(number) for number, when in enumerate(KILLS)}
    for place in caches.values():
        if damaged:
            shutil.copytree(cache / "tokens", place / "tokens")
            truncate(folder_of(place) / "train.bin")
    processes = {when: start(config, before, NORMLAB_CACHE=str(caches[when])) for when, before in KILLS.items()}
    for when, process in processes.items():
        process.communicate(timeout=100)
        assert process.returncode == -signal.SIGKILL, when
        assert ".normlab-making" in names_in(caches[when]), when
        assert_same(whole, open_corpus(config, caches[when]))
        open_corpus(replace(config, val_fraction=0.3), caches[when])
        assert names_in(caches[when]) == {"normlab.locks", "tokens"}, when
        assert len(list((caches[when] / "tokens").iterdir())) == 2, when


# The standard library


def test_stdlib(cache: Path) -> None:
    corpus = open_corpus(StdlibData())
    assert 10.5e6 < len(corpus.train) + len(corpus.val) < 14e6
    assert corpus.split == "documents"
    assert 0.049 < len(corpus.val) / (len(corpus.train) + len(corpus.val)) < 0.076
    held = Counter(documents_of(corpus.train)) + Counter(documents_of(corpus.val))
    sources = (source.path.read_text(encoding="utf-8") for source in find_sources(StdlibData()))
    assert held == Counter(text for text in sources if text)
    baselines = corpus.baselines(corpus.val[:-1], corpus.val[1:])
    assert 1 < baselines["bigram"] < baselines["unigram"] < 4 < baselines["uniform"]
