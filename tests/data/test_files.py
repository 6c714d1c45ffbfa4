"""Files of a corpus: their order, their hash, and the documents that are read from them."""

from __future__ import annotations

import gzip
import json
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from normlab.config.corpora import DataConfig, FilesData, StdlibData
from normlab.data.documents import Spool
from normlab.data.files import FilesText, find_sources, source_sha256
from normlab.errors import DataError

Files = Callable[..., FilesData]


def source_names(config: DataConfig) -> list[str]:
    return [source.name for source in find_sources(config)]


def test_stdlib_is_twelve_megabytes_of_sorted_text_without_tests() -> None:
    sources = find_sources(StdlibData())
    assert 10.5e6 < sum(source.path.stat().st_size for source in sources) < 14e6
    names = [source.name for source in sources]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "asyncio/__init__.py", "__future__.py"} <= {*names}
    excluded = ("/test/", "/tests/", "/idle_test/", "site-packages", "dist-packages", "/_bundled/", "_sysconfigdata")
    assert not [name for name in names for part in excluded if part in f"/{name}"]


def test_stdlib_excludes_tests_packages_and_other_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no source files of Python's standard library"):
        find_sources(StdlibData())
    for name in ("b.py", "a/c.py", "a/tests/t.py", "site-packages/x.py", "config-3.11/y.py", "_sysconfigdata_z.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "data.txt").write_text("no source")
    assert source_names(StdlibData()) == ["a/c.py", "b.py"]


def test_folders_are_read_recursively_without_hidden_files_and_results(files: Files, tmp_path: Path) -> None:
    users = {"b.txt": "b", "a/z.txt": "z", "a/b/c.jsonl": "", "a.md": "a", "results/runs/mine.txt": "m"}
    config = files(users)
    before = source_sha256(find_sources(config))
    files({
        ".hidden": "no", ".git/config": "no", "a/.ds/x.txt": "no", "results/runs/begun/lock": "",
        "results/runs/other/run.json": "{}", "results/sweeps/s/plan.json": "{}", "results/studies/s/report.json": "{}",
    })  # fmt: skip
    (tmp_path / "text" / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "text" / "pipe")
    assert source_names(config) == sorted(users)
    assert source_sha256(find_sources(config)) == before


def test_paths_keep_their_order_and_repeats_are_dropped(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = files({"x.txt": "x", "y.txt": "y", ".named": "yes"})
    root = tmp_path / "text"
    config.path = [f"{root}/.named", f"{root}/y.txt", f"{root}", f"{root}/../text/y.txt"]
    assert source_names(config) == [".named", "y.txt", "x.txt"]
    monkeypatch.setenv("HOME", str(root))
    assert source_names(FilesData(path=["~/x.txt"])) == ["x.txt"]


def test_format_depends_on_the_suffix(files: Files) -> None:
    contents = {"a.JSONL": "json", "b.json": "json", "c.parquet": "parquet", "d.txt": "text", "e": "text"}
    contents |= {"h.ndjson": "json", "i.jl": "json", "j.Py": "text", "README": "text"}
    config = files(dict.fromkeys(contents, "x"))
    assert {source.name: source.format for source in find_sources(config)} == contents


@pytest.mark.parametrize("name", ["a.jsonl~", "a.jsonl.bak", "a.jsonl.gz", "a.csv", "a.ipynb", "a.html", "README~"])
def test_unknown_suffix_is_rejected(name: str, files: Files) -> None:
    """Braces, keys and the syntax of backups would become text."""
    config = files({"a.txt": "a", f"deep/{name}": '{"text": "a"}'})
    suffix = "~" if name.endswith("~") else Path(name).suffix
    for path in (config.path[0], f"{config.path[0]}/deep/{name}"):
        with pytest.raises(DataError, match=rf"deep/{name}: {suffix} is the suffix of no known format; leave it out"):
            find_sources(FilesData(path=[path]))


def test_column_is_rejected_for_text_files(files: Files) -> None:
    config = files({"a.txt": "a"}, column="body")
    with pytest.raises(DataError, match=r"data\.column=body: has no effect, since .* only text files; leave"):
        find_sources(config)
    files({"b.jsonl": '{"body": "b"}\n'})
    assert source_names(config) == ["a.txt", "b.jsonl"]


@pytest.mark.parametrize("path", ["nowhere.txt", "x" * 5000, "/dev/null"])
def test_error_names_a_missing_path(path: str) -> None:
    with pytest.raises(DataError, match=f"data.path={path}: no such file or folder"):
        find_sources(FilesData(path=[path]))


def test_empty_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(DataError, match=r"has no files, or only hidden ones"):
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
    (tmp_path / "text").rename(tmp_path / "elsewhere")
    config.path = [str(tmp_path / "elsewhere")]
    assert sha256() == first
    config.path = [str(tmp_path / "elsewhere" / name) for name in ("b.txt", "a.txt")]
    assert sha256() != first


def test_error_names_an_unreadable_file(files: Files, tmp_path: Path) -> None:
    sources = find_sources(files({"a.txt": "x"}))
    (tmp_path / "text" / "a.txt").unlink()
    (tmp_path / "text" / "a.txt").mkdir()
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(Is a directory\)"):
        source_sha256(sources)


# Documents


@pytest.fixture
def read(tmp_path: Path) -> Callable[[FilesData], list[str]]:
    def documents(config: FilesData) -> list[str]:
        spool = Spool(tmp_path / "documents", FilesText(config).documents(tmp_path))
        texts = list(spool)
        assert list(spool) == texts  # documents can be iterated again
        return texts

    return documents


Read = Callable[[FilesData], list[str]]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(path: Path, **columns: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_text_file_is_one_document(files: Files, read: Read) -> None:
    contents = {"a.txt": "one\ntwo\n", "b.py": "x = '\u00e9\U0001f600'", "c": "  \n\n ", "d.md": "1,2\n"}
    assert read(files(contents)) == list(contents.values())
    assert read(files({"e.txt": "a\r\nb\rc\n"}))[-1] == "a\nb\nc\n"


def test_formats_are_mixed_in_the_order_of_the_files(files: Files, read: Read, tmp_path: Path) -> None:
    config = files({
        "1.txt": "1", "2.jsonl": lines({"text": "2a", "messages": [{"a": 1}]}, "2b"), "3.txt": "3",
        "4.json": json.dumps([{"text": "4", "only here": None}, {"text": "2020-01-01"}], indent=1),
    })  # fmt: skip
    parquet(tmp_path / "text" / "6.parquet", text=pa.array(["6a", "6b"], pa.large_string()), wide=[1.0, 2.0])
    parquet(tmp_path / "text" / "7.parquet", text=pa.array(["u", "v", "u"]).dictionary_encode())
    assert read(config) == ["1", "2a", "2b", "3", "4", "2020-01-01", "6a", "6b", "u", "v", "u"]


def test_column_selects_the_text(files: Files, read: Read, tmp_path: Path) -> None:
    config = files({"a.jsonl": lines({"text": "no", "body": "yes"})}, column="body")
    parquet(tmp_path / "text" / "b.parquet", text=["no"], body=["too"])
    assert read(config) == ["yes", "too"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", lines({"txt": "x", "id": 1}), r"no column 'text' \(did you mean 'txt'\?\); it has txt, id"),
        ("a.jsonl", lines({"text": "a"}, {"text": 7}), "row 2 of column 'text' is 7, not text; remove such rows"),
        ("a.jsonl", lines({"text": ["a"]}), r"row 1 of column 'text' is \['a'\], not text"),
        ("a.jsonl", lines("a", 7), "row 2 of column 'text' is 7, not text"),
        ("a.jsonl", "this is no JSON\n", r"cannot be read as json \(.*\); fix it"),
        ("a.jsonl", '{"text": "cut sho', r"cannot be read as json \(.*\); fix it"),
        ("a.jsonl", '{"text": "a\nnull"}\n', r"cannot be read as json \(.*\); fix it"),
        ("a.jsonl", '{"text": "half a pair \\ud800"}\n', r"cannot be read as json \(.*surrogates.*\); fix it"),
        ("a.parquet", "this is no Parquet", r"cannot be read as parquet \(.*\); fix it"),
        ("a.txt", "a \0 b", "has a NUL character, as binary files and UTF-16 have; convert the file"),
        ("a.txt", "abc".encode("utf-16-le"), "has a NUL character"),
        ("a.txt", "abc".encode("utf-16"), r"not UTF-8 \(.* position 0: .*\); convert the file"),
        ("a.txt", b"caf\xe9", r"not UTF-8 \(.*byte 0xe9 in position 3.*\); convert the file \(iconv -t utf-8\)"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), r"not UTF-8 \(.*\); convert the file \(iconv -t utf-8\), unpack it"),
    ],
)  # fmt: skip
def test_error_names_the_file_and_the_problem(
    name: str, content: str | bytes, message: str, files: Files, read: Read
) -> None:
    with pytest.raises(DataError, match=rf"{name}: {message}") as caught:
        read(files({"0.txt": "fine", name: content}))
    assert "\n" not in str(caught.value)


def test_parquet_errors_name_the_file(files: Files, read: Read, tmp_path: Path) -> None:
    parquet(tmp_path / "text" / "a.parquet", text=pa.array([b"caf\xe9"], pa.binary()).view(pa.string()))
    with pytest.raises(DataError, match=r"a\.parquet: not UTF-8 \(.*byte 0xe9"):
        read(files({}))
    pq.write_table(pa.Table.from_arrays([["a"], ["b"]], names=["text", "text"]), tmp_path / "text" / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: 2 columns 'text'"):
        read(files({}))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "\ufeffone\n\ufefftwo"),  # cat one.txt two.txt
        ("a.jsonl", '\ufeff{"text": "\ufeffone\\n"}\n\ufeff{"text": "two"}'),
    ],
)
def test_byte_order_marks_are_removed(name: str, content: str, files: Files, read: Read) -> None:
    assert "".join(read(files({name: content}))) == "one\ntwo"


def test_rows_without_text_are_counted(files: Files, tmp_path: Path) -> None:
    rows = lines({"text": "a"}, {"text": None}, {"text": ""}, {"other": 1}, {"text": "b"})
    config = files(
        {"a.jsonl": f"{rows}\nnull\n", "b.jsonl": lines({"text": "c"}), "c.txt": "", "d.txt": "d", "n.jsonl": "\n"}
    )
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(tmp_path / "text" / "e.parquet", schema) as writer:  # some row groups are empty
        for texts in ([], ["", None], [], [None, "e"]):
            writer.write_table(pa.table({"text": texts}, schema), row_group_size=10)
    text = FilesText(config)
    assert list(text.documents(tmp_path)) == ["a", "b", "c", "d", "e"]
    assert (text.counts.documents, text.counts.empty, text.counts.null) == (5, 3, 5)
    assert text.counts.formats == {"json": 3, "parquet": 1, "text": 2}
