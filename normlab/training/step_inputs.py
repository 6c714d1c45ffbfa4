"""What a step reads from memory that stays in place, so that a CUDA graph of the step can read the next step's too."""

from dataclasses import dataclass

import torch

from normlab.config.schema import RunConfig
from normlab.data.batches import Batches
from normlab.model.init import derive_seed
from normlab.training.optim import HyperparameterTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The batch and the hyperparameters of a step, and the random numbers of a plugin."""

    config: RunConfig
    """That of the first run; all runs of a pack have its options."""
    batches: Batches
    hyperparameters: HyperparameterTable
    device: str
    """cpu or cuda."""
    rank: int

    def load(self, step: int) -> None:
        """Load the inputs of the step after `step` updates."""
        self.load_batch(step)
        self.hyperparameters.load(step)

    def load_batch(self, step: int) -> None:
        # The norms and placements of normlab draw nothing in their forward pass.
        if self.config.plugins:
            self._seed_generator(step)
        self.batches.load(step)

    def _seed_generator(self, step: int) -> None:
        """Seed the generator of the device, for a plugin whose forward pass draws random numbers.

        It draws the same ones after a resume, and others on each rank. `torch.manual_seed` takes 200 times as long.
        """
        name = f"step/{step}"
        if self.rank:
            name += f"/rank/{self.rank}"
        generator = torch.default_generator
        if self.device == "cuda":
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.manual_seed(derive_seed(self.config.seed, name) % 2**63)
