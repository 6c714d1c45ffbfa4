"""Each norm has the defaults of its source."""

from collections.abc import Iterator
from typing import Any

import pytest

from normlab.catalogue.norms.base import NORMS, load_all
from normlab.verify.check import Check
from normlab.verify.variants import option_fields, other_values
from support.norm_defaults import DEFAULTS, default_check


def failed(checks: Iterator[Check]) -> list[str]:
    return [f"{check.claim}: {check.result}" for check in checks if not check.passed]


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_wrong_default_fails_the_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = load_all()[name]
    assert failed(default_check(name)) == []
    for field in option_fields(kind()):
        other = next(other_values(kind(), field, 16), None)
        if other is None:
            continue
        with monkeypatch.context() as patch:
            patch.setitem(kind.__init__.__kwdefaults__, field.name, getattr(other, field.name))
            (check,) = default_check(name)
            assert not check.passed, field.name
            assert f", found {field.name}={getattr(other, field.name)}" in check.result


def test_the_table_of_defaults_has_every_norm_of_the_package() -> None:
    load_all()
    assert set(DEFAULTS) == {name for name, kind in NORMS.items() if kind.__module__.startswith("normlab.")}
