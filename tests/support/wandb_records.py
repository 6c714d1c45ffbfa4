"""Records of runs from what W&B has of them: the inverse of `normlab sync`, without statistics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normlab.store.format import RUN_FILE, RUNS_FOLDER, STATUS_FILE, decode, to_json, with_checksum
from normlab.store.runs import RunFolder
from normlab.tracking.payloads import ROW_KEYS


def write_record(run: Mapping[str, Any], results: Path) -> None:
    """Write the folder of one run, with `config`, `summary` and `history` as W&B's public API returns them."""
    config = {key: value for key, value in run["config"].items() if key not in ("record", "_wandb")}
    record = {**run["config"]["record"]}
    record["config"] = config | record.pop("unresolved")
    folder = RunFolder(results / RUNS_FOLDER / record["run_id"])
    folder.path.mkdir(parents=True)
    (folder.path / RUN_FILE).write_bytes(with_checksum(record))
    (folder.path / STATUS_FILE).write_bytes(with_checksum(decode(run["summary"]["status"])))
    rows = []
    for sent in sorted(run["history"], key=lambda row: row["_step"]):
        for kind, names in ROW_KEYS.items():
            # W&B has NaN and infinity as text.
            numbers = {key: float(sent[name]) for key, name in names.items() if name in sent}
            if numbers:
                rows.append({"kind": kind, "step": sent["_step"], **numbers})
    folder.metrics_path.write_bytes(b"".join(map(to_json, rows)))
