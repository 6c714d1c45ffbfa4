"""Init rules equal their closed forms, and each placement has the rule of its source."""

import dataclasses

import pytest

from normlab.catalogue.placements import algebra
from normlab.catalogue.placements.algebra import AlgebraPlacement
from normlab.catalogue.placements.base import load_all
from normlab.catalogue.placements.init_rules import INIT_RULES
from normlab.catalogue.placements.table import ROWS
from support.init_rule_forms import CLOSED_FORMS, INIT_OF_PLACEMENT, placement_init_check, rule_checks


@pytest.mark.parametrize("rule", CLOSED_FORMS)
def test_an_init_rule_equals_its_closed_form(rule: str) -> None:
    (check,) = rule_checks(rule)
    assert check.passed, check.result


@pytest.mark.parametrize("name", INIT_OF_PLACEMENT)
def test_a_placement_has_the_init_rule_of_its_source(name: str) -> None:
    (check,) = placement_init_check(load_all()[name])
    assert check.passed, check.result


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("post", "gpt2"), ("sub_ln", "gpt2"), ("deepnorm", "xavier"), ("hybridnorm", "gpt2"), ("pre", "gpt2")],
)
def test_a_row_with_another_init_fails(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = load_all()[name]
    right = placement.init
    monkeypatch.setitem(algebra.ROWS_BY_NAME, name, dataclasses.replace(algebra.ROWS_BY_NAME[name], init=wrong))
    (check,) = placement_init_check(placement)
    assert (check.passed, check.reference_kind) == (False, "")
    assert check.result.startswith(f"expected {right}, found {wrong} (")


def test_the_tables_have_every_rule_and_placement_of_the_package() -> None:
    assert set(CLOSED_FORMS) == {name for name in INIT_RULES if INIT_RULES[name].std.__module__.startswith("normlab.")}
    own_wiring = [placement for placement in load_all().values() if not isinstance(placement, AlgebraPlacement)]
    ours = {placement.name for placement in own_wiring if type(placement).__module__.startswith("normlab.")}
    assert {row.name for row in ROWS} | ours == INIT_OF_PLACEMENT.keys()
    assert all(load_all()[name].init_source for name in INIT_OF_PLACEMENT)
