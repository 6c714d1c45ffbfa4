"""The sweep of 36 runs, its comparison page, and the tables of `normlab summarize`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import write_sweep

from support.compare_pages import BY, grid, normlab


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    write_sweep(folder, "two norms", grid())
    return folder


@pytest.fixture(scope="session")
def sweep(results) -> Path:
    return results / "sweeps" / "two norms"


@pytest.fixture(scope="session")
def path(sweep, tmp_path_factory) -> Path:
    """Return the path of the page."""
    path = tmp_path_factory.mktemp("page") / "page.html"
    assert normlab("compare", str(sweep), "-o", str(path)).splitlines()[-1] == str(path)
    return path


@pytest.fixture(scope="session")
def cells(sweep) -> list[dict[str, Any]]:
    """Return the cells of `summarize`."""
    return json.loads(normlab("summarize", str(sweep), "--by", BY, "--format", "json"))


@pytest.fixture(scope="session")
def runs(sweep) -> list[dict[str, Any]]:
    """Return the runs of `summarize`."""
    return json.loads(normlab("summarize", str(sweep), "--runs", "--format", "json"))
