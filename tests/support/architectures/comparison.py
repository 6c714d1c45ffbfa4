"""Both models of an architecture: transformers' and ours, with weights that are functions of the same tensors."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.func import functional_call

from normlab.config.model import ModelConfig
from normlab.model.gpt import GPT
from support.architectures.architecture import DEPTH, ROTATION, STEPS, Architecture, Combined, Tensors, joined
from support.transformers_models import VOCAB, config_of, randomised


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """Return the options that most configs of transformers have."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "max_position_embeddings": config.context,
        "rms_norm_eps": 1e-6,
        "rope_parameters": ROTATION,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def translated(row: Architecture, ours: Tensors, names: set[str]) -> Tensors:
    """Return the parameters of transformers, combined from ours; those without a counterpart are left out."""

    def of(module: str, leaf: str) -> Tensor | None:
        affine = {"weight": "gain", "bias": "bias"}[leaf]
        names = [f"{module}.{leaf}", f"{module}.affine.{affine}"]
        if leaf == "weight":
            names.append(module)
        return next((ours[name] for name in names if name in ours), None)

    places = [("", "", row.model_weights)]
    places += [(f"blocks.{layer}.", row.block_prefix.format(layer), row.block_weights) for layer in range(DEPTH)]
    theirs = {}
    for prefix, their_prefix, weights in places:
        for name, part in weights.items():
            source = part if isinstance(part, Combined) else joined(part)
            for leaf in ("weight", "bias"):
                parts = [tensor for module in source.modules if (tensor := of(prefix + module, leaf)) is not None]
                if parts:
                    whole = their_prefix + name
                    theirs[whole if whole in names else f"{whole}.{leaf}"] = source.combine(*parts)
    return theirs


def build_both(row: Architecture, monkeypatch: pytest.MonkeyPatch) -> tuple[GPT, nn.Module, Tensors, Tensors]:
    """Return both models, our parameters that the other model has too, and all parameters of the other model.

    Its parameters are functions of ours, and zero where ours have no counterpart.
    """
    if isinstance(row.transformers_class, str) and not hasattr(transformers, row.transformers_class):
        pytest.skip(f"transformers {transformers.__version__} has no {row.transformers_class}")
    config = config_of(f"model.depth={DEPTH}", *row.overrides.split())
    model = randomised(config, torch.float64)
    kind: Any = row.transformers_class
    if isinstance(kind, str):
        kind = getattr(transformers, kind)
    # Some configs change the values that they get.
    options = copy.deepcopy(shape_of(config.model) | dict(row.config))
    other = kind(kind.config_class(**options)) if row.build is None else row.build(kind, options)
    other.eval()
    if row.patch is not None:
        row.patch(other, monkeypatch)

    ours: Tensors = dict(model.named_parameters())
    for ending in row.zero_in_normlab:
        lacking = [name for name in ours if name.endswith(ending)]
        assert lacking
        for name in lacking:
            ours.pop(name).detach().zero_()
    theirs = dict(other.named_parameters())
    weights = translated(row, ours, set(theirs))
    assert weights.keys() <= theirs.keys()
    assert {name: value.shape for name, value in weights.items()} == {n: theirs[n].shape for n in weights}
    rest = theirs.keys() - weights.keys()
    assert [part for part in row.zero_in_transformers if not any(part in name for name in rest)] == []
    assert [name for name in rest if not any(part in name for part in row.zero_in_transformers)] == []
    return model, other, ours, weights | {name: torch.zeros_like(theirs[name]) for name in rest}


def both_logits(model: GPT, other: nn.Module, weights: Tensors, tokens: Tensor) -> tuple[Tensor, Tensor]:
    # Both logits are functions of our parameters.
    return model(tokens), functional_call(other, weights, (), {"input_ids": tokens, "use_cache": False}).logits


@dataclass(frozen=True)
class Results:
    logits: Tensor
    gradients: Tensors
    """The gradient of the loss with respect to each of our parameters that both models have."""


def results_of_both(row: Architecture, monkeypatch: pytest.MonkeyPatch) -> tuple[Results, Results]:
    """Return the results of our model and of the other one, for the same random weights and tokens."""
    model, other, ours, weights = build_both(row, monkeypatch)
    tokens, targets = torch.randint(VOCAB, (2, 3, STEPS), generator=torch.Generator().manual_seed(2))

    def results(logits: Tensor) -> Results:
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        # A parameter that one of the models does not use is an error here.
        return Results(logits, dict(zip(ours, torch.autograd.grad(loss, list(ours.values())), strict=True)))

    logits, expected = both_logits(model, other, weights, tokens)
    return results(logits), results(expected)
