"""Check equalities between entries of the catalogue, and which changes of its input a norm ignores.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from normlab.model.small import build_small, small_config, tokens
from normlab.norms.base import NORMS, NormConfig
from normlab.placements.base import PLACEMENTS
from normlab.verify.blocks import logits_of
from normlab.verify.check import Check, LargestError
from normlab.verify.norms import input_of, module_of
from normlab.verify.variants import is_valid

WIDTH = 16
TOLERANCE = 1e-10
SIZES = [10.0**power for power in (0, *range(-15, 0, 3), *range(3, 16, 3))]
"""Sizes of the input, 1 first: a function that is flat at one size may change at another."""

Pairs = Iterator[tuple[Tensor, Tensor]]


@torch.no_grad()
def identity_checks() -> Iterator[Check]:
    """Check every identity between entries."""
    for claim, identity in IDENTITIES.items():
        largest = LargestError(TOLERANCE)
        for left, right in identity():
            largest.add(float((left - right).abs().max() / right.abs().max()), "the outputs")
        yield Check(subject="identity", claim=claim, oracle="identity", passed=largest.passed, result=str(largest))


def invariance_checks(norm: NormConfig, subject: str, width: int) -> Iterator[Check]:
    """Check that the output in training is invariant exactly to the scale or shift that `blind_to` lists.

    A declared invariance is tested with an eps too small to matter. Its absence is tested at many sizes, since a
    bounded function is flat at most of them.
    """
    has_eps = hasattr(norm, "eps")
    tiny = dataclasses.replace(norm, eps=1e-15) if has_eps else norm  # pyright: ignore[reportCallIssue]
    module = module_of(tiny if is_valid(tiny, width) else norm, width).train()
    x = input_of(width)
    changed_inputs = {"scale": 3 * x, "shift": x + 2}
    # At a size below 1 the eps itself would change the output.
    sizes = [size for size in SIZES if size >= 1 or not has_eps]

    @torch.no_grad()
    def output_change(name: str, size: float) -> float:
        y = module(size * x)
        return float((module(size * changed_inputs[name]) - y).abs().max() / y.abs().max())

    largest, undeclared = LargestError(1e-9), []
    for name in changed_inputs:
        if name in norm.blind_to:
            largest.add(output_change(name, 1.0), name)
        elif all(output_change(name, size) < 1e-6 for size in sizes):
            undeclared.append(name)
    if undeclared:
        claim = "has no invariance beside those in `blind_to`"
        yield Check(subject=subject, claim=claim, passed=False, result=", ".join(undeclared))
    elif norm.blind_to:
        claim = f"is invariant to the {' and '.join(norm.blind_to)} of its input"
        yield Check(subject=subject, claim=claim, passed=largest.passed, result=str(largest))


def norm(name: str, **options: Any) -> NormConfig:
    """Return a norm of the catalogue."""
    return NORMS[name](**options)  # pyright: ignore[reportCallIssue]


def centred(x_D: Tensor) -> Tensor:
    """Return x minus its mean over the channels."""
    return x_D - x_D.mean(-1, keepdim=True)


def layer_norm_is_rms_norm_of_centred_input() -> Pairs:
    """With the same eps inside the root and no bias."""
    layer = module_of(norm("layernorm", eps=0.3, bias=False), WIDTH)
    rms = module_of(norm("rmsnorm", eps=0.3), WIDTH)
    yield layer(input_of(WIDTH)), rms(centred(input_of(WIDTH)))


def crms_norm_is_layer_norm_without_a_channel() -> Pairs:
    """For a vector with mean 0."""
    vector = centred(input_of(WIDTH + 1))
    compressed = module_of(norm("crmsnorm", eps=0.3), WIDTH)
    layer = module_of(norm("layernorm", eps=0.3, gain=False, bias=False), WIDTH + 1)
    yield compressed(vector[..., :-1]), layer(vector)[..., :-1]


def scale_norm_is_l2_norm_with_a_learned_radius() -> Pairs:
    """Both clamp the length by eps."""
    scale = module_of(norm("scalenorm", eps=0.3), WIDTH)
    l2 = module_of(norm("l2norm", eps=0.3, radius=WIDTH**0.5, learn_radius=True), WIDTH)
    yield scale(input_of(WIDTH)), l2(input_of(WIDTH))


def p_rms_norm_of_all_channels_is_rms_norm() -> Pairs:
    """Both with eps outside the root."""
    partial = module_of(norm("prmsnorm", eps=0.3, fraction=1.0), WIDTH)
    rms = module_of(norm("rmsnorm", eps=0.3, eps_mode="outside_rms"), WIDTH)
    yield partial(input_of(WIDTH)), rms(input_of(WIDTH))


def group_norm_of_one_group_is_layer_norm() -> Pairs:
    """With the same gain and bias."""
    group = module_of(norm("groupnorm", eps=0.3, groups=1), WIDTH)
    layer = module_of(norm("layernorm", eps=0.3), WIDTH)
    layer.load_state_dict(group.state_dict())
    yield group(input_of(WIDTH)), layer(input_of(WIDTH))


def z_score_is_layer_norm_with_eps_outside_the_root() -> Pairs:
    """Without gain and bias."""
    zscore = module_of(norm("zscore", eps=0.3, gain=False, bias=False), WIDTH)
    layer = module_of(norm("layernorm", eps=0.3, eps_mode="outside", gain=False, bias=False), WIDTH)
    yield zscore(input_of(WIDTH)), layer(input_of(WIDTH))


def pointwise_is_dyt_and_derf() -> Pairs:
    """With tanh and erf as its function."""
    for name, function in (("dyt", "tanh"), ("derf", "erf")):
        named = module_of(norm(name, shift=True), WIDTH)
        pointwise = module_of(norm("pointwise", function=function, shift=True), WIDTH)
        pointwise.load_state_dict(named.state_dict())
        yield pointwise(input_of(WIDTH)), named(input_of(WIDTH))


def pre_ln_becomes_pre_rms_norm() -> Pairs:
    """A pre-LN model becomes a pre-RMSNorm model by one change of its weights.

    The mean over the channels is removed from every weight that writes to the stream, and each norm's bias is moved
    into the linear layers that read it. Jiang, Gu, Zhu & Pan 2023, arXiv:2305.14858, section 3.
    """
    layer = norm("layernorm")
    rms = norm("rmsnorm", eps=layer.eps)  # pyright: ignore[reportAttributeAccessIssue]
    layer_model, rms_model = (
        build_small(small_config(kind, PLACEMENTS["pre"], tie_embeddings=False)).gpt for kind in (layer, rms)
    )
    weights = {name: value for name, value in layer_model.state_dict().items() if not name.endswith("affine.bias")}
    rms_model.load_state_dict(weights)
    for name, parameter in rms_model.named_parameters():
        if name.startswith("embed.") or name.endswith(("attn.out.bias", "mlp.down.bias")):
            parameter.copy_(centred(parameter))
        elif name.endswith(("attn.out.weight", "mlp.down.weight")):
            parameter.copy_(centred(parameter.T).T)
    for before, after in zip(layer_model.blocks, rms_model.blocks, strict=True):
        for part, readers in (("attn", ("q", "k", "v")), ("mlp", ("up",))):
            bias = before.get_parameter(f"wiring.{part}.norms.in.affine.bias")
            for reader in readers:
                weight = before.get_parameter(f"{part}.{reader}.weight")
                after.get_parameter(f"{part}.{reader}.bias").add_(weight @ bias)
    head_bias = layer_model.head.weight @ layer_model.get_parameter("head.close.affine.bias")
    yield logits_of(layer_model, tokens()), logits_of(rms_model, tokens()) + head_bias


IDENTITIES: dict[str, Callable[[], Pairs]] = {
    "layernorm is rmsnorm of the centred input": layer_norm_is_rms_norm_of_centred_input,
    "crmsnorm is layernorm of a zero-mean vector without its last channel": crms_norm_is_layer_norm_without_a_channel,
    "scalenorm is l2norm with a learned radius": scale_norm_is_l2_norm_with_a_learned_radius,
    "prmsnorm of all channels is rmsnorm": p_rms_norm_of_all_channels_is_rms_norm,
    "groupnorm of one group is layernorm": group_norm_of_one_group_is_layer_norm,
    "zscore is layernorm with eps outside the root": z_score_is_layer_norm_with_eps_outside_the_root,
    "pointwise is dyt with tanh, derf with erf": pointwise_is_dyt_and_derf,
    "a pre-LN model becomes a pre-RMSNorm model with equal logits": pre_ln_becomes_pre_rms_norm,
}
"""Functions that yield pairs of equal outputs, by claim."""
