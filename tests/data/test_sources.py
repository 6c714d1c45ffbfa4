from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.config.corpora import DataConfig, FilesData, StdlibData
from normlab.data.sources import find_sources, invalid_utf8_at, source_sha256
from normlab.errors import DataError

Files = Callable[..., FilesData]


def source_names(config: DataConfig) -> list[str]:
    return [source.name for source in find_sources(config)]


def test_stdlib_is_twelve_megabytes_without_tests() -> None:
    sources = find_sources(StdlibData())
    assert 10.5e6 < sum(source.path.stat().st_size for source in sources) < 14e6
    names = {source.name for source in sources}
    assert {"os.py", "json/decoder.py", "asyncio/__init__.py", "__future__.py"} <= names
    excluded = (
        "/test/",
        "/tests/",
        "/idle_test/",
        "site-packages",
        "dist-packages",
        "/_bundled/",
        "_sysconfigdata",
    )
    assert not [name for name in names for part in excluded if part in f"/{name}"]


def test_stdlib_is_sorted_text() -> None:
    sources = find_sources(StdlibData())
    assert [s.name for s in sources] == sorted(s.name for s in sources)
    for source in sources:
        assert source.kind == "text"
        source.path.read_text(encoding="utf-8")


def test_stdlib_excludes_tests_packages_and_other_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert source_names(StdlibData()) == ["a/c.py", "b.py"]


def test_error_for_a_missing_stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no source of Python's standard library"):
        find_sources(StdlibData())


def test_folders_are_read_recursively_without_hidden_files(files: Files) -> None:
    config = files({
        "b.txt": "b", "a/z.txt": "z", "a/b/c.jsonl": "", "a.md": "a",
        ".hidden": "no", ".git/config": "no", "a/.ds/x.txt": "no",
    })  # fmt: skip
    assert source_names(config) == ["a.md", "a/b/c.jsonl", "a/z.txt", "b.txt"]


def test_paths_keep_their_order_and_repeats_are_dropped(files: Files, tmp_path: Path) -> None:
    config = files({"x.txt": "x", "y.txt": "y", ".named": "yes"})
    root = tmp_path / "text"
    config.path = [f"{root}/.named", f"{root}/y.txt", f"{root}", f"{root}/../text/y.txt"]
    assert source_names(config) == [".named", "y.txt", "x.txt"]


def test_tilde_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text("x")
    assert source_names(FilesData(path=["~/mine.txt"])) == ["mine.txt"]


def test_format_depends_on_the_suffix(files: Files) -> None:
    contents = {"a.JSONL": "", "b.json": "", "c.parquet": "", "d.txt": "", "e": "", "f.csv": ""}
    kinds = {source.name: source.kind for source in find_sources(files(dict.fromkeys(contents, "x")))}
    assert kinds == {"a.JSONL": "json", "b.json": "json", "c.parquet": "parquet"} | dict.fromkeys(
        ("d.txt", "e", "f.csv"), "text"
    )


def test_column_is_rejected_for_text_files(files: Files) -> None:
    config = files({"a.txt": "a"})
    config.column = "body"
    with pytest.raises(DataError, match=r"data\.column=body: has no effect, text has no columns .*leave it out"):
        find_sources(config)
    (Path(config.path[0]) / "b.jsonl").write_text('{"body": "b"}\n')
    assert source_names(config) == ["a.txt", "b.jsonl"]


def test_dangling_links_and_pipes_are_skipped(files: Files, tmp_path: Path) -> None:
    config = files({"a.txt": "a"})
    (tmp_path / "text" / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "text" / "pipe")
    assert source_names(config) == ["a.txt"]


@pytest.mark.parametrize("path", ["nowhere.txt", "x" * 5000])
def test_error_names_a_missing_path(path: str) -> None:
    with pytest.raises(DataError, match=f"data.path={path}: there is no such file or folder"):
        find_sources(FilesData(path=[path]))


def test_empty_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(DataError, match=r"has no file that is not hidden"):
        find_sources(FilesData(path=[str(tmp_path)]))


def test_hash_depends_only_on_names_bytes_and_order(files: Files, tmp_path: Path) -> None:
    def sha256() -> str:
        return source_sha256(find_sources(config))

    config = files({"a.txt": "one", "b.txt": "two"})
    first = sha256()
    os.utime(tmp_path / "text" / "a.txt", (0, 0))
    assert sha256() == first
    hashes = {first}
    for contents in (
        {"a.txt": "onetwo", "b.txt": ""},
        {"a.txt": "two", "b.txt": "one"},
        {"a.txt": "one", "b.txt": "twp"},  # of the same length
        {"a.txt": "one", "b.txt": "two", "c.txt": ""},
    ):
        files(contents)
        hashes.add(sha256())
    (tmp_path / "text" / "c.txt").rename(tmp_path / "text" / "d.txt")
    hashes.add(sha256())
    (tmp_path / "text" / "d.txt").unlink()
    assert len(hashes) == 6
    config.path = [str(tmp_path / "text" / name) for name in ("a.txt", "b.txt")]
    files({"a.txt": "one", "b.txt": "two"})
    assert sha256() == first  # the same files, named one by one
    config.path.reverse()
    assert sha256() != first


def test_hash_of_a_moved_folder_stays(files: Files, tmp_path: Path) -> None:
    config = files({"a.txt": "one", "deep/b.txt": "two"})
    first = source_sha256(find_sources(config))
    (tmp_path / "text").rename(tmp_path / "elsewhere")
    assert source_sha256(find_sources(FilesData(path=[str(tmp_path / "elsewhere")]))) == first


def test_error_names_an_unreadable_file(files: Files, tmp_path: Path) -> None:
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
def test_invalid_utf8_at_finds_the_first_invalid_byte(content: bytes, at: int | None, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    assert invalid_utf8_at(path) == at
    decoded = content.decode("utf-8", "surrogateescape")
    assert (at is None) == (decoded.encode("utf-8", "replace") == content)
    content[:at].decode()  # the bytes before it are valid
