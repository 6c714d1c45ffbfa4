"""Rows parsed together equal rows parsed one by one, however the file is damaged."""

from __future__ import annotations

import json
import math
import os
import random

import pytest

from normlab.errors import StoreError
from normlab.store import reading
from normlab.store.schema import to_json

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


@pytest.mark.parametrize("seed", range(20))
def test_parsing_together_equals_parsing_one_by_one(tmp_path, monkeypatch, seed):
    draw, path, quick = random.Random(seed), tmp_path / "metrics.jsonl", 0
    parse_together = reading._parse_together
    for _ in range(200):
        made = content(draw)
        for _ in range(draw.choice([0, 0, 1, 2, 5])):
            at = draw.randrange(len(made) + 1)
            made = made[:at] + draw.choice([*PIECES, b""]) + made[at + draw.choice([0, 0, 1, 3]) :]
        path.write_bytes(made)
        for options in ({}, {"kind": "train"}, {"exclude": "train"}):
            monkeypatch.setattr(reading, "_parse_together", parse_together)
            result = reading.read_rows(path, **options)
            quick += parse_together([line for line in made.split(b"\n") if line]) is not None
            monkeypatch.setattr(reading, "_parse_together", lambda lines: None)
            assert repr(result) == repr(reading.read_rows(path, **options)), made
    assert quick > 100


def test_rows_of_a_run_are_parsed_together():
    rows = [{"kind": "train", "step": step, "loss": math.nan if step == 3 else 0.5} for step in range(5)]
    lines = [json.dumps(row).replace("NaN", '"nan"').encode() for row in rows]
    result = reading._parse_together(lines)
    assert result is not None
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
