"""The MLPs.

Shapes: B batch, T time, D model width, M hidden width.
"""

from collections.abc import Callable
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from normlab.catalogue.placements.base import MakeNorm
from normlab.config.model import ModelConfig
from normlab.model.instrument import observe


class MLP(nn.Module):
    """gelu: W_down N(gelu(W_up x)); relu2: W_down N(relu(W_up x)^2); swiglu: W_down N(silu(W_gate x) * W_up x).

    N is optional. GELU in the tanh form (Hendrycks & Gimpel 2016, arXiv:1606.08415), as GPT-2. Squared ReLU: So et al.
    2021, arXiv:2109.08668, section 4.2. SwiGLU: Shazeer 2020, arXiv:2002.05202, eq. 6. Maps (B, T, D) to (B, T, D).
    """

    init_roles: ClassVar[dict[str, str]] = {"up.weight": "mlp.up", "gate.weight": "mlp.gate", "down.weight": "mlp.down"}
    """The role of each weight in the init rules (`init_rules.Weight`)."""

    def __init__(
        self,
        config: ModelConfig,
        sites: frozenset[str],
        make_norm: MakeNorm,
        hidden_transform: Callable[[str, int, int], nn.Module | None],
    ):
        super().__init__()
        width, hidden = config.width, config.mlp_width
        assert hidden is not None, "ModelConfig.resolve() sets the hidden width"
        self.up = nn.Linear(width, hidden, bias=config.bias)
        self.gate: nn.Linear | None = None
        if config.mlp == "swiglu":
            self.gate = nn.Linear(width, hidden, bias=config.bias)
        self.down = nn.Linear(hidden, width, bias=config.bias)
        self.is_squared = config.mlp == "relu2"
        self.norm: nn.Module | None = None
        if "inner_mlp" in sites:
            self.norm = make_norm(hidden, "inner_mlp")
        # The placement may transform the outputs of `up` and `gate`, before any activation.
        self.of_up = hidden_transform("up", width, hidden)
        self.of_gate: nn.Module | None = None
        if self.gate is not None:
            self.of_gate = hidden_transform("gate", width, hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTM = self.up(x_BTD)
        if self.of_up is not None:
            h_BTM = self.of_up(h_BTM)
        if self.is_squared:
            h_BTM = F.relu(h_BTM).square()
        elif self.gate is None:
            h_BTM = F.gelu(h_BTM, approximate="tanh")
        else:
            gate_BTM = self.gate(x_BTD)
            if self.of_gate is not None:
                gate_BTM = self.of_gate(gate_BTM)
            h_BTM = F.silu(gate_BTM) * h_BTM
        observe("hidden", "", h_BTM)
        if self.norm is not None:
            h_BTM = self.norm(h_BTM)
        return self.down(h_BTM)
