"""A file that another normlab wrote is refused in one line, which names the file and says what to do."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_runs import Record, write_sweep

from normlab.base.errors import StoreError
from normlab.store.format import CHECKS_FILE, RECORD_VERSION, with_checksum, without_checksum
from normlab.store.plans import read_plan
from normlab.store.reading import read_record
from normlab.store.runs import RunFolder
from normlab.studies.base import STUDIES, load_studies
from normlab.studies.report import read_report
from normlab.sweeps.files import read_queue, slurm_folder, write_queue
from normlab.training import checkpoint

Command = Callable[..., tuple[int, str, str]]
READERS: dict[str, Callable[[RunFolder, Path], Any]] = {
    "run.json": lambda run, sweep: run.run(),
    "status.json": lambda run, sweep: run.status(),
    "manifest.json": lambda run, sweep: checkpoint.read_newest(run.path / checkpoint.FOLDER),
    CHECKS_FILE: lambda run, sweep: read_record(sweep / CHECKS_FILE),
    "plan.json": lambda run, sweep: read_plan(sweep),
    "queue.json": lambda run, sweep: read_queue(sweep),
    "report.json": lambda run, sweep: read_report(STUDIES["noise"], sweep),
}
OLDER, NEWER = RECORD_VERSION - 1, RECORD_VERSION + 1
ADVICE = {
    OLDER: f"was written by an older normlab (format {OLDER}); move its folder away and train again, or check out the "
    "normlab that wrote it",
    NEWER: f"was written by a newer normlab (format {NEWER}); update normlab",
}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Write a sweep of one run with a file of each kind, and return its folder."""
    load_studies()
    sweep = write_sweep(tmp_path, "mine", [Record(steps=20)])
    run = folder_of(sweep).path
    checkpoint.save(run / checkpoint.FOLDER, 20, {"x": torch.zeros(4)}, {})
    (sweep / CHECKS_FILE).write_bytes(with_checksum({"checks": 3, "failed": []}))
    (sweep / "report.json").write_bytes(with_checksum({"study": "noise"}))
    slurm_folder(sweep).mkdir()
    write_queue(sweep, {0: "1_0"})
    return sweep


def folder_of(sweep: Path) -> RunFolder:
    (path,) = (sweep.parent.parent / "runs").iterdir()
    return RunFolder(path)


def rewrite(sweep: Path, name: str, version: int) -> Path:
    """Give the only file of this name another format."""
    (path,) = sweep.parent.parent.rglob(name)
    path.write_bytes(with_checksum(json.loads(without_checksum(path.read_bytes())), version))
    return path


def test_a_file_with_the_checksum_of_format_3_is_refused_as_older(sweep: Path) -> None:
    path = folder_of(sweep).path / "run.json"
    record = json.loads(without_checksum(path.read_bytes())) | {"version": 3}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(record | {"sha256": digest}, indent=2) + "\n")
    with pytest.raises(StoreError, match=r"was written by an older normlab \(format 3\); move its folder away"):
        folder_of(sweep).run()


@pytest.mark.parametrize("version", ADVICE)
@pytest.mark.parametrize("name", READERS)
def test_each_kind_of_file_of_another_format_is_refused(name: str, version: int, sweep: Path) -> None:
    path = rewrite(sweep, name, version)
    with pytest.raises(StoreError, match=f"^{re.escape(f'{path}: {ADVICE[version]}')}$"):
        READERS[name](folder_of(sweep), sweep)


def test_a_command_prints_one_line(sweep: Path, run_command: Command) -> None:
    run = folder_of(sweep)
    expected = f"{rewrite(sweep, 'run.json', OLDER)}: {ADVICE[OLDER]}"
    for command in ("inspect", "sample"):
        assert run_command(command, str(run.path)) == (2, "", f"error: {expected}\n")
    code, out, _ = run_command("summarize", str(run.path), "--format", "json")
    assert (code, [(row["state"], row["note"]) for row in json.loads(out)]) == (0, [("damaged", expected)])
