"""The options `train.`, `eval.`, `tracking.` and `run.`: how long a run trains, how it is evaluated, sent and named."""

import re
from dataclasses import dataclass
from typing import Any

from normlab.base.errors import ConfigError
from normlab.base.options import option, override_text
from normlab.base.parsing import is_whole_number
from normlab.config.option_names import empty_list_hint

FOLDER_OF_WEIGHTS = re.compile(r"(.+)@([0-9a-f]{64})")
"""A resolved `train.start_from` that is a folder of transformers: FOLDER@SHA256, the hash of its weights."""
DEFAULT_STEPS = 500
MOST_STEPS = 10**9
LOG = "log"
"""The value of `train.keep` for powers of two."""


@dataclass(kw_only=True, slots=True)
class TrainConfig:
    """Number of steps, batch size, and how often the run is logged and checkpointed."""

    steps: int = option(DEFAULT_STEPS, "Optimiser steps; 0 measures the initial model.", at_least=0, at_most=MOST_STEPS)
    tokens_per_parameter: float | None = option(
        None, above=0, at_most=10**6, identity=False,
        help="Tokens for each weight of attention and MLPs, without embeddings and head; sets train.steps.",
    )  # fmt: skip
    batch_size: int = option(8, "Sequences per optimiser step, over all micro-batches.", at_least=1, at_most=2**20)
    accumulation: int = option(1, "Micro-batches per step; must divide the batch size.", at_least=1, at_most=2**20)
    log_every: int = option(
        10, "Steps between two writes of the record, which has every step.", at_least=1, at_most=10**9, identity=False
    )
    checkpoint_every: int = option(
        200, "Steps between two checkpoints; 0 for a final one only.", at_least=0, at_most=10**9, identity=False
    )
    # OmegaConf has no type for a list or a text.
    keep: Any = option(
        [], "Updates after which the weights are kept: a list, or log for 0, 1, 2, 4, 8, ...", identity=False
    )
    start_from: str | None = option(
        None, longest=4096,
        help="Start from the newest checkpoint of RUN, or from RUN@STEP, with the record up to there. Or from the "
        "weights of a model of transformers: FOLDER, or hf://OWNER/NAME on the hub.",
    )  # fmt: skip
    graph: str = option(
        "auto", "Replay steps as CUDA graphs; same numbers.", choices=("auto", "on", "off"), identity=False
    )

    def keeps(self, step: int) -> bool:
        """Whether the weights after `step` updates are kept."""
        if self.keep == LOG:
            return step & (step - 1) == 0  # 0 and the powers of two have at most one bit
        return step in self.keep

    def set_steps(self, weights: int, context: int) -> None:
        """Set the number of steps by `tokens_per_parameter`: r N / (B T), rounded, and at least 1.

        Args:
            weights: N, the weights of attention and MLPs in all blocks (`ModelConfig.block_weights`).
            context: T, the tokens of a sequence; B is the batch size.

        Raises:
            ConfigError: train.steps is set to another number, or the number is too large.
        """
        if self.tokens_per_parameter is None:
            return
        steps = max(1, round(self.tokens_per_parameter * weights / (self.batch_size * context)))
        name = f"train.tokens_per_parameter={self.tokens_per_parameter:g}"
        # A record has both options, and then they agree.
        if self.steps not in (DEFAULT_STEPS, steps):
            raise ConfigError(
                f"train.steps={self.steps}: {name} sets it to {steps} for {weights:,} weights; leave one of them out"
            )
        if steps > MOST_STEPS:
            raise ConfigError(f"{name}: makes {steps:,} steps, more than {MOST_STEPS:,}; lower it")
        self.steps = steps

    def resolve(self) -> None:
        """Make `keep` a list of steps, or log."""
        if self.keep == LOG:
            return
        values = self.keep
        if not isinstance(values, list):
            values = [values]
        if not all(is_whole_number(str(value)) for value in values):
            typed = override_text(self.keep)
            nearest = empty_list_hint(typed)
            raise ConfigError(
                f"train.keep={typed}{nearest}: must be {LOG} or a list of steps, such as train.keep=[0,100]"
            )
        self.keep = [int(value) for value in values]
        if max(self.keep, default=0) > self.steps:
            raise ConfigError(
                f"train.keep={override_text(self.keep)}: has a step after the last one, train.steps={self.steps}"
            )


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Validation on fixed windows, evenly spaced over the held-out text."""

    every: int = option(
        100, "Steps between two evaluations; 0 for the first and last only.", at_least=0, at_most=10**9, identity=False
    )
    sequences: int = option(64, "Number of windows, each as long as the context.", at_least=1, at_most=2**20)
    ema: float | None = option(
        None, above=0, below=1,
        help="Decay d per step of a mean of the weights after each update, whose validation loss is recorded too: the "
        "weights of step s count d^(t - s) at step t.",
    )  # fmt: skip


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    """Options of tracking. A separate process sends the local record to W&B; `normlab sync` sends it later."""

    wandb: str = option(
        "auto", "Mode of W&B; auto: online with a login.", choices=("auto", "online", "offline", "off"), identity=False
    )
    project: str = option("normlab", "W&B project.", longest=128, identity=False)
    entity: str | None = option(None, "W&B user or team; that of the login unless set.", longest=128, identity=False)


@dataclass(kw_only=True, slots=True)
class RunOptions:
    """The name of the run, and whether to start it again."""

    name: str | None = option(None, "Name in tables; the run's id unless set.", longest=128, identity=False)
    fresh: bool = option(False, "Start a new run although one with this config exists; keep both.", identity=False)
