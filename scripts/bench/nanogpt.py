"""The baseline karpathy/nanoGPT: train.py of the user's clone, unchanged, with the shapes and the text of a config.

train.py reads its files from the working folder. `make_folder` makes such a folder of links to the clone, beside the
text in nanoGPT's format; `arguments` returns the command line that trains the same shapes; `run` runs train.py in this
process and calls a function each time that train.py prints the loss.
"""

import argparse
import builtins
import contextlib
import io
import os
import pickle
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from normlab.catalogue.optimizers.options import AdamW
from normlab.config.schema import RunConfig
from normlab.data.corpus import Corpus

FILES = ("train.py", "model.py", "configurator.py")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
NEVER = 10**9
GPT2_VOCABULARY = 50_257


def commit_of(clone: Path) -> str:
    """Return the commit of a clone, or "unknown" if it is not one."""
    command = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def add_option(parser: argparse.ArgumentParser, use: str) -> None:
    """Add the option `--nanogpt`, the absolute path of a clone."""
    parser.add_argument("--nanogpt", type=_clone, metavar="DIR", help=f"a clone of karpathy/nanoGPT{use}")


def _clone(text: str) -> Path:
    clone = Path(text)
    if missing := [name for name in FILES if not (clone / name).is_file()]:
        url = "https://github.com/karpathy/nanoGPT"
        raise argparse.ArgumentTypeError(f"{clone} has no {missing[0]}; pass a clone of {url}")
    return clone.resolve()


def make_folder(clone: Path, folder: Path, corpus: Corpus) -> None:
    """Make the folder in which train.py runs."""
    for name in FILES:
        (folder / name).symlink_to(clone / name)
    data = folder / "data" / "text"
    data.mkdir(parents=True)
    for part, tokens_N in (("train", corpus.train), ("val", corpus.val)):
        np.asarray(tokens_N).astype(np.uint16).tofile(data / f"{part}.bin")
    # Without meta.pkl train.py has its own default, GPT-2's vocabulary padded to a multiple of 64. On a GPU normlab
    # pads its output matrix in the same way.
    if corpus.tokenizer.vocab_size != GPT2_VOCABULARY:
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.tokenizer.vocab_size}))


def arguments(
    config: RunConfig, *, steps: int, device: str, precision: str, compiled: bool, evaluates: bool = False
) -> list[str]:
    """Return the arguments of train.py for the shapes and the optimiser of a config.

    Args:
        config: A config with AdamW and the parameters that nanoGPT has: a GPT-2.
        steps: The last step; train.py takes one step more, because its last evaluation needs it.
        device: cpu or cuda.
        precision: fp32 or bf16.
        compiled: Whether train.py compiles the model.
        evaluates: Whether it evaluates as often as the config does, on as many batches. train.py evaluates on both
            parts of the text, so each gets half of the batches.
    """
    model, train, optim = config.model, config.train, config.optim
    assert isinstance(optim, AdamW)
    batches = config.eval.sequences // train.batch_size if evaluates else 2
    values: dict[str, Any] = {
        "dataset": "text", "device": device, "dtype": DTYPES[precision], "compile": compiled,
        "n_layer": model.depth, "n_head": model.heads, "n_embd": model.width, "block_size": model.context,
        "bias": model.bias, "dropout": 0.0, "batch_size": train.batch_size // train.accumulation,
        "gradient_accumulation_steps": train.accumulation, "learning_rate": optim.lr,
        "min_lr": optim.lr * (optim.final_lr_fraction or 0.0), "warmup_iters": optim.warmup_steps or 0,
        "lr_decay_iters": steps, "max_iters": steps, "weight_decay": optim.weight_decay, "beta1": optim.beta1,
        "beta2": optim.beta2, "grad_clip": optim.clip or 0.0, "log_interval": train.log_every,
        "eval_interval": config.eval.every if evaluates else NEVER, "eval_iters": max(1, batches // 2),
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in values.items()]


def run(folder: Path, arguments: list[str], at_log: Callable[[], object]) -> None:
    """Run train.py in this process; call `at_log` after each line with a loss: at step 0, 10, 20 and so on."""
    log = io.StringIO()

    def printing(*values: object, **options: Any) -> None:
        builtins.print(*values, file=log, flush=True)
        if str(values[0]).startswith("iter "):
            at_log()

    os.chdir(folder)
    sys.argv = ["train.py", *arguments]
    sys.path.insert(0, str(folder))
    with contextlib.redirect_stdout(log):
        runpy.run_path("train.py", init_globals={"print": printing}, run_name="__main__")
