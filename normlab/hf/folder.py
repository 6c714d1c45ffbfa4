"""Reads the model in a folder of transformers: config.json, the weights in safetensors, and tokenizer.json.

Nothing is executed, and sizes are compared with those of the model before a tensor is read. A folder is any with a
config.json, or a model of the hub (`hf://OWNER/NAME`).
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normlab.base.errors import ConfigError, StoreError, counted, unknown
from normlab.base.parsing import check_link, from_json, read_at_most
from normlab.catalogue.corpora import MAX_VOCAB_SIZE
from normlab.config.schema import RunConfig
from normlab.data.hub import TIMEOUT_S, hub_errors
from normlab.data.tokenizers import LARGEST_TOKENIZER, SubwordTokenizer, Tokenizer
from normlab.hf.classes import CLASSES, ONE, NativeClass, StoredTensor, differences
from normlab.hf.tokenizer import tokenizer_json
from normlab.hf.unused_tensors import problem_of_unused
from normlab.hf.weight_files import ADAPTER, INDEX, StoredTensors, weight_files

LARGEST_CONFIG = 2**20
"""Most bytes of a config.json."""
HUB = "hf://"
FILES = ("config.json", "tokenizer.json", "model*.safetensors", INDEX, ADAPTER)
DTYPES = ("F32", "BF16", "F16")
"""The dtypes of safetensors whose numbers float32 holds."""
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
        path = _folder(name)
        file = path / "config.json"
        try:
            check_link(file, path)
            options = from_json(read_at_most(file, LARGEST_CONFIG))
        except (OSError, ValueError) as error:
            raise StoreError(f"{file}: cannot be read ({error}); choose another folder") from error
        # A folder need not name a class: then the type of its model tells which one it is.
        names = options.get("architectures")
        class_name = str(names[0] if isinstance(names, list) and names else options.get("model_type"))
        by_type = {native.model_type: native for native in CLASSES}
        classes = by_type | {native.name: native for native in CLASSES}
        vocab_size = options.get("vocab_size")
        try:
            if class_name not in classes:
                raise ConfigError(unknown("class", f"{class_name:.60}", [native.name for native in CLASSES]))
            if not isinstance(vocab_size, int) or not 1 <= vocab_size <= MAX_VOCAB_SIZE:
                raise ConfigError(f"vocab_size={vocab_size!r:.60}: must be 1 to {MAX_VOCAB_SIZE}")
            overrides, config = classes[class_name].read_options(options)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}; choose another model") from error
        # Of several tokens that may end a text, the first one is used.
        end = options.get("eos_token_id")
        if isinstance(end, list) and end:
            end = end[0]
        return cls(path, classes[class_name], overrides, config, vocab_size, end)

    def check(self, config: RunConfig, tokenizer: Tokenizer) -> list[str]:
        """Check that a run can start from this model, and return the warnings about its start.

        Raises:
            ConfigError: The run has another model or another tokenizer; the message has the overrides that fit.
            StoreError: The tokenizer or the tensors cannot be read, or are not those of the model.
        """
        file = self.path / "tokenizer.json"
        try:
            check_link(file, self.path)
            definition = read_at_most(file, LARGEST_TOKENIZER).decode("utf-8-sig")
        except (OSError, ValueError) as error:
            raise StoreError(f"{file}: cannot be read ({error}); put the model's tokenizer there") from error
        is_same = isinstance(tokenizer, SubwordTokenizer) and tokenizer.definition == definition
        is_same = is_same or tokenizer_json(tokenizer) == definition
        different = differences(config, self.config, SAME_FUNCTION)
        # A run with a shorter context takes the first of the learned positions.
        context = self.config.model.context
        if context < config.model.context:
            different.append(f"model.context={config.model.context} (at most {context})")
        if different:
            overrides = list(self.overrides)
            if not is_same:
                overrides.append(f"data.tokenizer={file}")
            reason = f"holds another model than {', '.join(different)}; set {' '.join(overrides)}"
            raise ConfigError(f"train.start_from={self.path}: {reason}")
        if not is_same:
            raise ConfigError(
                f"data.tokenizer={config.data.tokenizer}: is not the tokenizer of train.start_from={self.path}; set "
                f"data.tokenizer={file}"
            )
        self.tensors(self.config)
        return self.vocabulary_warnings(tokenizer)

    def vocabulary_warnings(self, tokenizer: Tokenizer) -> list[str]:
        """Return how the loss of a run with this tokenizer differs from that of transformers on the same weights.

        Raises:
            ConfigError: The model lacks a token.
        """
        tokens_V = self._tokens(tokenizer)
        largest = int(tokens_V.max())
        if largest >= self.vocab_size:
            raise ConfigError(
                f"{self.path}: its tokenizer has a token {largest}, and its model vocab_size={self.vocab_size}; choose "
                "a model that has all tokens"
            )
        warnings: list[str] = []
        rows = len(tokens_V.unique())
        left_out = self.vocab_size - rows
        if left_out:
            warnings.append(
                f"{self.path}: has vocab_size={self.vocab_size}, and its tokenizer {rows} of these tokens; normlab "
                f"drops the {left_out} rows without a token, so each loss is lower than that of transformers by "
                "-ln(1 - p), where p is the probability that transformers gives them"
            )
        if len(tokens_V) > rows:
            warnings.append(
                f"{self.path}: its tokenizer has no token for the end of a document; a run adds one with the embedding "
                f"of token {self.end_of_text}, which the softmax then has twice, so that each loss is ln(1 + p) higher "
                "than in transformers, where that token has the probability p"
            )
        return warnings

    def _tokens(self, tokenizer: Tokenizer) -> Tensor:
        """Return the token of the folder for each token of a run, (V,).

        An end of a document that the folder lacks is the token after a text.
        """
        if isinstance(tokenizer, SubwordTokenizer) and tokenizer.end_token is not None:
            return torch.arange(tokenizer.vocab_size)
        end = self.end_of_text
        if not isinstance(end, int) or not 0 <= end < self.vocab_size:
            reason = "choose the token whose embedding the token after each document takes"
            raise ConfigError(f"{self.path / 'config.json'}: eos_token_id={end!s:.60}: is no token; {reason}")
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
        weights: dict[str, Tensor] = {}
        for stored, tensor in self.tensors(replace(self.config, norm=config.norm)):
            for name, values in stored.split(tensor.float()):
                if name in rows:
                    weights[name] = values[rows[name]]
                elif name != ONE:
                    weights[name] = values.contiguous()
        return weights

    def tensors(self, config: RunConfig) -> Iterator[tuple[StoredTensor, Tensor]]:
        """Return an iterator over the tensors of the class, which reads the values of one at a time.

        Raises:
            StoreError: A tensor is missing, superfluous, or of another shape or dtype. The headers of the files tell
                this before a tensor is read.
        """
        prefix = f"{self.native.blocks.partition('.')[0]}."
        tensors = StoredTensors(self.path, prefix)
        file = tensors.paths[0]
        depth = config.model.depth
        if depth > len(tensors):  # before a long list of tensors is made
            raise StoreError(
                f"{file}: has {counted(len(tensors), 'tensor')}, too few for model.depth={depth}; restore a copy"
            )
        expected: dict[str, StoredTensor] = {}
        for model in self.native.tensors(config, self.vocab_size):
            expected[model.name.removeprefix(prefix)] = model
        # The model's own tensors first, because the extra ones are compared with them.
        for name, model in expected.items():
            problem = _problem(name, tensors, model)
            if problem:
                raise StoreError(f"{file}: {problem}; choose another model")
        for name in tensors:
            if name in expected:
                continue
            problem = problem_of_unused(name, tensors, expected, config)
            if problem:
                raise StoreError(f"{file}: {problem}")
        return ((stored, tensors[name]) for name, stored in expected.items())


def check_weights(name: str, config: RunConfig, tokenizer: Tokenizer) -> list[str]:
    """Check that a run can start from a folder, and return the warnings about its start (`ModelFolder.check`)."""
    return ModelFolder.open(name).check(config, tokenizer)


def read_weights(name: str, config: RunConfig, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Return the weights in a folder that `check_weights` accepts, by the names of the run's model."""
    return ModelFolder.open(name).read(config, tokenizer)


def _problem(name: str, tensors: StoredTensors, model: StoredTensor) -> str:
    """Return how a tensor of a folder differs from that of its model; empty if it does not."""
    if name not in tensors:
        return f"has no tensor {name}"
    dtype, shape = tensors.dtype(name), tensors.shape(name)
    if shape != model.shape or dtype not in DTYPES:
        return f"its tensor {name} is {dtype} {shape}, and must be {' or '.join(DTYPES)} {model.shape}"
    if model.parameters == (ONE,) and float(tensors[name]) != 1:
        return f"its tensor {name} is {float(tensors[name]):g}, and must be 1"
    return ""


def weights_sha256(name: str) -> str:
    """Return the SHA-256 of the weights in a folder: of its file, or of its files one after the other.

    Raises:
        StoreError: The folder has no weights in safetensors, or they cannot be read.
    """
    paths = weight_files(_folder(name))  # which compares the headers with the lengths: a hash takes time
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
