"""Resolve short names and names from other code to options: `lr` to `optim.lr`, `n_layer` to `model.depth`."""

import difflib
import re
from collections.abc import Iterable

ALIASES = {
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_hidden_layers", "layers", "blocks"), "model.depth"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads"), "model.heads"),
    **dict.fromkeys(("n_embd", "n_embed", "d_model", "hidden_size", "hidden_dim", "dim"), "model.width"),
    **dict.fromkeys(("block_size", "context_length", "seq_len", "max_seq_len", "n_ctx", "ctx"), "model.context"),
    **dict.fromkeys(("learning_rate", "max_lr"), "optim.lr"),
    **dict.fromkeys(("warmup", "warm_up", "warmup_iters"), "optim.warmup_steps"),
    **dict.fromkeys(("grad_clip", "max_grad_norm", "clip_grad"), "optim.clip"),
    **dict.fromkeys(("max_steps", "max_iters", "num_steps", "iters", "iterations", "epochs"), "train.steps"),
    **dict.fromkeys(("batch", "bs"), "train.batch_size"),
    **dict.fromkeys(("grad_accum", "gradient_accumulation_steps", "accumulate"), "train.accumulation"),
    **dict.fromkeys(("normalization", "normalisation", "norm_type"), "norm"),
    **dict.fromkeys(("norm_position", "norm_placement"), "placement"),
    **dict.fromkeys(("opt", "optimizer", "optimiser"), "optim"),
    **dict.fromkeys(("dataset", "corpus"), "data"),
    "dtype": "precision",
    "wd": "optim.weight_decay",
    "experiment": "+experiment",
}
"""The option for each name in other code (the last part of a dotted name)."""
NOTHING = ("none", "nil", "off", "no", "false", "auto", "default", "unset", "disabled", "")
"""Words that users write for `null`, or for an empty list, in options that take none of these words."""


def meanings(name: str, options: Iterable[str]) -> list[str]:
    """Return the options that a name may mean: itself, its alias, or the least nested ones that end in it.

    Case and marks do not matter, so that a name in a table is understood: `QK norm` is `model.qk_norm`.
    """
    options = set(options)
    for exact in (name, name.lower()):
        if exact in options:
            return [exact]
    last = re.sub(r"[\s-]", "_", name.rpartition(".")[2].lower())
    alias = ALIASES.get(last)
    if alias in options:
        return [alias]
    ending = [option for option in options if last in (option.rpartition(".")[2], option.replace(".", "_"))]
    # `decay` is optim.decay: the options of each group, as optim.groups.gains.input.decay, are deeper.
    depth = min((option.count(".") for option in ending), default=0)
    return sorted(option for option in ending if option.count(".") == depth)


def empty_list_hint(value: str) -> str:
    """Return `" (did you mean '[]'?)"` if a value of an option that takes a list means that the list is empty."""
    if value.lower() in (*NOTHING, "null"):
        return " (did you mean '[]'?)"
    return ""


def hint(name: str, options: Iterable[str]) -> str:
    """Return `" (did you mean 'optim.lr'?)"` with the nearest options, or "" if none is close."""
    return did_you_mean_one_of(nearest_options(name, options))


def did_you_mean_one_of(candidates: Iterable[str]) -> str:
    """Return `" (did you mean 'optim.lr' or 'optim.eps'?)"`, or "" without candidates."""
    names = " or ".join(map(repr, candidates))
    return f" (did you mean {names}?)" if names else ""


def nearest_options(name: str, options: Iterable[str]) -> list[str]:
    """Return what a name may mean, or else the closest option; [] if none is close.

    The last part of the name is compared with the last parts of the options, first of those in the same section.
    """
    options = list(options)
    section, _, last = name.rpartition(".")
    candidates = meanings(name, options)
    # A typing error is more likely in the last part than in the section, so the same section comes first.
    nearby = [option for option in options if section and option.rpartition(".")[0] == section]
    for known in (nearby, options):
        if candidates:
            break
        parts = sorted({option.rpartition(".")[2] for option in known})
        close = difflib.get_close_matches(last.lower(), parts, n=1, cutoff=0.65)
        if close:
            candidates = meanings(close[0], known)
    return candidates
