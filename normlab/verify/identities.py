"""What the entries are to each other, whatever any one of them computes.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from normlab.norms.base import NORMS, NormConfig
from normlab.placements.base import PLACEMENTS
from normlab.verify.blocks import logits_of
from normlab.verify.check import Check, Worst
from normlab.verify.norms import input_of, module_of
from normlab.verify.small import built, config_of, tokens
from normlab.verify.variants import allowed

WIDTH = 16
EXACT = 1e-10
SIZES = [10.0**power for power in (0, *range(-15, 0, 3), *range(3, 16, 3))]
"""Of numbers, 1 first: where a function is flat at one, it may not be at another."""


@torch.no_grad()
def identities() -> Iterator[Check]:
    """All of them."""
    for name, identity in IDENTITIES.items():
        worst = Worst(EXACT)
        for ours, theirs in identity():
            worst.add(float((ours - theirs).abs().max() / theirs.abs().max()), "the outputs")
        yield Check(of="identity", check=name, kind="identity", passed=worst.passed, seen=str(worst))


def invariance_checks(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """That in training it is blind to the size of its input, or to a number added to all channels, where it says so.

    With an eps too small to see; and that it is not where it does not say so, for which it is shown numbers of many
    sizes: a bounded function may be flat at most of them.
    """
    fields = {field.name for field in dataclasses.fields(norm)}
    tiny = dataclasses.replace(norm, eps=1e-15) if "eps" in fields else norm  # pyright: ignore[reportCallIssue]
    module = module_of(tiny if allowed(tiny, width) else norm, width).train()
    x = input_of(width)
    changes = {"scale": 3 * x, "shift": x + 2}
    # Below 1 an eps would be seen, and be taken for sight.
    sizes = [size for size in SIZES if size >= 1 or "eps" not in fields]

    @torch.no_grad()
    def moved(change: str, size: float) -> float:
        y = module(size * x)
        return float((module(size * changes[change]) - y).abs().max() / y.abs().max())

    worst, wrong = Worst(1e-9), []
    for change in changes:
        if change in norm.blind_to:
            worst.add(moved(change, 1.0), change)
        elif all(moved(change, size) < 1e-6 for size in sizes):
            wrong.append(change)
    told = " and ".join(norm.blind_to)
    if wrong:
        yield Check(of=of, check="sees what it does not say it is blind to", passed=False, seen=", ".join(wrong))
    elif norm.blind_to:
        yield Check(of=of, check=f"is blind to the {told} of its input", passed=worst.passed, seen=str(worst))


Pairs = Iterator[tuple[Tensor, Tensor]]


def norm(name: str, **options: Any) -> NormConfig:
    """A norm by its name."""
    return NORMS[name](**options)  # pyright: ignore[reportCallIssue]


def centred(x_D: Tensor) -> Tensor:
    """Without its mean over the channels."""
    return x_D - x_D.mean(-1, keepdim=True)


def layer_norm_is_rms_norm_of_what_is_centred() -> Pairs:
    """Same eps inside the root, no bias."""
    layer = module_of(norm("layernorm", eps=0.3, bias=False), WIDTH)
    root = module_of(norm("rmsnorm", eps=0.3), WIDTH)
    yield layer(input_of(WIDTH)), root(centred(input_of(WIDTH)))


def crms_norm_is_layer_norm_less_a_channel() -> Pairs:
    """Of a vector whose mean is 0."""
    whole = centred(input_of(WIDTH + 1))
    compressed = module_of(norm("crmsnorm", eps=0.3), WIDTH)
    layer = module_of(norm("layernorm", eps=0.3, gain=False, bias=False), WIDTH + 1)
    yield compressed(whole[..., :-1]), layer(whole)[..., :-1]


def scale_norm_is_l2_norm_with_a_learned_radius() -> Pairs:
    """Both clamp the length by eps."""
    one = module_of(norm("scalenorm", eps=0.3), WIDTH)
    other = module_of(norm("l2norm", eps=0.3, radius=WIDTH**0.5, learn_radius=True), WIDTH)
    yield one(input_of(WIDTH)), other(input_of(WIDTH))


def p_rms_norm_of_all_channels_is_rms_norm() -> Pairs:
    """Both with eps outside the root."""
    one = module_of(norm("prmsnorm", eps=0.3, fraction=1.0), WIDTH)
    other = module_of(norm("rmsnorm", eps=0.3, eps_mode="outside_rms"), WIDTH)
    yield one(input_of(WIDTH)), other(input_of(WIDTH))


def group_norm_of_one_group_is_layer_norm() -> Pairs:
    """With the same gain and bias."""
    one = module_of(norm("groupnorm", eps=0.3, groups=1), WIDTH)
    other = module_of(norm("layernorm", eps=0.3), WIDTH)
    other.load_state_dict(one.state_dict())
    yield one(input_of(WIDTH)), other(input_of(WIDTH))


def z_score_is_layer_norm_with_eps_outside_the_root() -> Pairs:
    """Without gain and bias."""
    one = module_of(norm("zscore", eps=0.3, gain=False, bias=False), WIDTH)
    other = module_of(norm("layernorm", eps=0.3, eps_mode="outside", gain=False, bias=False), WIDTH)
    yield one(input_of(WIDTH)), other(input_of(WIDTH))


def pointwise_is_dyt_and_derf() -> Pairs:
    """With tanh and erf for its function."""
    for name, function in (("dyt", "tanh"), ("derf", "erf")):
        other = module_of(norm(name, shift=True), WIDTH)
        one = module_of(norm("pointwise", function=function, shift=True), WIDTH)
        one.load_state_dict(other.state_dict())
        yield one(input_of(WIDTH)), other(input_of(WIDTH))


def pre_ln_becomes_pre_rms_norm() -> Pairs:
    """A model with LayerNorm before each sub-layer, whose weights are changed once, is one with RMSNorm.

    The stream's mean over the channels is taken out of whatever writes into it, and the norm's bias is moved into
    the linear layers that read it. Jiang, Gu, Zhu & Pan 2023, arXiv:2305.14858, section 3.
    """
    first, _ = built(config_of(norm("layernorm"), PLACEMENTS["pre"], tie_embeddings=False))
    second, _ = built(config_of(norm("rmsnorm", eps=norm("layernorm").eps), PLACEMENTS["pre"], tie_embeddings=False))  # pyright: ignore[reportAttributeAccessIssue]
    second.load_state_dict({name: value for name, value in first.state_dict().items() if not _is_norm_bias(name)})
    for name, parameter in second.named_parameters():
        if name.startswith("embed."):
            parameter.copy_(centred(parameter))
        elif name.endswith(("attn.out.weight", "mlp.down.weight")):
            parameter.copy_(centred(parameter.T).T)
        elif name.endswith(("attn.out.bias", "mlp.down.bias")):
            parameter.copy_(centred(parameter))
    for before, after in zip(first.blocks, second.blocks, strict=True):
        for part, readers in (("attn", ("q", "k", "v")), ("mlp", ("up",))):
            moved = before.get_parameter(f"wiring.{part}.norms.in.affine.bias")
            for reader in readers:
                weight = before.get_parameter(f"{part}.{reader}.weight")
                after.get_parameter(f"{part}.{reader}.bias").add_(weight @ moved)
    lost = first.head.weight @ first.get_parameter("head.close.affine.bias")
    yield logits_of(first, tokens()), logits_of(second, tokens()) + lost


def _is_norm_bias(name: str) -> bool:
    return name.endswith("affine.bias")


IDENTITIES: dict[str, Callable[[], Pairs]] = {
    "layernorm is rmsnorm of the centred input": layer_norm_is_rms_norm_of_what_is_centred,
    "crmsnorm is layernorm of a zero-mean vector less its last channel": crms_norm_is_layer_norm_less_a_channel,
    "scalenorm is l2norm with a learned radius": scale_norm_is_l2_norm_with_a_learned_radius,
    "prmsnorm of all channels is rmsnorm": p_rms_norm_of_all_channels_is_rms_norm,
    "groupnorm of one group is layernorm": group_norm_of_one_group_is_layer_norm,
    "zscore is layernorm with eps outside the root": z_score_is_layer_norm_with_eps_outside_the_root,
    "pointwise is dyt with tanh, derf with erf": pointwise_is_dyt_and_derf,
    "a pre-LN model becomes a pre-RMSNorm model with equal logits": pre_ln_becomes_pre_rms_norm,
}
"""By what each says."""
