"""The config of a run: a tree of typed options, their validation, and the run's identity.

Imports neither Hydra nor torch. `compose.py` composes a `RunConfig` from overrides and calls `validate`, and
`recorded.py` reads one from a record; no later code changes the config.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from normlab.base.errors import ConfigError, no_effect, unknown
from normlab.base.options import check, identity_tree, option, plain_tree
from normlab.base.parsing import canonical_hash
from normlab.base.plugins import hint_of_empty_plugins
from normlab.catalogue.corpora import DATA, DataConfig, HubData
from normlab.catalogue.norms.base import NORMS, NormConfig
from normlab.catalogue.optimizers.options import GROUPS, OPTIMIZERS, OptimConfig
from normlab.catalogue.placements.base import NORM_UPDATE, PLACEMENTS, Placement
from normlab.catalogue.placements.init_rules import INIT_RULES, SCALED_RULES
from normlab.catalogue.statistics.registry import ADAM_STATISTICS, PER_EXAMPLE_STATISTICS, UPDATE_STATISTICS
from normlab.config.model import ModelConfig
from normlab.config.norms import PlacedNorm, check_norms, norm_at, placed_norms, without_defaults
from normlab.config.stats import StatsConfig
from normlab.config.train import FOLDER_OF_WEIGHTS, EvalConfig, RunOptions, TrackingConfig, TrainConfig

LARGE_DECAY = 0.01
"""The share of each weight that an independent decay takes in a step, from which there is a warning."""


@dataclass(kw_only=True, slots=True)
class RunConfig:
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
    seed: int = option(0, "Seed of the initial weights and of the order of the data.", at_least=0, at_most=2**63 - 1)
    init: str = option("auto", "Init rule; auto is the rule of the placement.")
    device: str = option(
        "auto", "Device; auto is a GPU if the machine has one.", choices=("auto", "cuda", "cpu"), identity=False
    )
    devices: int = option(
        1, "Devices (on a CPU, processes) that train the run together.", at_least=1, at_most=1024, identity=False
    )
    precision: str = option(
        "auto", choices=("auto", "fp32", "tf32", "bf16", "fp16"), identity=False,
        help="fp32, tf32 (on a GPU of Ampere or newer), or autocast with float32 weights: bf16, or fp16 with a dynamic "
        "loss scale. auto is bf16 on a GPU that has it, else fp32.",
    )  # fmt: skip
    compile: str = option(
        "auto", "torch.compile of each block (`normlab list auto`).", choices=("auto", "on", "off"), identity=False
    )
    deterministic: bool | None = option(
        None, "Repeat bit for bit on one machine; true on a CPU, false on a GPU unless set.", identity=False
    )
    results_dir: str = option("results", "Folder of the runs.", longest=4096, identity=False)
    plugins: list[str] = option([], "Your Python files that register norms or placements.", identity=False)

    @property
    def init_rule(self) -> str:
        """The resolved init rule: `init`, or the rule of the placement if `init` is auto."""
        if self.init != "auto":
            return self.init
        if self.model.scaling in SCALED_RULES:
            return SCALED_RULES[self.model.scaling][0]
        return self.placement.init

    @property
    def placed_norms(self) -> list[PlacedNorm]:
        """The norms of the model, block by block."""
        return placed_norms(self.norm, self.placement, self.model)

    @property
    def norms(self) -> list[NormConfig]:
        """The different norms of the model; without any, the run's norm."""
        norms = {repr(placed.norm): placed.norm for placed in self.placed_norms}
        return list(norms.values()) or [self.norm]

    def norm_at(self, site: str, layer: int | None = None) -> NormConfig:
        """Return the norm of a site (a key of `sites.SITES` without parts), in the block `layer` (from 0)."""
        return norm_at(self.norm, self.model, site, layer)

    @property
    def batch_statistics(self) -> bool:
        """Whether a norm of the model has statistics over the batch."""
        return any(norm.batch_statistics for norm in self.norms)

    @property
    def measures_batches(self) -> bool:
        """Whether an output depends on how a batch is divided into micro-batches."""
        return any(norm.measures_batches for norm in self.norms)

    @property
    def data_seed(self) -> int:
        """The seed of the data order: `data.seed`, or `seed` if that is not set."""
        if self.data.seed is None:
            return self.seed
        return self.data.seed

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per step on each device.

        A norm with statistics over the batch has the same micro-batches on several devices as on one, each divided
        among the devices. For other norms the loss does not depend on micro-batches: each device takes consecutive
        sequences, in as few micro-batches as are no larger than those of a single device.
        """
        train = self.train
        if self.devices == 1 or self.measures_batches:
            return train.accumulation
        sequences = train.batch_size // self.devices
        largest = train.batch_size // train.accumulation
        number = 1
        # It ends at one sequence each.
        while sequences % number or sequences // number > largest:
            number += 1
        return number

    def rows_of_device(self, index: int) -> list[int]:
        """Return the sequences of each batch that a device takes, as indices into the batch, in order."""
        # A norm that measures batches needs a part of each micro-batch on each device; other norms one block of rows.
        groups = self.train.accumulation if self.measures_batches else 1
        group = self.train.batch_size // groups
        size = group // self.devices
        rows: list[int] = []
        for start in range(index * size, self.train.batch_size, group):
            rows += range(start, start + size)
        return rows

    def validate(self) -> None:
        """Set the options that depend on others, and check every option.

        Raises:
            ConfigError: The message names the option, its value and what to do.
        """
        check(self)
        self._check_names()
        # A default may depend on an option that was resolved before: the optimiser's on train.steps and on the model.
        self.results_dir = os.path.expanduser(self.results_dir)  # a shell does not expand results_dir=~/x
        self.model.resolve()
        self.data.resolve()
        self.train.set_steps(self.model.block_weights, self.model.context)
        self.train.resolve()
        self.data.seed = self.data_seed
        self.optim.resolve(self.train.steps)
        self.optim.resolve_for_model(self.model.heads, self.model.width)
        self.stats.resolve()
        # Options that contradict each other.
        self._check_statistics()
        self._check_qk_clip()
        self.placement.validate()
        # A copy: a class has one object with its defaults, which other configs may hold too.
        self.placement = self.placement.resolved()
        self._check_scaling()
        check_norms(self.norm, self.placement, self.model)
        if self.init_rule not in INIT_RULES:  # a plugin's placement may misspell its rule
            source = "init" if self.init != "auto" else f"placement={self.placement.name}, init"
            message = unknown("init rule", self.init_rule, INIT_RULES)
            raise ConfigError(f"{source}={self.init_rule}: {hint_of_empty_plugins()}{message}")
        if self.train.batch_size % self.train.accumulation:
            raise ConfigError(
                f"train.accumulation={self.train.accumulation}: does not divide "
                f"train.batch_size={self.train.batch_size}; choose a number that does"
            )
        self._check_devices()

    def _check_names(self) -> None:
        """Check that no name was set without choosing: the options would be those of another class."""
        for group, registered in (
            ("norm", NORMS.get(self.norm.name)),
            ("optim", OPTIMIZERS.get(self.optim.name)),
            ("placement", type(PLACEMENTS.get(self.placement.name))),
            ("data", DATA.get(self.data.name, HubData)),
        ):
            part = getattr(self, group)
            if registered is not type(part):
                raise ConfigError(f"{group}.name={part.name}: cannot be set; {group}=... chooses another")

    def _check_scaling(self) -> None:
        """Check that the rule of transfer has been derived for the placement, the optimiser and the init rule."""
        scaling = f"model.scaling={self.model.scaling}"
        if self.model.scaling == "none":
            return
        # The factors of a rule are derived for matrices of width N, for sub-layers that are added, and for AdamW.
        if not self.placement.has_standard_matrices:
            raise ConfigError(
                f"{scaling}: has no rule for the wiring of placement={self.placement.name}; choose placement=pre, or "
                "another whose formula has only norms and numbers beside the sub-layers"
            )
        if self.model.scaling == "completep" and not self.placement.has_free_branches:
            raise ConfigError(
                f"{scaling}: placement={self.placement.name} has norms or factors on its sums or sub-layers, which "
                "undo the factor on a sub-layer; choose placement=pre with default options, or another with norms only "
                "before sub-layers"
            )
        if self.model.value_embed:
            raise ConfigError(f"{scaling}: has no rule for model.value_embed=true; leave one of them out")
        if not self.optim.has_transfer_rule:
            derived = " or ".join(f"optim={name}" for name, kind in OPTIMIZERS.items() if kind.has_transfer_rule)
            raise ConfigError(f"{scaling}: its learning rates are those of {derived}, not of optim={self.optim.name}")
        rules = SCALED_RULES[self.model.scaling]
        if self.init_rule not in rules:
            raise ConfigError(f"{scaling}: scales the init rule itself; choose init={' or init='.join(rules)}")

    def _check_qk_clip(self) -> None:
        """Check that the matrices of queries and keys determine the size of the scores."""
        if self.optim.qk_clip is None:
            return
        # QK-Clip makes the weights of queries and keys smaller, which must make their scores smaller.
        if self.optim.keeps_matrix_norms:
            raise ConfigError(
                f"optim.qk_clip={self.optim.qk_clip}: contradicts optim={self.optim.name}, which keeps the norm of "
                "each matrix; leave out one of the two"
            )
        if self.model.qk_norm != "off":
            raise no_effect(f"optim.qk_clip={self.optim.qk_clip}", f"model.qk_norm={self.model.qk_norm}")
        if any(placed.site == "q" for placed in self.placed_norms) or "q = " in self.placement.inside:
            reason = f"placement={self.placement.name}, which normalises queries and keys"
            raise no_effect(f"optim.qk_clip={self.optim.qk_clip}", reason)

    def _check_devices(self) -> None:
        """Check that the batches can be divided among the devices."""
        for norm in self.norms:
            if norm.batch_statistics and self.devices > 1 and not norm.synchronised:
                raise ConfigError(
                    f"devices={self.devices}: norm={norm.label} takes statistics over the batch and does not "
                    "synchronise them between devices; use devices=1, or call normlab.plugin.moments_over_ranks in the "
                    "norm and set synchronised = True"
                )
        # A norm that measures batches must have the same micro-batches as on one device, so each of them is divided.
        parts = self.train.accumulation if self.measures_batches else 1
        if self.train.batch_size // parts % self.devices:
            divided = f"train.batch_size={self.train.batch_size}"
            if parts > 1:
                divided += f" / train.accumulation={parts}"
            raise ConfigError(f"devices={self.devices}: does not divide {divided}; choose a number that does")

    def _check_statistics(self) -> None:
        """Check that the run measures something in each selected statistic."""
        # The statistics that a property of this run takes away, each with the setting that does.
        unmeasured: list[tuple[Collection[str], str]] = []
        if self.optim.adam_constants is None:
            unmeasured.append((ADAM_STATISTICS, f"optim={self.optim.name}"))
        if self.train.steps == 0:
            unmeasured.append((UPDATE_STATISTICS, "train.steps=0"))
        over_batches = [norm.label for norm in self.norms if norm.batch_statistics]
        if over_batches:
            unmeasured.append((PER_EXAMPLE_STATISTICS, f"norm={over_batches[0]}"))
        elif self.eval.sequences < 2:
            unmeasured.append((PER_EXAMPLE_STATISTICS, f"eval.sequences={self.eval.sequences}"))
        for statistics, setting in unmeasured:
            for name in self.stats.also:
                if name in statistics:
                    raise no_effect(f"stats.also={name}", setting)

    def reject_unused_options(self) -> None:
        """Check that each option of the norm and the placement has an effect in this model.

        `validate` does not: `normlab verify` builds placements with norms and depths for which some options have none.
        """
        model = self.model
        if not self.norm.is_identity and not self.placed_norms:
            raise ConfigError(
                f"placement={self.placement.name}: has no norms, so norm={self.norm.label} has no effect; set norm=none"
            )
        # Learned positions are added to the scaled embeddings.
        is_normed = self.placement.end_formulas[0] == NORM_UPDATE
        is_normed = is_normed and "scale" in self.norm_at("embedding").invariances
        if model.embed_scale != 1 and is_normed and model.positions == "rope":
            raise no_effect(
                f"model.embed_scale={model.embed_scale}",
                f"the norm of placement={self.placement.name} on the embeddings",
            )
        if self.norm.is_nowhere and model.qk_norm != "off":
            raise no_effect(f"model.qk_norm={model.qk_norm}", f"norm={self.norm.name}")
        if self.norm.is_nowhere and model.v_norm:
            raise no_effect("model.v_norm=true", f"norm={self.norm.name}")
        if model.v_norm and any("v" in self.placement.inner_sites(layer, model.depth) for layer in range(model.depth)):
            raise no_effect("model.v_norm=true", f"placement={self.placement.name}, which has this norm")
        self.placement.reject_unused_options(self.norm, self.model.depth)

    def warnings(self) -> list[str]:
        """Return a warning for each known problem of this config that does not prevent training."""
        warnings = self._init_warnings()
        for name in ("width", "depth"):
            size, base = getattr(self.model, name), getattr(self.model, f"base_{name}")
            if base is not None and size < base:
                warnings.append(f"model.base_{name}={base}: above model.{name}={size}; the base is the smaller model")
        optim = self.optim
        decay = max(optim.of_group(group).weight_decay for group in GROUPS)
        if optim.decay_mode == "independent" and decay >= LARGE_DECAY:
            warnings.append(
                f"optim.decay_mode=independent: a step at the peak takes up to {decay:.0%} of a weight, as a "
                f"decay of {decay / optim.lr:g} with proportional; lower optim.weight_decay or that of a group"
            )
        for norm in self.norms:
            warnings += self._norm_warnings(norm)
        return list(dict.fromkeys(warnings))

    def _norm_warnings(self, norm: NormConfig) -> list[str]:
        """Return the warnings about a norm of the model, wherever it stands."""
        warnings: list[str] = []
        end, steps = norm.changing[1], self.train.steps
        if end > steps:
            warnings.append(f"norm={norm.label}: changes until update {end}, and train.steps={steps}")
        if end and not self.placement.end_formulas[1]:
            warnings.append(
                f"norm={norm.label}: after its taper nothing bounds the logits, because "
                f"placement={self.placement.name} has no norm before the output matrix; set placement.final_norm=true"
            )
        if not norm.causal:
            evaluated = "uses running statistics and does not" if norm.batch_statistics else "does too"
            warnings.append(
                f"norm={norm.label}: in training, each token's statistics include later tokens, so the training "
                f"loss uses the future; the validation loss {evaluated}"
            )
        return warnings

    def _init_warnings(self) -> list[str]:
        """Return a warning if the init rule does not fit the placement, and one if it does not fit the norm."""
        placement, rule = self.placement, self.init_rule
        warnings: list[str] = []
        reason = placement.incompatible_inits.get(rule)
        if not reason and rule != placement.init:
            reason = placement.incompatible_inits.get("other")
        if reason:
            warnings.append(f"init={rule} is not the rule of placement={placement.name} ({placement.init}): {reason}")
        # Only in a plain sum does the norm of the branches alone decide how the stream grows.
        reason = self.norm.incompatible_inits.get(rule)
        if placement.is_plain_sum and reason:
            warnings.append(f"init={rule} is wrong with norm={self.norm.label}: {reason}")
        return warnings

    def identity(self) -> dict[str, Any]:
        """Return the options that can change the numbers, with `init` resolved.

        Of a folder of weights it has the hash, not the path.
        """
        # An option that repeats a default must not give the same run another id.
        placement = identity_tree(self.placement.without_defaults(self.model.depth, self.model.width))
        norm = identity_tree(without_defaults(self.norm, self.placement, self.model))
        tree = identity_tree(self) | {"init": self.init_rule, "norm": norm, "placement": placement}
        # The same weights in another folder start the same run.
        weights = FOLDER_OF_WEIGHTS.fullmatch(self.train.start_from or "")
        if weights:
            tree["train"]["start_from"] = weights[2]
        return tree

    def recorded(self) -> dict[str, Any]:
        """Return the options for a record or a plan: all but `results_dir`, which is the folder that it lies in.

        A record that is moved or shared then has only the paths that the user has set.
        """
        tree = plain_tree(self)
        del tree["results_dir"]
        return tree

    @property
    def config_hash(self) -> str:
        """SHA-256 of the canonical JSON of `identity()`."""
        return canonical_hash(self.identity())
