"""The page of a sweep of 36 runs."""

from pathlib import Path

import pytest
from synthetic_runs import write_sweep

from support.compare_pages import grid, normlab


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> Path:
    """Return the path of the page; the results folder is beside it."""
    folder = tmp_path_factory.mktemp("page")
    write_sweep(folder, "two norms", grid())
    path = folder / "page.html"
    assert normlab("compare", str(folder / "sweeps" / "two norms"), "-o", str(path)).splitlines()[-1] == str(path)
    return path
