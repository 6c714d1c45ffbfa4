"""The limits of float options hold in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from normlab.config.compose import compose_run
from normlab.config.corpora import DATA
from normlab.config.optim import OPTIMIZERS
from normlab.config.schema import RunConfig
from normlab.config.sweep_options import SweepOptions
from normlab.errors import ConfigError
from normlab.norms.base import load_all as load_norms
from normlab.options import check, option_fields
from normlab.placements.base import load_all as load_placements

BOUNDS = ("at_least", "above", "at_most", "below")
EDGES = (1e-300, 1e-50, 1e-46, 1.2e-38, 1e-30, 0.99999, 0.999999999, 1 - 1e-16, 1.0, 1e30, 3.4e38, 3.5e38, 1e300)
"""Values at which float32 and float64 differ, and their neighbours."""


def float_options() -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yield the name and the field of each float option of the run, the sweep and every registry."""
    classes = {"": RunConfig, "sweep": SweepOptions}
    classes |= {f"norm={name}": norm for name, norm in load_norms().items()}
    classes |= {f"placement={name}": type(placement) for name, placement in load_placements().items()}
    classes |= {f"data={name}": data for name, data in DATA.items()}
    classes |= {f"optim={name}": optim for name, optim in OPTIMIZERS.items()}
    for owner, kind in classes.items():
        for name, field in option_fields(kind):
            if "float" in str(field.type):
                yield f"{owner} {name}".strip(), field


def is_accepted(field: dataclasses.Field[Any], value: float) -> bool:
    """Return whether `check` accepts a value of a float option."""
    part = dataclasses.make_dataclass("Part", [("x", "float", dataclasses.field(metadata=field.metadata))])
    try:
        check(part(x=value))
    except ConfigError:
        return False
    return True


LIMITS = {str([field.metadata.get(limit) for limit in BOUNDS]): field for _, field in float_options()}
"""A field for each combination of limits."""


@pytest.mark.parametrize("field", LIMITS.values(), ids=LIMITS)
def test_a_float_option_is_valid_exactly_if_it_is_valid_in_float32(field: dataclasses.Field[Any]) -> None:
    limits = {limit: field.metadata.get(limit) for limit in BOUNDS}
    accepted = {value: is_accepted(field, value) for edge in EDGES for value in (edge, -edge)}
    for value, result in accepted.items():
        rounded = torch.tensor(value, dtype=torch.float32)
        is_valid = bool(rounded.isfinite()) and rounded.abs() >= torch.finfo(torch.float32).tiny
        for number in (torch.tensor(value, dtype=torch.float64), rounded):
            at_least, above, at_most, below = (
                None if limit is None else torch.tensor(limit, dtype=number.dtype) for limit in limits.values()
            )
            is_valid &= at_least is None or bool(number >= at_least)
            is_valid &= above is None or bool(number > above)
            is_valid &= at_most is None or bool(number <= at_most)
            is_valid &= below is None or bool(number < below)
        assert result == is_valid, value
    assert not accepted[1e-50]
    assert is_accepted(field, 0.0) == (limits["above"] is None and (limits["at_least"] or 0) <= 0)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.eps=1e-50"],
        ["optim.lr=1e300"],
        ["optim.beta2=0.999999999"],
        ["placement=gpas", "norm.eps=1e-50"],
    ],
)
def test_a_run_rejects_what_is_zero_or_infinite_in_float32(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        compose_run(overrides)
    assert str(raised.value).startswith(overrides[-1].partition("=")[0] + "=")
    assert "float32" in str(raised.value) or "at least" in str(raised.value)
    assert "\n" not in str(raised.value)
