from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.corpora import DataConfig, FilesData, StdlibData
from normlab.data.sources import find_sources, invalid_utf8_at, source_sha256
from normlab.errors import DataError

Files = Callable[..., FilesData]


def names(config: DataConfig) -> list[str]:
    return [source.name for source in find_sources(config)]


def test_stdlib_is_twelve_megabytes_without_tests() -> None:
    sources = find_sources(StdlibData())
    assert 10.5e6 < sum(source.path.stat().st_size for source in sources) < 14e6
    found = {source.name for source in sources}
    assert {"os.py", "json/decoder.py", "asyncio/__init__.py", "__future__.py"} <= found
    wrong = (
        "/test/",
        "/tests/",
        "/idle_test/",
        "site-packages",
        "dist-packages",
        "/_bundled/",
        "_sysconfigdata",
    )
    assert not [name for name in found for word in wrong if word in f"/{name}"]


def test_stdlib_is_in_order_and_all_text() -> None:
    sources = find_sources(StdlibData())
    assert [s.name for s in sources] == sorted(s.name for s in sources)
    for source in sources:
        assert source.kind == "text"
        source.path.read_text(encoding="utf-8")


def test_stdlib_leaves_out_what_is_not_utf8_or_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "b.py",
        "a/c.py",
        "a/tests/t.py",
        "site-packages/x.py",
        "config-3.11/y.py",
        "_sysconfigdata_z.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "data.txt").write_text("no source")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert names(StdlibData()) == ["a/c.py", "b.py"]


def test_stdlib_that_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no source of Python's standard library; use data=files"):
        find_sources(StdlibData())


def test_folders_are_searched_in_order_without_hidden_files(files: Files) -> None:
    config = files({
        "b.txt": "b", "a/z.txt": "z", "a/b/c.jsonl": "", "a.md": "a",
        ".hidden": "no", ".git/config": "no", "a/.ds/x.txt": "no",
    })  # fmt: skip
    assert names(config) == ["a.md", "a/b/c.jsonl", "a/z.txt", "b.txt"]


def test_paths_keep_their_order_and_count_once(files: Files, tmp_path: Path) -> None:
    config = files({"x.txt": "x", "y.txt": "y", ".named": "wanted"})
    root = tmp_path / "text"
    config.path = [f"{root}/.named", f"{root}/y.txt", f"{root}", f"{root}/../text/y.txt"]
    assert names(config) == [".named", "y.txt", "x.txt"]


def test_home_is_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text("x")
    assert names(FilesData(path=["~/mine.txt"])) == ["mine.txt"]


def test_kinds_go_by_the_end_of_the_name(files: Files) -> None:
    contents = {"a.JSONL": "", "b.json": "", "c.parquet": "", "d.txt": "", "e": "", "f.csv": ""}
    kinds = {source.name: source.kind for source in find_sources(files(dict.fromkeys(contents, "x")))}
    assert kinds == {"a.JSONL": "json", "b.json": "json", "c.parquet": "parquet"} | dict.fromkeys(
        ("d.txt", "e", "f.csv"), "text"
    )


def test_a_column_of_text_has_no_effect(files: Files) -> None:
    config = files({"a.txt": "a"})
    config.column = "body"
    with pytest.raises(DataError, match=r"data\.column=body: has no effect, text has no columns .*leave it out"):
        find_sources(config)
    (Path(config.path[0]) / "b.jsonl").write_text('{"body": "b"}\n')
    assert names(config) == ["a.txt", "b.jsonl"]


def test_what_is_no_file_is_left_out(files: Files, tmp_path: Path) -> None:
    config = files({"a.txt": "a"})
    (tmp_path / "text" / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "text" / "pipe")
    assert names(config) == ["a.txt"]


@pytest.mark.parametrize("word", ["nowhere.txt", "x" * 5000])
def test_a_missing_path_is_named(word: str) -> None:
    with pytest.raises(DataError, match=f"data.path={word}: there is no such file or folder"):
        find_sources(FilesData(path=[word]))


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(DataError, match=r"holds no file that is not hidden"):
        find_sources(FilesData(path=[str(tmp_path)]))


def test_hash_sees_names_bytes_and_order_and_nothing_else(files: Files, tmp_path: Path) -> None:
    def sha256() -> str:
        return source_sha256(find_sources(config))

    config = files({"a.txt": "one", "b.txt": "two"})
    first = sha256()
    os.utime(tmp_path / "text" / "a.txt", (0, 0))
    assert sha256() == first
    seen = {first}
    for contents in (
        {"a.txt": "onetwo", "b.txt": ""},
        {"a.txt": "two", "b.txt": "one"},
        {"a.txt": "one", "b.txt": "twp"},  # of the same length
        {"a.txt": "one", "b.txt": "two", "c.txt": ""},
    ):
        files(contents)
        seen.add(sha256())
    (tmp_path / "text" / "c.txt").rename(tmp_path / "text" / "d.txt")
    seen.add(sha256())
    (tmp_path / "text" / "d.txt").unlink()
    assert len(seen) == 6
    config.path = [str(tmp_path / "text" / name) for name in ("a.txt", "b.txt")]
    files({"a.txt": "one", "b.txt": "two"})
    assert sha256() == first  # the same files, named one by one
    config.path.reverse()
    assert sha256() != first


def test_a_moved_folder_is_the_same_text(files: Files, tmp_path: Path) -> None:
    config = files({"a.txt": "one", "deep/b.txt": "two"})
    first = source_sha256(find_sources(config))
    (tmp_path / "text").rename(tmp_path / "elsewhere")
    assert source_sha256(find_sources(FilesData(path=[str(tmp_path / "elsewhere")]))) == first


def test_a_file_that_cannot_be_read_is_named(files: Files, tmp_path: Path) -> None:
    sources = find_sources(files({"a.txt": "x"}))
    (tmp_path / "text" / "a.txt").unlink()
    (tmp_path / "text" / "a.txt").mkdir()
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(Is a directory\)"):
        source_sha256(sources)


@pytest.mark.parametrize(
    ("content", "at"),
    [
        (b"", None),
        ("\u00e9".encode() * 10, None),
        (b"abc\xff", 3),
        (b"abc\xc3", 3),
        (b"x" * ((1 << 20) - 1) + "\u00e9".encode(), None),  # a character across two reads
        (b"x" * ((1 << 20) - 1) + b"\xc3x", (1 << 20) - 1),
        (b"x" * (1 << 20) + b"\xff", 1 << 20),
        ("\ufeffa".encode("utf-16"), 0),
    ],
)
def test_the_first_byte_that_is_not_utf8(content: bytes, at: int | None, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    assert invalid_utf8_at(path) == at
    decoded = content.decode("utf-8", "surrogateescape")
    assert (at is None) == (decoded.encode("utf-8", "replace") == content)
    content[:at].decode()  # all before it is text
