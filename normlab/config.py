"""What a run is: a tree of typed options, validated, and the identity that is made from it.

Knows neither Hydra nor torch. `launch.py` makes a `RunConfig` from a command line; everything below takes
one. A config is treated as read-only once `validate` has passed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from normlab.corpora import DATA, DataConfig, HubData
from normlab.errors import ConfigError, unknown
from normlab.init_rules import INIT_RULES
from normlab.norms.base import NORMS, NormConfig
from normlab.options import check, from_tree, identity_tree, option
from normlab.placements.base import FORMER_NAMES, PLACEMENTS, Placement
from normlab.source import plugin_file
from normlab.stats.options import OF_ADAM, OF_EXAMPLES, StatsConfig


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The transformer, apart from its norms and where they stand."""

    preset: str = option("", identity=False)
    """The preset that these options came from; a label only."""
    depth: int = option(4, at_least=1, at_most=10_000)
    """Blocks, each of one attention and one MLP sub-layer."""
    width: int = option(128, at_least=1, at_most=2**17)
    """Numbers in a token's residual stream."""
    heads: int = option(4, at_least=1, at_most=2**17)
    """Attention heads; must divide the width."""
    context: int = option(128, at_least=1, at_most=2**20)
    """Tokens in a training sequence, and the most that the model can see."""
    positions: str = option("learned", choices=("learned", "rope"))
    """Learned position embeddings (GPT-2) or rotary ones (Su et al. 2021, arXiv:2104.09864)."""
    rope_theta: float | None = option(None, above=0)
    """Base of the rotary angles; 10000 unless set. Only with positions=rope."""
    mlp: str = option("gelu", choices=("gelu", "swiglu"))
    """GELU in its tanh form, as GPT-2; or SwiGLU (Shazeer 2020, arXiv:2002.05202), as Llama."""
    mlp_width: int | None = option(None, at_least=1, at_most=2**20)
    """Hidden width of the MLP; unless set 4 x width for gelu, 8/3 x width rounded up to 32 for swiglu."""
    bias: bool = True
    """Whether the linear layers have biases."""
    tie_embeddings: bool = True
    """Whether the head reads the token embedding's matrix."""
    qk_norm: str = option("off", choices=("off", "head", "full"))
    """The run's norm on queries and keys, before RoPE: each head apart, or the full width at once."""

    def resolve(self) -> None:
        """Fill in what depends on other options, and refuse what has no effect.

        Raises:
            ConfigError: Heads do not divide the width, or an option belongs to another choice.
        """
        if self.width % self.heads:
            choices = [n for n in range(1, self.width + 1) if self.width % n == 0 and n <= 4 * self.heads]
            close = min(choices, key=lambda n: abs(n - self.heads))
            raise ConfigError(
                f"model.heads={self.heads}: does not divide model.width={self.width}; "
                f"choose one of {', '.join(map(str, choices))} (did you mean {close}?)"
            )
        if self.positions == "rope":
            self.rope_theta = 10000.0 if self.rope_theta is None else self.rope_theta
            if (self.width // self.heads) % 2:
                raise ConfigError(
                    f"model.heads={self.heads}: positions=rope rotates pairs, so model.width / model.heads "
                    f"must be even; it is {self.width // self.heads}: choose other heads"
                )
        elif self.rope_theta is not None:
            raise ConfigError(
                f"model.rope_theta={self.rope_theta}: has no effect with model.positions=learned; "
                "leave it out or set model.positions=rope"
            )
        if self.mlp_width is None:
            self.mlp_width = 4 * self.width if self.mlp == "gelu" else -(-8 * self.width // 96) * 32


@dataclass(kw_only=True, slots=True)
class OptimConfig:
    """Options of every optimiser: the learning rate and its schedule, clipping, weight decay."""

    formula: ClassVar[str]
    source: ClassVar[str]

    name: str
    """Which optimiser; the word after `optim=`."""
    lr: float = option(1e-3, above=0)
    """Peak learning rate, per step."""
    schedule: str = option("cosine", choices=("cosine", "linear", "constant", "wsd"))
    """What follows the warm-up: cosine, linear, constant, or wsd (warm-up, stable, decay)."""
    warmup_steps: int | None = option(None, at_least=0)
    """Steps of linear rise to the peak; unless set 50, or half of all steps where that is less."""
    final_lr_fraction: float | None = option(None, at_least=0, at_most=1)
    """Learning rate at the end over the peak; 0.1 unless set (0 for wsd). Not with schedule=constant."""
    decay_fraction: float | None = option(None, above=0, at_most=1)
    """Share of the steps that the decay of wsd takes; 0.2 unless set. Only with schedule=wsd."""
    clip: float | None = option(1.0, above=0)
    """Largest norm of the whole gradient; null for no clipping."""
    weight_decay: float = option(0.1, at_least=0)
    """Decoupled for AdamW, added to the gradient for SGD."""
    decay: str = option("matrices", choices=("matrices", "all"))
    """What is decayed: matrices and embeddings, or gains and biases too."""

    def resolve(self, steps: int) -> None:
        """Fill in what depends on the schedule and the number of steps, and refuse what has no effect."""
        if self.warmup_steps is None:
            self.warmup_steps = min(50, steps // 2)
        if self.warmup_steps > steps:
            raise ConfigError(
                f"optim.warmup_steps={self.warmup_steps}: more than train.steps={steps}; lower it or raise the steps"
            )
        if self.schedule == "constant":
            if self.final_lr_fraction is not None:
                raise ConfigError(
                    f"optim.final_lr_fraction={self.final_lr_fraction}: has no effect with "
                    "optim.schedule=constant; leave it out or choose cosine, linear or wsd"
                )
        elif self.final_lr_fraction is None:
            self.final_lr_fraction = 0.0 if self.schedule == "wsd" else 0.1
        if self.schedule == "wsd":
            self.decay_fraction = 0.2 if self.decay_fraction is None else self.decay_fraction
        elif self.decay_fraction is not None:
            raise ConfigError(
                f"optim.decay_fraction={self.decay_fraction}: has no effect with "
                f"optim.schedule={self.schedule}; leave it out or set optim.schedule=wsd"
            )
        if self.decay == "all" and self.weight_decay == 0:
            raise ConfigError("optim.decay=all: has no effect with optim.weight_decay=0; leave one of them out")


@dataclass(kw_only=True, slots=True)
class AdamW(OptimConfig):
    """Adam with decoupled weight decay."""

    formula: ClassVar[str] = "w <- w - lr (m^/(sqrt(v^) + eps) + wd w)"
    source: ClassVar[str] = "Loshchilov & Hutter 2017, arXiv:1711.05101, algorithm 2"

    name: str = "adamw"
    beta1: float = option(0.9, at_least=0, below=1)
    """Decay of the mean of gradients, per step."""
    beta2: float = option(0.95, at_least=0, below=1)
    """Decay of the mean of squared gradients, per step."""
    eps: float = option(1e-8, above=0)
    """Added to the root of the second moment."""


@dataclass(kw_only=True, slots=True)
class SGD(OptimConfig):
    """Gradient descent with momentum."""

    formula: ClassVar[str] = "b <- momentum b + (g + wd w);  w <- w - lr b"
    source: ClassVar[str] = "Sutskever et al. 2013; torch.optim.SGD's form, dampening 0"

    name: str = "sgd"
    lr: float = option(0.1, above=0)
    """Peak learning rate, per step."""
    weight_decay: float = option(0.0, at_least=0)
    """Added to the gradient, as weight_decay x weight."""
    momentum: float = option(0.9, at_least=0, below=1)
    """Decay of the velocity, per step."""
    nesterov: bool = False
    """Look ahead along the velocity."""

    def resolve(self, steps: int) -> None:
        """As the base, and Nesterov needs momentum."""
        super(SGD, self).resolve(steps)
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optim.nesterov=true: has no effect with optim.momentum=0; leave one of them out")


OPTIMIZERS: dict[str, type[OptimConfig]] = {"adamw": AdamW, "sgd": SGD}


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """How long, in what batches, and how often things are written."""

    steps: int = option(500, at_least=1, at_most=10**9)
    """Optimiser steps."""
    batch_size: int = option(8, at_least=1, at_most=2**20)
    """Sequences in an optimiser step, over all its micro-batches."""
    accumulation: int = option(1, at_least=1, at_most=2**20)
    """Micro-batches that a step is split into; must divide the batch size."""
    log_every: int = option(10, at_least=1, at_most=10**9, identity=False)
    """Steps between two writes of the record; every step's numbers are in it whatever this is."""
    checkpoint_every: int = option(200, at_least=0, at_most=10**9, identity=False)
    """Steps between two checkpoints; 0 for one at the end only. The two newest are kept."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Validation: fixed windows, evenly spaced over the held-out text."""

    every: int = option(100, at_least=0, at_most=10**9, identity=False)
    """Steps between two evaluations; 0 for none but those at the beginning and the end."""
    sequences: int = option(64, at_least=1, at_most=2**20)
    """Windows of one context each."""


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    """Where numbers go besides the local record, which is always written."""

    wandb: str = option("auto", choices=("auto", "online", "offline", "off"), identity=False)
    """Weights & Biases; auto is online with a login, else offline."""
    project: str = option("normlab", longest=128, identity=False)
    """W&B project."""
    entity: str | None = option(None, longest=128, identity=False)
    """W&B entity (user or team); the login's own unless set."""
    group: str | None = option(None, longest=128, identity=False)
    """W&B group; norm-placement-depth unless set, so that seeds group together."""
    job_type: str = option("train", longest=64, identity=False)
    """W&B job type."""
    tags: list[str] = option([], longest=64, identity=False)
    """W&B tags, beside the norm, the placement and the corpus."""
    layers: bool = option(False, identity=False)
    """Whether W&B also gets each block's numbers, `layers/<statistic>/L03`: many keys in a deep model."""


@dataclass(kw_only=True, slots=True)
class RunOptions:
    """This run among others."""

    name: str | None = option(None, longest=128, identity=False)
    """What tables call it; the run's id unless set."""
    fresh: bool = option(False, identity=False)
    """Start another run beside the one that these words already made."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """One run, whole: what `normlab train` is asked for."""

    norm: NormConfig
    placement: Placement
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    stats: StatsConfig = field(default_factory=StatsConfig, metadata={"identity": False})
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    run: RunOptions = field(default_factory=RunOptions)
    seed: int = option(0, at_least=0, at_most=2**63 - 1)
    """Draws the initial weights; and the order of the data, unless data.seed is set."""
    init: str = "auto"
    """Init rule; auto is the placement's own."""
    device: str = option("auto", choices=("auto", "cuda", "cpu"), identity=False)
    """Where it trains; auto is a GPU where there is one. The resolved device is part of the identity."""
    precision: str = option("auto", choices=("auto", "fp32", "bf16"), identity=False)
    """fp32, or bf16 autocast over float32 weights; auto is bf16 on a GPU that has it, else fp32."""
    compile: str = option("auto", choices=("auto", "on", "off"), identity=False)
    """torch.compile, block by block; auto is on for a GPU, off for a CPU."""
    deterministic: bool | None = option(None, identity=False)
    """Bit for bit the same on the same machine; unless set, true on a CPU and false on a GPU."""
    results_dir: str = option("results", longest=4096, identity=False)
    """Where runs are kept."""
    plugins: list[str] = option([], identity=False)
    """Python files of yours that register norms or placements."""

    @property
    def init_rule(self) -> str:
        """The init rule that is used: `init`, or the placement's own where that is auto."""
        return self.placement.init_rule if self.init == "auto" else self.init

    @property
    def data_seed(self) -> int:
        """The seed of the data order: `data.seed`, or `seed` where that is not set."""
        return self.seed if self.data.seed is None else self.data.seed

    def validate(self) -> None:
        """Resolve what depends on other options and hold everything against its limits.

        Raises:
            ConfigError: Naming the word, what was seen, and what to do.
        """
        check(self)
        for kind, known in (("norm", NORMS), ("optim", OPTIMIZERS)):
            part = getattr(self, kind)
            if known.get(part.name) is not type(part):
                raise ConfigError(f"{kind}.name={part.name}: is not to be set; {kind}=... chooses another")
        if type(PLACEMENTS.get(self.placement.name)) is not type(self.placement):
            raise ConfigError(f"placement.name={self.placement.name}: is not to be set; placement=... chooses another")
        self.results_dir = os.path.expanduser(self.results_dir)  # Hydra's words are no shell's to every shell
        self.model.resolve()
        self.data.resolve()
        self.data.seed = self.data_seed
        self.optim.resolve(self.train.steps)
        self.stats.resolve()
        for name in set(self.stats.also) & set(OF_ADAM) if self.optim.name != "adamw" else ():
            raise ConfigError(f"stats.also={name}: has no effect with optim={self.optim.name}; it is of optim=adamw")
        if self.norm.batch_statistics or self.eval.sequences < 2:
            why = f"norm={self.norm.label}" if self.norm.batch_statistics else f"eval.sequences={self.eval.sequences}"
            for name in set(self.stats.also) & set(OF_EXAMPLES):
                raise ConfigError(f"stats.also={name}: has no effect with {why}; it needs two independent examples")
        self.norm.validate()
        self.placement.validate()
        self.placement.check_norm(self.norm)
        for width in self._norm_widths():
            self.norm.check_width(width)
        if self.init != "auto" and self.init not in INIT_RULES:
            raise ConfigError(f"init={self.init}: " + unknown("rule", self.init, ["auto", *INIT_RULES]))
        self._check_inits_of_placement()
        if self.train.batch_size % self.train.accumulation:
            raise ConfigError(
                f"train.accumulation={self.train.accumulation}: does not divide "
                f"train.batch_size={self.train.batch_size}; choose a number that does"
            )

    def reject_unused_options(self) -> None:
        """Refuse words about norms and their places that change nothing.

        Apart from `validate`, since such a model can be made: `normlab verify` tries a placement with other norms and
        at other depths than its options were chosen for.

        Raises:
            ConfigError: Naming the word, and what makes it idle.
        """
        if self.norm.name != "none" and self.model.qk_norm == "off" and not self.placement.has_norms(self.model.depth):
            raise ConfigError(
                f"placement={self.placement.name}: has no norm, so norm={self.norm.label}, named or by default, "
                "has no effect; add norm=none"
            )
        if self.norm.name == "none" and self.model.qk_norm != "off":
            raise ConfigError(
                f"model.qk_norm={self.model.qk_norm}: has no effect with norm=none; leave it out or choose a norm"
            )
        self.placement.reject_unused_options(self.norm, self.model.depth)

    def doubts(self) -> list[str]:
        """Return a warning for each thing that is known to be wrong with this config, which can still be trained."""
        placement, rule = self.placement, self.init_rule
        found = []
        wrong = placement.incompatible_inits
        if reason := wrong.get(rule) or (wrong.get("other") if rule != placement.init_rule else None):
            found.append(
                f"init={rule} is not what placement={placement.name} goes with ({placement.init_rule}): {reason}"
            )
        if placement.is_plain_sum and (reason := self.norm.incompatible_inits.get(rule)):
            found.append(f"init={rule} is wrong with norm={self.norm.label}: {reason}")
        if not self.norm.causal:
            evaluated = "uses running statistics and does not" if self.norm.batch_statistics else "leaks it too"
            found.append(
                f"norm={self.norm.label}: in training, each token's statistics include later tokens, so the training "
                f"loss leaks the future; the validation loss {evaluated}"
            )
        return found

    def _check_inits_of_placement(self) -> None:
        """The rules that a placement names are known: its own, and those that are wrong for it."""
        placement = self.placement
        for rule in (placement.init_rule, *(rule for rule in placement.incompatible_inits if rule != "other")):
            if str(rule) not in INIT_RULES:
                file = plugin_file("placement", placement.name)
                where = (
                    f"placement={placement.name}: "
                    if file is None
                    else f"plugins: {file}: placement {placement.name}: "
                )
                raise ConfigError(where + unknown("init rule", str(rule), INIT_RULES))

    def _norm_widths(self) -> set[int]:
        """The widths at which the placement asks for norms."""
        model, widths = self.model, {self.model.width}
        inner = {site for layer in range(model.depth) for site in self.placement.inner_sites(layer, model.depth)}
        if model.qk_norm == "head" or inner & {"q", "k", "v"}:
            widths.add(model.width // model.heads)
        if "mlp_inner" in inner and model.mlp_width is not None:
            widths.add(model.mlp_width)
        return widths

    def identity(self) -> dict[str, Any]:
        """The options that can change the numbers, `init` as it is resolved, and less what the placement has anyway."""
        placement = identity_tree(self.placement.without_defaults(self.model.depth))
        return identity_tree(self) | {"init": self.init_rule, "placement": placement}

    @property
    def config_hash(self) -> str:
        """SHA-256 of the canonical JSON of `identity()`."""
        return canonical_hash(self.identity())


def config_of_record(tree: Mapping[str, Any]) -> RunConfig:
    """The config that a run's record holds, its norm and placement being registered.

    Raises:
        ConfigError: A name, an option or a value is none of ours: another normlab wrote it, or a plugin is missing.
    """
    try:
        return _config_of_record(tree)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"a part of the config is missing, or none: {error}") from error


def _config_of_record(tree: Mapping[str, Any]) -> RunConfig:
    placement = dict(tree["placement"])
    placement["name"] = FORMER_NAMES.get(placement["name"], placement["name"])
    tree = {**tree, "placement": placement}

    def known(kind: str, names: Mapping[str, Any]) -> Any:
        name = tree[kind]["name"]
        if name not in names:
            raise ConfigError(unknown(kind, name, names))
        return names[name]

    parts: dict[str, Any] = dict(tree)
    for kind, names in (("norm", NORMS), ("optim", OPTIMIZERS)):
        parts[kind] = from_tree(known(kind, names), tree[kind])
    # A name that is no corpus of ours is a dataset of the hub.
    parts["data"] = from_tree(DATA.get(tree["data"]["name"], HubData), tree["data"])
    parts["placement"] = from_tree(type(known("placement", PLACEMENTS)), tree["placement"])
    for name, kind in (
        ("model", ModelConfig), ("train", TrainConfig), ("eval", EvalConfig), ("tracking", TrackingConfig),
        ("run", RunOptions),
    ):  # fmt: skip
        parts[name] = from_tree(kind, tree[name])
    if "stats" in tree:  # records of before have none
        parts["stats"] = from_tree(StatsConfig, tree["stats"])
    return from_tree(RunConfig, parts)


def canonical_hash(tree: Any) -> str:
    """SHA-256, in hex, of a tree of plain values: keys sorted, no spaces, shortest float that reads back."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
