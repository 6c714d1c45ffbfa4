"""The rows of `normlab list sweeps`."""

from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

from normlab.errors import StoreError
from normlab.store.format import DAMAGED, PLAN_FILE
from normlab.store.plans import Plan, read_plan, run_of
from normlab.store.query import NOT_STARTED, Folder, is_run, sweep_folders
from normlab.sweeps.removal import size_of

MOST_VALUES = 6
"""The most values of an option that `varies` lists."""


def sweep_rows(results_dir: Folder) -> list[dict[str, Any]]:
    """Return a row for each sweep of a results folder, the newest last.

    The keys: `sweep` (its name), `varies` (the options that its overrides vary, with their values), `runs`, `states`
    (the number of runs in each, by outcome where a run is completed), `date` (of the last change) and `bytes` (of its
    folder and of its runs, which other sweeps may share). A sweep whose plan cannot be read has the reason in `states`.
    """
    rows = [_row(folder) for folder in sweep_folders(results_dir)]
    return sorted(rows, key=lambda row: (row["date"], row["sweep"]))


def _row(folder: Path) -> dict[str, Any]:
    changed = (folder / PLAN_FILE).stat().st_mtime
    row: dict[str, Any] = {"sweep": folder.name, "varies": "", "runs": None}
    try:
        plan = read_plan(folder)
    except StoreError as error:
        return row | {"states": str(error), "date": _date(changed), "bytes": size_of(folder)}
    states, size = Counter[str](), size_of(folder)
    for planned in plan.runs:
        run = run_of(folder, planned)
        if not is_run(run.path):
            states[NOT_STARTED] += 1
            continue
        size += size_of(run.path)
        try:
            state, status = run.state_and_status()
        except StoreError:
            states[DAMAGED] += 1
            continue
        states[status.outcome or state] += 1
        changed = max(changed, status.updated or 0)
    texts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return row | {
        "varies": _varies(plan),
        "runs": len(plan.runs),
        "states": texts,
        "date": _date(changed),
        "bytes": size,
    }


def _varies(plan: Plan) -> str:
    values: dict[str, dict[str, None]] = {}
    for run in plan.runs:
        for override in run.overrides:
            option, _, value = override.partition("=")
            values.setdefault(option, {})[value] = None
    texts = []
    for option, own in values.items():
        more = ",..." if len(own) > MOST_VALUES else ""
        texts.append(f"{option}={','.join(list(own)[:MOST_VALUES])}{more}")
    return " ".join(texts)


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "minutes")
