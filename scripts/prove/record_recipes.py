#!/usr/bin/env python3
"""Write tests/train/recipes.json: how the public code that the recipes of conf/recipe are from trains each parameter.

    python scripts/prove/record_recipes.py NANOCHAT TRACK3

NANOCHAT is a folder with karpathy/nanochat at 3a5e0bc, TRACK3 the file train_gpt_simple.py of
KellerJordan/modded-nanogpt, track 3, at f411b3d. Their own code builds a model of 2 blocks of width 768 and its
optimisers; the file has the shape, group options and initial standard deviation of each tensor, by our names, and what
50 updates by these optimisers make of smaller tensors.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the updates are computed in float64, by torch's own operations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.drawn_updates import STEPS, drawn_gradients, drawn_start, sums_of  # noqa: E402

DEPTH, WIDTH, VOCAB = 2, 768, 60
COMMITS = {"nanochat": "karpathy/nanochat at 3a5e0bc", "modded_track3": "KellerJordan/modded-nanogpt at f411b3d"}
NAMES = {
    r"(?:transformer\.wte|embed)\.weight": "embed.tokens.weight",
    r"norm1\.gains": "embed.open.affine.gain",
    r"norm2\.gains": "head.close.affine.gain",
    r"(?:lm_head|proj)\.weight": "head.weight",
    r"(?:transformer\.h|blocks)\.(\d+)\.attn\.(?:c_)?([qkv])\.(weight|bias)": r"blocks.\1.attn.\2.\3",
    r"(?:transformer\.h|blocks)\.(\d+)\.attn\.(?:c_)?proj\.(weight|bias)": r"blocks.\1.attn.out.\2",
    r"(?:transformer\.h|blocks)\.(\d+)\.mlp\.(?:c_)?fc\.(weight|bias)": r"blocks.\1.mlp.up.\2",
    r"(?:transformer\.h|blocks)\.(\d+)\.mlp\.(?:c_)?proj\.(weight|bias)": r"blocks.\1.mlp.down.\2",
    r"blocks\.(\d+)\.norm1\.gains": r"blocks.\1.wiring.attn.norms.in.affine.gain",
    r"blocks\.(\d+)\.norm2\.gains": r"blocks.\1.wiring.mlp.norms.in.affine.gain",
}
"""Our name of each of their parameters; one without a match stays under its own."""


def nanochat(folder: Path) -> tuple[nn.Module, Iterable[torch.optim.Optimizer]]:
    sys.path.insert(0, str(folder))
    from nanochat.gpt import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    model = GPT(GPTConfig(vocab_size=VOCAB, n_layer=DEPTH, n_head=6, n_kv_head=6, n_embd=WIDTH))
    model.init_weights()
    return model, model.setup_optimizers()


def modded_track3(file: Path) -> tuple[nn.Module, Iterable[torch.optim.Optimizer]]:
    """Run the parts of the file that define the model and the optimisers, and that choose their options."""
    text = file.read_text()
    parts = re.split(r"^[ ]*#{20,}\n[ ]*#[ ]+(.*?)[ ]+#\n[ ]*#{20,}\n", text, flags=re.MULTILINE)
    by_title = dict(zip(parts[1::2], parts[2::2], strict=True))
    known: dict[str, Any] = {
        "torch": torch, "nn": nn, "F": F, "Tensor": torch.Tensor, "AdamW": torch.optim.AdamW,
        "dist": SimpleNamespace(get_world_size=lambda: 1, get_rank=lambda: 0, all_gather=lambda *_: None),
    }  # fmt: skip
    exec(by_title["Architecture"] + by_title["Optimizer"], known)  # noqa: S102
    known["model"] = known["GPT"](vocab_size=VOCAB, num_layers=DEPTH, model_dim=WIDTH)
    options = by_title["Init & Optim Hyperparams"]
    exec("if True:\n" + options.partition("    # learning rate schedule")[0], known)  # noqa: S102
    return known["model"], known["optimizers"]


def our_name(name: str) -> str:
    return next((re.sub(f"^{p}$", to, name) for p, to in NAMES.items() if re.fullmatch(p, name)), name)


def rows(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    options = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            update = "muon" if type(optimizer).__name__ == "Muon" else "adamw"
            own = {"update": update, "lr": group["initial_lr"], "decay": group.get("weight_decay", 0.0)}
            own |= {"betas": list(group["betas"]), "eps": group["eps"]} if update == "adamw" else {}
            own |= {"momentum": group.get("mu", group.get("momentum"))} if update == "muon" else {}
            options |= dict.fromkeys(map(id, group["params"]), own)
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().double()
        init = {"mean": round(values.mean().item(), 3), "sd": float(f"{values.std().item():.3g}")}
        found[our_name(name)] = {"shape": list(parameter.shape), **options[id(parameter)], **init}
    return found


def updated(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the sums of each small tensor after the updates."""
    parameters = {our_name(name): p for name, p in model.named_parameters()}
    start = drawn_start({name: p.shape for name, p in parameters.items()})
    for name, p in parameters.items():
        p.grad = None
        p.data = start[name]
    Tensor.bfloat16 = Tensor.clone  # pyright: ignore[reportAttributeAccessIssue]
    for step in range(STEPS):
        for name, grad in drawn_gradients(start, step).items():
            parameters[name].grad = grad
        for optimizer in optimizers:
            optimizer.step()
    return sums_of({name: p.detach() for name, p in parameters.items()})


def by_line(tensors: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in tensors.items()) + "}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("nanochat", type=Path)
    parser.add_argument("track3", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sources = {"nanochat": nanochat(arguments.nanochat), "modded_track3": modded_track3(arguments.track3)}
    data = {
        name: {"source": COMMITS[name], "parameters": rows(*source), "updated": updated(*source)}
        for name, source in sources.items()
    }
    path = ROOT / "tests" / "train" / "recipes.json"
    lines = [
        f'"{name}": {{"source": {json.dumps(recipe["source"])}, "parameters": {by_line(recipe["parameters"])}, '
        f'"updated": {by_line(recipe["updated"])}}}'
        for name, recipe in data.items()
    ]
    path.write_text("{" + ",\n".join(lines) + "}\n")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
