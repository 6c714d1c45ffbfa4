"""Each row of the residual algebra against a reference formula, in float64.

The reference formulas call the model's own sub-layers and norms, and determine their order, inputs and factors. Every
norm has other gains and biases, so that no two can be exchanged unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normlab.model.gpt import GPT, Block
from normlab.placements.algebra import (
    AlgebraPlacement,
    EarlyPlacement,
    FirstBlockPlacement,
    Row,
    SubLayer,
)
from normlab.placements.base import PLACEMENTS
from normlab.placements.table import ROWS
from support.reference_blocks import (
    CONTEXT,
    DEPTH,
    WIDTH,
    assert_same,
    build_test_model,
    heads,
    register_placement_of,
    rope,
    row_of,
)

pytestmark = pytest.mark.usefixtures("registries")

BlockFormula = Callable[[Block, int, Tensor], Tensor]
"""The stream after block `layer` (counted from 1), from the stream before it."""


def assert_equals_formula(model: GPT, block_formula: BlockFormula, *, embedding_norm: bool, final_norm: bool) -> None:
    """The model's logits, and their gradients with respect to every parameter, are those of the formula."""

    def reference(tokens: Tensor) -> Tensor:
        x = model.embed.tokens.weight[tokens]
        if embedding_norm:
            assert model.embed.open is not None
            x = model.embed.open(x)
        for layer, block in enumerate(model.blocks, start=1):
            assert isinstance(block, Block)
            x = block_formula(block, layer, x)
        if final_norm:
            assert model.head.close is not None
            x = model.head.close(x)
        return x @ model.head.weight.T

    assert_same(model, reference)


def norm(block: Block, part: str, site: str) -> nn.Module:
    return block.wiring.get_submodule(f"{part}.norms.{site}")


def pre(block: Block, layer: int, x: Tensor) -> Tensor:
    x = x + block.attn(norm(block, "attn", "in")(x))
    return x + block.mlp(norm(block, "mlp", "in")(x))


def post(block: Block, layer: int, x: Tensor) -> Tensor:
    x = norm(block, "attn", "res")(x + block.attn(x))
    return norm(block, "mlp", "res")(x + block.mlp(x))


def peri(block: Block, layer: int, x: Tensor) -> Tensor:
    x = x + norm(block, "attn", "out")(block.attn(norm(block, "attn", "in")(x)))
    return x + norm(block, "mlp", "out")(block.mlp(norm(block, "mlp", "in")(x)))


def keel_same(block: Block, layer: int, x: Tensor) -> Tensor:
    alpha = len(("attn", "mlp")) * DEPTH
    x = norm(block, "attn", "res")(alpha * x + block.attn(norm(block, "attn", "in")(x)))
    return norm(block, "mlp", "res")(alpha * x + block.mlp(norm(block, "mlp", "in")(x)))


def keel(block: Block, layer: int, x: Tensor) -> Tensor:
    if layer > 1:
        return keel_same(block, layer, x)
    h = x + block.attn(norm(block, "attn", "in")(x))
    return norm(block, "mlp", "res")(h + block.mlp(norm(block, "mlp", "in")(h)))


def keel_pre(block: Block, layer: int, x: Tensor) -> Tensor:
    return pre(block, layer, x) if layer == 1 else keel_same(block, layer, x)


def res_post(block: Block, layer: int, x: Tensor) -> Tensor:
    x = x + norm(block, "attn", "out")(block.attn(x))
    return x + norm(block, "mlp", "out")(block.mlp(x))


def mix_ln(block: Block, layer: int, x: Tensor) -> Tensor:
    return post(block, layer, x) if layer <= math.floor(0.25 * DEPTH) else pre(block, layer, x)


def deepnorm(block: Block, layer: int, x: Tensor) -> Tensor:
    a = (2 * DEPTH) ** 0.25
    x = norm(block, "attn", "res")(a * x + block.attn(x))
    return norm(block, "mlp", "res")(a * x + block.mlp(x))


def lns(block: Block, layer: int, x: Tensor) -> Tensor:
    x = x + block.attn(norm(block, "attn", "in")(x) / math.sqrt(layer))
    return x + block.mlp(norm(block, "mlp", "in")(x) / math.sqrt(layer))


def scaled(block: Block, layer: int, x: Tensor) -> Tensor:
    x = x + block.wiring.attn.scale * block.attn(x)
    return x + block.wiring.mlp.scale * block.mlp(x)


def shared(block: Block, layer: int, x: Tensor) -> Tensor:
    x = x + block.wiring.attn.scale * block.attn(x)
    return x + block.wiring.attn.scale * block.mlp(x)


def layerscale(block: Block, layer: int, x: Tensor) -> Tensor:
    x = x + block.attn(norm(block, "attn", "in")(x)) @ torch.diag(block.wiring.attn.scale)
    return x + block.mlp(norm(block, "mlp", "in")(x)) @ torch.diag(block.wiring.mlp.scale)


def pre_post(block: Block, layer: int, x: Tensor) -> Tensor:
    x = norm(block, "attn", "res")(x + block.attn(norm(block, "attn", "in")(x)))
    return norm(block, "mlp", "res")(x + block.mlp(norm(block, "mlp", "in")(x)))


def attention(block: Block, x: Tensor, inner: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Attention written out; `inner` is what is done at a site inside it."""
    q, k, v = (inner(site, heads(block, x @ getattr(block.attn, site).weight.T)) for site in ("q", "k", "v"))
    scores = rope(q) @ rope(k).transpose(-1, -2) / math.sqrt(WIDTH / 2)
    future = torch.ones(CONTEXT, CONTEXT).triu(1).bool()
    mixed = torch.exp(scores.masked_fill(future, -torch.inf))
    mixed = mixed / mixed.sum(-1, keepdim=True) @ v
    return inner("attn_inner", torch.cat(list(mixed.unbind(1)), dim=-1)) @ block.attn.out.weight.T


def gated(block: Block, x: Tensor) -> Tensor:
    """The MLP's hidden activations."""
    gate, up = x @ block.mlp.gate.weight.T, x @ block.mlp.up.weight.T
    return gate / (1 + torch.exp(-gate)) * up


def at(block: Block, sites: tuple[str, ...]) -> Callable[[str, Tensor], Tensor]:
    """The norm of each of these sites, and nothing at the others."""
    return lambda site, x: block.attn.norms[site](x) if site in sites else x


def sub_ln(block: Block, layer: int, x: Tensor) -> Tensor:
    x = x + attention(block, norm(block, "attn", "in")(x), at(block, ("attn_inner",)))
    assert block.mlp.norm is not None
    return x + block.mlp.norm(gated(block, norm(block, "mlp", "in")(x))) @ block.mlp.down.weight.T


def hybridnorm(block: Block, layer: int, x: Tensor) -> Tensor:
    z = norm(block, "attn", "res")(x + attention(block, x, at(block, ("q", "k", "v"))))
    return z + gated(block, z) @ block.mlp.down.weight.T


def hybridnorm_star(block: Block, layer: int, x: Tensor) -> Tensor:
    if layer > 1:
        return hybridnorm(block, layer, x)
    x = x + attention(block, norm(block, "attn", "in")(x), at(block, ("q", "k", "v")))
    return x + gated(block, norm(block, "mlp", "in")(x)) @ block.mlp.down.weight.T


def normformer(block: Block, layer: int, x: Tensor) -> Tensor:
    assert block.attn.head_scale is not None
    gain = block.attn.head_scale.repeat_interleave(WIDTH // 2)
    branch = attention(block, norm(block, "attn", "in")(x), lambda site, x: x * gain if site == "attn_inner" else x)
    x = x + norm(block, "attn", "out")(branch)
    assert block.mlp.norm is not None
    return x + block.mlp.norm(gated(block, norm(block, "mlp", "in")(x))) @ block.mlp.down.weight.T


BLOCK_FORMULAS: dict[str, tuple[BlockFormula, bool, bool]] = {
    # By name: one block, whether the embeddings are normed, whether the head's input is.
    "pre": (pre, False, True),
    "post": (post, False, False),
    "peri": (peri, False, True),
    "sandwich": (peri, False, True),
    "depth_scaled_sandwich": (peri, False, True),
    "res_post": (res_post, False, True),
    "mix_ln": (mix_ln, False, True),
    "deepnorm": (deepnorm, False, False),
    "keel": (keel, False, False),
    "lns": (lns, False, True),
    "skipinit": (scaled, False, False),
    "rezero": (shared, False, False),
    "layerscale": (layerscale, False, True),
    "pre_post": (pre_post, False, False),
    "sub_ln": (sub_ln, False, True),
    "hybridnorm": (hybridnorm, False, True),
    "hybridnorm_star": (hybridnorm_star, False, True),
    "normformer": (normformer, False, True),
}


def test_every_row_has_a_reference_formula() -> None:
    assert {row.name for row in ROWS} == set(BLOCK_FORMULAS)


@pytest.mark.parametrize("name", BLOCK_FORMULAS)
def test_row_equals_its_formula(name: str) -> None:
    block_formula, embedding_norm, final_norm = BLOCK_FORMULAS[name]
    placement = PLACEMENTS[name]
    assert isinstance(placement, AlgebraPlacement)
    model = build_test_model(placement)
    assert (model.embed.open is not None, model.head.close is not None) == (embedding_norm, final_norm)
    assert_equals_formula(model, block_formula, embedding_norm=embedding_norm, final_norm=final_norm)


def exchanged(block: Block, layer: int, x: Tensor) -> Tensor:
    """Pre-norm in which each sub-layer reads the norm of the other."""
    x = x + block.attn(norm(block, "mlp", "in")(x))
    return x + block.mlp(norm(block, "attn", "in")(x))


def between(block: Block, layer: int, x: Tensor) -> Tensor:
    """Pre-norm in which the MLP reads the stream from before attention."""
    return x + block.attn(norm(block, "attn", "in")(x)) + block.mlp(norm(block, "mlp", "in")(x))


@pytest.mark.parametrize("wrong", [exchanged, between], ids=lambda wrong: wrong.__name__)
def test_the_comparison_can_fail(wrong: BlockFormula) -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_equals_formula(
            build_test_model(AlgebraPlacement(name="pre")), wrong, embedding_norm=False, final_norm=True
        )


def everything(block: Block, layer: int, x: Tensor) -> Tensor:
    """All three norms and factors, the sub-layers unlike one another."""
    branch = block.attn(norm(block, "attn", "in")(x) / (layer + 1.5))
    x = norm(block, "attn", "res")(0.5**layer * x + layer / DEPTH * norm(block, "attn", "out")(branch))
    branch = block.mlp(norm(block, "mlp", "in")(x) / (DEPTH - layer + 2))
    return norm(block, "mlp", "res")((1 + 0.1 * layer) * x - 0.7 * norm(block, "mlp", "out")(branch))


def mixed(block: Block, layer: int, x: Tensor) -> Tensor:
    """Attention sandwiched, the MLP bare."""
    x = x + norm(block, "attn", "out")(block.attn(norm(block, "attn", "in")(x)))
    return x + block.mlp(x) / math.sqrt(2 * DEPTH)


SCHEDULED: dict[str, tuple[BlockFormula, Row]] = {
    "everything": (
        everything,
        row_of(
            attn=SubLayer(
                norms=("in", "out", "res"),
                skip=lambda layer, depth: 0.5**layer,
                branch=lambda layer, depth: layer / depth,
                shrink=lambda layer, depth: layer + 1.5,
            ),
            mlp=SubLayer(
                norms=("in", "out", "res"),
                skip=lambda layer, depth: 1 + 0.1 * layer,
                branch=lambda layer, depth: -0.7,
                shrink=lambda layer, depth: depth - layer + 2,
            ),
        ),
    ),
    "mixed": (
        mixed,
        row_of(
            attn=SubLayer(norms=("in", "out")),
            mlp=SubLayer(branch=lambda layer, depth: 1 / math.sqrt(2 * depth)),
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_equal_their_formulas(name: str) -> None:
    block_formula, row = SCHEDULED[name]
    assert_equals_formula(
        build_test_model(register_placement_of(row)), block_formula, embedding_norm=False, final_norm=False
    )


@pytest.mark.parametrize("embedding_norm", [False, True], ids=["", "embedding_norm"])
@pytest.mark.parametrize("final_norm", [False, True], ids=["", "final_norm"])
def test_switches_turn_the_norms_at_the_ends_on_and_off(embedding_norm: bool, final_norm: bool) -> None:
    placement = register_placement_of(
        row_of(
            attn=SubLayer(norms=("in",)),
            mlp=SubLayer(norms=("in",)),
            embedding_norm=embedding_norm,
            final_norm=final_norm,
        )
    )
    model = build_test_model(placement)
    assert (model.embed.open is not None, model.head.close is not None) == (embedding_norm, final_norm)
    assert_equals_formula(model, pre, embedding_norm=embedding_norm, final_norm=final_norm)


def test_config_overrides_the_switches_of_the_row() -> None:
    model = build_test_model(AlgebraPlacement(name="pre", embedding_norm=True, final_norm=False))
    assert_equals_formula(model, pre, embedding_norm=True, final_norm=False)
    assert_equals_formula(
        build_test_model(AlgebraPlacement(name="post", final_norm=True)), post, embedding_norm=False, final_norm=True
    )


@pytest.mark.parametrize(("first_block", "reference"), [("pre", keel_pre), ("same", keel_same)])
def test_variants_of_the_first_block_equal_their_formulas(first_block: str, reference: BlockFormula) -> None:
    model = build_test_model(FirstBlockPlacement(name="keel", first_block=first_block))
    assert_equals_formula(model, reference, embedding_norm=False, final_norm=False)


def test_model_has_the_configured_early_blocks() -> None:
    def reference(block: Block, layer: int, x: Tensor) -> Tensor:
        return post(block, layer, x) if layer <= 2 else pre(block, layer, x)

    assert_equals_formula(
        build_test_model(EarlyPlacement(name="mix_ln", early_blocks=2)),
        reference,
        embedding_norm=False,
        final_norm=True,
    )


def inner(block: Block, layer: int, x: Tensor) -> Tensor:
    """x <- x + A(x), x <- x + M(x), with a norm at each site inside."""
    x = x + attention(block, x, at(block, ("q", "k", "v", "attn_inner")))
    assert block.mlp.norm is not None
    return x + block.mlp.norm(gated(block, x)) @ block.mlp.down.weight.T


def test_norms_inside_sub_layers_are_at_their_sites() -> None:
    row = row_of(attn=SubLayer(norms=("q", "k", "v", "attn_inner")), mlp=SubLayer(norms=("mlp_inner",)))
    assert_equals_formula(build_test_model(register_placement_of(row)), inner, embedding_norm=False, final_norm=False)
