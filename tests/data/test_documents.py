from __future__ import annotations

import io
import json
import logging
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from normlab.config.corpora import FilesData
from normlab.data.documents import read_documents
from normlab.data.sources import find_sources
from normlab.errors import DataError

Files = Callable[..., FilesData]


@pytest.fixture
def read(tmp_path: Path) -> Callable[[FilesData], list[str]]:
    def documents(config: FilesData) -> list[str]:
        documents_read = read_documents(find_sources(config), config.column, tmp_path / "scratch")
        texts = list(documents_read)
        assert list(documents_read) == texts  # documents can be iterated again
        return texts

    return documents


Read = Callable[[FilesData], list[str]]


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(path: Path, **columns: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_text_file_is_one_document(files: Files, read: Read) -> None:
    contents = {"a.txt": "one\ntwo\n", "b.py": "x = '\u00e9\U0001f600'", "c": "  \n\n ", "d.csv": "1,2\n"}
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
    "content",
    [
        tar(one=b"1", two=b"2"),
        bytes(20_000),
        b"BZhou said: hello\n",
        b"PK\x03\x04 and so on",
        b"Rar!\x1a\x07\x00",
        b"\x04\x22M\x18",
    ],
    ids=["a tar", "zeros", "bzip2", "zip", "rar", "lz4"],
)
def test_text_that_begins_like_an_archive_is_not_unpacked(content: bytes, files: Files, read: Read) -> None:
    assert read(files({"a.txt": "a", "b.txt": content, "c.txt": "c"})) == ["a", content.decode(), "c"]


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
    assert read(files(contents)) == [contents[name] for name in sorted(NAMES)]


@pytest.mark.parametrize("folder", ["with space", "[x]", "a*b?", "$HOME", "x::y"])
def test_folders_may_have_any_name(folder: str, files: Files, read: Read, tmp_path: Path) -> None:
    config = files({f"{folder}/{n}": n for n in ("t.txt", "other.txt")} | {f"{folder}/r.jsonl": lines({"text": "r"})})
    config.path = [f"{tmp_path}/text/{folder}"]
    parquet(tmp_path / "text" / folder / "p.parquet", text=["p"])
    assert read(config) == ["other.txt", "p", "r", "t.txt"]


def test_paths_may_be_relative(files: Files, read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = files({"a.txt": "a"}, path=["text"])
    monkeypatch.chdir(tmp_path)
    assert read(config) == ["a"]


def test_jsonl_rows_are_documents(files: Files, read: Read) -> None:
    texts = ["one\r\ntwo", "\u00e9\U0001f600\x00", "12", "2020-01-01", "null", "x" * 1000]
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


@pytest.mark.slow
def test_line_of_25_million_characters(files: Files, read: Read) -> None:
    enormous = "0123456789" * 2_500_000
    texts = read(files({"a.txt": enormous, "b.jsonl": lines({"text": "before"}, {"text": enormous})}))
    assert [len(text) for text in texts] == [25_000_000, 6, 25_000_000]
    assert texts[0] == texts[2] == enormous


def test_empty_documents_are_dropped(files: Files, read: Read, tmp_path: Path) -> None:
    config = files({"a.txt": "", "b.jsonl": "", "c.jsonl": lines({"text": ""}, {"text": "c"}), "d.txt": "d"})
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


def test_changed_file_is_read_again(files: Files, tmp_path: Path) -> None:
    for text in ("one", "two"):  # of equal length, and with equal modification times
        sources = find_sources(files({"a.txt": text, "b.jsonl": lines({"text": text})}))
        assert list(read_documents(sources, "text", tmp_path / f"scratch {text}")) == [text, text]


@pytest.mark.parametrize("name", ["b.txt", "b.jsonl"])
@pytest.mark.parametrize("content", [b"caf\xe9", "text".encode("utf-16"), b"\x1f\x8b\x08\x00packed"])
def test_error_names_a_file_that_is_not_utf8(name: str, content: bytes, files: Files, read: Read) -> None:
    with pytest.raises(DataError, match=rf"{name}: not UTF-8 at byte \d+; convert it \(iconv -t utf-8\)"):
        read(files({"a.txt": "fine", name: content}))


def test_error_names_a_parquet_that_is_not_utf8(files: Files, read: Read, tmp_path: Path) -> None:
    config = files({})
    parquet(tmp_path / "text" / "a.parquet", text=pa.array([b"caf\xe9"], pa.binary()).view(pa.string()))
    with pytest.raises(DataError, match=r"a\.parquet: column 'text' is not UTF-8 .*convert it"):
        read(config)


def test_error_for_a_missing_column_lists_the_columns(files: Files, read: Read, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: no column 'text'; it has body, id; set data\.column"):
        read(files({"a.jsonl": lines({"body": "x", "id": 1})}))
    (tmp_path / "text" / "a.jsonl").unlink()
    parquet(tmp_path / "text" / "b.parquet", txt=["x"], id=[1])
    with pytest.raises(DataError, match=r"b\.parquet: no column 'text' \(did you mean 'txt'\?\); it has txt, id"):
        read(files({}))


@pytest.mark.parametrize(
    ("rows", "number", "value"),
    [
        ([{"text": "a"}, {"text": None}], 2, "None"),
        ([{"text": "a"}, {"other": "b"}], 2, "None"),
        ([{"text": 7}], 1, "7"),
        ([{"text": ["a"]}], 1, r"\['a'\]"),
        ([{"text": "2020-01-01"}, {"text": "2020-01-02"}], 1, r"datetime"),  # `datasets` parses them as dates
    ],
)
def test_error_names_a_row_that_is_not_text(
    rows: list[object], number: int, value: str, files: Files, read: Read
) -> None:
    with pytest.raises(DataError, match=rf"a\.jsonl: row {number} of column 'text' is {value}.*, not text; remove"):
        read(files({"a.jsonl": lines(*rows)}))


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
def test_error_names_a_line_that_is_null(number: int, before: str, after: str, files: Files, read: Read) -> None:
    """pyarrow crashes if such a line comes first in the file or in a block."""
    with pytest.raises(DataError, match=rf"a\.jsonl: row {number} of column 'text' is None, not text; remove"):
        read(files({"a.jsonl": f"{before}null{after}"}))


@pytest.mark.parametrize("content", ["null\n", "{}\n"])
def test_rows_without_columns_are_rejected(content: str, files: Files, read: Read) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read as json \(its rows have no columns\); fix it"):
        read(files({"a.jsonl": content}))


def test_null_inside_an_object_is_accepted(files: Files, read: Read) -> None:
    rows = [f'{{"text": "row {i}",\n"meta":\n\n  null}}\n' for i in range(500)]
    assert read(files({"a.jsonl": "".join(rows)})) == [f"row {i}" for i in range(500)]


def test_line_break_in_a_string_is_rejected(files: Files, read: Read) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read as json"):
        read(files({"a.jsonl": '{"text": "a\nnull"}\n'}))


def test_archive_named_jsonl_is_rejected(files: Files, read: Read, tmp_path: Path) -> None:
    """`datasets` would unpack it and read its content."""
    files({"a.jsonl": lines({"text": "a"})})
    inside = tmp_path / "text" / "a.jsonl"
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(inside, "inside.jsonl")
    (tmp_path / "a.tar").rename(inside)
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read as json \(a NUL byte\); fix it"):
        read(files({}))


def test_error_names_a_column_of_mixed_types(files: Files, read: Read) -> None:
    # Some versions of `datasets` reject the file, some return the number.
    with pytest.raises(DataError, match=r"a\.jsonl: (row 2 of column 'text' is 3|cannot be read as json)"):
        read(files({"a.jsonl": lines({"text": "a"}, {"text": 3})}))


def test_error_names_a_null_in_parquet(files: Files, read: Read, tmp_path: Path) -> None:
    parquet(tmp_path / "text" / "a.parquet", text=["x"] * 40 + [None])
    with pytest.raises(DataError, match=r"a\.parquet: row 41 of column 'text' is None, not text"):
        read(files({}))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", "this is no JSON\n"),
        ("a.jsonl", '{"text": "cut sho'),
        ("a.jsonl", '{"text": "half a pair \\ud800"}\n'),
        ("a.jsonl", "\n\n"),
        ("a.parquet", "this is no Parquet"),
        ("a.parquet", ""),
    ],
)
def test_error_names_a_file_of_another_format(
    name: str,
    content: str,
    files: Files,
    read: Read,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [handler])
    kind = "json" if name.endswith("l") else "parquet"
    with pytest.raises(DataError, match=rf"{name}: cannot be read as {kind} \(.*\); fix it") as caught:
        read(files({name: content}))
    assert "\n" not in str(caught.value)
    assert "normlab-" not in str(caught.value)  # the name of the link is internal
    assert capfd.readouterr() == ("", "")
    assert logged == []


def test_reading_uses_no_network_and_restores_the_settings(
    files: Files,
    read: Read,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    import datasets
    import huggingface_hub.constants
    from datasets.utils import are_progress_bars_disabled

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("the network was used")

    calls = []
    monkeypatch.setattr(socket.socket, "connect", lambda *args: calls.append(args) or fail())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: calls.append(args) or fail())
    parquet(tmp_path / "text" / "c.parquet", text=["c"])
    for offline in (False, True):
        for settings in (datasets.config, huggingface_hub.constants):
            monkeypatch.setattr(settings, "HF_HUB_OFFLINE", offline)
        bars = are_progress_bars_disabled()
        assert read(files({"a.txt": "a", "b.jsonl": lines({"text": "b"})})) == ["a", "b", "c"]
        assert datasets.config.HF_HUB_OFFLINE is offline
        assert are_progress_bars_disabled() is bars
    assert calls == []
    assert capfd.readouterr() == ("", "")
