"""Rounding in one direction is found where every output is within one unit in the last place."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from normlab.catalogue.norms.rmsnorm import RMSNormConfig
from normlab.verify.signed_error import signed_error_check


class Rounded(nn.Module):
    """RMSNorm whose output is rounded to bfloat16 by a function."""

    def __init__(self, towards_zero: bool):
        super().__init__()
        self.towards_zero = towards_zero

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = nn.functional.rms_norm(x_BTD.double(), x_BTD.shape[-1:])
        if x_BTD.dtype != torch.bfloat16:
            return y_BTD.to(x_BTD.dtype)
        if not self.towards_zero:
            return y_BTD.bfloat16()
        bits = y_BTD.float().view(torch.int32) & -(2**16)  # drops the last 16 bits of the significand
        return bits.view(torch.float32).bfloat16()


@pytest.mark.parametrize("towards_zero", [False, True])
def test_rounding_towards_zero_is_found(monkeypatch: pytest.MonkeyPatch, towards_zero: bool) -> None:
    norm = RMSNormConfig(gain=False)
    monkeypatch.setattr(RMSNormConfig, "build", lambda self, width: Rounded(towards_zero))
    check = signed_error_check(norm, "norm", 16)
    assert check.passed != towards_zero, check
    if towards_zero:
        assert "in bfloat16" in check.result
        assert "found -" in check.result


def test_the_error_is_that_of_the_module_with_its_options() -> None:
    for norm in (RMSNormConfig(), dataclasses.replace(RMSNormConfig(), unit_offset=True)):
        assert signed_error_check(norm, "norm", 16).passed
