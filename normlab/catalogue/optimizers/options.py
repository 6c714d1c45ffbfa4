"""The optimisers: their options, and what other modules must know of them. `updates.py` has their updates."""

import dataclasses
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import ClassVar

from normlab.base.errors import ConfigError, no_effect
from normlab.base.options import option

GROUPS = {
    "embed": "embeddings of tokens, positions and values",
    "head": "LM head of its own (model.tie_embeddings=false)",
    "matrices": "matrices of the linear layers of attention, MLP and stream wiring",
    "gains.input": "gains of norms on the input of a sub-layer, or inside it",
    "gains.output": "gains of norms on the output of a sub-layer, or after the addition",
    "gains.qk": "gains of norms on queries, keys and values",
    "gains.final": "gains of the norms before the LM head",
    "biases": "biases of linear layers and of norms",
    "scalars": "learned numbers and factors: alphas, residual lambdas, layer scales",
    "norm_matrices": "matrices of a norm",
}
"""The parameter groups: every parameter of a model is in one of them."""
MATRIX_GROUPS = ("embed", "head", "matrices", "norm_matrices")
"""The groups whose parameters are matrices."""


@dataclass(kw_only=True, slots=True)
class GroupOptions:
    """How one group of parameters differs from the others."""

    lr: float = option(
        1.0, "Factor on the learning rate of the group; 0 leaves its parameters as they are.", at_least=0
    )
    decay: float | None = option(
        None, "Strength of the group's weight decay; unless set that of optim.weight_decay and optim.decay.", at_least=0
    )


@dataclass(frozen=True, slots=True)
class GroupFactors:
    """What a rule of depth and width transfer multiplies the options of a group by (`ModelConfig.scaling`)."""

    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0


UNSCALED = GroupFactors()


@dataclass(kw_only=True, slots=True)
class GainGroups:
    """The gains of norms, by the place of the norm."""

    input: GroupOptions = field(default_factory=GroupOptions)
    output: GroupOptions = field(default_factory=GroupOptions)
    qk: GroupOptions = field(default_factory=GroupOptions)
    final: GroupOptions = field(default_factory=GroupOptions)


@dataclass(kw_only=True, slots=True)
class ParameterGroups:
    """Options of each group of parameters (`GROUPS`)."""

    embed: GroupOptions = field(default_factory=GroupOptions)
    head: GroupOptions = field(default_factory=GroupOptions)
    matrices: GroupOptions = field(default_factory=GroupOptions)
    gains: GainGroups = field(default_factory=GainGroups)
    biases: GroupOptions = field(default_factory=GroupOptions)
    scalars: GroupOptions = field(default_factory=GroupOptions)
    norm_matrices: GroupOptions = field(default_factory=GroupOptions)
    vacant: bool = option(
        False, "Whether options of a group that the model lacks have no effect, as in a recipe, or are an error.",
        identity=False,
    )  # fmt: skip

    def of(self, group: str) -> GroupOptions:
        """Return the options of a group of `GROUPS`."""
        return attrgetter(group)(self)

    @property
    def have_decay(self) -> bool:
        """Whether a group has a weight decay of its own that is not 0."""
        return any(self.of(group).decay for group in GROUPS)


def default_warmup(steps: int) -> int:
    """Return the warm-up of a run of some steps: a short run would otherwise end before its peak learning rate."""
    return min(50, steps // 2)


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """Options of every optimiser: learning rate and schedule, clipping, weight decay."""

    title: ClassVar[str] = ""
    """The name in papers; a subclass does not inherit it."""
    formula: ClassVar[str]
    source: ClassVar[str]
    version: ClassVar[int] = 1
    """Raise it with every change of the update that changes its numbers: then the runs have other ids."""
    kept: ClassVar[int]
    """Numbers that the optimiser keeps for each parameter."""
    per_run: ClassVar[tuple[str, ...]] = (
        *("lr", "weight_decay", "decay_mode", "warmup_steps", "schedule", "final_lr_fraction", "decay_fraction"),
        "groups",
    )
    """Options in which the runs of a pack may differ."""
    has_transfer_rule: ClassVar[bool] = False
    """Whether the rules of depth and width transfer (`model.scaling`) are derived for the update."""
    keeps_matrix_norms: ClassVar[bool] = False
    """Whether each matrix keeps its initial norm: then it must not start at 0, and QK-Clip cannot make it smaller."""

    name: str
    """Name of the optimiser; chosen by `optim=`."""
    lr: float = option(1e-3, "Peak learning rate, per step.", above=0)
    schedule: str = option(
        "cosine", choices=("cosine", "linear", "constant", "wsd"),
        help="Schedule after the warm-up: cosine; linear, to zero with optim.final_lr_fraction=0; constant; or wsd "
        "(warm-up, stable, decay).",
    )  # fmt: skip
    warmup_steps: int | None = option(
        None, "Steps of linear warm-up to the peak; unless set the smaller of 50 and half of all steps.", at_least=0
    )
    final_lr_fraction: float | None = option(
        None, at_least=0, at_most=1,
        help="Fraction f of the peak where the schedule ends, one update after the last; 0.1 unless set (0 for wsd). "
        "The last update has f + (1 - f) / N with linear and wsd, and f + (1 - f)(1 - cos(pi / N)) / 2 with "
        "cosine. N is the number of updates after the warm-up; with wsd, in the decay phase. Not with "
        "schedule=constant.",
    )  # fmt: skip
    decay_fraction: float | None = option(
        None, above=0, at_most=1,
        help="Fraction of the steps in the decay phase of wsd; 0.2 unless set. Only with schedule=wsd.",
    )  # fmt: skip
    clip: float | None = option(1.0, "Largest norm of the gradient over all parameters; null for no clipping.", above=0)
    weight_decay: float = option(
        0.1, at_least=0,
        help="Strength of the weight decay, wd in the formula.",
    )  # fmt: skip
    decay_mode: str = option(
        "proportional", choices=("proportional", "independent", "cautious"),
        help="proportional: a weight loses lr wd per step, so that a grid of learning rates is also one of decays. "
        "independent: it loses wd times the schedule, whatever lr is. cautious: as proportional, but not where the "
        "update moves it away from 0.",
    )  # fmt: skip
    decay: str = option(
        "matrices", choices=("matrices", "all"),
        help="Parameters with weight decay: matrices and embeddings, or all, with gains and biases.",
    )  # fmt: skip
    qk_clip: float | None = option(
        None, above=0,
        help="QK-Clip: if the largest attention score of a head is above this in a step, the weights and biases of its "
        "queries and keys are scaled so that it would equal this. The paper has 100 (arXiv:2507.20534).",
    )  # fmt: skip
    groups: ParameterGroups = field(default_factory=ParameterGroups)

    def of_group(self, group: str, factors: GroupFactors = UNSCALED) -> "OptimConfig":
        """Return the options of one group of `GROUPS`: of its own optimiser, learning rate and weight decay."""
        options = self.groups.of(group)
        decay = options.decay
        if decay is None:
            has_decay = self.decay == "all" or group in MATRIX_GROUPS
            decay = self.weight_decay if has_decay else 0.0
        # The learning rate multiplies the decay unless that is independent, so a factor on it needs one on the decay.
        if self.decay_mode != "independent":
            decay *= factors.decay
        return replace(self, lr=self.lr * options.lr * factors.lr, weight_decay=decay)

    @property
    def decay_per_lr(self) -> float:
        """The wd of the formula: `weight_decay`, over the peak learning rate if the decay is independent of it.

        Cautious decay is not part of the formula: it follows the update (`cautious_decay`).

        Source of independent decay: Loshchilov & Hutter 2017, arXiv:1711.05101, algorithm 2; Wortsman et al. 2023,
        arXiv:2309.14322.
        """
        if self.decay_mode == "cautious":
            return 0.0
        # The formula multiplies wd by lr, which independent decay must not depend on. With lr=0 nothing is decayed.
        if self.decay_mode == "independent":
            return self.weight_decay / (self.lr or 1.0)
        return self.weight_decay

    @property
    def cautious_decay(self) -> float:
        """The wd of a weight w that the update u does not move away from 0: w <- w - lr (u + wd [u w >= 0] w).

        Source: Chen et al. 2025, arXiv:2510.12402 (cautious weight decay).
        """
        return self.weight_decay if self.decay_mode == "cautious" else 0.0

    @property
    def adam_constants(self) -> tuple[float, float, float] | None:
        """beta1, beta2 and eps if an update divides the moment `mean` by sqrt(`square`) + eps as Adam; else None."""
        return None

    def resolve(self, steps: int) -> None:
        """Set the options that depend on the schedule and the number of steps, and reject those without effect."""
        if self.warmup_steps is None:
            self.warmup_steps = default_warmup(steps)
        if self.warmup_steps > steps:
            raise ConfigError(
                f"optim.warmup_steps={self.warmup_steps}: more than train.steps={steps}; lower it, or train for more "
                "steps"
            )
        # A constant schedule has no end, and only wsd has a decay phase.
        if self.schedule == "constant":
            if self.final_lr_fraction is not None:
                raise no_effect(f"optim.final_lr_fraction={self.final_lr_fraction}", "optim.schedule=constant")
        elif self.final_lr_fraction is None:
            self.final_lr_fraction = 0.0 if self.schedule == "wsd" else 0.1
        if self.schedule == "wsd":
            if self.decay_fraction is None:
                self.decay_fraction = 0.2
        elif self.decay_fraction is not None:
            raise no_effect(f"optim.decay_fraction={self.decay_fraction}", f"optim.schedule={self.schedule}")
        # `decay` says to which parameters weight_decay applies; `decay_mode` also matters to the decay of a group.
        if not self.weight_decay and self.decay != "matrices":
            raise no_effect(f"optim.decay={self.decay}", "optim.weight_decay=0")
        if not self.weight_decay and not self.groups.have_decay and self.decay_mode != "proportional":
            raise no_effect(f"optim.decay_mode={self.decay_mode}", "optim.weight_decay=0")

    def resolve_for_model(self, heads: int, width: int) -> None:
        """Set the options that depend on the model, after `resolve`; most optimisers have none."""


@dataclass(kw_only=True, slots=True)
class AdamW(OptimConfig):
    """Adam with decoupled weight decay, in torch's form.

    lr is the learning rate of the step, with its schedule. In algorithm 2 of the paper the schedule multiplies both
    terms, and the peak learning rate only the first (`decay_mode=independent`):
    w <- w - schedule (peak m^/(sqrt(v^) + eps) + wd w).

    The defaults of beta2 and weight_decay are those of GPT-3 (arXiv:2005.14165) and nanoGPT; torch has 0.999 and 0.01.
    """

    title: ClassVar[str] = "AdamW"
    formula: ClassVar[str] = "w <- w - lr (m^/(sqrt(v^) + eps) + wd w)"
    source: ClassVar[str] = "torch.optim.AdamW, after Loshchilov & Hutter 2017, arXiv:1711.05101"
    kept: ClassVar[int] = 2
    per_run: ClassVar[tuple[str, ...]] = (*OptimConfig.per_run, "beta1", "beta2")
    has_transfer_rule: ClassVar[bool] = True

    name: str = "adamw"
    beta1: float = option(0.9, "Decay per step of the mean of the gradients.", at_least=0, below=1)
    beta2: float = option(0.95, "Decay per step of the mean of the squared gradients.", at_least=0, below=1)
    eps: float = option(1e-8, "Added to the square root of the second moment.", above=0)

    @property
    def adam_constants(self) -> tuple[float, float, float] | None:
        return self.beta1, self.beta2, self.eps

    def of_group(self, group: str, factors: GroupFactors = UNSCALED) -> OptimConfig:
        return replace(super(AdamW, self).of_group(group, factors), eps=self.eps * factors.eps)


@dataclass(kw_only=True, slots=True)
class Lion(OptimConfig):
    """The sign of a mean of gradients. Its learning rate is some three to ten times lower than that of AdamW.

    The defaults of beta1 and beta2 are those of the paper. The authors' code, google/automl, has lr=1e-4 and
    weight_decay=0.
    """

    title: ClassVar[str] = "Lion"
    formula: ClassVar[str] = "w <- w - lr (sign(beta1 m + (1 - beta1) g) + wd w);  m <- beta2 m + (1 - beta2) g"
    source: ClassVar[str] = "Chen et al. 2023, arXiv:2302.06675, algorithm 2"
    kept: ClassVar[int] = 1
    per_run: ClassVar[tuple[str, ...]] = (*OptimConfig.per_run, "beta1", "beta2")

    name: str = "lion"
    lr: float = option(2e-4, "Peak learning rate, per step.", above=0)
    beta1: float = option(0.9, "Weight of the mean in the update.", at_least=0, below=1)
    beta2: float = option(0.99, "Decay per step of the mean of the gradients.", at_least=0, below=1)


@dataclass(kw_only=True, slots=True)
class Orthogonal(AdamW):
    """Options of the optimisers of matrices, whose updates have singular values near 1: NS(b), by Newton-Schulz.

    The matrices of attention and MLP have such an update. All other parameters have that of AdamW, with the same
    learning rate unless `groups` has another.
    """

    version: ClassVar[int] = 2
    note: ClassVar[str] = (
        "NS divides a matrix by its norm, however small that is, and a gradient of 0 changes nothing. "
        "KellerJordan/Muon adds 1e-7 to the norm and torch.optim.Muon divides by 1e-7 at least, so that there a matrix "
        "whose gradient norm is below 1e-7 (queries and keys of a deep LayerScale model) is hardly updated."
    )
    """What differs from public code."""
    kept: ClassVar[int] = 1
    per_run: ClassVar[tuple[str, ...]] = (*AdamW.per_run, "momentum")
    has_transfer_rule: ClassVar[bool] = False

    momentum: float = option(0.95, "mu: decay per step of the mean of the gradients.", at_least=0, below=1)
    nesterov: bool = option(True, "Whether NS is that of (1 - mu) g + mu b (Nesterov) in place of b.")
    ns_steps: int = option(5, "Newton-Schulz steps.", at_least=1, at_most=99)
    polynomial: str = option(
        "fast", choices=("fast", "convergent"),
        help="The polynomial of a Newton-Schulz step. fast: singular values from 0.01 up are between 0.68 and 1.13 "
        "after 5 steps; convergent: they are 1 after 12.",
    )  # fmt: skip
    qkv: str = option(
        "apart", choices=("apart", "together", "heads"),
        help="What is one matrix for NS in attention: each of q, k and v; the three together; or each head of them.",
    )  # fmt: skip
    heads: int | None = option(
        None, "With optim.qkv=heads the number of heads; model.heads unless set.", at_least=1, at_most=2**17
    )

    def resolve_for_model(self, heads: int, width: int) -> None:
        """Set the number of heads by that of the model."""
        if self.qkv != "heads":
            if self.heads is not None:
                raise no_effect(f"optim.heads={self.heads}", f"optim.qkv={self.qkv}")
            return
        if self.heads is None:
            self.heads = heads
        if width % self.heads:
            raise ConfigError(f"optim.heads={self.heads}: does not divide model.width={width}; leave it out")

    @property
    def adam_constants(self) -> None:
        return None

    @property
    def row_weight(self) -> float:
        """1 minus the decay per step of a second moment of rows."""
        return 1.0

    def of_group(self, group: str, factors: GroupFactors = UNSCALED) -> OptimConfig:
        if group == "matrices":
            return super(Orthogonal, self).of_group(group, factors)
        # Embeddings, gains and biases are no matrices, so they have AdamW's update, with the options of the same names.
        values = {shared.name: getattr(self, shared.name) for shared in dataclasses.fields(AdamW)}
        del values["name"]
        return AdamW(**values).of_group(group, factors)


@dataclass(kw_only=True, slots=True)
class Muon(Orthogonal):
    """Momentum whose singular values are set near 1, for the matrices of attention and MLP; AdamW for the others.

    The defaults are those of torch.optim.Muon, except for `scale`: torch's default and KellerJordan/Muon have `shape`,
    with which the learning rate is some ten times higher than that of AdamW.
    """

    title: ClassVar[str] = "Muon"
    formula: ClassVar[str] = "b <- mu b + (1 - mu) g;  w <- w - lr (scale NS((1 - mu) g + mu b) + wd w)"
    source: ClassVar[str] = (
        "torch.optim.Muon with adjust_lr_fn=match_rms_adamw, after Liu et al. 2025, arXiv:2502.16982; "
        "scale=shape: torch's default, after Jordan et al. 2024 (KellerJordan/Muon)"
    )

    name: str = "muon"
    scale: str = option(
        "rms", choices=("rms", "shape"),
        help="rms: 0.2 sqrt(max(n, m)) for a matrix of n x m, so that the update is as large as AdamW's; shape: "
        "sqrt(max(1, n / m)).",
    )  # fmt: skip

    def scale_of(self, rows: int, columns: int) -> float:
        """Return the factor on the update of a matrix."""
        # An n x m matrix with singular values of 1 has a root mean square of 1 / sqrt(max(n, m)).
        if self.scale == "rms":
            return 0.2 * max(rows, columns) ** 0.5
        return max(1.0, rows / columns) ** 0.5


@dataclass(kw_only=True, slots=True)
class NorMuon(Muon):
    """Muon with rows of equal size: each row of the update is divided by the root of its mean square over the steps.

    Defaults follow algorithm 1 of the paper: no Nesterov, update RMS 0.2. The authors' code is `nesterov=true`,
    `scale=shape`, with learning rates of 0.02 for matrices and 3e-4 for the others.
    """

    title: ClassVar[str] = "NorMuon"
    formula: ClassVar[str] = (
        "o = NS(b);  v <- beta v + (1 - beta) mean(o^2, row);  w <- w - lr (scale unit(o / sqrt(v)) + wd w), "
        "unit(x) = x / |x|"
    )
    source: ClassVar[str] = (
        "Li et al. 2025, arXiv:2510.05491, algorithm 1; scale=shape, nesterov=true: the authors' code, "
        "zichongli5/NorMuon at e5aaaf4"
    )
    version: ClassVar[int] = 3
    per_run: ClassVar[tuple[str, ...]] = (*Muon.per_run, "row_decay")

    name: str = "normuon"
    nesterov: bool = option(False, "Whether NS is that of (1 - mu) g + mu b (Nesterov) in place of b.")
    scale: str = option(
        "rms", choices=("rms", "shape"),
        help="rms: 0.2 sqrt(n m) for a matrix of n x m, so that the root mean square of the update is 0.2; shape: "
        "|o| sqrt(max(1, n / m)).",
    )  # fmt: skip
    row_decay: float = option(0.95, "beta: decay per step of the mean square of a row.", at_least=0, below=1)

    @property
    def row_weight(self) -> float:
        return 1 - self.row_decay

    @property
    def keeps_norm(self) -> bool:
        """Whether the update has the norm of NS, by which `scale_of` is multiplied."""
        return self.scale == "shape"

    def scale_of(self, rows: int, columns: int) -> float:
        # The update has a norm of 1, and so a root mean square of 1 / sqrt(n m).
        if self.scale == "rms":
            return 0.2 * (rows * columns) ** 0.5
        return super(NorMuon, self).scale_of(rows, columns)


@dataclass(kw_only=True, slots=True)
class Hyperball(Orthogonal):
    """Muon on a sphere: each matrix keeps its initial Frobenius norm R.

    The momentum is that of Muon. A matrix that starts at 0 stays there. The matrices have no weight decay, unless
    `groups.matrices.decay` is set, which makes the angle of each update larger.

    The default lr=0.01 is normlab's own.
    """

    title: ClassVar[str] = "Hyperball"
    formula: ClassVar[str] = "w <- R unit(w - lr (R unit(NS(...)) + wd w)), unit(x) = x / |x|"
    source: ClassVar[str] = "Wen et al. 2025, Hyperball Optimization, part 1 (MuonH)"
    keeps_matrix_norms: ClassVar[bool] = True

    name: str = "hyperball"
    lr: float = option(0.01, "Peak learning rate, per step: the angle by which a matrix turns.", above=0)

    def resolve(self, steps: int) -> None:
        super(Hyperball, self).resolve(steps)
        if self.decay_mode == "cautious" and self.groups.matrices.decay:
            raise ConfigError("optim.decay_mode=cautious: moves matrices off their sphere; leave out their decay")

    def of_group(self, group: str, factors: GroupFactors = UNSCALED) -> OptimConfig:
        options = super(Hyperball, self).of_group(group, factors)
        if group != "matrices":
            return options
        # On a sphere weight_decay would only turn a matrix further, so only a decay that is asked for is applied.
        return replace(options, weight_decay=self.groups.matrices.decay or 0.0)


@dataclass(kw_only=True, slots=True)
class SGD(OptimConfig):
    """Gradient descent with momentum; torch's defaults differ: lr=1e-3, momentum=0."""

    title: ClassVar[str] = "SGD"
    formula: ClassVar[str] = "b <- momentum b + (g + wd w);  w <- w - lr b"
    source: ClassVar[str] = "Sutskever et al. 2013; torch.optim.SGD's form, dampening 0"
    kept: ClassVar[int] = 1
    per_run: ClassVar[tuple[str, ...]] = (*OptimConfig.per_run, "momentum")

    name: str = "sgd"
    lr: float = option(0.1, "Peak learning rate, per step.", above=0)
    weight_decay: float = option(
        0.0, at_least=0,
        help="Strength of the weight decay, wd in the formula: wd w is added to the gradient, so "
        "that momentum makes it up to 1 / (1 - momentum) times as strong.",
    )  # fmt: skip
    momentum: float = option(0.9, "Decay per step of the velocity.", at_least=0, below=1)
    nesterov: bool = option(False, "Whether to use Nesterov momentum.")

    def resolve(self, steps: int) -> None:
        super(SGD, self).resolve(steps)
        if self.decay_mode == "cautious":
            raise ConfigError("optim.decay_mode=cautious: optim=sgd adds the decay to the gradient; choose another")
        if self.nesterov and self.momentum == 0:
            raise no_effect("optim.nesterov=true", "optim.momentum=0")


OPTIMIZERS: dict[str, type[OptimConfig]] = {
    "adamw": AdamW, "hyperball": Hyperball, "lion": Lion, "muon": Muon, "normuon": NorMuon, "sgd": SGD,
}  # fmt: skip
