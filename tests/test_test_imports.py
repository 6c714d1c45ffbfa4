"""No test module imports another or a private name of normlab, and none reaches the folders of the user."""

import re
from pathlib import Path

import pytest

from normlab.base.paths import cache_dir

TESTS = Path(__file__).parent
HABITS = re.compile(
    r"from normlab[\w.]* import [^\n]*\b_[a-z]|^\s*(?:from|import) [\w.]*\b(?:test_\w+|conftest)\b|"
    r"setattr\([a-z.]+, \"_[a-z]|\bnormlab[\w.]*\._[a-z]",
    re.MULTILINE,
)


def test_tests_use_no_private_name_and_no_other_test_module() -> None:
    found = {path.name: HABITS.findall(path.read_text()) for path in TESTS.rglob("*.py") if path != Path(__file__)}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_folders_of_the_user_are_not_reached(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = [Path.cwd(), cache_dir(), Path.home()]
    assert [folder for folder in folders if not folder.is_relative_to(tmp_path_factory.getbasetemp())] == []
