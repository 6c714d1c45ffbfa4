"""The options of the transformer, except its norm and its placement."""

from dataclasses import dataclass

from normlab.base.errors import ConfigError, no_effect
from normlab.base.options import option
from normlab.catalogue.optimizers.options import UNSCALED, GroupFactors


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The transformer: its shape, and what is switched on in it."""

    preset: str = option("", "Name of the preset that set these options; a label only.", identity=False)
    depth: int = option(4, "Number of blocks, each with attention and an MLP.", at_least=1, at_most=10_000)
    width: int = option(128, "Width of the residual stream.", at_least=1, at_most=2**17)
    heads: int = option(4, "Attention heads; must divide the width.", at_least=1, at_most=2**17)
    context: int = option(128, "Tokens in a sequence; the model cannot read longer ones.", at_least=1, at_most=2**20)
    positions: str = option(
        "learned", "Position embeddings: learned, or rotary (rope, arXiv:2104.09864).", choices=("learned", "rope")
    )
    rope_theta: float | None = option(None, "Base of the rotary angles; 10000 unless set.", at_least=1)
    rope_fraction: float = option(1.0, "Share of the channels of a head that RoPE rotates.", above=0, at_most=1)
    mlp: str = option(
        "gelu", choices=("gelu", "relu2", "swiglu"),
        help="GELU in its tanh form, as in GPT-2; the square of ReLU (arXiv:2109.08668); or SwiGLU (arXiv:2002.05202).",
    )  # fmt: skip
    mlp_width: int | None = option(
        None, "Hidden width; unless set 4 x width, or for swiglu 8/3 x width rounded up to 32.", at_least=1,
        at_most=2**20,
    )  # fmt: skip
    bias: bool = option(True, "Whether the linear layers have biases.")
    tie_embeddings: bool = option(True, "Whether the LM head and the token embedding share their weights.")
    qk_norm: str = option(
        "off", "The run's norm on queries and keys: over a head, or over all heads.", choices=("off", "head", "full")
    )
    qk_norm_after_rope: bool = option(False, "Whether model.qk_norm=head is after RoPE, not before it.")
    qk_scale: float = option(1.0, "Factor on queries and on keys, after model.qk_norm.", above=0)
    attn_gate: str = option(
        "off", choices=("off", "head", "channel"),
        help="A factor sigmoid(W x) on the output of attention before its last matrix: one for each head or channel.",
    )  # fmt: skip
    attn_softcap: float | None = option(
        None, "Bound c of the scores of attention before its softmax: c tanh(scores / c).", above=0
    )
    v_norm: bool = option(
        False, "Whether the run's norm, without gain and bias, is on the values of each head (Gemma 4)."
    )
    value_residual: str = option(
        "off", choices=("off", "fixed", "learned"),
        help="Values of attention in each block after the first: (1 - m) v + m v_1, v_1 those of the first block. m is "
        "0.5, or learned from there.",
    )  # fmt: skip
    value_embed: bool = option(
        False,
        "Whether every second block, the last one among them, adds a gated embedding of the tokens to its values.",
    )
    embed_scale: float = option(1.0, "Factor on the token embedding: sqrt(width) in Gemma, initially in DyT.", above=0)
    logit_softcap: float | None = option(None, "Bound c of the logits: c tanh(logits / c).", above=0)
    scaling: str = option(
        "none", choices=("none", "mup", "completep"),
        help="Factors by which hyperparameters of a small model fit a wider one (mup), or a wider and deeper one "
        "(completep): `normlab train --cfg optim` prints those of the optimiser. init=auto is gpt2 then.",
    )  # fmt: skip
    base_width: int | None = option(None, "Width of the small model; 256 unless set. With scaling.", at_least=1)
    base_depth: int | None = option(None, "Depth of the small model; 2 unless set. With completep.", at_least=1)
    z_loss: float = option(
        0.0, "Weight in training of the mean of (ln sum exp logits)^2; it is not in the recorded loss.", at_least=0
    )

    @property
    def default_mlp_width(self) -> int:
        """The hidden width of the MLP unless it is set."""
        if self.mlp != "swiglu":
            return 4 * self.width
        # SwiGLU has three matrices in place of two: 8/3 D keeps the number of weights, rounded up to 32.
        return -(-8 * self.width // 96) * 32

    @property
    def attn_outputs(self) -> int:
        """Rows of all matrices of an attention layer: queries, keys, values, output, and the gate if there is one."""
        return 4 * self.width + {"off": 0, "head": self.heads, "channel": self.width}[self.attn_gate]

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP, each between the width of the model and that of the MLP."""
        return 3 if self.mlp == "swiglu" else 2

    @property
    def block_weights(self) -> int:
        """Weights of the matrices of attention and MLPs in all blocks.

        This is N of Kaplan et al. 2020, arXiv:2001.08361, section 2.1: without embeddings, norms and biases. The wiring
        of streams is not counted.
        """
        assert self.mlp_width is not None  # resolved
        return self.depth * self.width * (self.attn_outputs + self.mlp_matrices * self.mlp_width)

    @property
    def shares_values(self) -> bool:
        """Whether blocks use tensors of the embeddings or of other blocks besides the stream."""
        return self.value_residual != "off" or self.value_embed

    def has_value_embed(self, layer: int) -> bool:
        """Return whether a block, counted from 0, has an embedding of its own for the values."""
        return self.value_embed and (self.depth - 1 - layer) % 2 == 0

    @property
    def value_gate_channels(self) -> int:
        """The channels of its input that the gate of a value embedding reads."""
        return min(self.width, 32)

    @property
    def width_ratio(self) -> float:
        """m_N: the width over that of the small model; 1 without scaling."""
        if self.base_width is None:
            return 1.0
        return self.width / self.base_width

    @property
    def depth_ratio(self) -> float:
        """m_L: the depth over that of the small model; 1 without completep. 1 / m_L multiplies each sub-layer."""
        if self.base_depth is None:
            return 1.0
        return self.depth / self.base_depth

    def factors_of(self, group: str) -> GroupFactors:
        """Return the factors on the optimiser's options of a group of `config.optim.GROUPS`.

        The factor on eps is that of the size of the gradients: the depth changes only those of the blocks.

        Source: Dey et al. 2025, arXiv:2505.01618 (CompleteP), table 1 and eq. 40, with alpha = 1; mup after Yang et al.
        2022, arXiv:2203.03466. All factors are those of the authors' code, EleutherAI/nanoGPT-mup at 3904404 (branch
        completep). Before that commit the depth factor was on every eps, a mistake that arXiv:2512.22382 found. The
        branch master does not scale eps with mup.
        """
        if self.scaling == "none":
            return UNSCALED
        eps = 1 / self.width_ratio
        if group in ("embed", "head", "gains.final"):
            return GroupFactors(eps=eps)
        eps /= self.depth_ratio
        if group != "matrices":
            return GroupFactors(eps=eps)
        # lr * decay stays that of the small model only with completep; mup leaves the decay as it is.
        decay = self.width_ratio if self.scaling == "completep" else 1.0
        return GroupFactors(1 / self.width_ratio, decay, eps)

    def _resolve_scaling(self) -> None:
        for name, default, rules in (("base_width", 256, ("mup", "completep")), ("base_depth", 2, ("completep",))):
            value = getattr(self, name)
            if self.scaling in rules:
                if value is None:
                    setattr(self, name, default)
            elif value is not None:
                raise no_effect(f"model.{name}={value}", f"model.scaling={self.scaling}")

    def resolve(self) -> None:
        """Set the options that depend on others, and reject those without effect."""
        self._resolve_scaling()
        if self.width % self.heads:
            divisors = [str(n) for n in range(1, 4 * self.heads + 1) if self.width % n == 0]
            raise ConfigError(
                f"model.heads={self.heads}: does not divide model.width={self.width}; choose {', '.join(divisors)}"
            )
        if self.positions == "rope":
            # A share such as 0.3 is not exact in binary, so the number of channels is rounded before it is tested.
            if self.rope_theta is None:
                self.rope_theta = 10000.0
            rotated = round(self.rope_fraction * (self.width // self.heads), 6)
            if rotated % 2:
                raise ConfigError(
                    f"model.heads={self.heads}: {rotated:g} channels of a head rotate, and model.positions=rope "
                    "rotates pairs; choose another number, or another model.rope_fraction"
                )
        for name, default in (("rope_theta", None), ("rope_fraction", 1.0)):
            value = getattr(self, name)
            if self.positions == "learned" and value != default:
                raise no_effect(f"model.{name}={value}", "model.positions=learned")
        for name, needed in (("qk_norm", "head"), ("positions", "rope")):
            value = getattr(self, name)
            if self.qk_norm_after_rope and value != needed:
                raise no_effect("model.qk_norm_after_rope=true", f"model.{name}={value}")
        if self.qk_scale != 1 and self.qk_norm == "off":
            raise no_effect(f"model.qk_scale={self.qk_scale}", "model.qk_norm=off")
        if self.value_residual != "off" and self.depth == 1:
            raise no_effect(f"model.value_residual={self.value_residual}", "model.depth=1")
        if self.mlp_width is None:
            self.mlp_width = self.default_mlp_width
