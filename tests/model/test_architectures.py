"""The model against decoders of transformers: one row of `support.architectures` for each design of the norms.

With the same random weights, gains and biases, both models must give the same logits, and the same gradient of the loss
with respect to each parameter, in float64.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from normlab.catalogue.placements.base import load_all
from support.architectures import ARCHITECTURES
from support.architectures.architecture import DEPTH, STEPS, TERMS, Architecture
from support.architectures.comparison import both_logits, build_both, results_of_both
from support.tolerance import assert_equal, float32_as_float64
from support.transformers_models import assert_equal_gradients, config_of

NO_DECODER_HAS = (
    "attn_res",
    "b2t",
    "deepnorm",
    "depth_scaled_sandwich",
    "gpas",
    "hybridnorm",
    "hybridnorm_star",
    "hyper_connections",
    "keel",
    "layerscale",
    "lns",
    "mhc",
    "mix_ln",
    "ngpt",
    "norm_preserving",
    "normformer",
    "peri_raw_attn",
    "pre_post",
    "resi_dual",
    "rezero",
    "siamese",
    "skipinit",
    "x0_lambdas",
)
"""Placements that no decoder of transformers has. Only its models of images and sound have LayerScale, and the one with
mhc has other attention: tests/placements/test_streams.py compares its streams."""


def test_every_placement_of_a_decoder_is_compared_with_one() -> None:
    overrides = {override for row in ARCHITECTURES for override in row.overrides.split()}
    held = {override.removeprefix("placement=") for override in overrides if override.startswith("placement=")}
    held |= {config_of(override).placement.name for override in overrides if override.startswith("recipe=")}
    shipped = {name for name, known in load_all().items() if type(known).__module__.startswith("normlab.")}
    assert not held & set(NO_DECODER_HAS)
    assert held | set(NO_DECODER_HAS) == shipped


def test_every_architecture_is_another_model_of_ours() -> None:
    assert len({frozenset(row.overrides.split()) for row in ARCHITECTURES}) == len(ARCHITECTURES)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float32_as_float64():
        yield


@pytest.mark.few(4)
@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_architecture_equals_our_model(row: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = results_of_both(row, monkeypatch)
    # Logits near zero would compare nothing.
    assert ours.logits.std() > row.least_logits
    assert_equal(ours.logits, theirs.logits, terms=TERMS, layers=DEPTH + 1)
    assert_equal_gradients(ours.gradients, theirs.gradients, terms=TERMS, layers=DEPTH + 1)


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("Gemma 2", "norm.eps=1.001e-6"),
        ("Granite", "placement.branch_factor=0.22001"),
        ("OLMo", "norm.eps=1.001e-5"),
        ("Helium", "model.rope_theta=9000"),
        ("Nemotron", "norm.unit_offset=false"),
        ("Qwen3.8-Flash-Next", "model.rope_theta=9990000"),
        ("Hy4, with one head and without latents and sinks", "placement.variant=marin"),
        ("ZAYA1", "norm.at.q.radius=2.83"),
    ],
)
def test_comparison_rejects_another_model(name: str, override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = [row for row in ARCHITECTURES if row.name == name]
    overrides = [known for known in row.overrides.split() if known.split("=")[0] != override.split("=")[0]]
    row = dataclasses.replace(row, overrides=" ".join([*overrides, override]))
    model, other, _, weights = build_both(row, monkeypatch)
    logits, expected = both_logits(model, other, weights, torch.arange(STEPS)[None])
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(logits, expected, terms=TERMS, layers=DEPTH + 1)
