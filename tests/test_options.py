"""The limits of float options hold in float32."""

from __future__ import annotations

import dataclasses
import math
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


FLOATS = dict(float_options())


def is_accepted(field: dataclasses.Field[Any], value: float) -> bool:
    """Return whether `check` accepts a value of a float option."""
    part = dataclasses.make_dataclass("Part", [("x", "float", dataclasses.field(metadata=field.metadata))])
    try:
        check(part(x=value))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", FLOATS)
def test_a_float_option_is_valid_exactly_if_it_is_valid_in_float32(name: str) -> None:
    field = FLOATS[name]
    limits = {limit: field.metadata.get(limit) for limit in ("at_least", "above", "at_most", "below")}
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
        ["optim.clip=1e-50"],
        ["optim.lr=1e300"],
        ["optim.beta2=0.999999999"],
        ["placement=gpas", "norm.eps=1e-50"],
        ["placement=depth_scaled_sandwich", "placement.c_attn=1e-50"],
        ["model.positions=rope", "model.rope_theta=1e-300"],
    ],
)
def test_a_run_rejects_what_is_zero_or_infinite_in_float32(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        compose_run(overrides)
    assert str(raised.value).startswith(overrides[-1].partition("=")[0] + "=")
    assert "float32" in str(raised.value) or "at least" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_error_claims_no_float32_computation_for_every_option() -> None:
    with pytest.raises(ConfigError, match=r"^data\.val_fraction=1e-40: is outside the range of float32; choose a size"):
        compose_run(["data.val_fraction=1e-40"])


@pytest.mark.parametrize("theta", [1.0, 3.4e38])
def test_rotary_angles_are_finite_at_the_limits_of_theta(theta: float) -> None:
    from normlab.model.attention import rotate

    rotated = rotate(torch.ones(1, 128, 64), theta)
    assert rotated.isfinite().all()
    assert math.isclose(float(rotated.square().sum()), 128 * 64, rel_tol=1e-4)
