"""Files of any size, of any kind, and damaged in any place: rows parsed together equal rows parsed line by line."""

import math
import os
import random
from typing import Any

import pytest

from normlab.base.errors import StoreError
from normlab.store.format import to_json
from normlab.store.reading import Rows, parse_rows, read_bytes, read_record

KEYS = {
    "train": {"loss", "grad_norm", "clip", "lr"},
    "eval": {"loss"},
    "pace": {"seconds", "tokens_per_s"},
}
PIECES = [
    b"\n", b"{", b"}", b'"', b",", b"[", b"]", b":", b'{"kind":"eval","step":1,"loss":2.5}', b"\n\n", b"\xff", b"\x00",
    b"\\", b"nan", b'"nan"', b'"\\u006ean"', b"NaN", b"1e999", b'},{"a":1', b'","', b"\r", b"\xef\xbb\xbf",
    b"9" * 5000,
]  # fmt: skip


def content(draw: random.Random) -> bytes:
    rows: list[dict[str, Any]] = [{"kind": "eval", "step": 0, "loss": 5.5}]
    for step in range(draw.randint(0, 9)):
        loss = draw.choice([1.5, 2.0, math.nan, math.inf, -math.inf, 1e300])
        kind = draw.choice(["train", "pace"])
        rows.append({"kind": kind, "step": step, **dict.fromkeys(sorted(KEYS[kind]), loss)})
    return b"".join(map(to_json, rows))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(4, 20))])
def test_only_damaged_lines_are_left_out(seed: int) -> None:
    draw, intact = random.Random(seed), 0
    for _ in range(200):
        made = content(draw)
        for _ in range(draw.choice([0, 0, 1, 2, 5])):
            at = draw.randrange(len(made) + 1)
            made = made[:at] + draw.choice([*PIECES, b""]) + made[at + draw.choice([0, 0, 1, 3]) :]
        lines = list(filter(None, made.split(b"\n")))
        alone = [parse_rows(line + b"\n").rows for line in lines]
        result = parse_rows(made)
        intact += result.damaged == 0
        assert repr(result.rows) == repr([row for rows in alone for row in rows]), made
        assert result.damaged == alone.count([]), made
        assert result.torn == (not made.endswith(b"\n") and alone[-1:] == [[]]), made
        trained = [line for line in lines if line.startswith(b'{"kind":"train"')]
        assert repr(parse_rows(made, "train").rows) == repr(parse_rows(b"\n".join(trained)).rows)
    assert 50 < intact < 190


def test_a_row_of_text_is_no_row() -> None:
    assert parse_rows(b'{"kind":"eval","step":1,"loss":"x"}\n') == Rows([], 1, torn=False)


@pytest.mark.parametrize("name", ["run.json", "status.json", "plan.json", "metrics.jsonl"])
def test_file_of_terabytes_is_not_read(tmp_path, name):
    """A sparse file of terabytes takes no space on the disk."""
    path = tmp_path / name
    path.write_bytes(b"{}\n")
    os.truncate(path, 2**40)
    read = read_bytes if name.endswith("l") else read_record
    with pytest.raises(StoreError, match=rf"{name}: is damaged \(has {2**40} bytes \(at most [0-9]+\)\); "):
        read(path)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_pipe_is_an_error(tmp_path, name):
    path = tmp_path / name
    os.mkfifo(path)
    read = read_bytes if name.endswith("l") else read_record
    with pytest.raises(StoreError, match=rf"{name}: is damaged \(is a pipe or a device, not a file\); "):
        read(path)
