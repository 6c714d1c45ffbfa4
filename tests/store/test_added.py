"""What was added to a record is read once, however it is written, cut and written again."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from normlab.catalogue.statistics.statistic import TIERS
from normlab.config.compose import compose_run
from normlab.store.added import AddedRecord, AddedRows
from normlab.store.runs import RunFolder
from normlab.training.start import train
from support.small_run import small_run

Keyed = dict[tuple[Any, ...], Any]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run, by their path in its folder."""
    options = [
        "train.steps=9",
        "train.log_every=3",
        "eval.every=2",
        "stats.tiers=[core,extended]",
        "stats.every=1",
        "stats.extended_every=2",
    ]
    folder = train(compose_run([*small_run(tmp_path_factory.mktemp("results")), *options]), trackers=[]).folder
    paths = [folder.metrics_path, *folder.statistics.path.iterdir()]
    return {str(path.relative_to(folder.path)): path.read_bytes() for path in paths}


def empty_folder(record: dict[str, bytes], results: Path) -> RunFolder:
    """Return the folder of the run, whose name is in its files."""
    return RunFolder(results / json.loads(record["metrics.jsonl"].splitlines()[0])["run_id"])


def write(folder: RunFolder, record: dict[str, bytes], share: float) -> None:
    """Write a share of the rows, as a process does: the description of a part comes before its rows."""
    folder.statistics.path.mkdir(parents=True, exist_ok=True)
    for name, content in record.items():
        if name.endswith(".json"):
            (folder.path / name).write_bytes(content)
        elif share:
            end = round(share * len(content))
            # A row without its line break counts as a row for other readers.
            (folder.path / name).write_bytes(content[: end + (content[end : end + 1] == b"\n")])


def keyed(rows: Any, parts: Any) -> Keyed:
    """Return rows and statistics, of which the later replace the earlier of the same step."""
    found: Keyed = {(row["kind"], row["step"]): row for row in rows}
    for part in parts:
        layout = repr(part.layout)
        found |= {(layout, step): row.tolist() for step, row in zip(part.steps.tolist(), part.values, strict=True)}
    return found


def whole(folder: RunFolder) -> Keyed:
    return keyed(folder.rows().rows, [part for tier in TIERS for part in folder.statistics.read(tier)[0]])


def assert_equal(found: Keyed, expected: Keyed) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert str(found[key]) == str(value)  # the text, because NaN does not equal itself


@pytest.mark.parametrize("seed", range(8))
def test_each_row_is_read_once(seed: int, record: dict[str, bytes], tmp_path: Path) -> None:
    """A reading may find the half of a row, or nothing new."""
    folder, found, number = empty_folder(record, tmp_path), Keyed(), 0
    added = AddedRecord(folder)
    assert keyed(*added.read()) == {}
    choose = random.Random(seed)
    for share in [0.0, *sorted(choose.random() for _ in range(12)), 1.0, 1.0]:
        write(folder, record, share)
        new = keyed(*added.read())
        found |= new
        number += len(new)
    assert_equal(found, whole(folder))
    assert number == len(found) > 30
    assert sum(name.endswith(".bin") for name in record) == 3


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("rewritten", [0.4, 0.9, 1.0])
def test_rows_that_are_written_again_are_read_again(
    kept: float, rewritten: float, record: dict[str, bytes], tmp_path: Path
) -> None:
    """A resumed run writes the same rows, but for the times, which may have more digits."""
    folder = empty_folder(record, tmp_path)
    added = AddedRecord(folder)
    write(folder, record, 0.8)
    found = keyed(*added.read())
    lines = record["metrics.jsonl"].splitlines(keepends=True)
    first = round(kept * len(lines))
    again = [line.replace(b'"seconds":', b'"seconds":1') for line in lines[first:]]
    write(folder, record | {"metrics.jsonl": b"".join([*lines[:first], *again])}, rewritten)
    found |= keyed(*added.read())
    expected = whole(folder)
    assert len(expected) > 8
    assert_equal({key: found[key] for key in expected}, expected)


def test_damaged_rows_are_left_out(record: dict[str, bytes], tmp_path: Path) -> None:
    folder = empty_folder(record, tmp_path)
    write(folder, record, 1.0)
    number = len(whole(folder))
    metrics, statistics = folder.metrics_path, folder.statistics.path / "core.bin"
    lines = metrics.read_bytes().splitlines(keepends=True)
    lines[2:4] = [b'{"kind":"train","loss":1}\n', b'{"kind":\n']
    metrics.write_bytes(b"".join(lines))
    content = bytearray(statistics.read_bytes())
    content[10] ^= 1
    statistics.write_bytes(content)
    assert len(keyed(*AddedRecord(folder).read())) == number - 3
    rows = AddedRows(folder)
    rows.read()
    assert rows.damaged == 2
    metrics.write_bytes(b"".join(lines[:4]))  # as a resumed run does: its rows are read again, and counted once
    rows.read()
    assert rows.damaged == 2


def test_statistics_are_read_once_their_description_can_be(record: dict[str, bytes], tmp_path: Path) -> None:
    folder = empty_folder(record, tmp_path)
    write(folder, record, 1.0)
    description = folder.statistics.path / "core.json"
    description.write_bytes(description.read_bytes().replace(b"resid", b"other"))
    added = AddedRecord(folder)
    found = keyed(*added.read())
    assert len(found) > 20
    write(folder, record, 1.0)
    assert_equal(found | keyed(*added.read()), whole(folder))
