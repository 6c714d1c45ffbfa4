"""A run from its record: its config, its metrics, and its model in evaluation mode.

Shapes: T time, V vocabulary.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from normlab import memory
from normlab.config import RunConfig, config_of_record
from normlab.data.tokenizers import Tokenizer, from_state
from normlab.errors import ConfigError, DataError, StoreError
from normlab.model.gpt import GPT
from normlab.model.init import build_model, weight_shapes
from normlab.norms import base as norms
from normlab.parsing import from_json, read_at_most
from normlab.placements import base as placements
from normlab.source import Plugin, read_plugins, run_plugins
from normlab.store.files import refusal
from normlab.store.query import resolve_run
from normlab.store.reading import LARGEST_TOKENIZER
from normlab.store.runs import RunFolder
from normlab.store.schema import RUN_FILE
from normlab.train import checkpoint
from normlab.train.identity import versions
from normlab.train.start import PLUGINS, TOKENIZER_FILE

if TYPE_CHECKING:
    import pandas as pd


MOST_NAMED = 3
"""Most files of a run's folder that a refusal names."""


def load(
    run: str | os.PathLike[str], results_dir: str | os.PathLike[str] = "results", *, trust: bool = False
) -> LoadedRun:
    """Return a run by its folder, its id, the beginning of its id, or its name.

    Args:
        run: The run.
        results_dir: Where ids and names are looked up.
        trust: Whether the run's own copies of plugins, Python files in its folder, may be executed. `config`, `model`
            and `sample` need them; the record, the metrics and the tokenizer never do.

    Raises:
        StoreError: No run or several answer to it, or its record cannot be read.
    """
    return LoadedRun(resolve_run(os.fspath(run), results_dir), trust=trust)


class LoadedRun:
    """A run, read from its folder. Each part is read when it is first asked for.

    A run's folder is data: code in it is executed only with `trust`.
    """

    def __init__(self, folder: RunFolder, *, trust: bool = False):
        self.folder = folder
        self.trust = trust
        """Whether the copies of plugins in the folder may be executed."""
        self.record: dict[str, Any] = folder.run()
        """The content of run.json."""

    def __repr__(self) -> str:
        return f"LoadedRun({self.folder.run_id!r}, {self.status['state']})"

    @property
    def status(self) -> dict[str, Any]:
        """The content of status.json, as it is now."""
        return self.folder.status()

    @cached_property
    def config(self) -> RunConfig:
        """The config that was trained; a plugin's norm comes from the copy that the run keeps.

        Raises:
            StoreError: The run keeps plugins that are not trusted, or its config is none that this normlab knows.
            ConfigError: A plugin cannot be read, or raises.
        """
        norms.load_all()
        placements.load_all()
        run_plugins(self._trusted_plugins())
        try:
            config = config_of_record(self.record.get("config", {}))
            config.validate()
        except ConfigError as error:
            raise StoreError(
                f"{self.folder.path / RUN_FILE}: holds no config that this normlab knows ({error}); "
                "update normlab, or put back a copy"
            ) from error
        return config

    def _trusted_plugins(self) -> list[Plugin]:
        """Return the run's own copies of plugins.

        Raises:
            StoreError: One is neither trusted nor code that this process has run before, byte for byte.
        """
        plugins = read_plugins(sorted((self.folder.path / PLUGINS).glob("*.py")))
        unknown = [plugin for plugin in plugins if not (self.trust or plugin.has_run)]
        if unknown:
            named = [f"{plugin.path} (SHA-256 {plugin.sha256})" for plugin in unknown[:MOST_NAMED]]
            more = [f"{len(unknown) - MOST_NAMED} more files"] if len(unknown) > MOST_NAMED else []
            paths = " ".join(shlex.quote(str(plugin.path)) for plugin in unknown[:MOST_NAMED])
            raise StoreError(
                f"run {self.folder.run_id} brings code of its own, which is executed only on request: "
                f"{', '.join([*named, *more])}; read it with `less {paths}`, then allow it with --trust "
                "(in Python: trust=True)"
            )
        return plugins

    @property
    def metrics(self) -> pd.DataFrame:
        """The rows of the record, oldest first: `kind` (train, eval, pace), `step`, and the numbers of each kind.

        Rows that cannot be read are left out. That, and rows that were lost or added since the run ended, is reported
        on stderr.
        """
        import pandas as pd

        record = self.folder.rows()
        if problem := self.folder.metrics_problem():
            print(f"normlab: {problem}", file=sys.stderr)
        # The last line of a run that is being written, or was killed, may be half a row.
        if missing := record.damaged - record.torn:
            print(f"normlab: {self.folder.metrics_path}: damaged rows, left out: {missing}", file=sys.stderr)
        return pd.DataFrame(record.rows)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was trained with."""
        path = self.folder.path / TOKENIZER_FILE
        try:
            return from_state(from_json(read_at_most(path, LARGEST_TOKENIZER)))
        except OSError as error:
            raise refusal(path, "read", error) from error
        except (DataError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path}: is damaged (it holds no tokenizer); put back a copy from a run on the same corpus"
            ) from error

    @cached_property
    def model(self) -> GPT:
        """The model of the newest whole checkpoint, on the CPU, in evaluation mode.

        Raises:
            StoreError: There is no checkpoint, or none that is whole, or no memory for it.
        """
        path = self.folder.path / checkpoint.FOLDER
        try:
            saved, problems = checkpoint.newest(path)
        except OSError as error:
            raise refusal(path, "read", error) from error
        except MemoryError as error:
            raise StoreError(f"the memory ran out while {path} was read; free some and try again") from error
        for problem in problems:
            print(f"normlab: {problem}; taking the checkpoint before it", file=sys.stderr)
        if saved is None:
            raise StoreError(
                f"run {self.folder.run_id} has no checkpoint: if it has ended, put them back or train another beside "
                "it with run.fresh=true; if not, start the same `normlab train` again, which makes one"
            )
        return self.model_at(saved)

    def model_at(self, saved: checkpoint.Checkpoint) -> GPT:
        """The model of one of the run's checkpoints, on the CPU, in evaluation mode.

        Every size that the config names is held against the machine's memory and the checkpoint before the model is
        built: nothing is allocated for a record that asks for more than was trained.

        Raises:
            StoreError: It is of another run, or there is no memory for it.
        """
        vocab_size = self.tokenizer.vocab_size
        try:
            memory.check_weights(self.config, memory.of_machine(), "this machine")
            for name, shape in weight_shapes(self.config.model, vocab_size).items():
                self._weights(saved, "param", name, shape)
            self._warn_about_other_versions()
            model = build_model(self.config, vocab_size)
        except (ConfigError, MemoryError) as error:
            reason = str(error) or "the memory ran out"
            raise StoreError(f"run {self.folder.run_id}: its model cannot be built ({reason})") from error
        with torch.no_grad():
            for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
                for name, tensor in tensors:
                    tensor.copy_(self._weights(saved, kind, name, tensor.shape))
        return model.eval()

    def _weights(self, saved: checkpoint.Checkpoint, kind: str, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of a checkpoint.

        Raises:
            StoreError: There is none of this name and shape.
        """
        values = saved.tensors.get(f"{kind}/{name}")
        if values is None or values.shape != torch.Size(shape):
            raise StoreError(
                f"the checkpoint of step {saved.step} of run {self.folder.run_id} has no {kind} {name} of "
                f"shape {tuple(shape)}: it is of another run, or of another normlab; put back the run's own"
            )
        return values

    def _warn_about_other_versions(self) -> None:
        """Print a warning where the norm or the placement has another version than the one that was trained."""
        identity = self.record.get("identity")
        if isinstance(identity, dict) and "sources" in identity:
            print(
                f"warning: run {self.folder.run_id} was recorded before norms and placements had versions; its model "
                "may compute something else than the one that was trained",
                file=sys.stderr,
            )
            return
        trained = identity.get("versions") if isinstance(identity, dict) else None
        if not isinstance(trained, dict):
            raise StoreError(
                f"{self.folder.path / RUN_FILE}: is damaged (it has no versions of its norm and placement); "
                "put back a copy of the run"
            )
        current = versions(self.config)
        if changed := [part for part in ("norm", "placement") if trained.get(part) != current[part]]:
            print(
                f"warning: run {self.folder.run_id} was trained with another version of its {' and its '.join(changed)}"
                "; its model may compute something else now",
                file=sys.stderr,
            )

    @torch.no_grad()
    def sample(self, prompt: str, *, tokens: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
        """The prompt and its continuation by the model.

        Args:
            prompt: The text to continue; an empty one begins a document.
            tokens: How many tokens to add.
            temperature: Divides the logits; 0 takes the likeliest token each time.
            seed: Draws the tokens.

        Raises:
            ConfigError: A negative number of tokens, a temperature that is no temperature, or a seed that is none.
            StoreError: The model's logits are no numbers to draw from.
        """
        if tokens < 0:
            raise ConfigError(f"tokens={tokens}: must be at least 0")
        if not 0 <= temperature < float("inf"):
            raise ConfigError(f"temperature={temperature}: must be a finite number, at least 0")
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seed={seed}: must be at least 0 and at most {2**63 - 1}")
        generator = torch.Generator().manual_seed(seed)
        start = [int(token) for token in self.tokenizer.encode(prompt)]
        context_T = torch.tensor([start or [self.tokenizer.end_of_document]])
        for _ in range(tokens):
            logits_V = self.model(context_T[:, -self.model.context :])[0, -1].double()
            if not logits_V.isfinite().all():
                raise StoreError(
                    f"run {self.folder.run_id}: its model's logits are not finite, because the run diverged; "
                    "sample another run, or train one with a lower optim.lr"
                )
            if temperature == 0:
                token = logits_V.argmax()
            else:
                # The largest becomes 0, which no temperature makes infinite.
                weights_V = ((logits_V - logits_V.max()) / temperature).softmax(-1)
                token = torch.multinomial(weights_V, 1, generator=generator)[0]
            context_T = torch.cat([context_T, token.view(1, 1)], dim=1)
        # A tokenizer that marks the beginnings of words loses a blank where it decodes from the middle.
        whole, head = (self.tokenizer.decode(tokens) for tokens in (context_T[0].tolist(), start))
        if start and whole.startswith(head):
            return prompt + whole[len(head) :]
        return prompt + self.tokenizer.decode(context_T[0, max(1, len(start)) :].tolist())
