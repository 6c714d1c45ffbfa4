"""Changes of a folder that transformers could have saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from normlab.data.tokenizers import CharsTokenizer
from support.transformers_models import VOCAB

CHARS = CharsTokenizer("".join(chr(33 + index) for index in range(VOCAB - 2)))
"""A tokenizer with the tokens of a small model."""


def change(**options: Any) -> Callable[[Path], None]:
    """Return a function that sets options in a config.json; `...` deletes one."""

    def write(folder: Path) -> None:
        path = folder / "config.json"
        merged = json.loads(path.read_text()) | options
        path.write_text(json.dumps({name: value for name, value in merged.items() if value is not ...}))

    return write


def change_tensor(name: str, value: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Path], None]:
    """Return a function that changes a tensor of the weights, which are zeros (2,) if it is new; None deletes it."""

    def write(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        values = weights.pop(name, torch.zeros(2))
        if value is not None:
            weights[name] = value(values).contiguous()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return write
