"""What the page shows of norms: their own modules, on the page's matrix, in float64.

Which numbers a value is made of is no hand-written list: it is where the module's own Jacobian is not zero.

Shapes: N the 24 values of the matrix, tokens first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from normlab import catalogue
from normlab.explain.mathematics import mathematics
from normlab.explain.matrix import CHANNELS, ORIGINAL, TOKENS
from normlab.norms.base import load_all

if TYPE_CHECKING:
    from torch import Tensor, nn

    from normlab.norms.base import NormConfig

Norm = dict[str, Any]

OPTIONS: dict[str, dict[str, Any]] = {"groupnorm": {"groups": 2}, "prmsnorm": {"fraction": 0.5}}
"""Options other than the default ones: of six channels, four groups or 6.25 % cannot be had."""
SEQUENCES = {"batchnorm_position": 2}
"""How many sequences the rows are, where that is not one: of a single one no position has a variance."""
SEED = 0
"""Of weights that are drawn."""
UPDATES = 20
"""How many training batches the running statistics have seen, until another number is asked for."""
PROBES = 64
"""How many random matrices the Jacobian is taken at: at a single one, min and max read two channels only."""

GROUPS = {
    "row": "each token by itself: one group is a row, all channels of one token",
    "column": "each channel by itself: one group is a column, that channel in all tokens",
    "group": "each token's groups of neighbouring channels by themselves",
    "value": "each value by itself: nothing is measured, no group at all",
    "past": "each channel, from the first token up to the value's own",
    "other": "neither rows nor columns: the value with the ring is made of the filled ones",
}
"""In words, over what a norm is taken."""

LIVE: tuple[dict[str, Any], ...] = (
    {
        "key": "zscore", "title": "Z-score", "norm": "zscore", "over": "column",
        "see": "The statistician's form asks of each feature how far a sample is from the others. Every column then "
        "has mean 0 and variance 1, and the large channel 5 looks like any other. Taken over each row, as norm=zscore "
        "takes it, it is layer norm but for where eps stands.",
        "causal": "over a row; not over a column, which has later tokens in it",
    },
    {
        "key": "minmax", "title": "Min-max", "norm": "minmax", "over": "column",
        "see": "The smallest value of a group becomes 0 and the largest 1; the rest lie between. One extreme value "
        "presses all others of its group together: take it over each row, and channel 5 does so in every token.",
        "causal": "over a row; not over a column, which has later tokens in it",
    },
    {
        "key": "batchnorm", "title": "BatchNorm, in training", "norm": "batchnorm", "over": "column",
        "see": "Each channel is measured over the tokens of the batch, here over the four rows. Edit one value: its "
        "whole column moves, so that a token is told something of the tokens after it.",
    },
    {
        "said": "nothing is measured: each value by itself, with the mean and variance that were kept for its channel",
        "key": "batchnorm_eval", "title": "BatchNorm, in evaluation", "norm": "batchnorm", "over": "value",
        "see": "The batch is not measured any more: what training kept is used. Edit one value: only its own output "
        "moves. But what is unlike the training batches is not brought to mean 0 and variance 1.",
        "formula": "(x - running_mean) / sqrt(running_var + eps) * gain + bias",
        "causal": "yes, once training is over", "blind_to": [],
    },
    {
        "key": "layernorm", "title": "LayerNorm", "norm": "layernorm", "over": "row",
        "see": "Each token is measured over its own channels, whatever the other tokens are. Every row has mean 0 and "
        "variance 1: neither ten times token 2 nor 3 more in every channel changes anything, but for eps. Columns keep "
        "their differences, and channel 5 stays the large one.",
    },
    {
        "key": "rmsnorm", "title": "RMSNorm", "norm": "rmsnorm", "over": "row",
        "see": "Each token is divided by its root mean square, and no mean is taken away: every row has RMS 1, signs "
        "stay, and ten times token 2 changes nothing, but for eps. Adding 3 does change it: shifted tokens look alike.",
    },
)  # fmt: skip
"""What is computed anew at each change: over what to begin with, and what to see."""


def live_norms() -> list[Norm]:
    """The normalisers that the page computes itself, with the options of the modules that they are held against."""
    entries = {entry["name"]: entry for entry in catalogue.norms()}
    shown = []
    for each in LIVE:
        options = _options(each["norm"])
        numbers = {name: getattr(options, name) for name in ("eps", "momentum") if hasattr(options, name)}
        entry = entries[each["norm"]]
        told = {**numbers, **_told(entry), "formula": entry["formula"], **each}
        shown.append({**told, "math": mathematics(told["formula"])})
    return shown


def all_norms() -> list[Norm]:
    """Every norm of the registry: what its module makes of the original matrix, and of what each value is made."""
    entries = {entry["name"]: entry for entry in catalogue.norms()}
    return [_shown(name, entries[name]) for name in load_all() if name in entries]


def apply(name: str) -> tuple[Tensor, nn.Module]:
    """What a norm's module, as it is built, makes of the original matrix, in training; and that module."""
    import torch

    module = build(name)
    x_TD = torch.tensor(ORIGINAL, dtype=torch.float64)
    with torch.no_grad():
        y_TD = _as_rows(name, module)(x_TD)
    return y_TD, module


def build(name: str) -> nn.Module:
    """A norm's module for the page's width, in float64 and in training mode."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return _options(name).build(CHANNELS).double().train()


def reads(name: str) -> list[list[int]]:
    """For each value of the output, the input's values that it is made of, by number; tokens first."""
    import torch
    from torch.func import jacrev, vmap

    norm = _as_rows(name, build(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        draws = torch.randn(PROBES, TOKENS, CHANNELS, dtype=torch.float64)
    jacobian_NN = vmap(jacrev(norm))(draws).reshape(PROBES, TOKENS * CHANNELS, -1).abs().amax(0)
    return [row.nonzero().flatten().tolist() for row in jacobian_NN]


def kind_of(made_of: list[list[int]]) -> str:
    """Which of `GROUPS` it is."""
    places = [divmod(number, CHANNELS) for number in range(TOKENS * CHANNELS)]
    known: dict[str, Callable[[int, int, int, int], bool]] = {
        "row": lambda t, c, token, channel: t == token,
        "column": lambda t, c, token, channel: c == channel,
        "value": lambda t, c, token, channel: (t, c) == (token, channel),
        "past": lambda t, c, token, channel: c == channel and t <= token,
    }
    for kind, belongs in known.items():
        expected = [
            [number for number, (t, c) in enumerate(places) if belongs(t, c, token, channel)]
            for token, channel in places
        ]
        # The first position of a past has no variance: its output is a constant, and reads nothing.
        if expected == made_of or (kind == "past" and expected[CHANNELS:] == made_of[CHANNELS:]):
            return kind
    of_one_token = all({number // CHANNELS for number in group} == {at // CHANNELS} for at, group in enumerate(made_of))
    is_partition = all(made_of[number] == group for group in made_of for number in group)
    return "group" if of_one_token and is_partition else "other"


def _options(name: str) -> NormConfig:
    kind: Callable[..., NormConfig] = load_all()[name]
    return kind(**OPTIONS.get(name, {}))


def _as_rows(name: str, module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module of a matrix whose rows are the tokens of one sequence, or of several, one after the other."""
    sequences = SEQUENCES.get(name, 1)
    if sequences == 1:
        return module
    return lambda x_TD: module(x_TD.unflatten(0, (sequences, -1))).flatten(0, 1)


def _shown(name: str, entry: catalogue.Entry) -> Norm:
    y_TD, module = apply(name)
    made_of = reads(name)
    return {
        "name": name, "result": y_TD.tolist(), "reads": made_of, "kind": kind_of(made_of),
        "weights": _weights(module), "set": [f"{word}={value}" for word, value in OPTIONS.get(name, {}).items()],
        "batch": _batch(name, entry), "about": entry["about"], "formula": entry["formula"],
        "math": mathematics(entry["formula"]), **_told(entry),
        "equals": entry["equals"], "pitfalls": list(entry.get("pitfalls") or ()),
    }  # fmt: skip


def _told(entry: catalogue.Entry) -> Norm:
    return {
        "learns": f"{entry['parameters']} numbers, for D channels" if entry["parameters"] != "0" else "nothing",
        "causal": "yes, in training too" if entry["causal"] else "not in training: it sees later tokens",
        "blind_to": list(entry["blind_to"]),
        "source": entry["source"],
    }


def _batch(name: str, entry: catalogue.Entry) -> str:
    if not entry["batch_statistics"]:
        return ""
    if name in SEQUENCES:
        return "The batch is two sequences of two tokens, tokens 1 and 2, and 3 and 4; in training mode."
    return "The batch is one sequence of four tokens; in training mode."


def _weights(module: nn.Module) -> list[str]:
    """What each parameter starts at, in words."""
    told = []
    for name, weight in module.named_parameters():
        values = weight.detach().flatten()
        if bool((values == values[0]).all()):
            told.append(f"{name.removeprefix('affine.')} = {values[0].item():.6g}")
        else:
            told.append(f"{name}: {' x '.join(map(str, weight.shape))} numbers drawn at random (seed {SEED})")
    return told
