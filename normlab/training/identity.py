"""The identity of a run, its id, and the content of `run.json`.

The identity holds the config fields that can change the numbers, the corpus, the device kind, the precision, the
compile mode, and the versions of the norm, the placement, the init rule and the optimiser. Its hash is part of the run
id: the same command on the same machine finds the same folder again, and a norm with a new version starts a new run.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from normlab.config.schema import RunConfig, canonical_hash
from normlab.data.batches import validation_windows
from normlab.data.corpus import Corpus
from normlab.model.flops import flops_per_token
from normlab.options import plain_tree
from normlab.placements.init_rules import INIT_RULE_VERSIONS
from normlab.plugins import version_of
from normlab.training.machine import RuntimeSettings
from normlab.version import __version__


def identity(config: RunConfig, resolved: RuntimeSettings, corpus: Corpus) -> dict[str, Any]:
    """Return the config fields, corpus, runtime settings and versions that the run id hashes, as plain values."""
    return {
        "config": config.identity(),
        "corpus": corpus.sha256,
        "device": resolved.device,
        "precision": resolved.precision,
        "compile": resolved.compile,
        "versions": versions(config),
    }


def versions(config: RunConfig) -> dict[str, int | str]:
    """Return the versions of the norm, placement, init rule and optimiser; for a plugin the SHA-256 of its file."""
    norm, placement, rule = config.norm, config.placement, config.init_rule
    return {
        "norm": version_of("norm", norm.name, norm.version),
        "placement": version_of("placement", placement.name, placement.version),
        "init": version_of("init rule", rule, INIT_RULE_VERSIONS.get(rule, 1)),
        "optim": config.optim.version,
    }


def run_id_of(config: RunConfig, identity: dict[str, Any]) -> str:
    """Return the run id: norm, placement, sizes and the first digits of the identity's hash."""
    model = config.model
    return f"{config.norm.name}-{config.placement.name}-d{model.depth}w{model.width}-{canonical_hash(identity)[:10]}"


def describe(config: RunConfig, resolved: RuntimeSettings, corpus: Corpus) -> dict[str, Any]:
    """Return the content of run.json without the fingerprint of the block, which is expensive for deep models."""
    run_identity = identity(config, resolved, corpus)
    run_id = run_id_of(config, run_identity)
    tokens_NT, targets_NT = validation_windows(corpus.val, config.model.context, config.eval.sequences)
    return {
        "run_id": run_id,
        "name": config.run.name or run_id,
        "config": plain_tree(config),
        "resolved": asdict(resolved),
        # The baselines and the run's evaluations use the same targets.
        "corpus": {**corpus.description, "baselines": corpus.baselines(tokens_NT.numpy(), targets_NT.numpy())},
        "identity": run_identity,
        "flops_per_token": flops_per_token(config, corpus.tokenizer.vocab_size),
        "warnings": config.warnings(),
        "norm": {name: getattr(config.norm, name) for name in ("formula", "source", "causal", "batch_statistics")},
        "placement": {"name": config.placement.name},
        "versions": {
            "normlab": __version__,
            "python": platform.python_version(),
            **_library_versions(),
        },
        "git": _git_state(),
        "command": sys.argv,
        "created": time.time(),
    }


@cache
def _library_versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "numpy", "datasets", "wandb")}


@cache
def _git_state() -> dict[str, str] | None:
    """Return the commit and the hash of uncommitted changes; None where normlab is not run from a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        commit, diff = git("rev-parse", "HEAD").strip(), git("diff", "HEAD", "--", "normlab", "conf")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "diff": hashlib.sha256(diff.encode()).hexdigest() if diff else ""}
