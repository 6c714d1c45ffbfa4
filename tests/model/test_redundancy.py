"""Norms that change nothing: by the identity of FlashNorm, and in no other placement."""

import pytest
import torch

from normlab.catalogue.placements.base import load_all
from normlab.config.compose import compose_run
from normlab.model.redundancy import without_redundant_norms
from normlab.model.small import build_small, shrink, tokens

ALL_NORMED = ("model.qk_norm=head", "model.v_norm=true")


def sites(*overrides: str) -> list[str]:
    return without_redundant_norms(compose_run(["model=llama_nano", "model.depth=3", *overrides]))[0]


@pytest.mark.parametrize("placement", ["pre", "peri"])
def test_the_norm_before_normed_queries_keys_and_values_changes_nothing(placement: str) -> None:
    assert sites("norm=rmsnorm", f"placement={placement}", *ALL_NORMED) == ["attn.in"]


def test_without_redundant_norms_two_placements_are_one_function() -> None:
    own, other = (
        without_redundant_norms(
            compose_run(["model=llama_nano", "norm=rmsnorm", f"placement={placement}", *ALL_NORMED])
        )
        for placement in ("peri", "peri_raw_attn")
    )
    assert (own[0], other[0]) == (["attn.in"], [])
    torch.testing.assert_close(own[1], other[1], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "overrides",
    [
        ("norm=rmsnorm", "placement=peri", "model.qk_norm=head"),  # the values of Gemma 3 have no norm
        ("norm=rmsnorm", "placement=pre", *ALL_NORMED, "model.bias=true"),
        ("norm=rmsnorm", "placement=pre", *ALL_NORMED, "model.attn_gate=head"),
        ("norm=layernorm", "placement=pre", *ALL_NORMED),  # the mean of its input does not cancel
        ("norm=dyt", "placement=pre", *ALL_NORMED),
        ("norm=none", "placement=pre"),
    ],
    ids=" ".join,
)
def test_other_norms_are_needed(overrides: tuple[str, ...]) -> None:
    assert sites(*overrides) == []


@pytest.mark.few(8)
@pytest.mark.parametrize("placement", [name for name, known in load_all().items() if known.has_norms(3)])
def test_which_placements_have_a_redundant_norm_of_their_own(placement: str) -> None:
    expected = {"hybridnorm_star": ["attn.in"]}  # that of its first block
    assert sites("norm=rmsnorm", f"placement={placement}") == expected.get(placement, [])


def test_the_identity() -> None:
    """RMSNorm, a linear layer without a bias and RMSNorm are the layer and RMSNorm, by torch."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((5, 8), (6, 8)))
    gain = torch.rand(8, generator=generator, dtype=torch.float64)

    def norm(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(y, y.shape[-1:], eps=1e-30)

    torch.testing.assert_close(norm((gain * norm(x)) @ weight.T), norm((gain * x) @ weight.T), atol=1e-13, rtol=1e-13)


@torch.no_grad()
def test_on_a_centred_stream_layernorm_is_rmsnorm() -> None:
    """Pre-LayerNorm is pre-RMSNorm if what is added to the stream has the mean 0 (Jiang et al., arXiv:2305.14858)."""
    overrides = ["model=llama_nano", "model.depth=3", "placement=pre", "norm.eps=1e-5"]
    layernorm, rmsnorm = (
        build_small(shrink(compose_run([*overrides, *norm]))).gpt
        for norm in (("norm=layernorm", "norm.bias=false"), ("norm=rmsnorm",))
    )
    assert (layernorm(tokens()) - rmsnorm(tokens())).abs().max() > 0.01
    for model in (layernorm, rmsnorm):
        for name, weight in model.named_parameters():
            if name.startswith("embed."):
                weight -= weight.mean(-1, keepdim=True)
            elif name.endswith(("attn.out.weight", "mlp.down.weight")):
                weight -= weight.mean(0)
    torch.testing.assert_close(layernorm(tokens()), rmsnorm(tokens()), atol=1e-12, rtol=0)
