"""Files of statistics read back as stored, however a file was damaged in between."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from normlab.catalogue.statistics.profiles import Layout, Profiles, StatisticColumn
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.store.arrays import StatisticsFiles

COLUMNS = (
    StatisticColumn("resid_rms", "", 2),
    StatisticColumn("norm_in_rms", "attn.in", 1), StatisticColumn("resid_rms", "", 1),
    StatisticColumn("grad_norm", "attn.q.weight", 1), StatisticColumn("resid_rms", "", 3),
)  # fmt: skip
LAYOUT, ORDER = Layout.of(COLUMNS, 2, {"attn.q.weight": "attn"})


def measured(*steps: int, layout: Layout = LAYOUT) -> Profiles:
    values = np.array([[step + place / 8 for place in range(layout.width)] for step in steps], dtype=np.float32)
    return Profiles(layout, np.array(steps, dtype=np.int64), values.reshape(len(steps), layout.width))


@pytest.fixture
def stored(tmp_path: Path) -> StatisticsFiles:
    statistics = StatisticsFiles(tmp_path)
    for step in (0, 10, 20):
        statistics.append("core", measured(step))
    statistics.close()
    return statistics


def open_in(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open."""
    descriptors = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(fd) for fd in descriptors if os.path.exists(fd) and str(folder) in os.readlink(fd)]


def steps_of(statistics: StatisticsFiles) -> list[list[int]]:
    return [part.steps.tolist() for part in statistics.read("core")[0]]


def test_layout_orders_columns() -> None:
    assert [COLUMNS[index] for index in ORDER] == [
        StatisticColumn("resid_rms", "", 1), StatisticColumn("resid_rms", "", 2), StatisticColumn("resid_rms", "", 3),
        StatisticColumn("norm_in_rms", "attn.in", 1), StatisticColumn("grad_norm", "attn.q.weight", 1),
    ]  # fmt: skip
    assert Layout.from_tree(json.loads(json.dumps(LAYOUT.as_tree()))) == LAYOUT


def test_what_is_written_is_read(stored: StatisticsFiles) -> None:
    (part,), damaged = stored.read("core")
    assert damaged == 0
    assert part.layout == LAYOUT
    assert part.steps.tolist() == [0, 10, 20]
    assert np.array_equal(part.values, measured(0, 10, 20).values)
    nan = np.nan
    assert np.array_equal(part.single_site("resid_rms")[1], [nan, 10, 10.125, 10.25], equal_nan=True)
    assert np.array_equal(part.get("norm_in_rms")["attn.in"][2], [nan, 20.375, nan, nan], equal_nan=True)


def test_numpy_reads_rows_by_their_description(stored: StatisticsFiles) -> None:
    """Read rows with the line in the module's docstring and the description, without normlab's code."""
    description = json.loads((stored.path / "core.json").read_text())
    rows = np.fromfile(
        stored.path / "core.bin", dtype=[("step", "<i8"), ("values", "<f4", (description["numbers"],)), ("crc", "<u4")]
    )
    assert rows["step"].tolist() == [0, 10, 20]
    names = [(g["statistic"], g["site"], place) for g in description["groups"] for place in g["places"]]
    assert rows["values"][0][names.index(("norm_in_rms", "attn.in", 1))] == 0.375
    assert description["statistics"]["resid_rms"]["formula"] == STATISTICS["resid_rms"].formula
    assert description["statistics"].keys() == {"resid_rms", "norm_in_rms", "grad_norm"}
    assert {entry["unit"] for entry in description["statistics"].values()} == {"1", "nats"}


@pytest.mark.parametrize("torn", [1, 7, 31])
def test_torn_last_row_is_left_out_and_truncated(stored: StatisticsFiles, torn: int) -> None:
    path = stored.path / "core.bin"
    os.truncate(path, path.stat().st_size - torn)
    assert steps_of(stored) == [[0, 10]]
    stored.truncate(20)
    stored.append("core", measured(20))
    assert steps_of(stored) == [[0, 10, 20]]
    assert np.array_equal(stored.read("core")[0][0].values, measured(0, 10, 20).values)


def test_row_with_a_flipped_bit_is_left_out(stored: StatisticsFiles) -> None:
    path = stored.path / "core.bin"
    content = path.read_bytes()
    for position in range(len(content) // 3, 2 * len(content) // 3):  # the row of step 10
        flipped = bytearray(content)
        flipped[position] ^= 16
        path.write_bytes(flipped)
        parts, damaged = stored.read("core")
        assert (steps_of(stored), damaged, len(parts)) == ([[0, 20]], 1, 1)
        stored.truncate(20)
        assert steps_of(stored) == [[0]]


@pytest.mark.parametrize(("step", "left"), [(0, []), (1, [0]), (10, [0]), (11, [0, 10]), (21, [0, 10, 20])])
def test_truncate(stored: StatisticsFiles, step: int, left: list[int]) -> None:
    stored.truncate(step)
    assert steps_of(stored) == [left]


def test_each_layout_has_its_own_files(stored: StatisticsFiles) -> None:
    other, _ = Layout.of(COLUMNS[:2], 2, {})
    stored.append("core", measured(30, layout=other))
    stored.append("core", measured(40))
    stored.append("core", measured(50, layout=other))
    assert len(open_in(stored.path)) == 1
    stored.close()
    assert sorted(os.listdir(stored.path)) == ["core.2.bin", "core.2.json", "core.bin", "core.json"]
    assert steps_of(stored) == [[0, 10, 20, 40], [30, 50]]
    stored.truncate(40)
    assert steps_of(stored) == [[0, 10, 20], [30]]


def test_damaged_description_is_reported_and_its_rows_are_kept(stored: StatisticsFiles) -> None:
    other, _ = Layout.of(COLUMNS[:2], 2, {})
    stored.append("core", measured(30, layout=other))
    stored.close()
    rows = (stored.path / "core.bin").read_bytes()
    (stored.path / "core.json").write_bytes(b"{}")
    problems: list[str] = []
    assert [part.layout for _, part in stored.parts(problems)] == [other]
    (problem,) = problems
    assert re.search(r"core\.json: is damaged.*restore a copy", problem)
    stored.truncate(30)
    stored.append("core", measured(30))
    assert steps_of(stored) == [[], [30]]
    assert (stored.path / "core.bin").read_bytes() == rows
    assert (stored.path / "core.3.json").exists()


def test_copy_of_the_rows_before_a_step(stored: StatisticsFiles, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stored.copy(tmp_path / "other", before=20)
    assert steps_of(StatisticsFiles(tmp_path / "other")) == [[0, 10]]
    stored.copy(tmp_path / "other", before=0)
    assert steps_of(StatisticsFiles(tmp_path / "other")) == [[0, 10]]


@pytest.mark.parametrize("name", ["other.json", "core.٢.json", "core.0.json", "core.02.bin", "core.json.bin"])
def test_other_files_are_ignored(name: str, stored: StatisticsFiles) -> None:
    (stored.path / name).write_bytes(b"{}")
    problems: list[str] = []
    assert [tier for tier, _ in stored.parts(problems)] == ["core"]
    assert problems == []
