"""Placements of several streams against public code, with the same sub-layers, norms and weights."""

import importlib.util
import math
import runpy
from collections.abc import Callable, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import hyper_connections
import pytest
import torch
from sympy.combinatorics import Permutation  # torch requires sympy
from sympy.matrices.expressions.permutation import PermutationMatrix
from torch import Tensor, nn
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead
from transformers.models.hy_v4.configuration_hy_v4 import HYV4Config
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Model
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextModel

from normlab.base.errors import ConfigError
from normlab.catalogue.norms.rmsnorm import RMSNormConfig
from normlab.catalogue.placements.attn_res import AttnRes
from normlab.catalogue.placements.gated_residual import GatedResidual
from normlab.catalogue.placements.hyper import HyperConnections
from normlab.catalogue.placements.identity_hc import IdentityHC
from normlab.catalogue.placements.mhc import ManifoldHC
from normlab.catalogue.placements.mixing import MIXINGS
from normlab.config.compose import compose_run
from normlab.model.gpt import GPT, Block
from normlab.model.small import build_small, small_config, tokens

NORM, EPS = RMSNormConfig(), 1e-6
TheirModel = Callable[[Tensor], Tensor]


def results(forward: TheirModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the logits, and the gradient of their weighted sum for each of our parameters."""
    logits_BTV = forward(tokens())
    weights_BTV = torch.linspace(-1, 1, logits_BTV.numel(), dtype=torch.float64).reshape(logits_BTV.shape)
    grads = torch.autograd.grad((logits_BTV * weights_BTV).sum(), list(parameters.values()))
    return {"logits": logits_BTV, **dict(zip(parameters, grads, strict=True))}


def rms_norm(gain_D: Tensor, x_BTD: Tensor) -> Tensor:
    return nn.functional.rms_norm(x_BTD, x_BTD.shape[-1:], gain_D, NORM.eps)


def embedded(model: GPT, tokens_BT: Tensor) -> Tensor:
    assert model.embed.positions is not None
    return model.embed.tokens(tokens_BT) + model.embed.positions.weight[: tokens_BT.shape[1]]


def blocks_of(model: GPT) -> list[Any]:
    """Return the blocks, whose wiring and sub-layers have the types of the placement."""
    return list(model.blocks)


def close_of(model: GPT) -> Any:
    """Return the module that reads the stream before the LM head, of the placement's type."""
    return model.head.close


def sub_layers(model: GPT) -> list[tuple[Any, Callable[[Tensor], Tensor]]]:
    """Return the wiring of each sub-layer, and the function of the sub-layer after its norm."""
    found = []
    for block in model.blocks:
        assert isinstance(block, Block)
        for wiring, part in ((block.wiring.attn, lambda x, b=block: b.attn(x, {})), (block.wiring.mlp, block.mlp)):
            found.append((wiring, part))
    return found


def with_parameters(module: nn.Module, values: Mapping[str, Tensor], *inputs: Tensor) -> Any:
    """Call their module with our parameters."""
    return torch.func.functional_call(module, dict(values), inputs)


class Connection580(DeepseekV4HyperConnection):
    """As in transformers 5.8.0, which cannot be installed beside the present version; its caller does not transpose."""

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, sizes = self.hc_mult, (self.hc_mult, self.hc_mult, self.hc_mult**2)
        numbers = nn.functional.linear(self.input_norm(hidden_streams.flatten(2)), self.fn).split(sizes, -1)
        pre, post, comb = (
            torch.sigmoid(number * scale + base) + EPS
            for number, scale, base in zip(numbers, self.scale, self.base.split(sizes), strict=True)
        )
        comb = comb.unflatten(-1, (n, n))
        for axis in (-1, -2) * self.hc_sinkhorn_iters:
            comb = comb / (comb.sum(axis, keepdim=True) + EPS)
        return post, comb.mT, torch.einsum("btn,btnd->btd", pre, hidden_streams)


def permutation_matrices(streams: int) -> Tensor:
    """Return all permutation matrices in lexicographic order, as sympy makes them, (P, n, n)."""
    matrices: list[Tensor] = []
    for rank in range(math.factorial(streams)):
        matrix = PermutationMatrix(Permutation.unrank_lex(streams, rank)).as_explicit()
        matrices.append(torch.tensor(matrix.tolist(), dtype=torch.float64))
    return torch.stack(matrices)


def permuted(numbers_BTP: Tensor, streams: int = 4) -> Tensor:
    """Return c of mHC-lite, (B, T, n, n): a convex combination of permutation matrices."""
    return torch.einsum("btp,pij->btij", numbers_BTP.softmax(-1), permutation_matrices(streams))


def kronecker(numbers_BTm: Tensor) -> Tensor:
    """Return c of KromHC, (B, T, n, n): torch's Kronecker product of convex combinations of both 2 x 2 permutations."""
    kept, swapped = permutation_matrices(2)

    def of_token(numbers_m: Tensor) -> Tensor:
        product = torch.ones(1, 1, dtype=torch.float64)
        for pair in numbers_m.split(2):
            p, q = pair.softmax(0)
            product = torch.kron(product, p * kept + q * swapped)
        return product

    return torch.vmap(torch.vmap(of_token))(numbers_BTm)


class OtherComb(DeepseekV4HyperConnection):
    """DeepSeek-V4's connection with another comb, made from the numbers behind those of pre and post."""

    comb_of: Callable[[Tensor], Tensor]

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        numbers = nn.functional.linear(self.input_norm(hidden_streams.flatten(2)), self.fn)
        (pre, post, comb), n = numbers.tensor_split((self.hc_mult, 2 * self.hc_mult), -1), self.hc_mult
        pre = torch.sigmoid(pre * self.scale[0] + self.base[:n]) + EPS
        post = 2 * torch.sigmoid(post * self.scale[1] + self.base[n : 2 * n])
        comb = type(self).comb_of(comb * self.scale[2] + self.base[2 * n :])
        return post, comb, torch.einsum("btn,btnd->btd", pre, hidden_streams)


class PermutedComb(OtherComb):
    comb_of = staticmethod(permuted)


class KroneckerComb(OtherComb):
    comb_of = staticmethod(kronecker)


def deepseek_v4(
    model: GPT, iterations: int, kind: type[DeepseekV4HyperConnection] = DeepseekV4HyperConnection
) -> TheirModel:
    width = model.embed.tokens.embedding_dim
    config = DeepseekV4Config(hidden_size=width, hc_mult=4, hc_sinkhorn_iters=iterations, hc_eps=EPS, rms_norm_eps=EPS)
    connection, head = kind(config).double(), DeepseekV4HyperHead(config).double()

    def forward(tokens_BT: Tensor) -> Tensor:
        x_BTnD = embedded(model, tokens_BT).unsqueeze(2).repeat(1, 1, 4, 1)
        for wiring, sub_layer in sub_layers(model):
            own = {"fn": wiring.fn.weight, "base": wiring.base, "scale": wiring.scale}
            post, comb, collapsed = with_parameters(connection, own, x_BTnD)
            y_BTD = sub_layer(rms_norm(wiring.norm.affine.gain, collapsed))
            x_BTnD = post.unsqueeze(-1) * y_BTD.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), x_BTnD)
        close = close_of(model)
        own = {"hc_fn": close.fn.weight, "hc_base": close.base, "hc_scale": close.scale}
        x_BTD = rms_norm(close.norm.affine.gain, with_parameters(head, own, x_BTnD))
        return nn.functional.linear(x_BTD, model.head.weight)

    return forward


class Part(nn.Module):
    """Our function in place of a part of their model, which returns a tuple of `outputs` if there are several."""

    def __init__(self, function: Callable[[Tensor], Tensor], outputs: int = 1):
        super().__init__()
        self.function, self.outputs = function, outputs

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        y_BTD = self.function(hidden_states)
        return y_BTD if self.outputs == 1 else (y_BTD, *[None] * (self.outputs - 1))


def no_positions(x: Tensor) -> Tensor:
    return x


def their_logits(model: GPT, theirs: nn.Module, values: Mapping[str, Tensor], tokens_BT: Tensor) -> Tensor:
    """Return the logits of their decoder, whose parameters of streams and norms are ours, of our embeddings."""
    inputs = {"inputs_embeds": embedded(model, tokens_BT), "use_cache": False}
    x_BTD = torch.func.functional_call(theirs, dict(values), (), inputs).last_hidden_state
    return nn.functional.linear(x_BTD, model.head.weight)


def small_hy_v4(width: int, depth: int, streams: int) -> HYV4Model:
    config = HYV4Config(
        vocab_size=11, pad_token_id=None, hidden_size=width, intermediate_size=8, num_hidden_layers=depth,
        mlp_layer_types=["dense"] * depth, hc_mult=streams, num_attention_heads=2, q_lora_rank=8, kv_lora_rank=8,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, index_head_dim=16, index_n_heads=2,
    )  # fmt: skip
    return HYV4Model(config).double()


def hy_v4(model: GPT, streams: int) -> TheirModel:
    """Return Hy4's model with our attention, MLPs and norms; its own RMSNorm computes in float32 in any case."""
    width, values = model.embed.tokens.embedding_dim, dict[str, Tensor]()
    theirs: Any = small_hy_v4(width, len(model.blocks), streams)
    theirs.rotary_emb = Part(no_positions)
    for number, (block, layer) in enumerate(zip(blocks_of(model), theirs.layers, strict=True)):
        for part, their_part, norm in (
            ("attn", "attn_hc", "input_layernorm"),
            ("mlp", "ffn_hc", "post_attention_layernorm"),
        ):
            wiring = block.wiring.get_submodule(part)
            values[f"layers.{number}.{their_part}.fn"] = wiring.fn.weight
            values[f"layers.{number}.{their_part}.base"] = wiring.base
            values[f"layers.{number}.{their_part}.scale"] = wiring.scale
            values[f"layers.{number}.{norm}.weight"] = wiring.norm.affine.gain
            setattr(layer, norm, nn.RMSNorm(width, eps=NORM.eps, dtype=torch.float64))
        layer.self_attn = Part(lambda x, block=block: block.attn(x, {}), outputs=3)
        layer.mlp = Part(block.mlp.forward)
    theirs.norm = nn.RMSNorm(width, eps=NORM.eps, dtype=torch.float64)
    close = close_of(model)
    values |= {
        "hc_head.hc_fn": close.fn.weight, "hc_head.hc_base": close.base, "hc_head.hc_scale": close.scale,
        "norm.weight": close.norm.affine.gain,
    }  # fmt: skip
    return partial(their_logits, model, theirs, values)


def qwen4_exp(model: GPT, placement: GatedResidual) -> TheirModel:
    """Return Qwen3.8-Flash-Next's text model with our attention and MLPs."""
    width, values = model.embed.tokens.embedding_dim, dict[str, Tensor]()
    config = Qwen4ExpTextConfig(
        vocab_size=11, hidden_size=width, num_hidden_layers=len(model.blocks), hc_count=placement.streams,
        hc_lowrank=placement.rank_at(width), layer_types=["indexed_attention"] * len(model.blocks), rms_norm_eps=EPS,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=8, shared_expert_intermediate_size=8, indexer_n_heads=2, indexer_kv_heads=1,
        indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=4,
    )  # fmt: skip
    theirs: Any = Qwen4ExpTextModel(config).double()
    theirs.rotary_emb = Part(no_positions)
    for number, (block, layer) in enumerate(zip(blocks_of(model), theirs.layers, strict=True)):
        for part in ("attn", "mlp"):
            wiring = block.wiring.get_submodule(part)
            values |= of_gates(f"layers.{number}.{part}_hyper_connection", wiring)
            values[f"layers.{number}.{part}_hyper_connection.block_inject_weight.weight"] = wiring.inject.weight
        layer.self_attn = Part(lambda x, block=block: block.attn(x, {}), outputs=2)
        layer.mlp = Part(block.mlp.forward)
    values |= of_gates("hyper_connection_mixer", model.head.close)
    return partial(their_logits, model, theirs, values)


def of_gates(prefix: str, ours: Any) -> dict[str, Tensor]:
    """Return the parameters of their gates from ours; one vector holds the gains of all streams, 1 + weight."""
    return {
        f"{prefix}.hc_norm.weight": torch.cat([norm.affine.gain for norm in ours.stream_norms]),
        f"{prefix}.input_mix_weight_down.weight": ours.down.weight,
        f"{prefix}.input_mix_weight_up.weight": ours.up.weight,
    }


def lucidrains(model: GPT, streams: int) -> TheirModel:
    width = model.embed.tokens.embedding_dim

    def forward(tokens_BT: Tensor) -> Tensor:
        expand, reduce = hyper_connections.get_expand_reduce_stream_functions(streams)
        x = expand(embedded(model, tokens_BT))
        for wiring, sub_layer in sub_layers(model):
            theirs: Any = hyper_connections.HyperConnections(streams, dim=width).double()
            theirs.norm.forward = partial(rms_norm, wiring.stream_norm.affine.gain)
            own = {
                "static_alpha": wiring.mixing, "dynamic_alpha_fn": wiring.fn[1:].mT, "static_beta": wiring.beta,
                "dynamic_beta_fn": wiring.fn[0], "dynamic_alpha_scale": wiring.mixing_scale,
                "dynamic_beta_scale": wiring.beta_scale,
            }  # fmt: skip
            read, add = with_parameters(theirs, own, x)
            x = add(sub_layer(rms_norm(wiring.norm.affine.gain, read)))
        x_BTD = rms_norm(close_of(model).norm.affine.gain, reduce(x))
        return nn.functional.linear(x_BTD, model.head.weight)

    return forward


def fla(model: GPT, every: int) -> TheirModel:
    """Return a model with the function of fla-core, whose package cannot be imported without triton."""
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.origin is not None
    attend = runpy.run_path(str(Path(package.origin).parent / "ops" / "attnres" / "naive.py"))["naive_attnres"]

    def forward(tokens_BT: Tensor) -> Tensor:
        x_BTD, states = embedded(model, tokens_BT), list[Tensor]()
        ones_D = torch.ones(x_BTD.shape[-1], dtype=torch.float64)
        for number, block in enumerate(blocks_of(model)):
            wiring = block.wiring
            read_BTD = attend(wiring.attn_recall.query, [*states, x_BTD], ones_D, wiring.attn_norm.affine.gain)
            y_BTD = block.attn(read_BTD, {})
            if number % every == 0:
                states.append(x_BTD)
                x_BTD = y_BTD
            else:
                x_BTD = x_BTD + y_BTD
            read_BTD = attend(wiring.mlp_recall.query, [*states, x_BTD], ones_D, wiring.mlp_norm.affine.gain)
            x_BTD = x_BTD + block.mlp(read_BTD)
        close = close_of(model)
        x_BTD = attend(close.recall.query, [*states, x_BTD], ones_D, close.norm.affine.gain)
        return nn.functional.linear(x_BTD, model.head.weight)

    return forward


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the other implementation compute in float64 where it asks for float32."""
    monkeypatch.setattr(Tensor, "float", lambda self: self)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("iterations", [1, 20])
@pytest.mark.parametrize(
    ("variant", "kind"), [("deepseek_v4", DeepseekV4HyperConnection), ("transformers_5_8_0", Connection580)]
)
def test_mhc_equals_deepseek_v4(
    variant: str, kind: type[DeepseekV4HyperConnection], iterations: int, depth: int
) -> None:
    placement = ManifoldHC(iterations=iterations, variant=variant)
    model = build_small(small_config(NORM, placement, depth=depth)).gpt
    check_equal(model, deepseek_v4(model, iterations, kind))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("mixing", "kind"), [("permutations", PermutedComb), ("kronecker", KroneckerComb)])
def test_mhc_with_another_mixing_equals_deepseek_v4_with_another_comb(
    mixing: str, kind: type[OtherComb], depth: int
) -> None:
    model = build_small(small_config(NORM, ManifoldHC(mixing=mixing), depth=depth)).gpt
    check_equal(model, deepseek_v4(model, 1, kind))


MIXED = [
    *(("permutations", streams) for streams in (2, 3, 5, 6)),
    *(("kronecker", streams) for streams in (2, 8, 64)),
]


@pytest.mark.parametrize(("mixing", "streams"), MIXED)
def test_rows_and_columns_of_another_mixing_sum_to_1(mixing: str, streams: int) -> None:
    count = MIXINGS[mixing].count_numbers(streams)
    numbers_BTm = 3 * torch.randn(2, 3, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    make_c = MIXINGS[mixing].function(streams)
    c_BTnn = (make_c.double() if isinstance(make_c, nn.Module) else make_c)(numbers_BTm)
    assert c_BTnn.shape == (2, 3, streams, streams)
    assert bool((c_BTnn > 0).all())
    for axis in (-1, -2):
        torch.testing.assert_close(c_BTnn.sum(axis), torch.ones(2, 3, streams, dtype=torch.float64))
    expected = permuted(numbers_BTm, streams) if mixing == "permutations" else kronecker(numbers_BTm)
    torch.testing.assert_close(c_BTnn, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("mixing", "streams"), [("permutations", 3), ("permutations", 4), ("kronecker", 4), ("kronecker", 8)]
)
def test_another_mixing_starts_near_the_identity(mixing: str, streams: int) -> None:
    """As the authors' code, where the matrix is 0 and the numbers of c are 0 and -8."""
    placement = ManifoldHC(mixing=mixing, streams=streams)
    wiring: Any = build_small(small_config(NORM, placement, depth=1), filled=False).gpt.blocks[0].wiring
    small = torch.tensor(math.exp(-8), dtype=torch.float64)
    if mixing == "permutations":
        # As many permutations keep a stream at its place as move it to another one; the identity keeps it.
        each = math.factorial(streams - 1) * small
        expected = each.expand(streams, streams).clone()
        expected.diagonal().copy_(each - small + 1)
        expected = expected / (1 + (math.factorial(streams) - 1) * small)
    else:
        kept = torch.eye(2, dtype=torch.float64)
        factor = (kept + small * kept.flip(0)) / (1 + small)
        expected = reduce(torch.kron, [factor] * int(math.log2(streams)))
    for part in (wiring.attn, wiring.mlp):
        c = part.mixing_function(part.base[2 * streams :])
        torch.testing.assert_close(c, expected, rtol=1e-10, atol=0)


def test_two_streams_have_one_such_mixing() -> None:
    """The permutations of two streams are both factors of a Kronecker product."""
    models = [build_small(small_config(NORM, ManifoldHC(mixing=mixing, streams=2), depth=3)).gpt for mixing in MIXINGS]
    one, other = (results(model, dict(model.named_parameters())) for model in models)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("mixing=permutations streams=7", "placement.streams=7: .* needs 7! numbers of each token; choose at most 6"),
        ("mixing=kronecker streams=6", "placement.streams=6: is no power of 2, .*; choose 2, 4, 8, 16, 32 or 64$"),
        ("mixing=kronecker iterations=3", "placement.iterations=3: has no effect with placement.mixing=kronecker"),
        ("mixing=permutations variant=megatron", "placement.variant=megatron: .* set placement.mixing=sinkhorn$"),
    ],
)
def test_options_that_another_mixing_does_not_have(options: str, error: str) -> None:
    overrides = [f"placement.{option}" for option in options.split()]
    with pytest.raises(ConfigError, match=f"^{error}"):
        compose_run(["placement=mhc", *overrides])


@pytest.mark.parametrize(
    "options", ["streams=7", "mixing=permutations streams=6", "mixing=kronecker streams=64 iterations=20"]
)
def test_options_that_fit_a_mixing(options: str) -> None:
    compose_run(["placement=mhc", *(f"placement.{option}" for option in options.split())])


@pytest.mark.parametrize("depth", [2, 9])
@pytest.mark.parametrize("streams", [1, 4])
def test_identity_hc_equals_hy4(streams: int, depth: int) -> None:
    placement = IdentityHC(variant="hy4", streams=streams)
    model = build_small(small_config(NORM, placement, depth=depth)).gpt
    check_equal(model, hy_v4(model, streams))


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_identity_hc_starts_as_hy4(streams: int) -> None:
    placement = IdentityHC(variant="hy4", streams=streams)
    model = build_small(small_config(NORM, placement, depth=2), filled=False).gpt
    theirs: Any = small_hy_v4(model.embed.tokens.embedding_dim, 2, streams)
    for block, layer in zip(blocks_of(model), theirs.layers, strict=True):
        for ours, their_part in ((block.wiring.attn, layer.attn_hc), (block.wiring.mlp, layer.ffn_hc)):
            torch.testing.assert_close(ours.base, their_part.base)
            torch.testing.assert_close(ours.scale, their_part.scale)
    torch.testing.assert_close(close_of(model).base, theirs.hc_head.hc_base)
    torch.testing.assert_close(close_of(model).scale, theirs.hc_head.hc_scale)


@pytest.mark.parametrize("depth", [2, 9])
@pytest.mark.parametrize(("streams", "rank"), [(2, None), (4, 3)])
def test_gated_residual_equals_qwen4_exp(streams: int, rank: int | None, depth: int) -> None:
    placement = GatedResidual(streams=streams, rank=rank)
    model = build_small(small_config(RMSNormConfig(eps=EPS, unit_offset=True), placement, depth=depth)).gpt
    check_equal(model, qwen4_exp(model, placement))


def test_the_default_rank_is_that_of_the_class_at_its_width() -> None:
    config = Qwen4ExpTextConfig()
    placement = GatedResidual()
    assert (placement.rank_at(config.hidden_size), placement.streams) == (config.hc_lowrank, config.hc_count)
    assert placement.rank_at(4) == 1


def test_ids_of_runs_without_the_later_options_stay() -> None:
    ends = {"embedding_norm": None, "final_norm": None}
    identity = compose_run(["placement=identity_hc"]).identity()["placement"]
    assert identity == {"name": "identity_hc", "streams": 4, "start": 1.0, **ends}
    identity = compose_run(["placement=identity_hc", "placement.variant=hy4"]).identity()["placement"]
    assert identity == {"name": "identity_hc", "streams": 4, "start": 0.01, "variant": "hy4", **ends}
    identity = compose_run(["placement=mhc"]).identity()["placement"]
    default = {"name": "mhc", "streams": 4, "start": 1.0, "iterations": 20, "variant": "deepseek_v4", **ends}
    assert identity == default
    identity = compose_run(["placement=mhc", "placement.mixing=kronecker"]).identity()["placement"]
    assert identity == {**default, "mixing": "kronecker"}


def test_a_rank_that_repeats_the_default_keeps_the_id() -> None:
    default, same, other = (
        compose_run(["placement=gated_residual", "model.width=64", *rank]).config_hash
        for rank in ((), ("placement.rank=10",), ("placement.rank=9",))
    )
    assert default == same != other


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("streams", [1, 3])
def test_hyper_connections_equal_lucidrains(depth: int, streams: int) -> None:
    placement = HyperConnections(streams=streams)
    model = build_small(small_config(NORM, placement, depth=depth)).gpt
    check_equal(model, lucidrains(model, streams))


@pytest.mark.parametrize("depth", [1, 3])
def test_hyper_connections_start_as_lucidrains(depth: int) -> None:
    model = build_small(small_config(NORM, HyperConnections(), depth=depth), filled=False).gpt
    for number, wiring in enumerate(
        part for block in blocks_of(model) for part in (block.wiring.attn, block.wiring.mlp)
    ):
        theirs: Any = hyper_connections.HyperConnections(4, dim=16, layer_index=number).double()
        torch.testing.assert_close(wiring.mixing, theirs.static_alpha)
        torch.testing.assert_close(wiring.beta, theirs.static_beta)
        torch.testing.assert_close(wiring.fn[1:].mT, theirs.dynamic_alpha_fn)
        for ours, name in ((wiring.mixing_scale, "dynamic_alpha_scale"), (wiring.beta_scale, "dynamic_beta_scale")):
            torch.testing.assert_close(ours, getattr(theirs, name))


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("every", [1, 2])
def test_attention_residuals_equal_fla(depth: int, every: int) -> None:
    model = build_small(small_config(RMSNormConfig(eps=EPS), AttnRes(every=every), depth=depth)).gpt
    check_equal(model, fla(model, every))


def check_equal(model: GPT, theirs: TheirModel) -> None:
    parameters = dict(model.named_parameters())
    found, expected = results(model, parameters), results(theirs, parameters)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-11, msg=lambda text, n=name: f"{n}: {text}")
