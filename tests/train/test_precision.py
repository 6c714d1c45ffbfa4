"""precision=tf32, as torch's compiler and the next run see it."""

from __future__ import annotations

import pytest
import torch

from normlab.errors import ConfigError
from normlab.training.machine import apply, resolve
from support.pretended_gpus import pretend_gpus
from support.small_steps import config_of


def test_tf32_is_on_for_one_run_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch)
    for precision in ("tf32", "fp32", "tf32", "bf16"):
        apply(resolve(config_of("device=cuda", "compile=off", f"precision={precision}")))
        is_on = precision == "tf32"
        # What torch's compiler reads; a product on a CPU stays as it is.
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if is_on else "ieee")
        assert torch.get_float32_matmul_precision() == ("high" if is_on else "highest")
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"  # pyright: ignore[reportAttributeAccessIssue]


def test_tf32_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^precision=tf32: a CPU has no TF32; use precision=fp32$"):
        resolve(config_of("device=cpu", "precision=tf32"))
    pretend_gpus(monkeypatch, major=(7,) * 4)
    with pytest.raises(ConfigError, match=r"^precision=tf32: 0 \(.*\) has no TF32; use precision=fp32$"):
        resolve(config_of("device=cuda", "precision=tf32"))
    assert resolve(config_of("device=cuda")).precision == "fp32"
