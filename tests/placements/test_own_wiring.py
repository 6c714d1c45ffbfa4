"""Every placement outside the residual algebra equals a reference formula, in float64.

A reference formula calls the model's sub-layers and norms, and repeats only the wiring: their order, inputs and
factors. Every norm has different gains and biases, so that an exchange of two norms changes the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.placements.algebra import AlgebraPlacement
from normlab.placements.base import PLACEMENTS, load_all
from normlab.placements.ngpt import NGPT
from support.reference_blocks import CONTEXT, DEPTH, VOCAB, WIDTH, assert_same, build_test_model, config_of, heads, rope

load_all()
OWN_WIRING = [name for name, placement in PLACEMENTS.items() if not isinstance(placement, AlgebraPlacement)]

TOKENS = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(2))

StreamFormula = Callable[[GPT, Tensor], Tensor]
"""The head's input, from the embeddings."""


def norms(model: nn.Module, where: str, *names: str) -> list[nn.Module]:
    return [model.get_submodule(f"{where}.{name}") for name in names]


def parallel(model: GPT, x: Tensor) -> Tensor:
    for layer, block in enumerate(model.blocks):
        (norm,) = norms(model, f"blocks.{layer}.wiring", "norm")
        x = x + block.attn(norm(x)) + block.mlp(norm(x))
    return model.head.close(x)


def parallel_two_norms(model: GPT, x: Tensor) -> Tensor:
    for layer, block in enumerate(model.blocks):
        first, second = norms(model, f"blocks.{layer}.wiring", "attn_norm", "mlp_norm")
        x = x + (block.mlp(second(x)) + block.attn(first(x)))
    return model.head.close(x)


def resi_dual(model: GPT, x: Tensor) -> Tensor:
    outputs = [x]  # y is their sum
    for layer, block in enumerate(model.blocks):
        first, second = norms(model, f"blocks.{layer}.wiring", "attn.norm", "mlp.norm")
        outputs.append(block.attn(x))
        x = first(x + outputs[-1])
        outputs.append(block.mlp(x))
        x = second(x + outputs[-1])
    (last,) = norms(model, "head.close", "norm")
    return x + last(torch.stack(outputs).sum(0))


def b2t(model: GPT, x: Tensor) -> Tensor:
    for layer, block in enumerate(model.blocks):
        first, second = norms(model, f"blocks.{layer}.wiring", "attn_norm", "mlp_norm")
        bottom = x
        x = first(x + block.attn(x))
        x = second(x + block.mlp(x) + bottom)
    return x


class Damped(torch.autograd.Function):
    """(1 - s) x with a modified gradient: dL/dx = dy, dL/ds = -sum(x dy)."""

    @staticmethod
    def forward(ctx, x: Tensor, s: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (1 - s) * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grad, -(x * grad).sum()


def gpas(model: GPT, x: Tensor) -> Tensor:
    for layer, block in enumerate(model.blocks):
        first, second = norms(model, f"blocks.{layer}.wiring", "attn_norm", "mlp_norm")
        gate = block.wiring.gate / (1 + torch.exp(-block.wiring.gate))
        x = Damped.apply(x + block.attn(first(x)), gate)
        x = Damped.apply(x + block.mlp(second(x)), gate)
    return model.head.close(x)


def siamese(model: GPT, x: Tensor) -> Tensor:
    y = x
    for layer, block in enumerate(model.blocks, start=1):
        for part, sub in (("attn", block.attn), ("mlp", block.mlp)):
            of_x, of_y, of_both = norms(block.wiring, part, "x_norm", "y_norm", "in_norm")
            x = of_x(x)
            z = sub(of_both(x + of_y(y)))
            x, y = x + z * (2 * layer) ** -0.5, y + z
    of_x, of_y, of_both = norms(model, "head.close", "x_norm", "y_norm", "out_norm")
    return of_both(of_x(x) + of_y(y))


def x0_lambdas(model: GPT, x: Tensor) -> Tensor:
    (opening,) = norms(model, "embed.open", "norm")
    x = start = opening(x)
    for layer, block in enumerate(model.blocks):
        first, second = norms(model, f"blocks.{layer}.wiring", "attn_norm", "mlp_norm")
        x = block.wiring.r * x + block.wiring.z * start
        x = x + block.attn(first(x))
        x = x + block.mlp(second(x))
    (last,) = norms(model, "head.close", "norm")
    return last(x)


def on_sphere(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def ngpt(model: GPT, x: Tensor) -> Tensor:
    """nGPT, with its changes inside attention and the MLP; `logits_of` has the factor s_z on the logits."""
    root = math.sqrt(WIDTH)
    for block in model.blocks:
        attn, mlp = block.attn, block.mlp
        s_qk = attn.rotated.scale.view(2, 1, WIDTH // 2) * root
        q, k = (on_sphere(rope(heads(block, x @ matrix.weight.T))) * s_qk for matrix in (attn.q, attn.k))
        scores = q @ k.transpose(-1, -2) * math.sqrt(WIDTH / 2)
        weights = torch.exp(scores) * torch.ones(CONTEXT, CONTEXT).tril()
        averages = weights / weights.sum(-1, keepdim=True) @ heads(block, x @ attn.v.weight.T)
        output = torch.cat(list(averages.unbind(1)), dim=-1) @ attn.out.weight.T
        alpha = 0.05 * root * block.wiring.attn.alpha.abs()
        x = on_sphere((1 - alpha) * on_sphere(x) + alpha * on_sphere(output))
        u, v = x @ mlp.up.weight.T * mlp.of_up.scale * root, x @ mlp.gate.weight.T * mlp.of_gate.scale * root
        output = (u * v / (1 + torch.exp(-v))) @ mlp.down.weight.T
        alpha = 0.05 * root * block.wiring.mlp.alpha.abs()
        x = on_sphere((1 - alpha) * x + alpha * on_sphere(output))
    return x


REFERENCE_FORMULAS: dict[str, StreamFormula] = {
    stream.__name__: stream
    for stream in (parallel, parallel_two_norms, resi_dual, b2t, gpas, siamese, x0_lambdas, ngpt)
}


def assert_equals_formula(name: str, reference: StreamFormula) -> None:
    model = build_test_model(PLACEMENTS[name])
    assert_same(model, lambda tokens: logits_of(name, model, reference(model, model.embed.tokens.weight[tokens])))


def logits_of(name: str, model: GPT, x: Tensor) -> Tensor:
    """Return the logits of the head's input."""
    logits = x @ model.head.weight.T
    return logits * model.head.logits.scale * math.sqrt(WIDTH) if name == "ngpt" else logits


def test_every_wiring_has_a_reference_formula() -> None:
    assert {name for name in OWN_WIRING if type(PLACEMENTS[name]).__module__.startswith("normlab.")} == set(
        REFERENCE_FORMULAS
    )


@pytest.mark.parametrize("name", REFERENCE_FORMULAS)
def test_wiring_equals_its_formula(name: str) -> None:
    assert_equals_formula(name, REFERENCE_FORMULAS[name])


@pytest.mark.parametrize(("embedding_norm", "final_norm"), [(True, None), (None, False), (True, False), (False, True)])
@pytest.mark.parametrize("name", [name for name in REFERENCE_FORMULAS if PLACEMENTS[name].has_switches])
def test_switches_turn_the_norms_at_the_ends_on_and_off(
    name: str, embedding_norm: bool | None, final_norm: bool | None
) -> None:
    plain = PLACEMENTS[name]
    model = build_test_model(dataclasses.replace(plain, embedding_norm=embedding_norm, final_norm=final_norm))
    begin, end = model.embed.open, model.head.close
    assert (begin is not None, end is not None) == (
        bool(embedding_norm),
        bool(plain.head_formula) if final_norm is None else final_norm,
    )
    model.head.close = nn.Identity() if plain.head_formula else None  # the reference formula ends before the final norm

    def reference(tokens: Tensor) -> Tensor:
        x = model.embed.tokens.weight[tokens]
        x = REFERENCE_FORMULAS[name](model, x if begin is None else begin(x))
        return logits_of(name, model, x if end is None else end(x))

    def model_with_switches(tokens: Tensor) -> Tensor:
        kept, model.head.close = model.head.close, end
        try:
            return model(tokens)
        finally:
            model.head.close = kept

    torch.testing.assert_close(model_with_switches(TOKENS), reference(TOKENS), rtol=1e-12, atol=1e-12)


def test_only_placements_with_one_stream_have_switches() -> None:
    with_switches = {name for name in REFERENCE_FORMULAS if PLACEMENTS[name].has_switches}
    assert with_switches == {"b2t", "gpas", "ngpt", "parallel", "parallel_two_norms"}
    assert not NGPT(normalize_embeddings=True).has_switches


def gpas_with_its_gradient(model: GPT, x: Tensor) -> Tensor:
    """GPAS without its modified gradient: the values are equal."""
    for layer, block in enumerate(model.blocks):
        first, second = norms(model, f"blocks.{layer}.wiring", "attn_norm", "mlp_norm")
        gate = torch.nn.functional.silu(block.wiring.gate)
        x = (1 - gate) * (x + block.attn(first(x)))
        x = (1 - gate) * (x + block.mlp(second(x)))
    return model.head.close(x)


def b2t_around_the_mlp(model: GPT, x: Tensor) -> Tensor:
    """Post-norm whose block input skips the first norm only."""
    for layer, block in enumerate(model.blocks):
        first, second = norms(model, f"blocks.{layer}.wiring", "attn_norm", "mlp_norm")
        bottom = x
        x = first(x + block.attn(x)) + bottom
        x = second(x + block.mlp(x))
    return x


@pytest.mark.parametrize(("name", "wrong"), [("gpas", gpas_with_its_gradient), ("b2t", b2t_around_the_mlp)])
def test_the_comparison_can_fail(name: str, wrong: StreamFormula) -> None:
    with pytest.raises(AssertionError, match="not close"):
        assert_equals_formula(name, wrong)


# Placements at initialisation, and with added parts switched off


def fresh(name: str) -> GPT:
    return build_model(config_of(PLACEMENTS[name]), VOCAB).double()


def logits(name: str, model: GPT | None = None) -> Tensor:
    return (model or fresh(name))(TOKENS).detach()


def test_gpas_is_initially_pre() -> None:
    pre, gpas = fresh("pre"), fresh("gpas")
    matrices = {name: tensor for name, tensor in pre.state_dict().items() if ".wiring." not in name}
    # Under one init rule; pre's scales the output matrices.
    assert gpas.load_state_dict(matrices, strict=False).unexpected_keys == []
    torch.testing.assert_close(logits("gpas", gpas), logits("pre", pre), rtol=1e-12, atol=1e-12)
    gates = [parameter for name, parameter in gpas.named_parameters() if name.endswith("gate")]
    assert len(gates) == DEPTH
    gates[0].data.fill_(1.0)
    assert (logits("gpas", gpas) - logits("pre", pre)).abs().max() > 1e-4


def test_parallel_equals_parallel_two_norms_with_equal_norms() -> None:
    # Every gain starts at 1: two norms of one stream are then one.
    torch.testing.assert_close(logits("parallel"), logits("parallel_two_norms"), rtol=1e-12, atol=1e-12)


def test_x0_lambdas_have_the_initial_values_of_nanochat() -> None:
    parameters = dict(fresh("x0_lambdas").named_parameters())
    for override, values in (("r", (1.15, 1.125, 1.10, 1.075, 1.05)), ("z", (0.20, 0.1625, 0.125, 0.0875, 0.05))):
        for layer, value in enumerate(values):
            assert parameters[f"blocks.{layer}.wiring.{override}"].item() == pytest.approx(value, abs=1e-7)


def test_siamese_divides_by_the_root_of_twice_the_layer() -> None:
    buffers = {name: buffer.item() for name, buffer in fresh("siamese").named_buffers()}
    assert buffers == {
        f"blocks.{layer}.wiring.{part}.root": math.sqrt(2 * (layer + 1))
        for layer in range(DEPTH)
        for part in ("attn", "mlp")
    }


def test_ngpt_scales_have_their_initial_values() -> None:
    model = fresh("ngpt")
    parameters = dict(model.named_parameters())
    root = math.sqrt(WIDTH)
    for name, start in (
        ("attn.rotated.scale", 1 / root), ("mlp.of_up.scale", 1.0), ("mlp.of_gate.scale", 1.0),
        ("wiring.attn.alpha", 1 / root), ("wiring.mlp.alpha", 1 / root),
    ):  # fmt: skip
        for layer in range(DEPTH):
            tensor = parameters.pop(f"blocks.{layer}.{name}")
            torch.testing.assert_close(tensor.float(), torch.full(tensor.shape, start))
    torch.testing.assert_close(parameters.pop("head.logits.scale").float(), torch.full((VOCAB,), 1 / root))
    assert all(tensor.dim() == 2 for tensor in parameters.values())  # the model has no other norm


def lengths(name: str, matrix: Tensor) -> Tensor:
    return matrix.square().sum(-2 if name.endswith(("attn.out.weight", "mlp.down.weight")) else -1).sqrt()


def test_ngpt_projects_its_matrices_to_length_one() -> None:
    model = fresh("ngpt")
    matrices = {name: parameter for name, parameter in model.named_parameters() if parameter.dim() == 2}
    for name, matrix in matrices.items():
        torch.testing.assert_close(lengths(name, matrix), torch.ones_like(lengths(name, matrix)))
    generator = torch.Generator().manual_seed(0)
    moved = {n: m.detach() + torch.randn(m.shape, generator=generator, dtype=m.dtype) for n, m in matrices.items()}
    # Two runs at once, as in a pack, beside what is no matrix.
    stacked = {name: torch.stack([matrix, 3 * matrix]) for name, matrix in moved.items()}
    scale = torch.full((2, 5), 7.0)
    PLACEMENTS["ngpt"].project(moved)
    PLACEMENTS["ngpt"].project(stacked | {"head.logits.scale": scale})
    assert (scale == 7).all()
    for name, matrix in moved.items():
        torch.testing.assert_close(lengths(name, matrix), torch.ones_like(lengths(name, matrix)))
        for run in stacked[name]:
            torch.testing.assert_close(run, matrix, rtol=1e-12, atol=1e-12)
