"""Cells that differ in a setting that no option shows, such as the init rule of `init=auto`: every report names it."""

import csv
import io
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from normlab.analysis.cell_differences import resolved_differences
from normlab.analysis.cells import group_cells
from normlab.store.run_json import Machine
from support.made_runs import record_of

INITS = {"pre": "gpt2_scaled", "peri": "gpt2"}
LINE = "the cells also differ in init: gpt2 (peri-LN), gpt2_scaled (pre-norm)"
PACK = {"runs": ["a", "b"]}


def differences(*runs: dict[str, Any], by: tuple[str, ...] = ("placement", "model.depth")) -> list[str]:
    """Return the differences of runs with these settings: `placement`, `depth`, `pack` and resolved settings."""
    results = []
    for run in runs:
        settings = {"placement": "pre", "depth": 2, "pack": {}} | run
        config = {"placement": {"name": settings.pop("placement")}, "model": {"depth": settings.pop("depth")}}
        unknown = dict.fromkeys(("device", "device_name", "threads", "instructions", "attention"))
        content = {"config": config, "pack": settings.pop("pack"), "resolved": unknown | settings}
        results.append(record_of(content))
    return resolved_differences(group_cells(results, by))


CASES: dict[str, tuple[Any, Any, str]] = {
    "init": ("gpt2", "xavier", "init: gpt2 (peri-LN), xavier (pre-norm)"),
    "decayed": ("matrices", "all parameters", "weight decay: matrices (peri-LN), all parameters (pre-norm)"),
    "compile": ("off", "on", "compile: off (peri-LN), on (pre-norm)"),
    "graph": ("off", "on", "CUDA graphs: off (peri-LN), on (pre-norm)"),
    "threads": (1, 16, "threads: 1 (peri-LN), 16 (pre-norm)"),
    "precision": ("fp32", "bf16", "precision: fp32 (peri-LN), bf16 (pre-norm)"),
    "pack": ({}, PACK, "pack size: 1 (peri-LN), 2 (pre-norm)"),
    "device": ("cpu", "cuda", "device: cpu (peri-LN), cuda (pre-norm)"),
    "device_name": ("H100", "H200", "device: H100 (peri-LN), H200 (pre-norm)"),
    "deterministic": (True, False, "deterministic: true (peri-LN), false (pre-norm)"),
    "devices": (1, 2, "devices: 1 (peri-LN), 2 (pre-norm)"),
    "instructions": ("AVX2", "AVX512", "instructions: AVX2 (peri-LN), AVX512 (pre-norm)"),
    "attention": ("eager", "flash_attention", "attention: eager (peri-LN), flash_attention (pre-norm)"),
}
"""The values of two placements, by the field of the record, and the text."""
NOT_COMPARED = {"device_uuid", "wait_policy"}
"""They say which device it was, and how fast; neither changes the numbers."""


@pytest.mark.parametrize("option", [*(each.name for each in fields(Machine) if each.name not in NOT_COMPARED), "pack"])
def test_each_resolved_setting_is_named(option: str) -> None:
    value, other, text = CASES[option]
    peri = {"placement": "peri", option: value}
    assert differences(peri, {"placement": "pre", option: other}) == [f"the cells also differ in {text}"]
    assert differences(peri, {**peri, "placement": "pre"}) == []


def test_the_init_comes_first_and_cells_are_named_by_the_option_that_decides() -> None:
    grid = [
        {"placement": placement, "depth": depth, "init": INITS[placement], "threads": depth}
        for placement in INITS
        for depth in (2, 4)
    ]
    assert differences(*grid) == [f"{LINE}; threads: 2 (depth 2), 4 (depth 4)"]
    grid[0]["init"] = "xavier"
    assert differences(*grid)[0].startswith(
        "the cells also differ in init: gpt2 (peri-LN, depth 2; peri-LN, depth 4), "
        "xavier (pre-norm, depth 2), gpt2_scaled (pre-norm, depth 4); threads:"
    )


def test_cells_whose_names_would_hide_the_values_are_counted() -> None:
    placements = ("pre", "peri", "post", "deepnorm", "keel")
    grid: list[dict[str, Any]] = []
    for index, placement in enumerate(placements):
        for depth in range(2, 2 + 2 * len(placements)):
            grid.append({"placement": placement, "depth": depth, "threads": 1 + (index + depth) % len(placements)})
    cells = ", ".join(f"{threads} (10 cells)" for threads in range(1, 6))
    assert differences(*grid) == [f"the cells also differ in threads: {cells}"]


def test_a_setting_that_also_differs_within_a_cell_is_named() -> None:
    runs = [{"placement": "pre", "threads": 1}, {"placement": "pre", "threads": 2}, {"placement": "peri", "threads": 1}]
    assert differences(*runs) == ["the cells also differ in threads: 1 (peri-LN), 1 and 2 (pre-norm)"]
    assert differences(*runs, {"placement": "peri", "threads": 2}) == []


def test_factors_and_unknown_settings_are_left_out() -> None:
    runs = [{"placement": placement, "init": init} for placement, init in INITS.items()]
    assert differences(*runs, by=("placement", "init")) == []
    runs = [{"placement": placement, "threads": threads} for threads, placement in enumerate(INITS, 1)]
    line = "the cells also differ in threads: 2 (peri-LN), 1 (pre-norm)"
    assert differences(*runs, {"placement": "post"}) == [line]
    assert differences(runs[0], {"placement": "post"}) == []


@pytest.fixture
def results(make_run, tmp_path: Path) -> Path:
    """A results folder with two runs of each placement, which the init rules of `INITS` were drawn by."""
    for placement, init in INITS.items():
        for seed in (0, 1):
            resolved = {"device": "cpu", "precision": "fp32", "init": init}
            make_run(f"{placement}{seed}", placement=placement, seed=seed, run={"resolved": resolved})
    return tmp_path


@pytest.mark.parametrize("test", [[], ["--test", "counts"]])
def test_every_format_of_a_table_has_the_line(test: list[str], results: Path, run_command) -> None:
    arguments = ["summarize", str(results), "--by", "placement", *test, "--format"]
    texts = {form: run_command(*arguments, form)[1] for form in ("table", "markdown", "latex", "json", "csv")}
    assert LINE in texts["table"].replace("\n  ", " ").split("\n")
    assert f"- {LINE}" in texts["markdown"].split("\n")
    assert f"% {LINE}" in texts["latex"].split("\n")
    assert all(row["resolved_differences"] == [LINE] for row in json.loads(texts["json"]))
    assert all(LINE in row["resolved_differences"] for row in csv.DictReader(io.StringIO(texts["csv"])))
