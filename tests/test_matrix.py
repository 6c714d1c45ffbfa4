"""scripts/prove/matrix.py: a pair is trained, and interrupted and resumed."""

import matrix
import pytest


@pytest.mark.few(1)
@pytest.mark.parametrize(("lr", "resumed"), [("1e30", False), ("1e-3", True)])
def test_a_pair_records_whether_it_was_resumed(lr: str, resumed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "OVERRIDES", [*(w for w in matrix.OVERRIDES if "optim" not in w), f"optim.lr={lr}"])
    cell = matrix.pair("none", "pre")
    assert (cell.error, cell.resumed) == ("", resumed)
    assert cell.text.startswith("diverged") is not resumed
