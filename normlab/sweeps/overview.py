"""The rows of `normlab list sweeps`."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from normlab.analysis.settings import format_setting
from normlab.base.errors import StoreError
from normlab.store.files import size_of
from normlab.store.format import PLAN_FILE
from normlab.store.plans import Plan, PlannedRun, read_plan, run_of, study_of
from normlab.store.query import NOT_STARTED, Folder, is_run, sweep_folders
from normlab.store.record import RunRecord, as_setting

MOST_VALUES = 6
"""The most values of an option that `varies` lists."""


def sweep_rows(results_dir: Folder) -> list[dict[str, Any]]:
    """Return a row for each sweep of a results folder, the newest last.

    The keys: `sweep` (its name), `varies` (the options that its overrides vary, with their values), `fixed` (the other
    overrides of all arms), `arms` (the overrides of each arm by its name), `study` (the name of the study to which it
    belongs, or empty), `runs`, `states` (the number of runs in each, by outcome where a run is completed), `date` (of
    the last change) and `bytes` (of its folder and of its runs, which other sweeps may share). A sweep whose plan
    cannot be read has the reason in `states`.
    """
    rows = [_row(folder) for folder in sweep_folders(results_dir)]
    return sorted(rows, key=lambda row: (row["date"], row["sweep"]))


def _row(folder: Path) -> dict[str, Any]:
    changed = (folder / PLAN_FILE).stat().st_mtime
    row: dict[str, Any] = {
        "sweep": folder.name, "varies": "", "fixed": "", "arms": {}, "study": "", "runs": None,
    }  # fmt: skip
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
        record = RunRecord.read(run)
        if isinstance(record, RunRecord):
            states[record.status.outcome or record.state] += 1
            changed = max(changed, record.status.updated or 0)
        else:
            states[record.state] += 1
    texts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    study = study_of(plan.notes)
    return row | {
        "varies": _varies(plan),
        "fixed": _fixed(plan),
        "arms": {arm: _set_by(arm, options, plan) for arm, options in plan.design.arms.items()},
        "study": study[0] if study is not None else "",
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
    texts: list[str] = []
    for option, values_of_option in values.items():
        texts.append(_override(option, list(values_of_option)))
    return " ".join(texts)


def _fixed(plan: Plan) -> str:
    """Return the overrides of all arms that the sweep does not vary; results_dir is that of the list."""
    left_out = {*plan.design.searched, "results_dir"}
    for run in plan.runs:
        left_out.update(override.partition("=")[0] for override in run.overrides)
    texts: list[str] = []
    for option in plan.design.shared:
        # An arm that sets the option, too, replaces the shared value.
        runs = [run for run in plan.runs if option not in plan.design.arms.get(run.arm, ())]
        if runs and option not in left_out:
            texts.append(_override(option, _values(runs, option)))
    return " ".join(texts)


def _set_by(arm: str, options: Sequence[str], plan: Plan) -> str:
    runs = [run for run in plan.runs if run.arm == arm]
    return " ".join(_override(option, _values(runs, option)) for option in options)


def _values(runs: Sequence[PlannedRun], option: str) -> list[str]:
    """Return the values of an option in the configs of runs; none for `recipe`, which is no part of a config."""
    values: dict[str, None] = {}
    for run in runs:
        value: Any = run.config
        for part in option.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        # The value of a config group, as norm=rmsnorm, is its preset, or its name where it has no preset.
        if isinstance(value, dict):
            value = value.get("preset") or value.get("name") or value
        if isinstance(value, list):
            text = f"[{','.join(map(str, value))}]"
        else:
            text = format_setting(as_setting(value))
        if option.partition(".")[0] in run.config:
            values[text] = None
    return list(values)


def _override(option: str, values: Sequence[str]) -> str:
    """Return an option and some of its values as on the command line; the option alone without values."""
    if not values:
        return option
    text = f"{option}={','.join(values[:MOST_VALUES])}"
    if len(values) > MOST_VALUES:
        text += ",..."
    return text


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "minutes")
