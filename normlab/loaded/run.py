"""A run read from its folder (`normlab.load`): its config, its metrics, and its model in evaluation mode."""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from normlab.analysis.factors import find_run
from normlab.base.errors import ConfigError, DataError, StoreError, unknown, warn
from normlab.base.parsing import from_json, read_at_most
from normlab.base.plugins import Plugin, read_plugins, run_plugins
from normlab.catalogue.norms import base as norms
from normlab.catalogue.placements import base as placements
from normlab.config import memory
from normlab.config.recorded import config_from_record
from normlab.config.schema import RunConfig
from normlab.data.tokenizers import LARGEST_TOKENIZER, Tokenizer, from_state
from normlab.loaded.sampling import LogitsNotFiniteError, TextLoss, continue_prompt, text_loss
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.report.histories import history, read_statistics
from normlab.store.files import io_error
from normlab.store.format import CLIP_FACTOR_KEY, RUN_FILE, TOKENIZER_FILE
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.store.status import Status
from normlab.training import checkpoint
from normlab.training.changed_plugins import changed_plugins
from normlab.training.identity import versions
from normlab.training.machine import resolve_device
from normlab.training.training_run import FRESH, PLUGINS

if TYPE_CHECKING:
    import pandas as pd


def load(
    run: str | os.PathLike[str],
    results_dir: str | os.PathLike[str] = "results",
    *,
    where: str = "",
    at: int | None = None,
    trust: bool = False,
) -> LoadedRun:
    """Return a run by its folder, id, beginning of its id, or name; or a run of a sweep by its factors.

    Args:
        run: The folder, id or name of a run or a sweep.
        where: Conditions that only this run of the sweep meets, such as `placement=post,depth=8,seed=0`.
        at: The step of the model, as in `LoadedRun.at`; by default that of the newest checkpoint.
        results_dir: The folder in which to find ids and names.
        trust: Whether the copies of plugins in the run's folder, which are Python files, may be executed. `config`,
            `model` and `sample` need them; the record, the metrics and the tokenizer never do.

    Raises:
        ConfigError: A condition is invalid, or no run or several runs of the sweep meet it.
        StoreError: No run or several runs match, the record cannot be read, or it has no weights of the step.
    """
    conditions = [where] if where else []
    loaded = LoadedRun(find_run(os.fspath(run), conditions, results_dir), trust=trust)
    if at is None:
        return loaded
    return loaded.at(at)


class LoadedRun:
    """A run, read from its folder; each part on first access. Code in the folder runs only with `trust`."""

    def __init__(self, folder: RunFolder, *, trust: bool = False, step: int | None = None):
        self.folder = folder
        self.trust = trust
        self.step = step
        """The step of the checkpoint of `model`; of the newest one, None until it is read."""
        self.record = RunRecord.load(folder)

    def __repr__(self) -> str:
        return f"LoadedRun({self.folder.run_id!r}, {self.status.state})"

    @property
    def status(self) -> Status:
        return self.folder.read_status()

    @cached_property
    def config(self) -> RunConfig:
        """The config of the run, with `init` resolved; norms of plugins come from the copies in the run's folder.

        `record.machine` has the resolved device, precision, compile and deterministic.

        Raises:
            StoreError: The run has plugins that are not trusted, or a config that this version does not know.
            ConfigError: A plugin cannot be read, or raises.
        """
        norms.load_all()
        placements.load_all()
        run_plugins(self._trusted_plugins())
        try:
            config = config_from_record(self.record.run.config)
            config.validate()
            config.init = config.init_rule
        except ConfigError as error:
            raise StoreError(
                f"{self.folder.path / RUN_FILE}: holds no config that this version of normlab knows "
                f"({error}); update normlab, or restore a copy"
            ) from error
        return config

    def _trusted_plugins(self) -> list[Plugin]:
        """Return the plugins in the run's folder.

        Raises:
            StoreError: A plugin is not trusted, and this process has not run the same bytes before.
        """
        plugins = read_plugins(sorted((self.folder.path / PLUGINS).glob("*.py")))
        if self.trust:
            return plugins
        # In a notebook that has trained the run, its plugins have run already, and loading them runs nothing new.
        new_plugins = [plugin for plugin in plugins if not plugin.has_run]
        if new_plugins:
            files = ", ".join(f"{plugin.path} (SHA-256 {plugin.sha256})" for plugin in new_plugins)
            paths = shlex.join(str(plugin.path) for plugin in new_plugins)
            raise StoreError(
                f"run {self.folder.run_id} has plugins in its folder, which run only if you allow it: {files}; "
                f"read it with `less {paths}`, then allow it with --trust (in Python: trust=True)"
            )
        return plugins

    @property
    def metrics(self) -> pd.DataFrame:
        """The rows of the record, oldest first: `kind` (train, eval, pace), `step`, and the numbers of each kind.

        Damaged rows of a run that is not completed are left out. A warning on stderr names them.

        Raises:
            StoreError: The run is completed, and its rows are not those that were written.
        """
        import pandas as pd

        record = self.folder.rows()
        problem = record.problem(self.folder.metrics_path)
        if problem:
            warn(problem)
        return pd.DataFrame(record.rows).rename(columns={CLIP_FACTOR_KEY: "clip_factor"})

    def stats(self, name: str, site: str | None = None) -> pd.DataFrame:
        """Return a statistic over training: a row for each measured step, a column for each layer.

        Layer 0 is the embeddings, L + 1 the head; a statistic without layers has one column. Several sites give columns
        with two levels, site and layer. `.stack()` makes a long table.

        Args:
            name: One of `normlab list stats`, such as `resid_rms`.
            site: The position inside the block, such as `attn`; None for all.

        Raises:
            ConfigError: The statistic or the site is unknown.
            StatisticsError, StoreError: The statistic was not measured, or cannot be read.
        """
        import pandas as pd

        problems: list[str] = []
        statistics = read_statistics(self.folder, problems, name)
        measured = {series.site: series for series in history(statistics, name)}
        for problem in problems:
            warn(problem)
        if site is not None and site not in measured:
            raise ConfigError(unknown(f"site of {name}", site, measured))
        tables: dict[str, pd.DataFrame] = {}
        for site_name, series in measured.items():
            if site not in (None, site_name):
                continue
            index = pd.Index(series.steps, name="step")
            if series.values.ndim == 1:
                tables[site_name] = pd.DataFrame({name: series.values}, index)
            else:
                columns = pd.Index(series.layers, name="layer")
                tables[site_name] = pd.DataFrame(series.values[:, series.layers], index, columns)
        if len(tables) == 1:
            return next(iter(tables.values()))
        return pd.concat(tables, axis=1, names=["site"])

    def at(self, step: int) -> LoadedRun:
        """Return the same run with the model of a step: of its checkpoint, or of its weights (`train.keep`).

        Raises:
            StoreError: The run has neither of this step.
        """
        known = self._kept()
        if not known:
            raise self._no_checkpoint()
        if step not in known:
            kept = ", ".join(map(str, sorted(known)))
            raise StoreError(
                f"run {self.folder.run_id}: has no weights of step {step}, only of these: {kept}; train.keep keeps more"
            )
        return LoadedRun(self.folder, trust=self.trust, step=step)

    def _no_checkpoint(self) -> StoreError:
        sweep = self.record.run.pack.sweep
        command = "normlab train"
        if sweep is not None:
            command = f"normlab sweep ... sweep.name={shlex.quote(sweep)}"
        return StoreError(
            f"run {self.folder.run_id} has no checkpoint: if it is from a zip file, ask for one with checkpoints "
            f"(`normlab share {self.folder.run_id} --checkpoints -o FILE.zip`); if it is yours and has ended, put them "
            f"back or {FRESH}; else the same `{command}` makes one"
        )

    def _kept(self) -> dict[int, Path]:
        """Return for each step whose weights are on disk their folder."""
        kept: dict[int, Path] = {}
        # The last folder replaces the first: of a step that has both, the checkpoint is read.
        for name in (checkpoint.WEIGHTS_FOLDER, checkpoint.FOLDER):
            folder = self.folder.path / name
            for step in checkpoint.steps(folder):
                kept[step] = folder
        return kept

    @cached_property
    def tokenizer(self) -> Tokenizer:
        path = self.folder.path / TOKENIZER_FILE
        try:
            content = read_at_most(path, LARGEST_TOKENIZER)
            tokenizer = from_state(from_json(content))
        except OSError as error:
            raise io_error(path, "read", error) from error
        except (DataError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path}: is damaged (it holds no tokenizer: {error}); restore a copy from a run on the same corpus"
            ) from error
        if hashlib.sha256(content).hexdigest() != self.record.corpus.tokenizer_sha256:
            raise StoreError(
                f"{path}: is not the tokenizer of run {self.folder.run_id}; restore a copy from a run on the "
                "same corpus"
            )
        return tokenizer

    @cached_property
    def device(self) -> torch.device:
        """The device of `model`: the one on which this machine would train the run, or the CPU if it has no GPU."""
        if not torch.cuda.is_available():
            # A run with device=cuda, too, can be looked at on a machine without a GPU.
            return torch.device("cpu")
        return torch.device(resolve_device(self.config, has_gpu=True))

    @contextmanager
    def _explaining_failures(self) -> Iterator[None]:
        """Raise a StoreError that says what to do if the memory of the GPU runs out, or if the run diverged."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise StoreError(
                f"run {self.folder.run_id}: the memory of the GPU ran out; stop what else uses it, or set "
                "CUDA_VISIBLE_DEVICES= to use the CPU"
            ) from error
        except LogitsNotFiniteError as error:
            raise StoreError(
                f"run {self.folder.run_id}: its model's logits are not finite, because the run diverged; choose "
                "another run, or train one with a lower optim.lr"
            ) from error

    @cached_property
    def model(self) -> GPT:
        """The model of the newest intact checkpoint, or of the one of `at`, on `device`, in evaluation mode.

        Without a checkpoint, it is that of the newest weights.

        Raises:
            StoreError: There is no intact checkpoint, or it does not fit into memory.
        """
        path = self.folder.path / checkpoint.FOLDER
        try:
            if self.step is not None:
                return self._model_at(checkpoint.read(self._kept()[self.step], self.step))
            saved, problems = checkpoint.read_newest(path)
            if saved is None:
                saved, problems = checkpoint.read_newest(path.with_name(checkpoint.WEIGHTS_FOLDER))
        except OSError as error:
            raise io_error(path, "read", error) from error
        except MemoryError as error:
            raise StoreError(f"the memory ran out while reading {path}; free some memory and try again") from error
        for problem in problems:
            warn(f"{problem}; using the previous checkpoint")
        if saved is None:
            raise self._no_checkpoint()
        self.step = saved.step
        return self._model_at(saved)

    def _model_at(self, saved: checkpoint.Checkpoint) -> GPT:
        """Return the model of one of the run's checkpoints, on `device`, in evaluation mode.

        The number of weights is compared with the checkpoint's before anything is allocated.

        Raises:
            StoreError: The checkpoint belongs to another run, or the model does not fit into memory.
        """
        run_id = self.folder.run_id
        try:
            # The config may be a stranger's and describe a model of any size: the check comes before any allocation.
            stored = 0
            for name, values in saved.tensors.items():
                if name.startswith("param/"):
                    stored += values.numel()
            needed = memory.num_weights(self.config, self.tokenizer.vocab_size)
            if needed > stored:
                raise ConfigError(
                    f"it has {needed:,} weights, and the checkpoint {stored:,}; restore the run's own files"
                )
            self._warn_of_other_versions()
            model = build_model(self.config, self.tokenizer.vocab_size)
        except (ConfigError, MemoryError) as error:
            reason = str(error) or "the memory ran out"
            raise StoreError(f"run {run_id}: its model cannot be built ({reason})") from error
        with torch.no_grad():
            for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
                for name, tensor in tensors:
                    values = saved.tensors.get(f"{kind}/{name}")
                    if values is None or values.shape != tensor.shape:
                        raise StoreError(
                            f"the checkpoint of step {saved.step} of run {run_id} has no {kind} {name} of shape "
                            f"{tuple(tensor.shape)}: it is of another run or another version of normlab; restore the "
                            "run's own"
                        )
                    tensor.copy_(values)
        with self._explaining_failures():
            model.to(self.device)
        return model.eval()

    def _warn_of_other_versions(self) -> None:
        """Warn if a plugin of the run, its norm or its placement is not the version with which it was trained."""
        run_id, trained = self.folder.run_id, self.record.run.identity.versions
        files = changed_plugins(self.config, trained)
        if files:
            warn(
                f"run {run_id}: {' and '.join(files)} in its folder has changed since it was trained; its model may "
                "compute something else"
            )
            return
        current = versions(self.config)
        changed = [part for part in ("norm", "placement") if trained[part] != current[part]]
        if changed:
            warn(
                f"run {run_id} was trained with another version of its {' and its '.join(changed)} than this normlab "
                "has; its model may compute something else"
            )

    def evaluate(self, *texts: str) -> TextLoss:
        """Return the loss of the model on some texts, each a document of its own, as `inference.text_loss` does.

        A warning says how many characters the tokenizer changes.

        Raises:
            ConfigError: The texts have no token.
            StoreError: The model's logits are not finite.
        """
        model = self.model
        with self._explaining_failures():
            loss = text_loss(model, self.tokenizer, self.device, texts)
        if loss.changed:
            warn(
                f"the run's tokenizer changes at least {loss.changed:,} of {loss.characters:,} characters of the text: "
                "its bits/byte cannot be compared with that of another tokenizer"
            )
        return loss

    def sample(self, prompt: str, *, tokens: int = 200, temperature: float = 0.8, seed: int = 0) -> str:
        """Return the prompt and its continuation by the model.

        Args:
            prompt: The start of a document, which is continued.
            tokens: The number of tokens to add.
            temperature: Divides the logits; 0 selects the most likely token each time.
            seed: The seed of the random draws.

        Raises:
            ConfigError: An argument is out of range.
            StoreError: The model's logits are not finite.
        """
        model = self.model
        with self._explaining_failures():
            return continue_prompt(
                model, self.tokenizer, self.device, prompt, tokens=tokens, temperature=temperature, seed=seed
            )
