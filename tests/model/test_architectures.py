"""The model against decoders of transformers: one row of `support.architectures` for each design of the norms.

With the same random weights, gains and biases, both models must give the same logits, and the same gradient of the loss
with respect to each parameter, in float64.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.func import functional_call

from normlab.catalogue.placements.base import load_all
from normlab.config.model import ModelConfig
from normlab.model.gpt import GPT
from support.architectures import ARCHITECTURES
from support.architectures.architecture import DEPTH, ROTATION, STEPS, TERMS, Architecture, Combined, Tensors, joined
from support.tolerance import assert_equal, float32_as_float64
from support.transformers_models import VOCAB, assert_equal_gradients, config_of, randomised

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


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """Return the options that most configs of transformers have."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "max_position_embeddings": config.context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROTATION,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def translated(row: Architecture, ours: Tensors, names: set[str]) -> Tensors:
    """Return the parameters of transformers, combined from ours; those without a counterpart are left out."""

    def of(module: str, leaf: str) -> Tensor | None:
        affine = {"weight": "gain", "bias": "bias"}[leaf]
        names = [f"{module}.{leaf}", f"{module}.affine.{affine}"]
        if leaf == "weight":
            names.append(module)
        return next((ours[name] for name in names if name in ours), None)

    places = [("", "", row.model_weights)]
    places += [(f"blocks.{layer}.", row.block_prefix.format(layer), row.block_weights) for layer in range(DEPTH)]
    theirs = {}
    for prefix, their_prefix, weights in places:
        for name, part in weights.items():
            source = part if isinstance(part, Combined) else joined(part)
            for leaf in ("weight", "bias"):
                parts = [tensor for module in source.modules if (tensor := of(prefix + module, leaf)) is not None]
                if parts:
                    whole = their_prefix + name
                    theirs[whole if whole in names else f"{whole}.{leaf}"] = source.combine(*parts)
    return theirs


def test_every_placement_of_a_decoder_is_compared_with_one() -> None:
    overrides = {override for row in ARCHITECTURES for override in row.overrides.split()}
    held = {override.removeprefix("placement=") for override in overrides if override.startswith("placement=")}
    held |= {config_of(override).placement.name for override in overrides if override.startswith("recipe=")}
    shipped = {name for name, known in load_all().items() if type(known).__module__.startswith("normlab.")}
    assert not held & set(NO_DECODER_HAS)
    assert held | set(NO_DECODER_HAS) == shipped


def test_every_architecture_is_another_model_of_ours() -> None:
    assert len({frozenset(row.overrides.split()) for row in ARCHITECTURES}) == len(ARCHITECTURES)


def build_both(row: Architecture, monkeypatch: pytest.MonkeyPatch) -> tuple[GPT, nn.Module, Tensors, Tensors]:
    """Return both models, our parameters that the other model has too, and all parameters of the other model.

    Its parameters are functions of ours, and zero where ours have no counterpart.
    """
    if isinstance(row.transformers_class, str) and not hasattr(transformers, row.transformers_class):
        pytest.skip(f"transformers {transformers.__version__} has no {row.transformers_class}")
    config = config_of(f"model.depth={DEPTH}", *row.overrides.split())
    model = randomised(config, torch.float64)
    kind: Any = row.transformers_class
    if isinstance(kind, str):
        kind = getattr(transformers, kind)
    # Some configs change the values that they get.
    options = copy.deepcopy(shape_of(config.model) | row.config)
    other = kind(kind.config_class(**options)) if row.build is None else row.build(kind, options)
    other.eval()
    if row.patch is not None:
        row.patch(other, monkeypatch)

    ours = dict(model.named_parameters())
    for ending in row.zero_in_normlab:
        lacking = [name for name in ours if name.endswith(ending)]
        assert lacking
        for name in lacking:
            ours.pop(name).detach().zero_()
    theirs = dict(other.named_parameters())
    weights = translated(row, ours, set(theirs))
    assert weights.keys() <= theirs.keys()
    assert {name: value.shape for name, value in weights.items()} == {n: theirs[n].shape for n in weights}
    rest = theirs.keys() - weights.keys()
    assert [part for part in row.zero_in_transformers if not any(part in name for name in rest)] == []
    assert [name for name in rest if not any(part in name for part in row.zero_in_transformers)] == []
    return model, other, ours, weights | {name: torch.zeros_like(theirs[name]) for name in rest}


def both_logits(model: GPT, other: nn.Module, weights: Tensors, tokens: Tensor) -> tuple[Tensor, Tensor]:
    # Both logits are functions of our parameters.
    return model(tokens), functional_call(other, weights, (), {"input_ids": tokens, "use_cache": False}).logits


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float32_as_float64():
        yield


@pytest.mark.few(4)
@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.name)
def test_architecture_equals_our_model(row: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other, ours, weights = build_both(row, monkeypatch)
    tokens, targets = torch.randint(VOCAB, (2, 3, STEPS), generator=torch.Generator().manual_seed(2))
    logits, expected = both_logits(model, other, weights, tokens)
    # Logits near zero would compare nothing.
    assert logits.std() > row.least_logits
    assert_equal(logits, expected, terms=TERMS, layers=DEPTH + 1)

    def gradients(logits: Tensor) -> Tensors:
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        # A parameter that one of the models does not use is an error here.
        return dict(zip(ours, torch.autograd.grad(loss, list(ours.values())), strict=True))

    assert_equal_gradients(gradients(logits), gradients(expected), terms=TERMS, layers=DEPTH + 1)


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
