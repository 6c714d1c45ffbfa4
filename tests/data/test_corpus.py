import hashlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normlab.base.errors import DataError
from normlab.catalogue.corpora import FilesData, ReferenceData, StdlibData
from normlab.data import corpus as module
from normlab.data.corpus import Corpus, open_corpus, replace_folder
from normlab.data.documents import held_out_documents
from normlab.data.files import find_sources

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
    monkeypatch.setattr(module, "replace_folder", lambda *args: built.append(args) or replace_folder(*args))
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


def test_corpus_without_text_is_rejected(files: Files, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^data.path={tmp_path / 'text'}: every document is empty; add text"):
        open_corpus(files({"a.txt": "", "b.txt": ""}))


@pytest.mark.parametrize(("count", "more"), [(2, ""), (6, ", and 2 more")])
def test_a_message_about_several_files_names_them(count: int, more: str, files: Files, tmp_path: Path) -> None:
    paths = [str(tmp_path / "text" / f"{index}.txt") for index in range(count)]
    config = files({f"{index}.txt": "ab" for index in range(count)}, path=paths)
    with pytest.raises(DataError) as error:
        open_corpus(config)
    assert str(error.value).startswith(f"data.path=[{', '.join(paths[:4])}{more}]: no text is held out: ")


def test_corpus_too_short_to_split_is_rejected(files: Files, cache: Path) -> None:
    config = files({"a.txt": "abc"})
    with pytest.raises(
        DataError, match=r"no text is held out: .* fewer than 20 distinct .*longest \(3\).*; add documents"
    ):
        open_corpus(config)
    assert not (cache / "tokens").exists()
    assert len(open_corpus(replace(config, val_fraction=0.4)).val) > 0


def test_max_tokens_too_few_to_split_are_rejected(files: Files) -> None:
    with pytest.raises(DataError, match=r"data\.max_tokens=5: leaves no tokens for val; raise it"):
        open_corpus(files({"a.txt": "abc" * 100}, max_tokens=5))


def test_record_has_what_was_read(files: Files) -> None:
    config = files({"a.txt": "some text " * 9, "b.txt": "one two", "c.txt": ""})
    for _ in range(2):  # built, and read from the cache
        read = open_corpus(config).description["read"]
        assert read == {"rows": 3, "documents": 2, "empty": 1, "null": 0}


def test_command_resumes_in_the_folder_of_its_results(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], run_command: Any
) -> None:
    """The results in the folder are not part of the text; the user's files beside them are."""
    files({"a.txt": "one two three\n" * 200, "exp/texts/b.txt": "b", "exp/runs/r.txt": "four"})
    monkeypatch.chdir(tmp_path / "text")
    kept = [override for override in overrides if not override.startswith(("data", "results_dir"))]
    command = ["train", *kept, "data=files", "data.path=.", "train.steps=2", "results_dir=exp"]
    code, _, err = run_command(*command)
    assert code == 0, err
    code, out, err = run_command(*command)
    assert (code, out[:18]) == (0, "finished at step 2"), err


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


def test_other_files_in_the_cache_folder_stay(files: Files, cache: Path) -> None:
    for name in ("datasets/mine", "making/mine", "tokens/mine", ".making/mine"):
        (cache / name).mkdir(parents=True)
    before = file_names(cache)
    open_corpus(files(some_texts(30)))
    assert file_names(cache) == before | {"normlab.locks", ".normlab-making"}
    assert list((cache / ".normlab-making").iterdir()) == []
    for name in before:
        assert "mine" in file_names(cache / name)


def test_cache_key_has_every_option_that_changes_the_tokens(files: Files, cache: Path) -> None:
    config = files({f"{i}.txt": f"x{i}" for i in range(99)})
    corpora = [
        open_corpus(config),
        open_corpus(replace(config, tokenizer="chars")),
        open_corpus(replace(config, val_fraction=0.2)),
    ]
    assert len({corpus.sha256 for corpus in corpora}) == 3
    assert len(file_names(cache / "tokens")) == 3
    open_corpus(replace(config, seed=7))  # the seed changes only the windows
    assert len(file_names(cache / "tokens")) == 3


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


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink, make_folder])
@pytest.mark.parametrize("name", ["train.bin", "meta.json", "counts.npz"])
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
def test_full_disk_leaves_no_corpus(files: Files, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = files(some_texts(3))
    monkeypatch.setitem(module.FILES, "train", "/dev/full")
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); set NORMLAB_CACHE .*space"):
        open_corpus(config)
    assert not (cache / "tokens").exists()
    assert list((cache / ".normlab-making").iterdir()) == []
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
from normlab.catalogue.corpora import FilesData
from normlab.data import corpus, tokenizers

def kill(*args):
    os.kill(os.getpid(), signal.SIGKILL)

def stop(*args):
    os.kill(os.getpid(), signal.SIGSTOP)
    return split(*args)

split = corpus.held_out_documents
{before}
print(corpus.open_corpus(FilesData(path=[sys.argv[1]])).sha256)
"""


def start(config: FilesData, before: str = "", **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN.format(before=before), *config.path],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env,
    )  # fmt: skip


def test_one_process_builds_and_the_others_wait(files: Files, cache: Path) -> None:
    """A stopped process blocks only its own corpus; one that waits can be interrupted."""
    config = files(some_texts(30))
    owner = start(config, "corpus.held_out_documents = stop")
    try:
        assert os.WIFSTOPPED(os.waitpid(owner.pid, os.WUNTRACED)[1])
        other = open_corpus(replace(config, val_fraction=0.3))
        waiting = [start(config, "corpus.replace_folder = kill") for _ in range(2)]  # which only a builder calls
        for process in waiting:
            assert process.stderr is not None
            assert process.stderr.readline() == "normlab: waiting for another process, which is building this corpus\n"
        waiting[0].send_signal(signal.SIGINT)
        waiting[0].communicate(timeout=50)
        assert waiting[0].returncode == -signal.SIGINT
    finally:
        owner.send_signal(signal.SIGCONT)
    outputs = [process.communicate(timeout=100) for process in (owner, waiting[1])]
    assert outputs[0][0] == outputs[1][0] != f"{other.sha256}\n"
    assert len(outputs[0][0]) == 65


KILLS = {
    "after reading the text": "corpus.held_out_documents = kill",
    "while writing the tokens": "tokenizers.BytesTokenizer.encode = kill",
    "before writing the counts": "corpus.count_tokens = kill",
    "before moving the new folder": "Path.rename = kill",
}


@pytest.mark.process
@pytest.mark.parametrize("damaged", [False, True])
def test_killed_build_leaves_no_trace(damaged: bool, files: Files, cache: Path) -> None:
    """After a kill at any moment, the next open builds the same corpus, and removes the remains."""
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
        assert len(file_names(caches[when] / ".normlab-making")) == 1, when
        assert_same(expected, open_corpus(config, caches[when]))
        assert file_names(caches[when] / ".normlab-making") == set(), when


# The corpora that come with Python


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


def test_reference_corpus_is_prose_with_complete_documents_held_out() -> None:
    corpus = open_corpus(ReferenceData())
    assert 4e5 < len(corpus.train) + len(corpus.val) < 1e6
    assert corpus.description["split"] == "documents"
    documents = [*decode_documents(corpus.train), *decode_documents(corpus.val)]
    assert len(documents) == corpus.description["read"]["documents"] > 70
    assert any(text.startswith('The "while" statement') for text in documents)
