"""Reads the model in a folder of transformers: config.json, the weights in safetensors, and tokenizer.json.

Nothing is executed, and sizes are compared with those of the model before a tensor is read. A folder is any with a
config.json, or a model of the hub (`hf://OWNER/NAME`).
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normlab.config.corpora import MAX_VOCAB_SIZE
from normlab.config.schema import RunConfig
from normlab.data.hub import TIMEOUT_S, hub_errors
from normlab.data.tokenizers import LARGEST_TOKENIZER, SubwordTokenizer, Tokenizer
from normlab.errors import ConfigError, StoreError, unknown
from normlab.hf.classes import CLASSES, ONE, NativeClass, StoredTensor, differences
from normlab.hf.tokenizer import tokenizer_json
from normlab.parsing import from_json, read_at_most

LARGEST_CONFIG = 2**20
"""Most bytes of a config.json."""
HUB = "hf://"
FILES = ("config.json", "tokenizer.json", "model*.safetensors")
DTYPES = ("F32", "BF16", "F16")
"""The dtypes of safetensors whose numbers float32 holds."""
NOT_USED = re.compile(r".*\.attn\.(masked_)?bias|.*\.rotary_emb\.inv_freq|lm_head\.weight")
"""Tensors of older files that the classes of transformers do not read either: constants, and a tied head."""
SAME_FUNCTION = (
    "norm.preset", "norm.unit_offset", "norm.compute", "norm.rounding", "norm.taper_steps", "norm.taper_warmup",
    "model.preset", "model.context", "model.z_loss",
)  # fmt: skip
"""Options in which a run may differ from the folder: in float32 the model computes the same before the first update."""


def is_model(name: str) -> bool:
    """Return whether a name is that of a folder with a config.json, or of a model of the hub."""
    return name.startswith(HUB) or os.path.isfile(os.path.join(os.path.expanduser(name), "config.json"))


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model in a folder, of which config.json is read."""

    path: Path
    native: NativeClass
    overrides: Sequence[str]
    """The norm, placement and model of a run with this model."""
    config: RunConfig
    """The config with these overrides."""
    vocab_size: int
    end_of_text: object
    """The `eos_token_id`: the token after a text."""

    @classmethod
    def open(cls, name: str) -> "ModelFolder":
        """Read the config.json of a folder.

        Raises:
            ConfigError: normlab has no model that computes the same.
            DataError, StoreError: The hub does not have the model, or the file cannot be read.
        """
        file = (path := _folder(name)) / "config.json"
        try:
            options = from_json(read_at_most(file, LARGEST_CONFIG))
        except (OSError, ValueError) as error:
            raise StoreError(f"{file}: cannot be read ({error}); choose another folder") from error
        names, end, vocab_size = (options.get(each) for each in ("architectures", "eos_token_id", "vocab_size"))
        class_name = str(names[0] if isinstance(names, list) and names else options.get("model_type"))
        known = {each.model_type: each for each in CLASSES} | {each.name: each for each in CLASSES}
        try:
            if class_name not in known:
                raise ConfigError(unknown("class", f"{class_name:.60}", (each.name for each in CLASSES)))
            if not isinstance(vocab_size, int) or not 1 <= vocab_size <= MAX_VOCAB_SIZE:
                raise ConfigError(f"vocab_size={vocab_size!r:.60}: must be 1 to {MAX_VOCAB_SIZE}")
            overrides, config = known[class_name].read_options(options)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}; choose another model") from error
        end = end[0] if isinstance(end, list) and end else end
        return cls(path, known[class_name], overrides, config, vocab_size, end)

    def check(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        """Check that a run can start from this model.

        Raises:
            ConfigError: The run has another model or another tokenizer; the message has the overrides that fit.
            StoreError: The tokenizer or the tensors cannot be read, or are not those of the model.
        """
        file = self.path / "tokenizer.json"
        try:
            definition = read_at_most(file, LARGEST_TOKENIZER).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise StoreError(f"{file}: cannot be read ({error}); put the model's tokenizer there") from error
        is_same = isinstance(tokenizer, SubwordTokenizer) and tokenizer.definition == definition
        is_same = is_same or tokenizer_json(tokenizer) == definition
        different = differences(config, self.config, SAME_FUNCTION)
        if (context := self.config.model.context) < config.model.context:
            different.append(f"model.context={config.model.context} (at most {context})")
        if different:
            overrides = [*self.overrides, *([] if is_same else [f"data.tokenizer={file}"])]
            needed = f"holds another model than {', '.join(different)}; set {' '.join(overrides)}"
            raise ConfigError(f"train.start_from={self.path}: {needed}")
        if not is_same:
            raise ConfigError(
                f"data.tokenizer={config.data.tokenizer}: is not the tokenizer of train.start_from={self.path}; set "
                f"data.tokenizer={file}"
            )
        if (largest := int(self._tokens(tokenizer).max())) >= self.vocab_size:
            raise ConfigError(
                f"data.tokenizer={config.data.tokenizer}: has a token {largest}, and train.start_from={self.path} has "
                f"vocab_size={self.vocab_size}; choose a model that has all tokens"
            )
        self.tensors(self.config)

    def _tokens(self, tokenizer: Tokenizer) -> Tensor:
        """Return the token of the folder for each token of a run, (V,).

        An end of a document that the folder lacks is the token after a text.
        """
        if isinstance(tokenizer, SubwordTokenizer) and tokenizer.end_token is not None:
            return torch.arange(tokenizer.vocab_size)
        end = self.end_of_text
        if not isinstance(end, int) or not 0 <= end < self.vocab_size:
            needed = "choose the token whose embedding the token after each document takes"
            raise ConfigError(f"{self.path / 'config.json'}: eos_token_id={end!s:.60}: is no token; {needed}")
        tokens_V = torch.arange(tokenizer.vocab_size)
        tokens_V[tokenizer.end_of_document] = end
        return tokens_V

    def read(self, config: RunConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
        """Return the weights of a run that `check` accepts, in float32 by the names of its model.

        A shorter context has the first of the learned positions. Errors as for `tensors`.
        """
        tokens_V, positions_T = self._tokens(tokenizer), torch.arange(config.model.context)
        rows = {"embed.tokens.weight": tokens_V, "head.weight": tokens_V, "embed.positions.weight": positions_T}
        # The norm of the run, because its unit offset may differ.
        return {
            ours: values[rows[ours]] if ours in rows else values.contiguous()
            for stored, file, name in self.tensors(replace(self.config, norm=config.norm))
            for ours, values in stored.split(file.get_tensor(name).float())
            if ours != ONE
        }

    def tensors(self, config: RunConfig) -> list[tuple[StoredTensor, Any, str]]:
        """Return each tensor of the class, with its file and its name there.

        Raises:
            StoreError: By the headers of the files, one is missing, is one more, or has another shape or dtype.
        """
        paths, prefix = _weight_files(self.path), f"{self.native.blocks.partition('.')[0]}."
        try:
            files: list[Any] = [safe_open(path, "pt") for path in paths]
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{paths[0]}: cannot be read ({error}); restore a copy") from error
        # A file of the model without its head has names without the prefix.
        found = {name.removeprefix(prefix): (file, name) for file in files for name in file.keys()}  # noqa: SIM118
        if (depth := config.model.depth) > len(found):  # before a long list of tensors is made
            raise StoreError(f"{paths[0]}: has {len(found)} tensors, too few for model.depth={depth}; restore a copy")
        expected = {each.name.removeprefix(prefix): each for each in self.native.tensors(config, self.vocab_size)}
        for problem in _problems(found, expected):
            raise StoreError(f"{paths[0]}: {problem}; choose another model")
        return [(stored, *found[name]) for name, stored in expected.items()]


def _problems(found: Mapping[str, tuple[Any, str]], expected: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield how the tensors of a folder differ from those of its model."""
    for name in {**expected, **found}:
        if name not in found:
            yield f"has no tensor {name}"
        elif name in expected:
            values, shape = found[name][0].get_slice(found[name][1]), expected[name].shape
            dtype, actual = values.get_dtype(), values.get_shape()
            if actual != shape or dtype not in DTYPES:
                yield f"its tensor {name} is {dtype} {actual}, and must be {' or '.join(DTYPES)} {shape}"
            elif expected[name].parameters == (ONE,) and float(values[:]) != 1:
                yield f"its tensor {name} is {float(values[:]):g}, and must be 1"
        elif not NOT_USED.fullmatch(name):
            yield f"its tensor {name} is not one of the model in config.json"


def weights_sha256(name: str) -> str:
    """Return the SHA-256 of the weights in a folder: of its file, or of its files one after the other.

    Raises:
        StoreError: The folder has no weights in safetensors, or they cannot be read.
    """
    paths = _weight_files(_folder(name))
    try:
        return _sha256(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths))
    except (OSError, ValueError) as error:
        raise StoreError(f"{paths[0]}: cannot be read ({error}); choose another folder") from error


@lru_cache
def _sha256(files: Sequence[tuple[Path, int, int]]) -> str:
    """Return the SHA-256 of files of these sizes and times: the runs of a sweep start from the same ones."""
    digest = hashlib.sha256()
    for path, _, _ in files:
        digest.update(np.memmap(path, mode="r").data)
    return digest.hexdigest()


def _folder(name: str) -> Path:
    """Return the folder of a name; a model of the hub is downloaded unless the cache of the hub's library has it."""
    if not name.startswith(HUB):
        return Path(os.path.expanduser(name))
    with hub_errors(f"train.start_from={name}"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        repository = name.removeprefix(HUB)
        return Path(snapshot_download(repository, allow_patterns=list(FILES), etag_timeout=TIMEOUT_S))


def _weight_files(path: Path) -> list[Path]:
    """Return the file of the weights, or the several in which transformers stores large ones."""
    if (file := path / "model.safetensors").is_file():
        return [file]
    if files := sorted(path.glob("model-*-of-*.safetensors")):
        return files
    raise StoreError(f"{path}: has no model.safetensors; save the model with save_pretrained(safe_serialization=True)")
