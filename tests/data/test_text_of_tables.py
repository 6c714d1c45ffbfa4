"""CSV, TSV and JSON: every cell is the text in the file, compared with Python's own readers; all else is an error."""

import csv
import io
import json
import math
import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TextIO

import pytest

from normlab.base.errors import DataError
from normlab.catalogue.corpora import HubData
from normlab.data.corpus import open_corpus
from normlab.data.hub import HubText
from normlab.data.tables import csv_rows, json_rows

WORDS = [
    "null",
    "NA",
    "None",
    "007",
    "nan",
    "a,b\nsecond line",
    "N/A",
    'say "hi"',
    "true",
    "1e5",
    "2024-01-01",
    " x ",
    "-",
]
"""Texts that a reader which guesses types takes for missing cells, numbers, truth values or dates."""


@pytest.fixture
def documents(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    scratch = tmp_path_factory.mktemp("scratch")
    return lambda folder: list(HubText(HubData(name=str(folder))).documents(scratch))


Documents = Callable[[Path], list[str]]


def opener(content: str) -> Callable[[], AbstractContextManager[TextIO]]:
    return lambda: nullcontext(io.StringIO(content, newline=""))


def texts_of(content: str, separator: str = ",", column: str = "text") -> list[str]:
    return [row.text for row in csv_rows(opener(content), separator, column)]


def written(texts: list[str], separator: str, end: str = "\n") -> str:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=separator, lineterminator=end).writerows([("id", "text"), *enumerate(texts)])
    return file.getvalue()


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json", "ndjson"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_cell_is_text(suffix: str, mark: str, end: str, tmp_path: Path, documents: Documents) -> None:
    rows = [{"text": text, "id": index} for index, text in enumerate(WORDS)]
    contents = {
        "csv": written(WORDS, ",", end),
        "tsv": written(WORDS, "\t", end),
        "json": json.dumps(rows, indent=1).replace("\n", end),
    }
    lines = "".join(json.dumps(row) + end for row in rows)
    (tmp_path / f"a.{suffix}").write_bytes((mark + contents.get(suffix, lines)).encode())
    assert documents(tmp_path) == WORDS


@pytest.mark.parametrize("separator", [",", "\t"])
def test_quoted_cells_are_read_as_python_writes_them(separator: str) -> None:
    draw = random.Random(0)
    texts = ["".join(draw.choices(f'ab"\n\r {separator}', k=draw.randrange(9))) for _ in range(2000)]
    assert texts_of(written(texts, separator, "\r\n"), separator) == texts


def test_a_long_cell_is_read() -> None:
    assert texts_of(written(["x" * 300_000], ",")) == ["x" * 300_000]


def test_blank_and_empty_cells_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f'text,id\nnull,1\n"",2\n,3\n\n{"end" * 99},4\n')
    read = open_corpus(HubData(name=str(tmp_path))).description["read"]
    assert read == {"rows": 5, "documents": 2, "empty": 3, "null": 0}


def test_bare_quotes_of_a_tsv_are_characters(tmp_path: Path) -> None:
    """A quote at the start of two sentences once joined all rows between them."""
    sentences = [f"sentence {index}" for index in range(60)]
    sentences[14], sentences[32], sentences[40] = '"an open quote', '"another', 'in "the" middle"'
    content = "".join(f"{index}\t{text}\n" for index, text in enumerate(sentences))
    (tmp_path / "a.tsv").write_text("id\ttext\n" + content)
    corpus = open_corpus(HubData(name=str(tmp_path)))
    assert corpus.description["read"] == {"rows": 60, "documents": 60, "empty": 0, "null": 0}
    assert texts_of("id\ttext\n" + content, "\t") == sentences


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ('id\ttext\n1\t"he\n2\tsaid"\n', ['"he', 'said"']),  # quotes would join two complete rows
        ('id\ttext\n1\t"he\nsaid"\n', ["he\nsaid"]),  # without quotes, the last line would be no row
        ('id\ttext\n1\t"he\tsaid"\n', ["he\tsaid"]),
        ('id\ttext\n1\t"he ""said"""\n', ['he "said"']),
        ('text\n"he\nsaid"\nI\n', ['"he', 'said"', "I"]),  # any line is a row of one cell
        ('text\n"he"\n"she said ""I"""\n', ["he", 'she said "I"']),
        ('id\ttext\n1\t"he" said\n', ['"he" said']),
    ],
)
def test_quotes_of_a_tsv(content: str, texts: list[str]) -> None:
    assert texts_of(content, "\t") == texts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('id,text\n1,a\n2,"b" c\n', r"the row that starts in line 3: ',' expected after '\"'; double each quote"),
        ('id,text\n1,"a\n2,b\n', r"the row that starts in line 2: unexpected end of data; double each quote"),
        ("id,text\n1,a\n2,b,c\n", r"line 3: number of cells: 3 \(header: 2\); fix the line"),
        ('id,text\n1,"a\nb"\n2\n', r"line 4: number of cells: 1 \(header: 2\); fix the line"),
        ("text,text\na,b\n", r"has 2 columns 'text'; rename one"),
        ("id,txt\na,b\n", r"no column 'text' \(did you mean 'txt'\?\); it has id, txt; set data.column"),
        ("id,my text,\n1,a,\n", r"no column 'text' .*; it has id, 'my text', ''; set data.column"),
    ],
)
def test_csv_errors_name_the_line(content: str, message: str) -> None:
    with pytest.raises(DataError, match=f"^{message}"):
        texts_of(content)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "a"}\n{"text": "b\n',
            r"line 2, column 10: is not JSON \(Unterminated string starting at\); write one",
        ),
        ('{"text": "a"}\n\n{"text": "b",}\n', r"line 3, column 14: is not JSON"),
        ('{"text": "a"}\n[3]\n', r"line 2, column 1: is not JSON|item 1: 3 is no object"),
        ('[{"text": "a"},\n {"text": }]\n', r"line 2, column 11: is not JSON"),
        ('{"text": "a", "text": "b"}\n', r"line 1: cannot be read \(an object has two keys 'text'\)"),
        ('{"text": "a"}\n7\n', r"line 2: 7 is no object with a field for each column"),
        ("[" * 100_000, r"line 1: cannot be read \(maximum recursion depth|line 1, column"),
        ('{"body": "a"}\n', r"no column 'text'; it has body; set data.column"),
    ],
)
def test_json_errors_name_the_line(content: str, message: str) -> None:
    with pytest.raises(DataError, match=f"^({message})"):
        list(json_rows(opener(content), "text"))


@pytest.mark.parametrize("value", [7, 1.5, True, ["a"], {"a": "b"}, math.nan])
def test_a_cell_that_is_not_text_is_rejected(value: object, tmp_path: Path, documents: Documents) -> None:
    """A number in JSON has no text of its own: 1e5, 100000 and 100000.0 are one number."""
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{json.dumps({"text": value})}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: line 2: column 'text' is .*, not text; write it as text, or set"):
        documents(tmp_path)


def test_half_a_surrogate_pair_is_rejected(tmp_path: Path, documents: Documents) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: line 1: column 'text' has half of a surrogate pair .*; write the"):
        documents(tmp_path)


def test_json_rows_without_the_column_have_no_text() -> None:
    content = '{"id": 1}\n{"id": 2, "text": "a"}\n{"id": 3, "text": null}\n'
    assert [row.text for row in json_rows(opener(content), "text")] == [None, "a", None]
    assert [row.text for row in json_rows(opener('["a", "b"]'), "text")] == ["a", "b"]


@pytest.mark.parametrize(("written_with", "read_with"), [(";", ","), ("\t", ","), ("|", ","), (",", "\t"), (";", "\t")])
def test_a_wrong_separator_is_named(written_with: str, read_with: str) -> None:
    content = written(["a b", "c d"], written_with)
    message = f"the header is one cell, {f'id{written_with}text'!r}: its separator looks like {written_with!r}, and is"
    with pytest.raises(DataError, match="^" + re.escape(message)):
        texts_of(content, read_with)
    assert texts_of(content, written_with) == ["a b", "c d"]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_the_separator_is_set_as_its_error_says(separator: str, tmp_path: Path, documents: Documents) -> None:
    (tmp_path / "a.csv").write_text(written(["a b", "c d"], separator))
    with pytest.raises(DataError, match=r"a\.csv: the header is one cell") as error:
        documents(tmp_path)
    setting = str(error.value).partition("or set ")[2].partition(" for it")[0]
    (tmp_path / "README.md").write_text(README % setting)
    assert documents(tmp_path) == ["a b", "c d"]


README = """---
configs:
- config_name: one
  data_files: a.csv
  %s
---
"""


def test_options_of_a_dataset_are_followed_or_rejected(tmp_path: Path, documents: Documents) -> None:
    (tmp_path / "a.csv").write_text("1;na\u00efve\n", encoding="latin-1")
    (tmp_path / "README.md").write_text(README % 'sep: ";"\n  names: [id, text]\n  encoding: latin-1')
    assert documents(tmp_path) == ["na\u00efve"]
    (tmp_path / "README.md").write_text(README % "skiprows: 1")
    with pytest.raises(DataError, match=r"its README.md sets skiprows=1, which normlab does not follow; write"):
        documents(tmp_path)


def test_error_names_the_file(tmp_path: Path, documents: Documents) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r": b\.jsonl: UnicodeDecodeError: .*; convert the file to UTF-8 \(iconv"):
        documents(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text"\n')
    with pytest.raises(DataError, match=rf"^data.name={tmp_path}: b\.jsonl: line 2, column 8: is not JSON"):
        documents(tmp_path)
