import pytest

from normlab.catalogue.placements import algebra, base
from support.reference_blocks import composed


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the rows that a test registers."""
    composed()  # before them, because Hydra's store forgets nothing
    monkeypatch.setattr(base, "PLACEMENTS", dict(base.PLACEMENTS))
    monkeypatch.setattr(algebra, "ROWS_BY_NAME", dict(algebra.ROWS_BY_NAME))
