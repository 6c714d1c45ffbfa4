"""scripts/matrix.py: its arguments and its counts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from normlab.config.compose import register

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("matrix", SCRIPTS / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "matrix", module)
    spec.loader.exec_module(module)
    register()
    return module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "norm=dty", "placement=pre"], "--only norm=dty: unknown norm 'dty' (did you mean 'dyt'?)"),
        (["--only", "norm=dyt", "--write", "x.md"], "leave out --only or --write"),
    ],
)
def test_a_wrong_argument_is_refused(
    arguments: list[str],
    message: str,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["matrix.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert message in capsys.readouterr().err


def test_a_run_that_diverged_before_the_interruption_does_not_count_as_resumed(script: ModuleType) -> None:
    cell = script.Cell
    cells = [
        cell("3.1", resumed=True), cell("diverged at 3"), cell("diverged at 15", resumed=True), cell("-"),
        cell("failed", "OSError"), cell("3.2", "the records differ", resumed=True),
    ]  # fmt: skip
    assert script.summary(cells) == (
        "5 pairs trained 20 steps, 2 diverged, 1 refused; 2 resumed bit for bit, "
        "1 diverged before the interruption and again, 2 failed"
    )
