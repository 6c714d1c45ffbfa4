"""Hyper-connections: n streams that learned weights read, mix and write, for each token or for all.

Shapes: B batch, T time, n streams, D width. A weight that is the same for all tokens lacks the axes B and T.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.options import option
from normlab.catalogue.parameters import parameter, zero_matrix
from normlab.catalogue.placements.base import MakeNorm, register_placement
from normlab.catalogue.placements.streams import MixedStreams, Streams
from normlab.catalogue.placements.wiring import Sequential


@dataclass(kw_only=True, slots=True)
class HyperConnections(Streams):
    """x <- mix(c, x) + write(b, F(N(read(a, x)))): n streams and learned a, b and c.

    The streams start as copies of the embeddings, and the head reads their sum. Initially sub-layer k of the model
    reads stream k mod n, both counted from 0, its output is added to all streams, and c is the identity. With `dynamic`
    the weights depend on the token: a learned number times the tanh of products with each of its normed streams is
    added. The products start at 0 and the learned numbers at 0.01.
    """

    title: ClassVar[str] = "hyper-connections"
    head_weights_formula: ClassVar[str] = "a = ones(streams)"
    source: ClassVar[str] = "Zhu et al. 2024, arXiv:2409.19606 (Hyper-Connections), static and dynamic"
    note: ClassVar[str] = "placement.dynamic=false are the static hyper-connections of the paper"
    pitfalls: ClassVar[tuple[str, ...]] = (
        "At the start the head reads n times what it reads in pre; the norm before the head removes the factor.",
        "The dynamic weights are computed from the streams after LayerNorm in the paper, after RMSNorm in "
        "lucidrains/hyper-connections, and after the run's norm here.",
    )
    init: ClassVar[str] = "gpt2_scaled"
    init_source: ClassVar[str] = "our choice: that of pre; each stream starts as that of pre"

    name: str = "hyper_connections"
    dynamic: bool = option(True, "Whether the weights depend on the token.")

    @property
    def weights_formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        if not self.dynamic:
            return "a = mixing[:, 0]; c = mixing[:, 1:]; b = beta"
        return (
            "t = tanh(N(x) @ fn.mT); a = mixing[:, 0] + mixing_scale * t[..., 1]; "
            "c = mixing[:, 1:] + mixing_scale * t[..., 2:]; b = beta + beta_scale * t[..., 0]"
        )

    @property
    def initial_values(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        values = {}
        for number, part in enumerate(("attn", "mlp")):
            stream, row = f"(2 * (l - 1) + {number}) % streams", "[1.0 * (i == j) for j in range(streams)]"
            values[f"wiring.{part}.mixing"] = f"[[1.0 * (i == {stream})] + {row} for i in range(streams)]"
            values[f"wiring.{part}.beta"] = "[1] * streams"
            if self.dynamic:
                values[f"wiring.{part}.fn"] = "[[0] * D] * (streams + 2)"
                values |= {f"wiring.{part}.{name}_scale": "0.01" for name in ("mixing", "beta")}
        return values

    @property
    def parameters(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        n = self.streams
        return f"2 * L * ({n * (n + 2)} + {n + 2} * D + 2)" if self.dynamic else f"2 * L * {n * (n + 2)}"

    def matmul_weights(self, depth: int, width: int) -> int:
        computed = self.streams * (self.streams + 2) if self.dynamic else 0
        return 2 * depth * width * (computed + self.streams * (self.streams + 1))

    def kept_numbers(self, depth: int, width: int) -> int:
        # Each sub-layer keeps the streams x, and of dynamic weights n (n + 1) numbers [a, c], n of b and n (n + 2) of
        # tanh. The norm of the streams is counted with the other norms.
        n = self.streams
        weights = n * (n + 1) + n + n * (n + 2) if self.dynamic else 0
        return 2 * (n * width + weights)

    def kept_with_input(self, width: int) -> int:
        # One product with [a, c] has what the sub-layer reads and the mixed streams.
        return self.streams * width

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        attn = HyperSubLayer(self, "attn", 2 * layer, width, make_norm)
        return Sequential(attn, HyperSubLayer(self, "mlp", 2 * layer + 1, width, make_norm))

    def wiring_sites(self, layer: int, depth: int) -> tuple[str, ...]:
        if not self.dynamic:
            return self.block_sites
        return "input_attn", "streams", "input_mlp", "streams"

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module:
        return SumOfStreams(width, make_norm)


class HyperSubLayer(MixedStreams):
    """One sub-layer of `HyperConnections`, number `number` of the model, from 0."""

    def __init__(self, placement: HyperConnections, sub_layer: str, number: int, width: int, make_norm: MakeNorm):
        super().__init__(sub_layer, width, make_norm)
        n = placement.streams
        # With these initial values all streams stay equal, so that the model starts as pre-norm.
        first_n1 = F.one_hot(torch.tensor(number % n), n)[:, None]
        self.mixing = parameter(torch.cat([first_n1, torch.eye(n)], -1), role="scalar")
        """a, then the columns of c."""
        self.beta = parameter(torch.ones(n), role="scalar")
        self.fn: nn.Parameter | None = None
        if placement.dynamic:
            self.stream_norm = make_norm(width, "streams")
            self.fn = zero_matrix(n + 2, width)
            self.mixing_scale = parameter(torch.tensor(0.01), role="scalar")
            self.beta_scale = parameter(torch.tensor(0.01), role="scalar")

    def weights(self, x_BTnD: Tensor) -> tuple[Tensor, Tensor]:
        mixing, beta = self.mixing, self.beta
        if self.fn is not None:
            t_BTnm = torch.tanh(self.stream_norm(x_BTnD) @ self.fn.mT)
            mixing, beta = mixing + self.mixing_scale * t_BTnm[..., 1:], beta + self.beta_scale * t_BTnm[..., 0]
        return mixing, beta


class SumOfStreams(nn.Module):
    """N(sum of the streams)."""

    def __init__(self, width: int, make_norm: MakeNorm):
        super().__init__()
        self.norm = make_norm(width, "final")

    def forward(self, x_BTnD: Tensor) -> Tensor:
        return self.norm(x_BTnD.sum(-2))


register_placement(HyperConnections())
