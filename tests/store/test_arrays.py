"""Statistics on the disk: read back as they were written, whatever happened to the file in between."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from normlab.errors import StoreError
from normlab.stats import options  # noqa: F401  (with it every statistic is known)
from normlab.stats.profiles import Column, Layout, Profiles
from normlab.stats.statistic import STATISTICS
from normlab.store import arrays
from normlab.store.arrays import Arrays
from normlab.store.runs import RunFolder

COLUMNS = (
    Column("resid_rms", "", 2), Column("norm_in_rms", "attn.in", 1), Column("resid_rms", "", 1),
    Column("grad_norm", "attn.q.weight", 1), Column("resid_rms", "", 3),
)  # fmt: skip
LAYOUT, ORDER = Layout.of(COLUMNS, 2, {"attn.q.weight": "attn"})


def measured(*steps: int, layout: Layout = LAYOUT) -> Profiles:
    values = np.array([[step + place / 8 for place in range(layout.width)] for step in steps], dtype=np.float32)
    return Profiles(layout, np.array(steps, dtype=np.int64), values.reshape(len(steps), layout.width))


@pytest.fixture
def written(tmp_path: Path) -> Arrays:
    found = Arrays(tmp_path)
    for step in (0, 10, 20):
        found.append("core", measured(step))
    found.close()
    return found


def open_in(folder: Path) -> list[str]:
    """The files of a folder that this process has open."""
    descriptors = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(fd) for fd in descriptors if os.path.exists(fd) and str(folder) in os.readlink(fd)]


def steps_of(found: Arrays) -> list[list[int]]:
    return [part.steps.tolist() for part in found.read("core")[0]]


def test_columns_are_brought_into_order() -> None:
    assert [COLUMNS[index] for index in ORDER] == [
        Column("resid_rms", "", 1), Column("resid_rms", "", 2), Column("resid_rms", "", 3),
        Column("norm_in_rms", "attn.in", 1), Column("grad_norm", "attn.q.weight", 1),
    ]  # fmt: skip
    assert Layout.from_tree(json.loads(json.dumps(LAYOUT.as_tree()))) == LAYOUT


def test_what_is_written_is_read(written: Arrays) -> None:
    (part,), damaged = written.read("core")
    assert damaged == 0
    assert part.layout == LAYOUT
    assert part.steps.tolist() == [0, 10, 20]
    assert np.array_equal(part.values, measured(0, 10, 20).values)
    nan = np.nan
    assert np.array_equal(part.single_site("resid_rms")[1], [nan, 10, 10.125, 10.25], equal_nan=True)
    assert np.array_equal(part.get("norm_in_rms")["attn.in"][2], [nan, 20.375, nan, nan], equal_nan=True)


def test_numpy_alone_reads_it_as_the_file_says(written: Arrays) -> None:
    """The line that the description gives, with the numbers in the JSON beside it and no code of ours."""
    told = json.loads((written.path / "core.json").read_text())
    rows = np.fromfile(
        written.path / "core.bin", dtype=[("step", "<i8"), ("values", "<f4", (told["numbers"],)), ("crc", "<u4")]
    )
    assert rows["step"].tolist() == [0, 10, 20]
    names = [(g["statistic"], g["site"], place) for g in told["groups"] for place in g["places"]]
    assert rows["values"][0][names.index(("norm_in_rms", "attn.in", 1))] == 0.375
    assert told["statistics"]["resid_rms"]["formula"] == STATISTICS["resid_rms"].formula
    assert told["statistics"].keys() == {"resid_rms", "norm_in_rms", "grad_norm"}
    assert {one["unit"] for one in told["statistics"].values()} == {"of x", "nats / of w"}


def test_rows_of_terabytes_are_not_read(written: Arrays) -> None:
    os.truncate(written.path / "core.bin", 2**40)
    with pytest.raises(StoreError, match=rf"core.bin: is damaged \(has {2**40} bytes, of at most "):
        written.read("core")


@pytest.mark.parametrize("torn", [1, 7, 31])
def test_half_a_row_at_the_end_is_left_out_and_cut_off(written: Arrays, torn: int) -> None:
    path = written.path / "core.bin"
    os.truncate(path, path.stat().st_size - torn)
    assert steps_of(written) == [[0, 10]]
    written.cut(20)
    written.append("core", measured(20))
    assert steps_of(written) == [[0, 10, 20]]
    assert np.array_equal(written.read("core")[0][0].values, measured(0, 10, 20).values)


def test_a_bit_that_flipped_is_seen_and_its_row_left_out(written: Arrays) -> None:
    path = written.path / "core.bin"
    content = path.read_bytes()
    for position in range(len(content) // 3, 2 * len(content) // 3):  # the row of step 10
        flipped = bytearray(content)
        flipped[position] ^= 16
        path.write_bytes(flipped)
        parts, damaged = written.read("core")
        assert (steps_of(written), damaged, len(parts)) == ([[0, 20]], 1, 1)
        written.cut(20)
        assert steps_of(written) == [[0]]


@pytest.mark.parametrize(("step", "left"), [(0, []), (1, [0]), (10, [0]), (11, [0, 10]), (21, [0, 10, 20])])
def test_cut(written: Arrays, step: int, left: list[int]) -> None:
    written.cut(step)
    assert steps_of(written) == [left]


def test_another_layout_gets_files_of_its_own_and_goes_back_to_the_first(written: Arrays) -> None:
    other, _ = Layout.of(COLUMNS[:2], 2, {})
    written.append("core", measured(30, layout=other))
    written.append("core", measured(40))
    written.append("core", measured(50, layout=other))
    assert len(open_in(written.path)) == 1
    written.close()
    assert sorted(os.listdir(written.path)) == ["core.2.bin", "core.2.json", "core.bin", "core.json"]
    assert steps_of(written) == [[0, 10, 20, 40], [30, 50]]
    written.cut(40)
    assert steps_of(written) == [[0, 10, 20], [30]]


def test_a_disk_that_refuses_leaves_whole_rows(written: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (written.path / "core.bin").read_bytes()

    def half(descriptor: int, content: bytes) -> None:
        os.write(descriptor, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(arrays, "write_all", half)
    with pytest.raises(StoreError, match=r"core\.bin: cannot be written .*; free some space"):
        written.append("core", measured(30))
    assert (written.path / "core.bin").read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"{}", "is damaged"),
        (b'{"version": 1, "sha256": "0"}', "is damaged"),
    ],
)
def test_a_damaged_description_is_said_and_what_it_describes_left_alone(
    written: Arrays, content: bytes, message: str
) -> None:
    other, _ = Layout.of(COLUMNS[:2], 2, {})
    written.append("core", measured(30, layout=other))
    written.close()
    rows = (written.path / "core.bin").read_bytes()
    (written.path / "core.json").write_bytes(content)
    problems: list[str] = []
    assert [part.layout for _, part in written.parts(problems)] == [other]
    assert re.search(rf"core\.json: {message}.*put back a copy", *problems)
    written.cut(30)
    written.append("core", measured(30))
    assert steps_of(written) == [[], [30]]
    assert (written.path / "core.bin").read_bytes() == rows
    assert (written.path / "core.3.json").exists()


def test_rows_whose_description_is_gone_are_not_gone_on_with(written: Arrays) -> None:
    rows = (written.path / "core.bin").read_bytes()
    (written.path / "core.json").unlink()
    problems: list[str] = []
    assert list(written.parts(problems)) == []
    assert re.search(r"core\.json: is missing", *problems)
    written.append("core", measured(20))
    assert steps_of(written) == [[20]]
    assert (written.path / "core.bin").read_bytes() == rows


def test_what_was_measured_before_a_step_is_copied(written: Arrays, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    written.copy(tmp_path / "other", before=20)
    assert steps_of(Arrays(tmp_path / "other")) == [[0, 10]]
    written.copy(tmp_path / "other", before=0)
    assert steps_of(Arrays(tmp_path / "other")) == [[0, 10]]


@pytest.mark.parametrize(
    ("sessions", "before", "missing"),
    [
        ([(0, {"core": 10})], 30, {}),
        ([(0, {"core": 10})], 51, {"core": [30, 40, 50]}),
        ([(0, {"core": 5})], 20, {"core": [5, 15]}),
        ([(0, {"core": 10}), (25, {"core": None})], 90, {}),
        ([(0, {"core": 10}), (25, {"core": 20})], 60, {"core": [40]}),
        ([(0, {"core": 10}), (25, {"core": 5}), (21, {"core": 10})], 30, {}),
        ([(0, {"core": 5}), (0, {"core": None})], 90, {}),
        ([(15, {"core": 5})], 30, {"core": [15, 25]}),
        ([(0, {"extended": 10})], 30, {}),
        ([], 90, {}),
    ],
)
def test_rows_of_measured_steps_are_missed_where_the_cadence_is_known(
    sessions: list[tuple[int, dict[str, int | None]]], before: int, missing: dict[str, list[int]], written: Arrays
) -> None:
    for step, every in sessions:
        written.begin(step, every)
    assert written.missing(before) == missing
    assert len(written.told_missing(before)) == len(missing)


def test_of_adam_nothing_is_missed_at_step_0(written: Arrays) -> None:
    written.append("extended", measured(10))
    written.begin(0, {"extended": 10})
    assert written.missing(30) == {"extended": [20]}


def test_the_cadence_goes_with_what_is_copied(written: Arrays, tmp_path: Path) -> None:
    written.begin(0, {"core": 10})
    written.begin(20, {"core": 2})
    (tmp_path / "other").mkdir()
    written.copy(tmp_path / "other", before=20)
    copy = Arrays(tmp_path / "other")
    assert copy.missing(25) == {"core": [20]}
    copy.begin(20, {"core": 5})
    assert copy.missing(29) == {"core": [20, 25]}


def test_a_cadence_that_cannot_be_read_is_none(written: Arrays) -> None:
    written.begin(0, {"core": 5})
    (written.path / "cadence.json").write_bytes(b"{}")
    assert written.missing(90) == {}
    written.begin(20, {"core": 5})
    assert written.missing(30) == {"core": [25]}


@pytest.mark.parametrize("name", ["other.json", "core.٢.json", "core.0.json", "core.02.bin", "core.json.bin"])
def test_foreign_files_are_left_alone(name: str, written: Arrays) -> None:
    (written.path / name).write_bytes(b"{}")
    problems: list[str] = []
    assert [tier for tier, _ in written.parts(problems)] == ["core"]
    assert problems == []


def test_a_run_without_statistics_has_none(tmp_path: Path) -> None:
    found = RunFolder(tmp_path).arrays
    assert found.read("core") == ([], 0)
    found.cut(0)
    found.copy(tmp_path, before=3)
    assert not found.path.exists()
