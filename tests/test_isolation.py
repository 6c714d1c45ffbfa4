"""No test reads the working folder, results, cache or home of the user who starts the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from normlab.paths import cache_dir


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working folder of a fixture that several tests share."""
    return Path.cwd()


def test_a_test_runs_in_its_own_folder(tmp_path: Path) -> None:
    assert Path.cwd() == tmp_path
    assert os.listdir() == []


def test_folders_of_the_user_are_not_reached(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = [Path.cwd(), shared_folder, cache_dir(), Path.home()]
    assert [folder for folder in folders if not folder.is_relative_to(tmp_path_factory.getbasetemp())] == []
