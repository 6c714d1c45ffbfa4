"""Files of a corpus: their order, their hash, and the documents that are read from them."""

from __future__ import annotations

import csv
import io
import json
import os
import sysconfig
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from normlab.config.corpora import DataConfig, FilesData, StdlibData
from normlab.data import file_rows as module
from normlab.data.corpus_files import FilesText, find_sources, source_sha256
from normlab.data.documents import Spool
from normlab.data.file_rows import invalid_utf8_at
from normlab.errors import DataError
from normlab.report.figure_draw import render_figure
from normlab.report.pages.shell import page
from normlab.studies.index import write_index

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
        assert source.format == "text"
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
    with pytest.raises(DataError, match="no source files of Python's standard library"):
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
    contents = {"a.JSONL": "json", "b.json": "json", "c.parquet": "parquet", "d.txt": "text", "e": "text"}
    contents |= {"f.csv": "csv", "g.tsv": "tsv", "h.ndjson": "json", "i.jl": "json", "j.Py": "text", "README": "text"}
    config = files(dict.fromkeys(contents, "x"))
    assert {source.name: source.format for source in find_sources(config)} == contents
    config.format = "csv"
    assert {source.format for source in find_sources(config)} == {"csv"}


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl~",
        "a.jsonl.bak",
        "a.parquet.tmp",
        "a.csv.gz",
        "a.jsonl.zst",
        "a.ipynb",
        "a.html",
        "a.pdf",
        "README~",
        "a.txt.orig",
    ],
)
def test_unknown_suffix_is_rejected(name: str, files: Files) -> None:
    """Braces, keys and the syntax of backups would become text."""
    config = files({"a.txt": "a", f"deep/{name}": '{"text": "a"}'})
    suffix = "~" if name.endswith("~") else Path(name).suffix
    for path in (config.path[0], f"{config.path[0]}/deep/{name}"):
        with pytest.raises(DataError, match=rf"deep/{name}: {suffix} is the suffix of no known format; leave it out"):
            find_sources(FilesData(path=[path]))
    assert {source.format for source in find_sources(FilesData(path=config.path, format="text"))} == {"text"}


@pytest.mark.parametrize("content", ['{"text": "a"}\n{"text": "b"}\n', '\ufeff\n \n{"id": 1}', "{}"])
def test_json_lines_without_a_suffix_are_rejected(content: str, files: Files) -> None:
    config = files({"part-00000": content})
    with pytest.raises(DataError, match=r"part-00000: has no suffix and begins with a JSON object; set data\.format="):
        find_sources(config)
    for chosen in ("json", "text"):
        assert {source.format for source in find_sources(FilesData(path=config.path, format=chosen))} == {chosen}


@pytest.mark.parametrize("content", ["", "\n", "{not JSON}\n", '{"text": "cut', '["a"]', "12", "{" * 100_000, "\0{}"])
def test_prose_without_a_suffix_is_text(content: str, files: Files) -> None:
    config = files({"README": content, "a.txt": '{"text": "a"}'})
    assert {source.format for source in find_sources(config)} == {"text"}


@pytest.mark.parametrize(("option", "value"), [("column", "body"), ("skip", "null")])
def test_options_of_rows_are_rejected_for_text_files(option: str, value: str, files: Files) -> None:
    config = files({"a.txt": "a"})
    setattr(config, option, value)
    with pytest.raises(DataError, match=rf"data\.{option}={value}: has no effect, since .* only text files; leave"):
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


def test_line_ends_of_text_files_become_newlines(files: Files, read: Read) -> None:
    assert read(files({"a.txt": "a\r\nb\rc\n"})) == ["a\nb\nc\n"]


def tar(**members: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize(
    "content", [b"BZhou said: hello\n", b"PK\x03\x04 and so on", b"Rar!\x1a\x07", b"\x04\x22M\x18"]
)
def test_text_that_begins_like_an_archive_is_not_unpacked(content: bytes, files: Files, read: Read) -> None:
    assert read(files({"a.txt": "a", "b.txt": content, "c.txt": "c"})) == ["a", content.decode(), "c"]


@pytest.mark.parametrize("content", [tar(one=b"1", two=b"2"), bytes(20_000), b"a \0 b"])
def test_error_names_a_file_with_a_nul(content: bytes, files: Files, read: Read) -> None:
    with pytest.raises(DataError, match=r"b\.txt: has a NUL character, as binary files and UTF-16 have; convert"):
        read(files({"a.txt": "a", "b.txt": content}))


@pytest.mark.parametrize(
    ("name", "content"), [("b.jsonl", lines({"text": "a"}, {"text": "\0"})), ("b.csv", "text\na\n\0\n")]
)
def test_a_row_may_have_a_nul(name: str, content: str, files: Files, read: Read) -> None:
    """It is valid UTF-8, and the user of a dataset of the hub cannot remove it."""
    assert read(files({name: content})) == ["a", "\0"]


@pytest.mark.parametrize("content", [bytes(20_000), b"BZhou said: hello\n", b"PK\x03\x04 and so on"])
def test_error_names_a_jsonl_that_begins_like_an_archive(content: bytes, files: Files, read: Read) -> None:
    with pytest.raises(DataError, match=r"b\.jsonl: cannot be read as json \(.*\); fix it") as caught:
        read(files({"a.jsonl": lines({"text": "a"}), "b.jsonl": content}))
    assert "\n" not in str(caught.value)


def test_more_files_than_one_batch(files: Files, read: Read) -> None:
    contents = {f"{i:03d}.txt": f"document {i}" for i in range(50)}
    assert read(files(contents)) == list(contents.values())


NAMES = [
    "a b.txt", "q'uo\"te.txt", "br[ack]et.txt", "[a-z]", "st*r.txt", "**", "qu?st.txt", "ha#sh", "pct%20.txt",
    "co::lon.txt", "http:x", "$HOME.txt", "__init__.py", "new\nline.txt", "~t", "{a,b}.txt", "back\\slash",
    "README.md", "uni\u00e9.txt", "x.zip", "y.gz", "z.tar", "semi;a=b&c", "zip:::", "-x",
    "dataset_info.json.txt",
]  # fmt: skip


def test_files_may_have_any_name(files: Files, read: Read) -> None:
    contents = {name: f"I am {name!r}" for name in NAMES}
    assert read(files(contents, format="text")) == [contents[name] for name in sorted(NAMES)]


@pytest.mark.parametrize("folder", ["with space", "[x]", "a*b?", "$HOME", "x::y"])
def test_folders_may_have_any_name(folder: str, files: Files, read: Read, tmp_path: Path) -> None:
    config = files({f"{folder}/{n}": n for n in ("t.txt", "other.txt")} | {f"{folder}/r.jsonl": lines({"text": "r"})})
    config.path = [f"{tmp_path}/text/{folder}"]
    parquet(tmp_path / "text" / folder / "p.parquet", text=["p"])
    assert read(config) == ["other.txt", "p", "r", "t.txt"]


def test_paths_may_be_relative(files: Files, read: Read) -> None:
    config = files({"a.txt": "a"}, path=["text"])
    assert read(config) == ["a"]


def test_jsonl_rows_are_documents(files: Files, read: Read) -> None:
    texts = ["one\r\ntwo", "\u00e9\U0001f600", "12", "2020-01-01", "null", "x" * 1000]
    rows = [{"id": i, "text": text, "more": {"deep": [i]}} for i, text in enumerate(texts)]
    assert read(files({"a.jsonl": lines(*rows)})) == texts
    assert read(files({"a.jsonl": json.dumps(rows)})) == texts  # one list


def test_column_selects_the_text(files: Files, read: Read, tmp_path: Path) -> None:
    config = files({"a.jsonl": lines({"text": "no", "body": "yes"})}, column="body")
    parquet(tmp_path / "text" / "b.parquet", text=["no"], body=["too"])
    assert read(config) == ["yes", "too"]


def test_mixed_formats_keep_their_order(files: Files, read: Read, tmp_path: Path) -> None:
    config = files({
        "1.txt": "1", "2.jsonl": lines({"text": "2a"}, {"text": "2b"}), "3.txt": "3", "4.txt": "4",
        "5.json": json.dumps([{"text": "5", "only here": 1}]),
    })  # fmt: skip
    parquet(tmp_path / "text" / "6.parquet", text=["6a", "6b"], wide=[1.0, 2.0])
    assert read(config) == ["1", "2a", "2b", "3", "4", "5", "6a", "6b"]


def test_rows_with_chat_columns_are_not_converted(files: Files, read: Read) -> None:
    row = {
        "id": "1",
        "source": "s",
        "model": "m",
        "system_prompt": "p",
        "messages": [{"a": 1}],
        "text": "expected",
    }
    assert read(files({"a.jsonl": lines(row)})) == ["expected"]


def test_parquet_with_large_strings_and_dictionaries(files: Files, read: Read, tmp_path: Path) -> None:
    config = files({})
    parquet(tmp_path / "text" / "a.parquet", text=pa.array(["x", "y"], pa.large_string()))
    parquet(tmp_path / "text" / "b.parquet", text=pa.array(["u", "v", "u"]).dictionary_encode())
    assert read(config) == ["x", "y", "u", "v", "u"]


QUOTED = [" a,b\tc ", 'He said "yes"', "two\r\nlines\n", "\u00e9\U0001f600", "null", "12", "x" * 200_000]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_csv_rows_are_documents(name: str, delimiter: str, files: Files, read: Read) -> None:
    written = io.StringIO(newline="")
    writer = csv.writer(written, delimiter=delimiter)
    writer.writerows([["id", "text"], *([number, text] for number, text in enumerate(QUOTED))])
    assert read(files({name: written.getvalue() + "\r\n"})) == QUOTED  # a blank line is no row


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id,text\n1,the cat, the mat\n", "row 1 has 3 fields, and the header has 2; quote the fields"),
        ('id,text\n1,a\n\n2,"b', r"cannot be read as csv \(unexpected end of data\); fix it"),
        ('id,text\n1,"a" b\n', r"cannot be read as csv \(.*expected after.*\); fix it"),
        ("1,a\n2,b\n", "no column 'text'; it has 1, a; set data.column"),
        ("", "no column 'text'; it has none; set data.column"),
        ("text,id,text\na,1,b\n", "has 2 columns 'text'; remove all but one, or rename them"),
    ],
)
def test_error_names_an_invalid_csv(content: str, message: str, files: Files, read: Read) -> None:
    with pytest.raises(DataError, match=rf"a\.csv: {message}"):
        read(files({"a.csv": content}))


def test_error_names_a_repeated_column(files: Files, read: Read, tmp_path: Path) -> None:
    """One of the two would be used silently."""
    good = '{"text": "a", "meta": {"text": 1, "text": 2}, "id": 1, "id": 2}\n'  # only the column of the text matters
    assert read(files({"a.jsonl": good})) == ["a"]
    for twice in (good + '{"text": "b", "text": "c"}', f'[{good}, {{"text": "b", "text": null}}]'):
        with pytest.raises(DataError, match=r"a\.jsonl: row 2 has more than one 'text'; remove all but one"):
            read(files({"a.jsonl": twice}))
    (tmp_path / "text" / "a.jsonl").unlink()
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "text" / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: has 2 columns 'text'; remove all but one, or rename them"):
        read(files({}))


@pytest.mark.parametrize(
    ("name", "content", "number"),
    [
        ("a.txt", "\ufeffone\ntwo", 1),
        ("a.txt", "\ufeffone\n\ufefftwo", 2),  # cat one.txt two.txt
        ("a.txt", "one\ufeff\ntwo\ufeff", 2),
        ("a.jsonl", '\ufeff{"text": "\ufeffone\\ntwo"}', 2),
        ("a.csv", '\ufefftext\n"one\ntwo\ufeff"\n', 2),
        ("a.tsv", "\ufefftext\n'one\ntwo'\n", 1),
    ],
)
def test_byte_order_marks_are_removed_and_counted(
    name: str, content: str, number: int, files: Files, tmp_path: Path
) -> None:
    text = FilesText(files({name: content}))
    documents = "".join(text.documents(tmp_path))
    assert "\ufeff" not in documents
    assert documents.replace("'", "") == ("onetwo" if name == "a.tsv" else "one\ntwo")
    assert text.counts[0].byte_order_marks == number


def test_byte_order_marks_in_names_of_columns_are_removed(files: Files, read: Read, tmp_path: Path) -> None:
    rows = '{"\ufefftext": "a", "id": 1}\n{"text": "b"}\n'
    config = files({"a.jsonl": rows, "b.csv": 'id,"\ufefftext"\n1,c\n'})
    parquet(tmp_path / "text" / "d.parquet", **{"id": [1], "\ufefftext": ["d"]})
    assert read(config) == ["a", "b", "c", "d"]
    with pytest.raises(DataError, match=r"a\.jsonl: row 1 has more than one 'text'"):
        read(files({"a.jsonl": '{"\ufefftext": "a", "text": "b"}'}))


def test_rows_without_text_are_counted(files: Files, tmp_path: Path) -> None:
    rows = lines({"text": "a"}, {"text": None}, {"text": ""}, {"other": 1}, {"text": "b"})
    config = files({"a.jsonl": f"{rows}null\n", "b.csv": 'text\n""\nc\n', "c.txt": "", "d.txt": "d"}, skip="null")
    parquet(tmp_path / "text" / "e.parquet", text=["", None, None, "e"])
    text = FilesText(config)
    assert list(text.documents(tmp_path)) == ["a", "b", "c", "d", "e"]
    found = [(each.name, each.format, each.documents, each.empty, each.null) for each in text.counts]
    assert found == [
        ("a.jsonl", "json", 2, 1, 3), ("b.csv", "csv", 1, 1, 0), ("c.txt", "text", 0, 1, 0),
        ("d.txt", "text", 1, 0, 0), ("e.parquet", "parquet", 1, 1, 2),
    ]  # fmt: skip
    assert [each.bytes for each in text.counts] == [
        (tmp_path / "text" / each.name).stat().st_size for each in text.counts
    ]


def test_only_the_output_of_normlab_is_left_out(files: Files, tmp_path: Path) -> None:
    record = '{"version": 1, "sha256": "0"}'
    users = {
        "a.txt": "a", "exp/t.txt": "t", "exp/texts/b.txt": "b", "exp/runs/r.jsonl": "", "exp/runs/other/run.json": "{}",
        "exp/runs/other/run.txt": "o", "exp/sweeps/mine/s.txt": "s", "exp/studies/mine.txt": "m", "cache/c.txt": "c",
        "cache/tokens/mine.txt": "m", "lock": "l", "texts/report.json": "{}", "texts/plan.json": record,
        "texts/tokens/t/t.txt": "t", "texts/studies/README.md": "r", "texts/runs/london/lock": "a canal lock",
        "notes.md": "Each begins with <!-- Written by normlab. -->",
    }  # fmt: skip
    outputs = {
        "exp/runs/begun/lock": "", "exp/runs/killed/lock": '{"pid":1}', "exp/runs/copied/run.json": record,
        "exp/sweeps/s/plan.json": record,
        "exp/studies/s/report.json": '{"criterion": "0"}', "exp/studies/s/README.md": "r",
        "cache/normlab.locks/z": "", "cache/tokens/z/meta.json": "{}",
    }  # fmt: skip
    config = files(users)
    before = source_sha256(find_sources(config))
    files(outputs)
    assert source_names(config) == sorted(users)
    assert source_sha256(find_sources(config)) == before
    root = tmp_path / "text"
    assert FilesText(config).left_out == [
        f"{root}/cache/normlab.locks", f"{root}/cache/tokens/z",
        f"{root}/exp/runs/begun and 2 more in {root}/exp/runs", f"{root}/exp/studies/s", f"{root}/exp/sweeps/s",
    ]  # fmt: skip
    # The name of a folder does not depend on how the user writes it.
    config.path = [f"{root}/exp/runs/other/.."]
    assert source_names(config) == ["other/run.json", "other/run.txt", "r.jsonl"]


def test_pages_and_figures_of_normlab_are_left_out(files: Files, tmp_path: Path) -> None:
    written = page("a page", "<p>", {"many": ["a"] * 10_000}, [])
    outputs: dict[str, str | bytes] = dict.fromkeys(("c.html", "deep/e.HTM", "page"), written)
    outputs |= {f"f.{kind}": render_figure(Figure(), kind) for kind in ("pdf", "svg", "png")}
    root = tmp_path / "text"
    users = files({"a.md": "a", "deep/b.md": "b", "README": "<!doctype html>"})
    files(outputs)
    write_index(root)  # README.md
    assert source_names(users) == ["README", "a.md", "deep/b.md"]
    assert FilesText(users).left_out == [f"{root}/README.md and 5 more in {root}", f"{root}/deep/e.HTM"]
    with pytest.raises(DataError, match=r"c\.html: \.html is the suffix of no known format"):
        find_sources(FilesData(path=[f"{root}/c.html"]))
    # A page or a figure of another program is not text either.
    canvas = io.BytesIO()
    Figure().savefig(canvas, format="pdf")
    files({"theirs.pdf": canvas.getvalue()})
    with pytest.raises(DataError, match=r"theirs\.pdf: \.pdf is the suffix of no known format"):
        find_sources(users)


@pytest.mark.exhaustive
def test_line_of_25_million_characters(files: Files, read: Read) -> None:
    enormous = "0123456789" * 2_500_000
    texts = read(files({"a.txt": enormous, "b.jsonl": lines({"text": "before"}, {"text": enormous})}))
    assert [len(text) for text in texts] == [25_000_000, 6, 25_000_000]
    assert texts[0] == texts[2] == enormous


def test_empty_documents_are_dropped(files: Files, read: Read, tmp_path: Path) -> None:
    rows = lines({"text": ""}, {"text": "c"})
    config = files({"a.txt": "", "b.jsonl": "", "blank.jsonl": "\n\n", "c.jsonl": rows, "d.txt": "d"})
    parquet(tmp_path / "text" / "e.parquet", text=pa.array([], pa.string()))
    assert read(config) == ["c", "d"]


def test_parquet_with_empty_row_groups(files: Files, read: Read, tmp_path: Path) -> None:
    config = files({"a.parquet": ""})
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(tmp_path / "text" / "a.parquet", schema) as writer:
        for texts in ([], ["x", "y"], [], ["z"]):
            writer.write_table(pa.table({"text": texts}, schema), row_group_size=10)
    assert pq.ParquetFile(tmp_path / "text" / "a.parquet").metadata.row_group(0).num_rows == 0
    assert read(config) == ["x", "y", "z"]


@pytest.mark.parametrize("name", ["b.txt", "b.jsonl"])
@pytest.mark.parametrize("content", [b"caf\xe9", b"\x1f\x8b\x08\x00packed"])
def test_error_names_a_file_that_is_not_utf8(name: str, content: bytes, files: Files, read: Read) -> None:
    with pytest.raises(DataError, match=rf"{name}: not UTF-8 at byte \d+; convert the file \(iconv -t utf-8\)"):
        read(files({"a.txt": "fine", name: content}))


@pytest.mark.parametrize("name", ["b.txt", "b.jsonl", "b.csv"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_error_names_another_unicode_encoding(name: str, encoding: str, files: Files, read: Read) -> None:
    content = lines({"text": "a"})
    family, unmarked = encoding[:6], encoding[:6] + encoding[-2:]
    for text, seems in (("\ufeff" + content, family), (content, unmarked), ("a\u4e00", unmarked)):
        with pytest.raises(
            DataError, match=rf"{name}: seems to be {seems}, not UTF-8; .* \(iconv -f {seems} -t utf-8\)"
        ):
            read(files({name: text.encode(encoding)}))


def test_error_names_a_parquet_that_is_not_utf8(files: Files, read: Read, tmp_path: Path) -> None:
    config = files({})
    parquet(tmp_path / "text" / "a.parquet", text=pa.array([b"caf\xe9"], pa.binary()).view(pa.string()))
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as parquet \(.*utf-8.* byte 0xe9 .*; fix it"):
        read(config)


def test_error_for_a_missing_column_lists_the_columns(files: Files, read: Read, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: no column 'text'; it has body, id; set data\.column"):
        read(files({"a.jsonl": lines({"body": "x", "id": 1})}))
    (tmp_path / "text" / "a.jsonl").unlink()
    parquet(tmp_path / "text" / "b.parquet", txt=["x"], id=[1])
    with pytest.raises(DataError, match=r"b\.parquet: no column 'text' \(did you mean 'txt'\?\); it has txt, id"):
        read(files({}))


def not_text(path: Path, number: int, value: object) -> str:
    remedy = "set data.skip=null to leave such rows out" if value is None else "remove such rows"
    return (
        f"{path}: row {number} of column 'text' is {value!r}, not text; {remedy}, or set data.column to another column"
    )


@pytest.mark.parametrize(
    ("rows", "number", "value"),
    [
        ([{"text": "a"}, {"text": None}], 2, None),
        ([{"text": "a"}, {"other": "b"}], 2, None),
        ([{"text": 7}], 1, 7),
        ([{"text": ["a"]}], 1, ["a"]),
        ([7], 1, 7),
        ([None], 1, None),
        ([{}], 1, None),
    ],
)
def test_error_names_a_row_that_is_not_text(
    rows: list[object], number: int, value: object, files: Files, read: Read, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        read(files({"a.jsonl": lines(*rows)}))
    assert str(caught.value) == not_text(tmp_path / "text" / "a.jsonl", number, value)


@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (1, "", '\n{"text": "a"}\n'),
        (1, "\ufeff\n ", '\n{"text": "a"}\n'),
        (2, '{"text": "a"}\n', ""),
        (2, '{"text": "a"}\r', "\r"),
        (1001, '{"text": "a"}\n' * 1000, "\nnull" * 100_000),
    ],
)
def test_error_names_a_line_that_is_null(
    number: int, before: str, after: str, files: Files, read: Read, tmp_path: Path
) -> None:
    """pyarrow crashes if such a line comes first in the file or in a block."""
    with pytest.raises(DataError) as caught:
        read(files({"a.jsonl": f"{before}null{after}"}))
    assert str(caught.value) == not_text(tmp_path / "text" / "a.jsonl", number, None)


def test_null_inside_an_object_is_accepted(files: Files, read: Read) -> None:
    rows = [f'{{"text": "row {i}",\n"meta":\n\n  null}}\n' for i in range(500)]
    assert read(files({"a.jsonl": "".join(rows)})) == [f"row {i}" for i in range(500)]


def test_line_break_in_a_string_is_rejected(files: Files, read: Read) -> None:
    with pytest.raises(DataError):
        read(files({"a.jsonl": '{"text": "a\nnull"}\n'}))


def test_archive_named_jsonl_is_rejected(files: Files, read: Read, tmp_path: Path) -> None:
    """`datasets` would unpack it and read its content."""
    files({"a.jsonl": lines({"text": "a"})})
    inside = tmp_path / "text" / "a.jsonl"
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(inside, "inside.jsonl")
    (tmp_path / "a.tar").rename(inside)
    with pytest.raises(DataError):
        read(files({}))


def test_error_names_a_column_of_mixed_types(files: Files, read: Read) -> None:
    # Some versions of `datasets` reject the file, some return the number.
    with pytest.raises(DataError, match=r"a\.jsonl: (row 2 of column 'text' is 3|cannot be read as json)"):
        read(files({"a.jsonl": lines({"text": "a"}, {"text": 3})}))


def test_error_names_a_null_in_parquet(files: Files, read: Read, tmp_path: Path) -> None:
    parquet(tmp_path / "text" / "a.parquet", text=["x"] * 40 + [None])
    with pytest.raises(DataError) as caught:
        read(files({}))
    assert str(caught.value) == not_text(tmp_path / "text" / "a.parquet", 41, None)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", "this is no JSON\n"),
        ("a.jsonl", '{"text": "cut sho'),
        ("a.jsonl", '{"text": "half a pair \\ud800"}\n'),
        ("a.parquet", "this is no Parquet"),
        ("a.parquet", ""),
    ],
)
def test_error_names_a_file_of_another_format(
    name: str, content: str, files: Files, read: Read, capfd: pytest.CaptureFixture[str]
) -> None:
    kind = "json" if name.endswith("l") else "parquet"
    with pytest.raises(DataError, match=rf"{name}: cannot be read as {kind} \(.*\); fix it") as caught:
        read(files({name: content}))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_dates_in_json_stay_text(files: Files, read: Read) -> None:
    assert read(files({"a.jsonl": lines({"text": "2020-01-01"}, {"text": "2020-01-02"})})) == [
        "2020-01-01",
        "2020-01-02",
    ]


def test_json_list_of_texts(files: Files, read: Read) -> None:
    assert read(files({"a.json": json.dumps(["a", "b"])})) == ["a", "b"]


def test_json_is_read_in_chunks(files: Files, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, escapes and numbers may lie across two chunks."""
    texts = ["\u00e9\U0001f600" * 9, 'a "quoted" \\ one', "", *(f"row {i}" for i in range(99))]
    rows = [{"number": i, "none": None, "text": text} for i, text in enumerate(texts)]
    for content in (lines(*rows), json.dumps(rows), json.dumps(rows, indent=1), lines(*rows).replace("\n", "")):
        for chunk in range(1, 40):
            monkeypatch.setattr(module, "CHUNK", chunk)
            assert read(files({"a.json": content})) == [text for text in texts if text]


def test_invalid_json_is_not_read_to_its_end(files: Files, tmp_path: Path) -> None:
    """The memory for a damaged file has a limit."""
    files({"a.jsonl": '{"text": "a"}\n{oops}\n' + lines({"text": "b" * 1000}) * 100_000})
    tracemalloc.start()
    with pytest.raises(DataError):
        list(FilesText(FilesData(path=[str(tmp_path / "text")])).documents(tmp_path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
