"""What makes two runs the same run, and what `run.json` says of one.

The identity is the config's part that can change the numbers, the corpus, the device kind, precision and
compile, and what defines the norm, the placement and the init rule. Its hash is the run's id; the same words on
the same machine therefore find the same folder again, and an edited norm is another run.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import normlab
from normlab.config import RunConfig, canonical_hash
from normlab.data.batches import validation_windows
from normlab.data.corpus import Corpus
from normlab.init_rules import numbers_of
from normlab.options import plain_tree
from normlab.train.resolve import RuntimeSettings


def identity(config: RunConfig, resolved: RuntimeSettings, corpus: Corpus) -> dict[str, Any]:
    """Everything that a run's numbers depend on, as plain values."""
    return {
        "config": config.identity(),
        "corpus": corpus.sha256,
        "device": resolved.device,
        "precision": resolved.precision,
        "compile": resolved.compile,
        "sources": sources(config, corpus.tokenizer.vocab_size),
    }


def sources(config: RunConfig, vocab_size: int) -> dict[str, str]:
    """A hash of each part that a name alone does not tell: another version of it is another run."""
    model = config.model
    assert model.mlp_width is not None, "ModelConfig.resolve() sets it"
    drawn = numbers_of(
        config.init_rule, depth=model.depth, width=model.width, mlp_width=model.mlp_width, vocab_size=vocab_size
    )
    texts = {
        "norm": config.norm.definition(),
        "placement": config.placement.definition(model.depth),
        "init": repr(drawn),
    }
    return {part: hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()}


def trunk_hash(identity: dict[str, Any]) -> str | None:
    """The hash of what a run shares with a longer one, or nothing where the schedule binds them to a length.

    Under a constant or a warm-up-stable-decay schedule, a run of more steps begins with the very same steps.
    """
    config = identity["config"]
    if config["optim"]["schedule"] not in ("constant", "wsd"):
        return None
    train = {word: value for word, value in config["train"].items() if word != "steps"}
    return canonical_hash({**identity, "config": {**config, "train": train}})


def run_id_of(config: RunConfig, identity: dict[str, Any]) -> str:
    """Return the id of the run of a config with this identity."""
    model = config.model
    return f"{config.norm.name}-{config.placement.name}-d{model.depth}w{model.width}-{canonical_hash(identity)[:10]}"


def describe(config: RunConfig, resolved: RuntimeSettings, corpus: Corpus) -> dict[str, Any]:
    """The content of run.json, but for the block's fingerprint, which takes as long as the model is deep."""
    whole = identity(config, resolved, corpus)
    run_id = run_id_of(config, whole)
    tokens_NT, targets_NT = validation_windows(corpus.val, config.model.context, config.eval.sequences)
    return {
        "run_id": run_id,
        "name": config.run.name or run_id,
        "config": plain_tree(config),
        "resolved": resolved.record(),
        # The baselines are scored on the very targets that the run's evaluations score.
        "corpus": {**corpus.describe(), "baselines": corpus.baselines(tokens_NT.numpy(), targets_NT.numpy())},
        "identity": whole,
        "trunk": trunk_hash(whole),
        "doubts": config.warnings(),
        "norm": _facts(config.norm, "formula", "source", "causal", "batch_statistics"),
        "placement": {"name": config.placement.name},
        "versions": {
            "normlab": normlab.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "datasets", "wandb")},
        },
        "git": _git_state(),
        "command": sys.argv,
        "created": time.time(),
    }


def _facts(obj: object, *names: str) -> dict[str, Any]:
    return {name: getattr(obj, name) for name in names}


@cache
def _git_state() -> dict[str, str] | None:
    """Commit and the hash of what differs from it, where normlab runs from a checkout."""
    root = Path(normlab.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        commit, diff = git("rev-parse", "HEAD").strip(), git("diff", "HEAD", "--", "normlab", "conf")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "diff": hashlib.sha256(diff.encode()).hexdigest() if diff else ""}
