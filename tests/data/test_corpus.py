from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normlab.config.corpora import FilesData, StdlibData
from normlab.data import corpus as module
from normlab.data.cache import atomic_folder
from normlab.data.corpus import Corpus, open_corpus
from normlab.data.corpus_files import find_sources
from normlab.data.documents import held_out_documents
from normlab.errors import DataError

Files = Callable[..., FilesData]

END = 256


def some_texts(count: int, seed: int = 0) -> dict[str, str]:
    draw = random.Random(seed)
    overrides = ["def", "return", "\u00e9t\u00e9", "x", "\n", "    ", "\U0001f600"]
    return {f"{i:03d}.txt": f"# {i}\n" + " ".join(draw.choices(overrides, k=60)) for i in range(count)}


def decode_documents(tokens: np.ndarray) -> list[str]:
    """Decode the documents of a part with the bytes tokenizer, independently of the package."""
    ends = np.flatnonzero(tokens == END)
    assert len(tokens) == 0 or ends[-1] == len(tokens) - 1
    return [bytes(part[:-1].tolist()).decode() for part in np.split(tokens, ends + 1)[:-1]]


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def corpus_folder(cache: Path) -> Path:
    (folder,) = (cache / "tokens").iterdir()
    return folder


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    built: list[object] = []
    monkeypatch.setattr(module, "atomic_folder", lambda *args: built.append(args) or atomic_folder(*args))
    return built


def assert_same(first: Corpus, second: Corpus) -> None:
    np.testing.assert_array_equal(first.train, second.train)
    np.testing.assert_array_equal(first.val, second.val)
    assert first.description == second.description


# Content


def test_complete_documents_are_held_out_if_there_are_enough(files: Files) -> None:
    texts = some_texts(100)
    corpus = open_corpus(files(texts, val_fraction=0.1))
    train, val = decode_documents(corpus.train), decode_documents(corpus.val)
    assert corpus.description["split"] == "documents"
    assert corpus.description["documents"] == 100
    assert Counter(train + val) == Counter(texts.values())
    assert train == [text for text in texts.values() if text in set(train)]  # in the order of the files
    total = sum(map(len, texts.values()))
    assert 0.1 * total <= sum(map(len, val)) <= 0.15 * total
    assert max(digests(val)) < min(digests(train))


def digests(texts: list[str]) -> list[str]:
    return [hashlib.sha256(text.encode()).hexdigest() for text in texts]


def test_split_does_not_depend_on_names_or_order(files: Files, tmp_path: Path) -> None:
    texts = list(some_texts(40).values())
    held_out = []
    for order in (texts, texts[::-1]):
        shutil.rmtree(tmp_path / "text", ignore_errors=True)
        corpus = open_corpus(files({f"{hash(text)}/{i:02d}": text for i, text in enumerate(order)}))
        held_out.append(set(decode_documents(corpus.val)))
    assert held_out[0] == held_out[1] != set()


def test_tails_are_held_out_of_few_documents(files: Files) -> None:
    texts = some_texts(3)
    corpus = open_corpus(files(texts, val_fraction=0.2))
    assert corpus.description["split"] == "tails"
    assert corpus.description["documents"] == 3
    rejoined = map("".join, zip(decode_documents(corpus.train), decode_documents(corpus.val), strict=True))
    assert list(rejoined) == list(texts.values())
    for text, tail in zip(texts.values(), decode_documents(corpus.val), strict=True):
        assert 0.1 * len(text) - 1 <= len(tail) <= 0.2 * len(text)


def test_alphabet_is_that_of_the_training_text(files: Files) -> None:
    text = "abcabcab\n" * 100 + "\u00e9\u00e9"  # the last two are held out
    corpus = open_corpus(files({"a.txt": text}, tokenizer="chars"))
    assert corpus.tokenizer.state()["characters"] == "\nabc"
    assert corpus.tokenizer.vocab_size == 6
    assert corpus.val[-3:].tolist() == [5, 5, 4]  # unknown, unknown, end
    assert corpus.tokenizer.decode(corpus.val[:-1]).endswith("\nabcabcab\n\ufffd\ufffd")
    assert corpus.train[-1] == 4
    assert corpus.tokenizer.decode(corpus.train[:-1]) + corpus.tokenizer.decode(corpus.val[:-3]) == text[:-2]


def test_large_vocabulary_has_32_bit_tokens(files: Files) -> None:
    ranges = (range(0x20, 0xD800), range(0xE000, 0xFEFF), range(0xFF00, 0x13000))  # without the byte order mark
    characters = [chr(c) for c in itertools.chain(*ranges)]
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
    description = corpus.description
    assert json.loads(json.dumps(description)) == description
    assert description["name"] == "files"
    assert description["tokenizer"] == "bytes"
    assert description["vocab_size"] == 257
    assert description["train_tokens"] == len(corpus.train)
    assert description["val_tokens"] == len(corpus.val)
    assert description["documents"] == 30
    assert description["split"] == "documents"
    assert len(description["sha256"]) == 64


def test_tokens_are_read_only(files: Files) -> None:
    corpus = open_corpus(files(some_texts(3)))
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


def test_corpus_hash_depends_on_tokens_not_on_file_names(files: Files, tmp_path: Path) -> None:
    config = files({"a.txt": "one\n" * 50, "b.txt": "two\n" * 50})
    first = open_corpus(config)
    (tmp_path / "text" / "a.txt").rename(tmp_path / "text" / "0.txt")
    renamed = open_corpus(config)
    assert renamed.folder != first.folder
    assert renamed.sha256 == first.sha256
    others = [
        open_corpus(replace(config, val_fraction=0.3)),
        open_corpus(replace(config, tokenizer="chars")),
        open_corpus(files({"b.txt": "twp\n" * 50})),
    ]
    assert len({first.sha256, *(other.sha256 for other in others)}) == 4


# Too little text


def test_corpus_without_text_is_rejected(files: Files) -> None:
    with pytest.raises(DataError, match="data=files: every document is empty; add text"):
        open_corpus(files({"a.txt": "", "b.jsonl": '{"text": ""}\n'}))


def test_corpus_too_short_to_split_is_rejected(files: Files, cache: Path) -> None:
    for text, remedy in (
        ("abc", r"documents, or set data\.val_fraction=0\.334$"),
        ("ab", r"=0\.5$"),
        ("a", "documents$"),
    ):
        with pytest.raises(
            DataError, match=rf"no text is held out: .*longest \({len(text)}\); add distinct .*{remedy}"
        ):
            open_corpus(files({"a.txt": text}))
    rows = '{"text": "ab ab ab ab ab"}\n{"text": "cd cd cd"}\n' * 200
    config = replace(files({}), path=[str(next(iter(files({"two.jsonl": rows}).path))) + "/two.jsonl"])
    with pytest.raises(
        DataError, match=r"whole if 20 or more are distinct \(2 of 400 are\), else the last data"
    ) as caught:
        open_corpus(config)
    assert file_names(cache / "tokens") == set()
    needed = float(str(caught.value).rpartition("data.val_fraction=")[2])
    assert len(open_corpus(replace(config, val_fraction=needed)).val) > 0


def test_max_tokens_too_few_to_split_are_rejected(files: Files) -> None:
    with pytest.raises(DataError, match=r"data\.max_tokens=5: leaves no tokens for val; raise it"):
        open_corpus(files({"a.txt": "abc" * 100}, max_tokens=5))


def test_record_has_every_file(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = '{"text": "\\ufeffone two three"}\n{"text": ""}\n{"text": null}\n'
    config = files({"a.txt": "some text " * 9, "b.jsonl": rows, "results/runs/x/lock": ""}, skip="null")
    kinds = ("documents", "empty", "null", "byte_order_marks")
    for _ in range(2):  # built, and read from the cache
        read = open_corpus(config).description["read"]
        assert [tuple(each[kind] for kind in kinds) for each in read["files"]] == [(1, 0, 0, 0), (1, 1, 1, 1)]
        assert [(each["name"], each["format"], each["bytes"]) for each in read["files"]] == [
            ("a.txt", "text", 90), ("b.jsonl", "json", len(rows)),
        ]  # fmt: skip
        assert {kind: read[kind] for kind in kinds} == dict(zip(kinds, (2, 1, 1, 1), strict=True))
        assert (read["bytes"], read["formats"]) == (90 + len(rows), {"json": 1, "text": 1})
        assert read["left_out"] == [f"{config.path[0]}/results/runs/x"]
    monkeypatch.setattr(module, "MAX_LISTED", 1)
    assert len(open_corpus(replace(config, val_fraction=0.1)).description["read"]["files"]) == 1


@pytest.mark.parametrize("results_dir", ["results", "exp", "."])
def test_command_resumes_in_the_folder_of_its_results(
    results_dir: str, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str],
    run_command: Any,
) -> None:  # fmt: skip
    """The results and the cache in the folder are not part of the text; the user's files beside them are."""
    text = "one two three\n" * 200
    files({"a.txt": text, "exp/texts/b.txt": text, "runs/r.jsonl": '{"text": "four"}'})
    monkeypatch.chdir(tmp_path / "text")
    monkeypatch.setenv("NORMLAB_CACHE", "cache")
    kept = [override for override in overrides if not override.startswith(("data", "results_dir"))]
    command = ["train", *kept, "data=files", "data.path=.", "train.steps=2", f"results_dir={results_dir}"]
    code, _, err = run_command(*command)
    assert code == 0, err
    code, out, err = run_command(*command)
    assert (code, out[:18]) == (0, "finished at step 2"), err
    (record,) = Path(results_dir, "runs").glob("*/run.json")
    assert f"normlab: data=files: leaving out {record.parent}, which normlab wrote\n" in err
    names = [each["name"] for each in json.loads(record.read_text())["corpus"]["read"]["files"]]
    assert names == ["a.txt", "exp/texts/b.txt", "runs/r.jsonl"]


# The cache


def test_second_open_reads_the_cache(files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = count_builds(monkeypatch)
    config = files(some_texts(30))
    first, second = open_corpus(config), open_corpus(config)
    assert len(built) == 1
    assert_same(first, second)
    elsewhere = open_corpus(config, cache / "other")
    assert len(built) == 2
    assert_same(first, elsewhere)


def test_cache_keeps_only_tokens(files: Files, cache: Path) -> None:
    open_corpus(files(some_texts(30)))
    assert file_names(cache) == {"normlab.locks", "tokens"}
    assert file_names(corpus_folder(cache)) == {"counts.npz", "meta.json", "train.bin", "val.bin"}


def test_other_files_in_the_cache_folder_stay(files: Files, cache: Path) -> None:
    for name in ("datasets/mine", "making/mine", "tokens/mine", ".making/mine"):
        (cache / name).mkdir(parents=True)
    before = file_names(cache)
    open_corpus(files(some_texts(30)))
    assert file_names(cache) == before | {"normlab.locks"}
    for name in before:
        assert "mine" in file_names(cache / name)


def test_cache_key_has_every_option_that_changes_the_tokens(files: Files, cache: Path) -> None:
    config = files({"a.jsonl": "".join(json.dumps({"text": f"x{i}", "body": f"y{i}"}) + "\n" for i in range(99))})
    corpora = [
        open_corpus(config),
        open_corpus(replace(config, tokenizer="chars")),
        open_corpus(replace(config, val_fraction=0.2)),
        open_corpus(replace(config, column="body")),
    ]
    assert len({corpus.sha256 for corpus in corpora}) == 4
    assert len(file_names(cache / "tokens")) == 4
    open_corpus(replace(config, seed=7))  # the seed changes only the windows
    assert len(file_names(cache / "tokens")) == 4


def test_changed_text_gives_another_corpus(files: Files, tmp_path: Path) -> None:
    config = files({"a.txt": "one\n" * 100})
    first = open_corpus(config)
    times = (tmp_path / "text" / "a.txt").stat()
    files({"a.txt": "two\n" * 100})
    os.utime(tmp_path / "text" / "a.txt", ns=(times.st_atime_ns, times.st_mtime_ns))  # the same modification time
    second = open_corpus(config)
    assert decode_documents(first.train)[0].startswith("one")
    assert decode_documents(second.train)[0].startswith("two")


def test_text_that_changes_while_it_is_read_is_rejected(
    files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = files(some_texts(30))

    def change_after_reading(*args: Any) -> set[bytes] | None:
        files({"000.txt": "other"})
        return held_out_documents(*args)

    monkeypatch.setattr(module, "held_out_documents", change_after_reading)
    with pytest.raises(DataError, match="changed while it was read; try again"):
        open_corpus(config)
    monkeypatch.undo()
    monkeypatch.setenv("NORMLAB_CACHE", str(cache))
    assert "other" in decode_documents(open_corpus(config).train) + decode_documents(open_corpus(config).val)


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
def test_damaged_corpus_is_built_again(
    name: str, damage: Callable[[Path], None], files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = files(some_texts(30))
    first = open_corpus(config)
    kept = first.train.copy(), first.val.copy()
    (corpus_folder(cache) / name).rename(corpus_folder(cache) / "x")  # the opened corpus keeps its files
    shutil.copy(corpus_folder(cache) / "x", corpus_folder(cache) / name)
    damage(corpus_folder(cache) / name)
    built = count_builds(monkeypatch)
    again = open_corpus(config)
    assert len(built) == 1
    assert_same(first, again)
    np.testing.assert_array_equal(first.train, kept[0])
    np.testing.assert_array_equal(first.val, kept[1])
    open_corpus(config)
    assert len(built) == 1


@pytest.mark.parametrize("meta", ["null", "[]", "3", "{}", '{"meta_sha256": 1, "x": [[[]]]}', "[" * 200_000])
def test_corpus_with_invalid_meta_is_built_again(meta: str, files: Files, cache: Path) -> None:
    config = files(some_texts(3))
    first = open_corpus(config)
    (corpus_folder(cache) / "meta.json").write_text(meta)
    assert_same(first, open_corpus(config))


@pytest.mark.parametrize("part", ["num_documents", "tokenizer_state", "split"])
def test_corpus_with_edited_meta_is_built_again(part: str, files: Files, cache: Path) -> None:
    config = files(some_texts(3), tokenizer="chars")
    first = open_corpus(config)
    path = corpus_folder(cache) / "meta.json"
    meta = json.loads(path.read_text())
    meta[part] = {
        "num_documents": 4,
        "tokenizer_state": {"name": "chars", "characters": "abc"},
        "split": "documents",
    }[part]
    path.write_text(json.dumps(meta))
    assert_same(first, open_corpus(config))


def test_file_in_place_of_the_folder_is_replaced(files: Files, cache: Path) -> None:
    config = files(some_texts(3))
    first = open_corpus(config)
    folder = corpus_folder(cache)
    shutil.rmtree(folder)
    folder.write_text("a file")
    assert_same(first, open_corpus(config))


def test_error_for_a_read_only_cache_names_the_variable(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NORMLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        DataError, match=r"file/cache: the cache cannot be written \(Not a directory\); set NORMLAB_CACHE"
    ):
        open_corpus(files(some_texts(3)))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_leaves_no_files(files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = files(some_texts(3))

    @contextlib.contextmanager
    def full_disk(*args: Path) -> Iterator[Path]:
        with atomic_folder(*args) as folder:
            (folder / "train.bin").symlink_to("/dev/full")
            yield folder

    monkeypatch.setattr(module, "atomic_folder", full_disk)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); set NORMLAB_CACHE .*space"):
        open_corpus(config)
    assert file_names(cache) == {"normlab.locks", "tokens"}
    assert file_names(cache / "tokens") == set()
    monkeypatch.undo()
    assert len(open_corpus(config, cache).train) > 0


def test_opening_a_cached_corpus_writes_no_file(files: Files, cache: Path) -> None:
    config = files(some_texts(3))
    first = open_corpus(config)
    shutil.rmtree(cache / "normlab.locks")
    times = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert_same(first, open_corpus(config))
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == times


# Several processes

OPEN = """
import os, signal, sys, time
from pathlib import Path
from normlab.config.corpora import FilesData
from normlab.data import cache, corpus, tokenizers

def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def kill_at_call(number, function):
    calls = []
    def counting(*args):
        calls.append(args)
        return kill() if len(calls) == number else function(*args)
    return counting

built = []
corpus.atomic_folder = lambda *args: built.append(args) or cache.atomic_folder(*args)
{before}
opened = corpus.open_corpus(FilesData(path=[sys.argv[1]]))
print(opened.sha256, bool(built))
"""


def start(config: FilesData, before: str = "", **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN.format(before=before), *config.path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=100)
    # On a busy machine, a process may wait long enough to print its message.
    assert process.returncode == 0, err
    assert re.fullmatch(r"(normlab: waiting for process \d+, which is building this corpus\n)?", err)
    return out.split()


def test_two_processes_build_a_corpus_once(files: Files, tmp_path: Path) -> None:
    """One process builds it, the other waits and reads it; neither writes outside the cache."""
    config, home, meeting = files(some_texts(30)), tmp_path / "home", tmp_path / "meeting"
    home.mkdir()
    meeting.mkdir()
    # Both processes find the cache empty before either takes the lock.
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
    (first, first_built), (second, second_built) = map(finish, processes)
    assert {first_built, second_built} == {"True", "False"}
    assert first == second == open_corpus(config).sha256
    assert list(home.rglob("*")) == []


STOP = """
split = corpus.held_out_documents
def stop(*args):
    os.kill(os.getpid(), signal.SIGSTOP)
    return split(*args)
corpus.held_out_documents = stop
"""


def test_stopped_process_blocks_only_its_own_corpus(files: Files, cache: Path) -> None:
    config = files(some_texts(30))
    owner = start(config, STOP)
    try:
        assert os.WIFSTOPPED(os.waitpid(owner.pid, os.WUNTRACED)[1])
        half_built = set(cache.glob(".normlab-making/*/*"))
        other = open_corpus(replace(config, val_fraction=0.3))
        assert set(cache.glob(".normlab-making/*/*")) == half_built != set()
        waiting = [start(config) for _ in range(2)]
        for process in waiting:
            assert process.stderr is not None
            assert (
                process.stderr.readline()
                == f"normlab: waiting for process {owner.pid}, which is building this corpus\n"
            )
        waiting[0].send_signal(signal.SIGINT)
        waiting[0].communicate(timeout=5)
        assert waiting[0].returncode == -signal.SIGINT
    finally:
        owner.send_signal(signal.SIGCONT)
    assert finish(owner)[0] == finish(waiting[1])[0] != other.sha256
    assert file_names(cache) == {"normlab.locks", "tokens"}


KILLS = {
    "after reading the text": "corpus.held_out_documents = kill",
    "while writing the tokens": "encode = tokenizers.BytesTokenizer.encode\n"
    "tokenizers.BytesTokenizer.encode = kill_at_call(9, encode)",
    "before writing meta.json": "corpus.load_or_count = kill",
    "before the first fsync": "os.fsync = kill",
    "before moving the old folder": "Path.rename = kill",
    "between moving the old and the new folder": "Path.rename = kill_at_call(2, Path.rename)",
    "before deleting the old folder": "os.fsync = kill_at_call(6, os.fsync)",
}


@pytest.mark.process
@pytest.mark.parametrize("damaged", [False, True])
def test_killed_build_leaves_no_trace(damaged: bool, files: Files, cache: Path) -> None:
    """After a kill at any moment, the next open builds the same corpus, and the next build removes the remains."""
    config = files(some_texts(30))
    expected = open_corpus(config)
    caches = {when: cache / str(number) for number, when in enumerate(KILLS)}
    for cache_folder in caches.values():
        if damaged:
            shutil.copytree(cache / "tokens", cache_folder / "tokens")
            truncate(corpus_folder(cache_folder) / "train.bin")
    processes = {when: start(config, before, NORMLAB_CACHE=str(caches[when])) for when, before in KILLS.items()}
    for when, process in processes.items():
        process.communicate(timeout=100)
        assert process.returncode == -signal.SIGKILL, when
        assert ".normlab-making" in file_names(caches[when]), when
        assert_same(expected, open_corpus(config, caches[when]))
        open_corpus(replace(config, val_fraction=0.3), caches[when])
        assert file_names(caches[when]) == {"normlab.locks", "tokens"}, when
        assert len(list((caches[when] / "tokens").iterdir())) == 2, when


# The standard library


def test_stdlib_corpus_has_all_sources(cache: Path) -> None:
    corpus = open_corpus(StdlibData())
    assert 10.5e6 < len(corpus.train) + len(corpus.val) < 14e6
    assert corpus.description["split"] == "documents"
    assert 0.049 < len(corpus.val) / (len(corpus.train) + len(corpus.val)) < 0.076
    documents = Counter(decode_documents(corpus.train)) + Counter(decode_documents(corpus.val))
    sources = (source.path.read_text(encoding="utf-8") for source in find_sources(StdlibData()))
    assert documents == Counter(text for text in sources if text)
    baselines = corpus.baselines(corpus.val[:-1], corpus.val[1:])
    assert 1 < baselines["bigram"] < baselines["unigram"] < 4 < baselines["uniform"]
