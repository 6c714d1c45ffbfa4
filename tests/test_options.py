"""A float option is rejected if it leaves its limits in float32, and a text that a table cannot show."""

import pytest

from normlab.base.errors import ConfigError
from normlab.config.compose import compose_run


@pytest.mark.parametrize(
    "overrides",
    [["optim.eps=1e-50"], ["optim.lr=1e300"], ["optim.beta2=0.999999999"], ["placement=gpas", "norm.eps=1e-50"]],
)
def test_a_run_rejects_what_leaves_the_limits_in_float32(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        compose_run(overrides)
    assert str(raised.value).startswith(overrides[-1].partition("=")[0] + "=")
    assert "float32" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["' '", "'a\u200bb'", "a" * 129])
def test_a_name_that_is_empty_long_or_not_printable_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="must be a printable text of 1 to 128 characters"):
        compose_run([f"run.name={name}"])
