"""Causal self-attention, with the norms that the placement or `qk_norm` put inside it.

Shapes: B batch, T time, D model width, H heads, K head width.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from normlab.catalogue.parameters import parameter, zero_matrix
from normlab.catalogue.placements.base import MakeNorm
from normlab.config.model import ModelConfig
from normlab.model.instrument import observe
from normlab.model.stack import StackedLinear

Kernel = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Maps queries, keys and values, (*lead, H, T, K) each, and the scale of q k^T to the output, (*lead, H, T, K)."""


def rotate(x_HTK: Tensor, theta: float, fraction: float = 1.0) -> Tensor:
    """Apply rotary position embedding, in Llama's half-split layout, to the first channels of each head.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34.

    With K the number of rotated channels, a fraction of all, channels i and i + K/2 are rotated by t * theta^(-2i/K) at
    position t, in float32, or in float64 for float64 input.
    """
    if fraction < 1:
        rotated_HTK, others_HTK = x_HTK.tensor_split([round(fraction * x_HTK.shape[-1])], dim=-1)
        return torch.cat([rotate(rotated_HTK, theta), others_HTK], dim=-1)
    steps, width = x_HTK.shape[-2:]
    device, dtype = x_HTK.device, torch.promote_types(x_HTK.dtype, torch.float32)
    inverse_K = theta ** (-torch.arange(0, width, 2, device=device, dtype=dtype) / width)
    angle_TK = torch.outer(torch.arange(steps, device=device, dtype=dtype), inverse_K)
    cos_TK, sin_TK = angle_TK.cos(), angle_TK.sin()
    first, second = x_HTK.to(dtype).chunk(2, dim=-1)
    rotated = (first * cos_TK - second * sin_TK, second * cos_TK + first * sin_TK)
    return torch.cat(rotated, dim=-1).to(x_HTK.dtype)


def attend(q_HTK: Tensor, k_HTK: Tensor, v_HTK: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """Return softmax(scale q k^T + causal mask) v, as SDPA, in operations that vmap can batch.

    With a softcap c the scores s = scale q k^T are c tanh(s / c). Source: Gemma Team 2024, arXiv:2408.00118, section 2.
    """
    steps = q_HTK.shape[-2]
    future_TT = torch.ones(steps, steps, dtype=torch.bool, device=q_HTK.device).triu(1)
    logits_HTT = capped((q_HTK @ k_HTK.transpose(-1, -2)) * scale, softcap)
    weights_HTT = logits_HTT.masked_fill(future_TT, float("-inf")).softmax(-1)
    return weights_HTT.to(v_HTK.dtype) @ v_HTK


def capped(x: Tensor, softcap: float | None) -> Tensor:
    """Return c tanh(x / c) with a softcap c, else x."""
    if softcap is None:
        return x
    return softcap * torch.tanh(x / softcap)


def sdpa(q_HTK: Tensor, k_HTK: Tensor, v_HTK: Tensor, scale: float) -> Tensor:
    """Return softmax(scale q k^T + causal mask) v by the kernel that torch chooses."""
    return F.scaled_dot_product_attention(q_HTK, k_HTK, v_HTK, is_causal=True, scale=scale)


def stacked_sdpa(q_HTK: Tensor, k_HTK: Tensor, v_HTK: Tensor, scale: float) -> Tensor:
    """Return the same under vmap, on a GPU by a fused kernel.

    vmap cannot batch torch's fused kernel of a CPU. On a GPU `sdpa` omits the log-sum-exp, which the backward pass
    needs, because no tensor under vmap reports that it requires a gradient.
    """
    match _stacked_backend(q_HTK):
        case "flash_attention":
            outputs = torch.ops.aten._scaled_dot_product_flash_attention(q_HTK, k_HTK, v_HTK, 0.0, True, scale=scale)
        case "efficient_attention":
            outputs = torch.ops.aten._scaled_dot_product_efficient_attention(
                q_HTK, k_HTK, v_HTK, None, True, 0.0, True, scale=scale
            )
        case _:
            return attend(q_HTK, k_HTK, v_HTK, scale)
    return outputs[0]


EAGER = "eager"
"""The backend of `attend`, as in transformers; the other backends are torch's."""


def _stacked_backend(q_HTK: Tensor) -> str:
    """Return the backend of `stacked_sdpa`, which torch's own choice may differ from."""
    width = q_HTK.shape[-1]
    # Torch's flash attention takes head widths that are multiples of 8, up to 256.
    is_fused = q_HTK.device.type != "cpu" and width % 8 == 0 and width <= 256
    if is_fused and q_HTK.dtype in (torch.bfloat16, torch.float16):
        return "flash_attention"
    if is_fused and q_HTK.dtype == torch.float32:
        return "efficient_attention"
    return EAGER


def attention_backend(
    config: ModelConfig, batch: int, *, device: torch.device, dtype: torch.dtype, is_stacked: bool
) -> str:
    """Return the backend of attention in training steps, on which the last bits depend.

    `eager` is `attend`; the others are the names of `torch.nn.attention.SDPBackend` in lower case, such as
    `flash_attention`.

    Args:
        batch: Sequences of a micro-batch.
        dtype: That of queries and keys, by the precision of the run.
        is_stacked: Whether the run is one of stacked runs.
    """
    if config.attn_softcap is not None:
        return EAGER
    shape = (batch, config.heads, config.context, config.width // config.heads)
    q_BHTK = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
    if is_stacked:
        return _stacked_backend(q_BHTK)
    # torch has no public function for the choice that scaled_dot_product_attention makes for some tensors.
    choice = torch.ops.aten._fused_sdp_choice.default(q_BHTK, q_BHTK, q_BHTK, None, 0.0, True, scale=1.0)
    return SDPBackend(choice).name.lower()


def _placed_norms(config: ModelConfig, sites: frozenset[str], make_norm: MakeNorm) -> nn.ModuleDict:
    """Return the norms that the placement and `v_norm` put inside attention, by the names of their modules."""
    norms = nn.ModuleDict()
    head_width = config.width // config.heads
    for site in ("q", "k", "v"):
        if site in sites:
            norms[site] = make_norm(head_width, site)
    if config.v_norm:
        norms["v"] = make_norm(head_width, "v")
    if "inner_attn" in sites:
        norms["attn_inner"] = make_norm(config.width, "inner_attn")
    return norms


def _qk_norms(config: ModelConfig, make_norm: MakeNorm) -> nn.ModuleDict:
    """Return the norms of `qk_norm` by site, q and k; none with qk_norm=off."""
    norms = nn.ModuleDict()
    if config.qk_norm != "off":
        width = {"head": config.width // config.heads, "full": config.width}[config.qk_norm]
        for site in ("q", "k"):
            norms[site] = make_norm(width, site)
    return norms


class Attention(nn.Module):
    """W_o (g attend(rope(N_q(W_q x)), rope(N_k(W_k x)), N_v(W_v x))); norms, rope and g are optional.

    g is a learned number of each head, and with a gate sigmoid(W_g x), of each head or channel. With a value residual,
    (1 - m) W_v x + m v_1 replaces W_v x in all blocks but the first, whose W_v x is v_1 (Zhou et al. 2024,
    arXiv:2410.17897, with m = 0.5). A value embedding e of the token is added, with a factor 2 sigmoid(W_e x[:32]) for
    each head, initially 1 (as in forks of karpathy/nanochat).

    Maps (B, T, D) to (B, T, D).
    """

    init_roles: ClassVar[dict[str, str]] = {
        "q.weight": "attn.q", "k.weight": "attn.k", "v.weight": "attn.v", "value_embed.weight": "attn.v",
        "gate.weight": "attn.gate", "out.weight": "attn.out",
    }  # fmt: skip
    """The role of each weight in the init rules (`init_rules.Weight`)."""

    def __init__(
        self,
        config: ModelConfig,
        sites: frozenset[str],
        scale: float,
        make_norm: MakeNorm,
        *,
        layer: int,
        vocab_size: int,
        head_scale: bool,
        rotated: nn.Module | None,
    ):
        super().__init__()
        self.rotated = rotated
        """The placement's `qk_transform` of queries and keys, after RoPE."""
        self.heads = config.heads
        self.scale = scale
        self.rope_theta, self.rope_fraction = config.rope_theta, config.rope_fraction
        self.kernel: Kernel = sdpa
        """Computes attention. Packs set another function: vmap cannot batch torch's fused kernel on a CPU."""
        self.linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        """Computes x W^T + b; packs set another function."""
        width = config.width
        self.q = nn.Linear(width, width, bias=config.bias)
        self.k = nn.Linear(width, width, bias=config.bias)
        self.v = nn.Linear(width, width, bias=config.bias)
        self.out = nn.Linear(width, width, bias=config.bias)
        self.gate: nn.Linear | None = None
        """W_g: sigmoid(W_g x) multiplies the output of each head or channel (Qiu et al. 2025, arXiv:2505.06708)."""
        if config.attn_gate != "off":
            gates = {"head": config.heads, "channel": width}[config.attn_gate]
            self.gate = nn.Linear(width, gates, bias=False)
        self.head_scale: nn.Parameter | None = None
        if head_scale:
            self.head_scale = parameter(torch.ones(config.heads), role="scalar")
        # The order in which norms are made is part of a run's weights: a norm that draws its parameters draws them
        # from its number in the model (`model.init.build_model`).
        self.norms = _placed_norms(config, sites, make_norm)
        self.qk_norms = _qk_norms(config, make_norm)
        self.qk_norm_full = config.qk_norm == "full"
        self.qk_norm_after_rope = config.qk_norm_after_rope
        self.qk_scale = config.qk_scale
        self.softcap = config.attn_softcap
        self.has_value_residual = config.value_residual != "off"
        self.value_mix: nn.Parameter | None = None
        """m; None where it is fixed."""
        # The first block has the values that the others mix with theirs, so it mixes none itself.
        if config.value_residual == "learned" and layer > 0:
            self.value_mix = parameter(torch.tensor(0.5), role="scalar")
        self.value_embed: nn.Embedding | None = None
        self.value_gate: nn.Linear | None = None
        if config.has_value_embed(layer):
            self.value_embed = nn.Embedding(vocab_size, width)
            self.value_gate = nn.Linear(config.value_gate_channels, config.heads, bias=False)
            # The factor 2 sigmoid(0) = 1: training starts as if there were no gate.
            self.value_gate.weight = zero_matrix(config.heads, config.value_gate_channels)

    def project(self, x_BTD: Tensor) -> Sequence[Tensor]:
        """Return queries, keys and values, (B, T, D) each, by one product: three small ones take longer."""
        layers = [self.q, self.k, self.v]
        if any(type(layer) not in (nn.Linear, StackedLinear) for layer in layers):  # of a plugin
            return [layer(x_BTD) for layer in layers]
        weight = torch.cat([layer.weight for layer in layers])
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        bias = None
        if biases:
            bias = torch.cat(biases)
        return self.linear(x_BTD, weight, bias).chunk(3, dim=-1)

    def split_heads(self, site: str, y_BTD: Tensor) -> Tensor:
        """Return queries, keys or values with their norms, split into heads: (B, H, T, K)."""
        if self.qk_norm_full and site in self.qk_norms:
            y_BTD = self.qk_norms[site](y_BTD)
        y_BTHK = y_BTD.unflatten(-1, (self.heads, -1))
        if not (self.qk_norm_full or self.qk_norm_after_rope) and site in self.qk_norms:
            y_BTHK = self.qk_norms[site](y_BTHK)
        if site in self.norms:
            y_BTHK = self.norms[site](y_BTHK)
        return y_BTHK.transpose(1, 2)

    def mix_values(self, x_BTD: Tensor, v_BTD: Tensor, shared: dict[str, Tensor]) -> Tensor:
        """Return the values with those of the first block and of the tokens."""
        if self.has_value_residual:
            first_BTD = shared.setdefault("values", v_BTD)
            if first_BTD is not v_BTD:
                mix = 0.5 if self.value_mix is None else self.value_mix.to(v_BTD.dtype)
                v_BTD = (1 - mix) * v_BTD + mix * first_BTD
        if self.value_embed is not None and self.value_gate is not None:
            gate_BTH = 2 * torch.sigmoid(self.value_gate(x_BTD[..., : self.value_gate.in_features]))
            embed_BTHK = self.value_embed(shared["tokens"]).unflatten(-1, (self.heads, -1))
            v_BTD = v_BTD + (gate_BTH[..., None] * embed_BTHK).flatten(-2).to(v_BTD.dtype)
        return v_BTD

    def forward(self, x_BTD: Tensor, shared: dict[str, Tensor]) -> Tensor:
        """Return the output.

        Args:
            shared: The `tokens` and the `values` of the first block, which adds them; empty without `shares_values`.
        """
        q_BTD, k_BTD, v_BTD = self.project(x_BTD)
        v_BTD = self.mix_values(x_BTD, v_BTD, shared)
        q_BHTK = self.split_heads("q", q_BTD)
        k_BHTK = self.split_heads("k", k_BTD)
        v_BHTK = self.split_heads("v", v_BTD)
        if self.rope_theta is not None:
            q_BHTK = rotate(q_BHTK, self.rope_theta, self.rope_fraction)
            k_BHTK = rotate(k_BHTK, self.rope_theta, self.rope_fraction)
        if self.qk_norm_after_rope:
            # In the layout of `split_heads`, (B, T, H, K), so that a norm has the same input shape in both places.
            q_BHTK = self.qk_norms["q"](q_BHTK.transpose(1, 2)).transpose(1, 2)
            k_BHTK = self.qk_norms["k"](k_BHTK.transpose(1, 2)).transpose(1, 2)
        if self.qk_scale != 1:
            q_BHTK, k_BHTK = q_BHTK * self.qk_scale, k_BHTK * self.qk_scale
        if self.rotated is not None:
            q_BHTK, k_BHTK = self.rotated(q_BHTK), self.rotated(k_BHTK)
        observe("attention", "", q_BHTK, k_BHTK, self.scale, self.softcap)
        if self.softcap is None:
            y_BHTK = self.kernel(q_BHTK, k_BHTK, v_BHTK, self.scale)
        else:  # no fused kernel of torch has a softcap
            y_BHTK = attend(q_BHTK, k_BHTK, v_BHTK, self.scale, self.softcap)
        if self.head_scale is not None:
            y_BHTK = y_BHTK * self.head_scale[:, None, None].to(y_BHTK.dtype)
        y_BTD = y_BHTK.transpose(1, 2).flatten(-2)
        if self.gate is not None:
            gate_BTG = torch.sigmoid(self.gate(x_BTD)).to(y_BTD.dtype)
            y_BTD = (y_BTD.unflatten(-1, (gate_BTG.shape[-1], -1)) * gate_BTG[..., None]).flatten(-2)
        if "attn_inner" in self.norms:
            y_BTD = self.norms["attn_inner"](y_BTD)
        return self.out(y_BTD)
