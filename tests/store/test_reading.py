"""Rows parsed together equal rows parsed one by one, however the file is damaged."""

from __future__ import annotations

import math
import os
import random

import pytest

from normlab.errors import StoreError
from normlab.parsing import from_json
from normlab.store import reading
from normlab.store.format import decode, to_json

PIECES = [
    b"\n", b"{", b"}", b'"', b",", b"[", b"]", b":", b'{"kind":"eval"}', b"\n\n", b"\xff", b"\x00", b"\\", b"nan",
    b'"nan"', b'"\\u006ean"', b"NaN", b"1e999", b'},{"a":1', b'","', b" ", b"\r", b"\xef\xbb\xbf", b"9" * 5000,
]  # fmt: skip


def content(draw):
    rows = [{"kind": "eval", "step": 0, "loss": 5.5}]
    for step in range(draw.randint(0, 9)):
        loss = draw.choice([1.5, 2, math.nan, math.inf, -math.inf, 1e300, None, "a {b}", "é"])
        rows.append({"kind": draw.choice(["train", "pace"]), "step": step, "loss": loss})
    return b"".join(map(to_json, rows))


def parse_one_by_one(content, kind=None, exclude=None):
    lines = content.split(b"\n")
    rows, damaged = [], []
    for number, line in enumerate(lines):
        if not line or (exclude is not None and line.startswith(b'{"kind":"%b"' % exclude.encode())):
            continue
        try:
            row = decode(from_json(line))
        except ValueError:
            damaged.append(number)
        else:
            if kind is None or row.get("kind") == kind:
                rows.append(row)
    return reading.Rows(rows, len(damaged), torn=bool(damaged) and damaged[-1] == len(lines) - 1)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(4, 20))])
def test_parsing_together_equals_parsing_one_by_one(tmp_path, seed):
    draw, path, intact = random.Random(seed), tmp_path / "metrics.jsonl", 0
    for _ in range(200):
        made = content(draw)
        for _ in range(draw.choice([0, 0, 1, 2, 5])):
            at = draw.randrange(len(made) + 1)
            made = made[:at] + draw.choice([*PIECES, b""]) + made[at + draw.choice([0, 0, 1, 3]) :]
        path.write_bytes(made)
        for options in ({}, {"kind": "train"}, {"exclude": "train"}):
            result = reading.read_rows(path, **options)
            intact += result.damaged == 0
            assert repr(result) == repr(parse_one_by_one(made, **options)), made
    assert 100 < intact < 500


def test_rows_of_a_run_are_parsed_together(tmp_path, monkeypatch):
    rows = [{"kind": "train", "step": step, "loss": math.nan if step == 3 else 0.5} for step in range(5)]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(map(to_json, rows)))
    monkeypatch.setattr(reading, "from_json", lambda line: pytest.fail("a row is parsed alone"))
    result = reading.read_rows(path).rows
    assert math.isnan(result[3]["loss"])
    assert [row["step"] for row in result] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["run.json", "status.json", "plan.json", "metrics.jsonl"])
def test_file_of_terabytes_is_not_read(tmp_path, name):
    """A sparse file of terabytes takes no space on the disk."""
    path = tmp_path / name
    path.write_bytes(b"{}\n")
    os.truncate(path, 2**40)
    read = reading.read_rows if name.endswith("l") else reading.read_record
    with pytest.raises(StoreError, match=rf"{name}: is damaged \(has {2**40} bytes \(at most [0-9]+\)\); "):
        read(path)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_pipe_is_an_error(tmp_path, name):
    path = tmp_path / name
    os.mkfifo(path)
    read = reading.read_rows if name.endswith("l") else reading.read_record
    with pytest.raises(StoreError, match=rf"{name}: is damaged \(is a pipe or a device, not a file\); "):
        read(path)
