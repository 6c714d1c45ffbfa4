"""Compare updates with depth and width transfer to those of EleutherAI/nanoGPT-mup, from equal weights, in float64.

    python scripts/prove/compare_transfer.py DIR [--steps 50]

DIR holds the model.py of that project (read at 3904404). Both models have the same weights, batches and learning rate;
the largest difference of any parameter after the updates is printed. The other code has the exact GELU, and gets
normlab's tanh form. Exits with 1 if a difference is above 1e-12.
"""

import argparse
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normlab.config.compose import compose_run
from normlab.model.groups import groups_of
from normlab.model.init import build_model
from normlab.model.runner import SingleRun
from normlab.training.optim import Optimizer, hyperparameters_at
from normlab.training.step import Step

VOCAB, WIDTH, HEADS, DEPTH, CONTEXT, BASE_WIDTH, BASE_DEPTH = 30, 32, 2, 6, 12, 8, 2
OPTIM = {"lr": 3e-3, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-4}


def other_model(folder: Path, rule: str) -> Any:
    spec = importlib.util.spec_from_file_location("nanogpt_mup", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_mup"] = module  # for its dataclass
    spec.loader.exec_module(module)
    is_deep = rule == "completep"
    model = module.GPT(module.GPTConfig(
        block_size=CONTEXT, vocab_size=VOCAB, n_layer=DEPTH, n_head=HEADS, n_embd=WIDTH, bias=False, mup_enabled=True,
        mup_width_multiplier=WIDTH / BASE_WIDTH, depth_alpha_enabled=is_deep,
        depth_multiplier=DEPTH / BASE_DEPTH if is_deep else 1.0,
    ))  # fmt: skip
    for each in model.modules():
        if isinstance(each, nn.GELU):
            each.approximate = "tanh"
    return model.double()


def weights_for_other(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our parameters by the names of the other model."""
    found = {
        "transformer.wte.weight": params["embed.tokens.weight"], "lm_head.weight": params["embed.tokens.weight"],
        "transformer.wpe.weight": params["embed.positions.weight"],
        "transformer.ln_f.weight": params["head.close.affine.gain"],
    }  # fmt: skip
    for block in range(DEPTH):
        ours, theirs = f"blocks.{block}.", f"transformer.h.{block}."
        found |= {
            f"{theirs}ln_1.weight": params[f"{ours}wiring.attn.norms.in.affine.gain"],
            f"{theirs}ln_2.weight": params[f"{ours}wiring.mlp.norms.in.affine.gain"],
            f"{theirs}attn.c_attn.weight": torch.cat([params[f"{ours}attn.{x}.weight"] for x in "qkv"]),
            f"{theirs}attn.c_proj.weight": params[f"{ours}attn.out.weight"],
            f"{theirs}mlp.c_fc.weight": params[f"{ours}mlp.up.weight"],
            f"{theirs}mlp.c_proj.weight": params[f"{ours}mlp.down.weight"],
        }
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def largest_difference(folder: Path, rule: str, steps: int) -> float:
    base = [f"model.base_width={BASE_WIDTH}", *([f"model.base_depth={BASE_DEPTH}"] if rule == "completep" else [])]
    config = compose_run([
        f"model.depth={DEPTH}", f"model.width={WIDTH}", f"model.heads={HEADS}", f"model.context={CONTEXT}",
        "model.bias=false", "norm=layernorm_nobias", f"model.scaling={rule}", *base, "optim.clip=null",
        "optim.schedule=constant", "optim.warmup_steps=0", *(f"optim.{name}={x}" for name, x in OPTIM.items()),
    ])  # fmt: skip
    model, other = build_model(config, VOCAB).double(), other_model(folder, rule)
    other.load_state_dict(weights_for_other(dict(model.named_parameters())))
    adamw = other.configure_optimizers(
        OPTIM["weight_decay"], OPTIM["lr"], (OPTIM["beta1"], OPTIM["beta2"]), OPTIM["eps"], "cpu"
    )
    runner = SingleRun(model, compiled=False)
    optimizer = Optimizer([config.optim], runner.params, groups_of(model), config.model.factors_of)
    step = Step(runner, optimizer)
    generator = torch.Generator().manual_seed(0)
    for number in range(steps):
        tokens = torch.randint(VOCAB, (4, CONTEXT + 1), generator=generator)
        own = [hyperparameters_at(family.options[0], steps, number) for family in optimizer.families]
        step(tokens[:, :-1], tokens[:, 1:], own)
        for group in adamw.param_groups:
            group["lr"] = OPTIM["lr"] * group["lr_scale"]
        adamw.zero_grad()
        other(tokens[:, :-1], tokens[:, 1:].contiguous())[1].backward()
        adamw.step()
    theirs = dict(other.named_parameters())
    ours = weights_for_other(runner.params)
    return max((theirs[name] - ours[name]).abs().max().item() for name in theirs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with model.py of the other project")
    parser.add_argument("--steps", type=int, default=50, help="updates (default: 50)")
    options = parser.parse_args()
    worst = 0.0
    for rule in ("mup", "completep"):
        difference = largest_difference(options.folder, rule, options.steps)
        print(f"{rule}: largest difference of a parameter after {options.steps} updates {difference:.1e}")
        worst = max(worst, difference if math.isfinite(difference) else math.inf)
    return int(worst > 1e-12)


if __name__ == "__main__":
    sys.exit(main())
