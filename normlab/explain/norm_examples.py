"""The norms of the page: the outputs of their modules for the page's matrix, in float64.

The inputs that an output depends on are those with a nonzero entry in the module's Jacobian.

Shapes: T = 4 tokens, D = 6 channels, N = 24 values of the matrix, tokens first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from normlab import catalogue
from normlab.explain.mathematics import mathematics
from normlab.norms.base import load_all

if TYPE_CHECKING:
    from torch import Tensor, nn

Norm = dict[str, Any]

TOKENS, CHANNELS = 4, 6
# Token 2 is small, token 3 large and token 4 shifted, compared with token 1; channel 5 is large in every token.
ORIGINAL: tuple[tuple[float, ...], ...] = (
    (0.5, -1.1, 0.2, 1.3, 6.0, -0.4),
    (0.1, 0.3, -0.2, 0.4, 4.5, -0.1),
    (4.0, -6.5, 2.5, 7.0, 15.0, -3.0),
    (3.2, 2.6, 3.5, 2.9, 9.0, 3.1),
)
LIMIT = 1e12
"""The largest absolute value of an input; sums of its square keep their digits in float64."""
PRESETS: tuple[dict[str, object], ...] = (
    {"label": "add 3 to every value", "add": 3.0},
    {"label": "ten times token 2", "row": 1, "times": 10.0},
    {"label": "ten times channel 4", "column": 3, "times": 10.0},
    {"label": "token 3 constant", "row": 2, "value": 2.0},
)
"""The changes that the buttons apply to the current matrix: to a row, to a column, or to all values."""
OPTIONS: dict[str, dict[str, Any]] = {"groupnorm": {"groups": 2}, "prmsnorm": {"fraction": 0.5}}
"""Options of norms whose defaults do not fit six channels."""
SEQUENCES = {"batchnorm_position": 2}
"""The number of sequences that the rows form, if not one: over one sequence a position has no variance."""
SEED = 0
"""The seed of random weights and of the matrices for the Jacobian."""
UPDATES = 20
"""The initial number of training updates of the running statistics."""
PROBES = 64
"""The number of random matrices for the Jacobian: for a single matrix, min and max depend on two channels only."""

GROUPS = {
    "row": "each token: a group is a row, all channels of a token",
    "column": "each channel: a group is a column, a channel of all tokens",
    "group": "each token's groups of neighbouring channels",
    "value": "single values: the norm computes no statistics",
    "past": "each channel, over the tokens from the first to the value's own",
    "other": "neither rows nor columns: the marked value depends on the filled values",
}
"""Descriptions of the values that a norm computes its statistics over."""

LIVE: tuple[dict[str, Any], ...] = (
    {
        "key": "zscore", "title": "Z-score", "norm": "zscore", "over": "column",
        "see": "In statistics, a z-score compares a value with the other samples of its feature. Over columns, every "
        "column has mean 0 and variance 1, and the large channel 5 looks like any other. Over rows, as norm=zscore "
        "computes it, it equals layer norm except for the position of eps.",
        "causal": "over a row; not over a column, which contains later tokens",
    },
    {
        "key": "minmax", "title": "Min-max", "norm": "minmax", "over": "column",
        "see": "The smallest value of a group becomes 0 and the largest becomes 1. One extreme value compresses all "
        "others of its group: over rows, channel 5 does so in every token.",
        "causal": "over a row; not over a column, which contains later tokens",
    },
    {
        "key": "batchnorm", "title": "BatchNorm, in training", "norm": "batchnorm", "over": "column",
        "see": "The statistics of each channel are computed over the tokens of the batch, here the four rows. Edit one "
        "value: its whole column changes, so the output of a token depends on later tokens.",
    },
    {
        "groups": "single values: each is normalised with the running mean and variance of its channel",
        "key": "batchnorm_eval", "title": "BatchNorm, in evaluation", "norm": "batchnorm", "over": "value",
        "see": "The running statistics from training replace those of the batch. Edit one value: only its own output "
        "changes. But values unlike the training batches do not get mean 0 and variance 1.",
        "formula": "(x - running_mean) / sqrt(running_var + eps) * gain + bias",
        "causal": "yes, after training", "invariant_to": [],
    },
    {
        "key": "layernorm", "title": "LayerNorm", "norm": "layernorm", "over": "row",
        "see": "The statistics of each token are computed over its channels. Every row has mean 0 and variance 1. "
        "Except for eps, neither ten times token 2 nor 3 more in every channel changes the output. Columns keep their "
        "differences, and channel 5 stays large.",
    },
    {
        "key": "rmsnorm", "title": "RMSNorm", "norm": "rmsnorm", "over": "row",
        "see": "Each token is divided by its root mean square, without subtracting the mean: every row has RMS 1 and "
        "signs stay. Except for eps, ten times token 2 changes nothing. Adding 3 does: shifted tokens look alike.",
    },
)  # fmt: skip
"""The norms that the page computes itself, with the initial group (`over`) and an explanation (`see`)."""


def live_norms() -> list[Norm]:
    """Return the norms that the page computes itself, with the options of their modules."""
    entries = {entry["name"]: entry for entry in catalogue.norms()}
    norms = []
    for live in LIVE:
        options = _options(live["norm"])
        numbers = {name: getattr(options, name) for name in ("eps", "momentum") if hasattr(options, name)}
        entry = entries[live["norm"]]
        norm = {"formula": entry["formula"], **numbers, **_facts(entry), **live}
        norms.append({**norm, "math": mathematics(norm["formula"])})
    return norms


def all_norms() -> list[Norm]:
    """Return each catalogued norm with its output for the original matrix and its dependencies."""
    entries = {entry["name"]: entry for entry in catalogue.norms()}
    return [_norm(name, entries[name]) for name in load_all() if name in entries]


def build(name: str) -> nn.Module:
    """Return a norm's module for the page's width, in float64 and in training mode."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return _options(name).build(CHANNELS).double().train()


def dependencies(name: str) -> list[list[int]]:
    """Return the indices of the input values that each of the N output values depends on."""
    import torch
    from torch.func import jacrev, vmap

    norm = _on_matrix(name, build(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        x_PTD = torch.randn(PROBES, TOKENS, CHANNELS, dtype=torch.float64)
    jacobian_NN = vmap(jacrev(norm))(x_PTD).reshape(PROBES, TOKENS * CHANNELS, -1).abs().amax(0)
    return [row.nonzero().flatten().tolist() for row in jacobian_NN]


def group_kind(inputs: list[list[int]]) -> str:
    """Return the key of `GROUPS` for the input indices of each output value."""
    token, channel = np.divmod(np.arange(TOKENS * CHANNELS), CHANNELS)
    same_token, same_channel = token[:, None] == token, channel[:, None] == channel
    kinds = {
        "row": same_token, "column": same_channel, "value": same_token & same_channel,
        "past": same_channel & (token <= token[:, None]),
    }  # fmt: skip
    depends = np.zeros((TOKENS * CHANNELS, TOKENS * CHANNELS), bool)
    for index, group in enumerate(inputs):
        depends[index, group] = True
    for kind, expected in kinds.items():
        # The first token of a past has no variance, so its output is constant and depends on nothing.
        first = CHANNELS if kind == "past" else 0
        if np.array_equal(expected[first:], depends[first:]):
            return kind
    within_token = all({i // CHANNELS for i in group} == {index // CHANNELS} for index, group in enumerate(inputs))
    is_partition = all(inputs[i] == group for group in inputs for i in group)
    return "group" if within_token and is_partition else "other"


def _options(name: str) -> Any:
    return load_all()[name](**OPTIONS.get(name, {}))  # pyright: ignore[reportCallIssue]


def _on_matrix(name: str, module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function of a matrix whose rows are the tokens of one or more sequences."""
    sequences = SEQUENCES.get(name, 1)
    if sequences == 1:
        return module
    return lambda x_TD: module(x_TD.unflatten(0, (sequences, -1))).flatten(0, 1)


def _norm(name: str, entry: catalogue.Entry) -> Norm:
    import torch

    module = build(name)
    with torch.no_grad():
        y_TD = _on_matrix(name, module)(torch.tensor(ORIGINAL, dtype=torch.float64))
    inputs = dependencies(name)
    return {
        "name": name, "result": y_TD.tolist(), "inputs": inputs, "kind": group_kind(inputs),
        "options": [f"{key}={value}" for key, value in OPTIONS.get(name, {}).items()],
        "weights": _initial_weights(module), "batch": _batch_note(name, entry),
        "about": entry["about"], "formula": entry["formula"], "math": mathematics(entry["formula"]), **_facts(entry),
        "equals": entry["equals"], "pitfalls": list(entry.get("pitfalls") or ()),
    }  # fmt: skip


def _facts(entry: catalogue.Entry) -> Norm:
    return {
        "parameters": f"{entry['parameters']} for D channels" if "D" in entry["parameters"] else entry["parameters"],
        "causal": "yes, also in training" if entry["causal"] else "not in training: it depends on later tokens",
        "invariant_to": list(entry["invariant_to"]),
        "source": entry["source"],
    }


def _batch_note(name: str, entry: catalogue.Entry) -> str:
    if not entry["batch_statistics"]:
        return ""
    if name in SEQUENCES:
        return "In training mode, on two sequences of two tokens: tokens 1 and 2, and tokens 3 and 4."
    return "In training mode, on one sequence of four tokens."


def _initial_weights(module: nn.Module) -> list[str]:
    """Return the initial value of each parameter, as text."""
    texts = []
    for name, weight in module.named_parameters():
        values = weight.detach().flatten()
        if bool((values == values[0]).all()):
            texts.append(f"{name.removeprefix('affine.')} = {values[0].item():.6g}")
        else:
            texts.append(f"{name}: {' x '.join(map(str, weight.shape))}, random (seed {SEED})")
    return texts
