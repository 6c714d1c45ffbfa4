"""What a run is: its identity, whose hash is part of its id, and the content of its run.json.

The identity holds the config fields that can change the numbers, the corpus, the device kind, the precision, the
compile mode, and the versions of the norm, the placement, the init rule and the optimiser. The same command on the same
machine therefore finds the same folder again, and a norm with a new version starts a new run.
"""

import hashlib
import platform
import subprocess
import time
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import msgspec

from normlab.base.plugins import plugin_file, version_of
from normlab.base.version import __version__
from normlab.catalogue.placements.init_rules import INIT_RULES
from normlab.config.schema import RunConfig
from normlab.data.batches import validation_windows
from normlab.data.corpus import Corpus
from normlab.model.flops import flops_per_token
from normlab.store.format import to_json
from normlab.store.run_json import Git, Identity, Machine, NormFacts, RecordedCorpus, Run
from normlab.training.machine import RuntimeSettings
from normlab.training.training_run import TrainingRun


def identity(config: RunConfig, settings: RuntimeSettings, corpus: Corpus) -> Identity:
    """Return what the run id hashes."""
    return Identity(
        config=config.identity(),
        corpus=corpus.sha256,
        device=settings.device,
        precision=settings.precision,
        compile=settings.compile,
        versions=versions(config),
    )


def versions(config: RunConfig) -> dict[str, int | str]:
    """Return the versions of the norm, placement, init rule and optimiser; for a plugin the hash of its code."""
    norm, placement, rule = config.norm, config.placement, config.init_rule
    return {
        "norm": version_of("norm", norm.name, norm.version),
        "placement": version_of("placement", placement.name, placement.version),
        "init": version_of("init rule", rule, INIT_RULES[rule].version),
        "optim": config.optim.version,
    }


def plugins_of(config: RunConfig) -> dict[str, str]:
    """Return the file name of the plugin of each part in `versions` that a plugin registered."""
    parts = {
        "norm": ("norm", config.norm.name),
        "placement": ("placement", config.placement.name),
        "init": ("init rule", config.init_rule),
    }
    files: dict[str, str] = {}
    for part, (kind, name) in parts.items():
        file = plugin_file(kind, name)
        if file is not None:
            files[part] = file
    return files


def run_id_of(config: RunConfig, identity: Identity) -> str:
    """Return the run id: norm, placement, sizes and the first digits of the identity's hash."""
    model = config.model
    return f"{config.norm.name}-{config.placement.name}-d{model.depth}w{model.width}-{identity.sha256[:10]}"


def describe(
    run: TrainingRun, settings: RuntimeSettings, corpus: Corpus, *, fingerprint: str, decayed: str | None
) -> Run:
    """Return the content of the run.json of a run whose model is built.

    Args:
        fingerprint: The hash of what its block computes.
        decayed: The parameters with weight decay (`optim.decayed_groups`).
    """
    config, run_id, norm = run.config, run.folder.run_id, run.config.norm
    # Only the init rule differs between the runs of a pack.
    settings = replace(settings, init=config.init_rule)
    return Run(
        run_id=run_id,
        name=config.run.name or run_id,
        config=config.recorded(),
        resolved=Machine(**asdict(settings), decayed=decayed),
        corpus=_recorded(corpus, config),
        identity=run.identity,
        flops_per_token=flops_per_token(config, corpus.tokenizer.vocab_size),
        warnings=run.warnings,
        norm=NormFacts(
            formula=norm.formula, source=norm.source, causal=norm.causal, batch_statistics=norm.batch_statistics
        ),
        versions={"normlab": __version__, "python": platform.python_version(), **_library_versions()},
        git=_git_state(),
        created=time.time(),
        pack=run.pack,
        fingerprint=fingerprint,
        parameters=[row.cells for row in run.parameters],
    )


def _recorded(corpus: Corpus, config: RunConfig) -> RecordedCorpus:
    """Return the corpus as run.json has it, with the losses of models that know no context."""
    # The baselines and the run's evaluations use the same targets.
    tokens_NT, targets_NT = validation_windows(corpus.val, config.model.context, config.eval.sequences)
    facts = {
        **corpus.description,
        "tokenizer_sha256": hashlib.sha256(to_json(corpus.tokenizer.state())).hexdigest(),
        "baselines": corpus.baselines(tokens_NT.numpy(), targets_NT.numpy()),
    }
    return msgspec.convert(facts, RecordedCorpus)


@cache
def _library_versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "numpy", "datasets", "wandb")}


@cache
def _git_state() -> Git | None:
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
    diff_hash = hashlib.sha256(diff.encode()).hexdigest() if diff else ""
    return Git(commit=commit, diff=diff_hash)
