"""Resolve short names and names from other code to options: `lr` to `optim.lr`, `n_layer` to `model.depth`."""

import difflib
from collections.abc import Iterable

ALIASES = {
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_hidden_layers", "layers", "blocks"), "model.depth"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads"), "model.heads"),
    **dict.fromkeys(("n_embd", "n_embed", "d_model", "hidden_size", "hidden_dim", "dim"), "model.width"),
    **dict.fromkeys(("block_size", "context_length", "seq_len", "max_seq_len", "n_ctx", "ctx"), "model.context"),
    **dict.fromkeys(("learning_rate", "max_lr"), "optim.lr"),
    **dict.fromkeys(("warmup", "warmup_iters"), "optim.warmup_steps"),
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


def meanings(name: str, options: Iterable[str]) -> list[str]:
    """Return the options that a name may mean: itself, its alias, or the least nested ones that end in it."""
    options = set(options)
    if (exact := name if name in options else name.lower()) in options:
        return [exact]
    last = name.rpartition(".")[2].lower().replace("-", "_")
    if (alias := ALIASES.get(last)) in options:
        return [alias]
    found = [option for option in options if option.rpartition(".")[2] == last]
    return sorted(option for option in found if option.count(".") == min(each.count(".") for each in found))


def hint(name: str, options: Iterable[str]) -> str:
    """Return `" (did you mean 'optim.lr'?)"` with what a name may mean, or the closest option.

    A name without a dot is compared with the last part of each option. Return "" if no option is close.
    """
    options = list(options)
    if not (candidates := meanings(name, options)):
        names = options if "." in name else {option.rpartition(".")[2] for option in options}
        close = difflib.get_close_matches(name.lower(), sorted(names), n=1, cutoff=0.6)
        candidates = meanings(close[0], options) if close else []
    return f" (did you mean {' or '.join(map(repr, candidates))}?)" if candidates else ""
