"""Export a run's model as a folder that transformers loads, where one of its classes computes the same.

The folder has the weights (model.safetensors), config.json, the tokenizer and a card (README.md).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from normlab.analysis.cells import BAD_OUTCOMES
from normlab.base.errors import ConfigError, warn
from normlab.base.version import __version__
from normlab.config.schema import RunConfig
from normlab.data.tokenizers import Tokenizer
from normlab.hf.classes import NativeClass, class_of
from normlab.hf.tokenizer import end_token, tokenizer_json
from normlab.loaded.run import LoadedRun
from normlab.model.gpt import GPT
from normlab.store.files import io_error
from normlab.store.hidden import new_folder
from normlab.store.outcome import format_loss


def export(run: LoadedRun, folder: Path) -> NativeClass:
    """Write a run's model to a new folder: that of its newest checkpoint, or of the one of `run.at`.

    Raises:
        ConfigError: The folder exists and is not empty, or no class computes the model.
        StoreError: The run has no checkpoint, or the folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"-o {folder}: exists; give the name of a new folder")
    native = class_of(run.config)
    if run.record.result in BAD_OUTCOMES:
        warn(f"run {run.folder.run_id}: {run.record.result}; its model is exported as it is")
    model = run.model
    write_folder(folder, native, run.config, model, run.tokenizer, _card(run, native))
    return native


@torch.no_grad()
def write_folder(
    folder: Path, native: NativeClass, config: RunConfig, model: GPT, tokenizer: Tokenizer, card: str
) -> None:
    """Write the folder, whole or not at all; errors as for `export`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    options = {
        "architectures": [native.name], "model_type": native.model_type, "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.end_of_document, "eos_token_id": tokenizer.end_of_document, "pad_token_id": None,
        "dtype": "float32",
    }  # fmt: skip
    parameters = {name: parameter.cpu() for name, parameter in model.named_parameters()}
    weights = {stored.name: stored.join(parameters) for stored in native.tensors(config, tokenizer.vocab_size)}
    definition = tokenizer_json(tokenizer)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(folder) as temporary_folder:
            save_file(weights, temporary_folder / "model.safetensors", metadata={"format": "pt"})
            _write_json(temporary_folder / "config.json", options | native.write_options(config))
            (temporary_folder / "tokenizer.json").write_text(definition, encoding="utf-8")
            _write_json(temporary_folder / "tokenizer_config.json", _tokenizer_options(tokenizer, config))
            (temporary_folder / "README.md").write_text(card, encoding="utf-8")
            # safetensors makes a file that only its owner may read.
            shutil.copymode(temporary_folder / "config.json", temporary_folder / "model.safetensors")
    except SafetensorError as error:
        raise io_error(folder, "written", OSError(str(error)), setting="-o") from error
    except OSError as error:
        raise io_error(folder, "written", error, setting="-o") from error


def _tokenizer_options(tokenizer: Tokenizer, config: RunConfig) -> dict[str, Any]:
    end = end_token(tokenizer)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end,
        "clean_up_tokenization_spaces": False, "model_max_length": config.model.context,
    }  # fmt: skip


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _card(run: LoadedRun, native: NativeClass) -> str:
    record, config, status = run.record, run.config, run.status
    corpus, train = record.corpus, config.train
    # The loss of the record is that of the last step, so a card of an earlier checkpoint does not have it.
    if run.step == status.step:
        result = f"validation loss {format_loss(status.val_loss)} nats/token"
    else:
        result = f"this is its checkpoint of step {run.step}"
    lines = {
        "block": f"norm={record.options['norm.preset'] or config.norm.name} placement={config.placement.name}, "
        f"fingerprint {record.run.fingerprint} (`normlab verify` checks it)",
        "size": f"depth {config.model.depth}, width {config.model.width}, context {config.model.context}",
        "text": f"{corpus.name}, SHA-256 {corpus.sha256}, tokenizer {corpus.tokenizer}",
        "training": f"{run.step} updates of {train.batch_size} x {config.model.context} tokens, {config.optim.name}, "
        f"learning rate {config.optim.lr:g}, seed {config.seed}",
        "outcome": f"{record.outcome or status.state}, {result}",
        "run": f"{record.run_id}, by normlab {__version__}",
    }
    table = "\n".join(f"- {name}: {text}" for name, text in lines.items())
    return (
        f"# {native.name} of a normlab run\n\n{table}\n\n```python\nfrom transformers import AutoModelForCausalLM, "
        'AutoTokenizer\n\nmodel = AutoModelForCausalLM.from_pretrained(".")\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n```\n\nIn training each document started with '
        f"`{end_token(run.tokenizer)}`.\n"
    )
