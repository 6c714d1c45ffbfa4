"""No forward pass of the package draws random numbers; one of a plugin draws the same ones after a resume."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from normlab.base.source_text import code_of
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.config.compose import compose_run
from normlab.model.small import build_small, shrink, tokens
from support.run_folders import Train, differences
from support.small_steps import norm_in

NORMS = [name for name, norm in load_norms().items() if norm.__module__.startswith("normlab.")]
PLACEMENTS = [name for name, entry in load_placements().items() if type(entry).__module__.startswith("normlab.")]
DRAWING = """
from dataclasses import dataclass
import torch
from torch import nn
from normlab.catalogue.norms.base import NormConfig, register_norm

class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x) if self.training else x

@register_norm
@dataclass(kw_only=True, slots=True)
class NoiseConfig(NormConfig):
    formula = "x + noise"
    name: str = "noise"

    def build(self, width):
        return Noise()
"""


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("norm", "placement"), [*((name, "pre") for name in NORMS), *(("rmsnorm", name) for name in PLACEMENTS)]
)
def test_forward_pass_draws_no_random_numbers(norm: str, placement: str) -> None:
    config = compose_run([norm_in(placement, norm), f"placement={placement}"])
    model = build_small(shrink(config)).gpt.train()
    before = torch.get_rng_state()
    model(tokens())
    assert torch.equal(torch.get_rng_state(), before)


def test_plugin_that_draws_random_numbers_resumes_bit_identically(
    train: Train, interrupt: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "noise.py").write_text(DRAWING)
    options = (f"plugins=[{tmp_path}/noise.py]", "norm=noise")
    whole = train(*options, results="whole")
    interrupt(6)
    folder = train(*options)
    assert folder.state() == "interrupted"
    assert differences(whole.path, train(*options).path) == []
    (copy,) = (folder.path / "plugins").iterdir()
    assert copy.read_text() == DRAWING
    assert (
        folder.run()["identity"]["versions"]["norm"] == hashlib.sha256(code_of(copy.read_bytes()).encode()).hexdigest()
    )
