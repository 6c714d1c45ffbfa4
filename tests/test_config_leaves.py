"""Every option does something: for each leaf of the config, two values and what must differ between them.

A leaf without a row fails, so an option cannot be added that nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from normlab.config import OPTIMIZERS, RunConfig
from normlab.corpora import DATA, NamedData
from normlab.data.corpus import open_corpus
from normlab.errors import ConfigError, DataError, NormlabError
from normlab.launch import compose_run
from normlab.model.init import build_model
from normlab.norms.base import load_all as load_norms
from normlab.options import leaves
from normlab.placements.base import load_all as load_placements
from normlab.train.probing import probed_steps
from normlab.train.resolve import resolve
from normlab.train.start import Outcome, train

HERE = Path(__file__).parent


# What can differ.


def losses(config: RunConfig) -> Any:
    """The losses of a run of a few steps, in training and in validation."""
    return [row["loss"] for row in train(config, sinks=[]).folder.rows().rows if "loss" in row]


def validation(config: RunConfig) -> Any:
    """The losses that it is judged by."""
    return [row["loss"] for row in train(config, sinks=[]).folder.rows("eval").rows]


def weights(config: RunConfig) -> Any:
    """The initial weights."""
    return [p.tolist() for p in build_model(config, 20).parameters()]


def shapes(config: RunConfig) -> Any:
    """The parameters that there are."""
    return {name: tuple(p.shape) for name, p in build_model(config, 20).named_parameters()}


def eval_steps(config: RunConfig) -> Any:
    return [row["step"] for row in train(config, sinks=[]).folder.rows("eval").rows]


def checkpoints(config: RunConfig) -> Any:
    return sorted(path.name for path in (train(config, sinks=[]).folder.path / "checkpoints").iterdir())


def paces(config: RunConfig) -> Any:
    return [row["step"] for row in train(config, sinks=[]).folder.rows("pace").rows]


def inside(config: RunConfig) -> Any:
    """What was measured, and at which steps."""
    arrays = train(config, sinks=[]).folder.arrays
    return [(part.names(), part.steps.tolist()) for tier in ("core", "extended") for part in arrays.read(tier)[0]]


def probed(config: RunConfig) -> Any:
    """After which steps the run is probed."""
    return sorted(probed_steps(config))


def corpus(config: RunConfig) -> Any:
    run = train(config, sinks=[]).folder.run()["corpus"]
    return run["sha256"], run["val_tokens"]


def corpus_or_refusal(config: RunConfig) -> Any:
    """The corpus, or why there is none."""
    try:
        return open_corpus(config.data).sha256
    except DataError as error:
        return str(error)


def record(word: str) -> Callable[[RunConfig], Any]:
    """A value in run.json."""

    def read(config: RunConfig) -> Any:
        tree: Any = train(config, sinks=[]).folder.run()
        for part in word.split("."):
            tree = tree[part]
        return tree

    return read


def where(config: RunConfig) -> Any:
    train(config, sinks=[])
    outcome: Outcome = train(config, sinks=[])
    return str(outcome.folder.path)


def told_to_wandb(config: RunConfig) -> Any:
    """What W&B is told of the run, if anything."""
    from normlab.tracking.wandb import WandbSink
    from normlab.train.start import make_sinks

    outcome = train(config, sinks=[])
    inner = [getattr(sink, "sink", sink) for sink in make_sinks(config, outcome.folder)]
    sinks = [sink for sink in inner if isinstance(sink, WandbSink)]
    run = outcome.folder.run()
    return [sink.options(run) for sink in sinks]


def sent_to_wandb(config: RunConfig) -> Any:
    """The keys under which W&B gets what was seen inside a step."""
    from normlab.tracking.wandb import WandbSink

    folder = train(config, sinks=[]).folder
    (profiles,), _ = folder.arrays.read("core")
    return sorted(WandbSink(config.tracking, folder.path).inside(profiles))


def resolved(config: RunConfig) -> Any:
    """What is decided on this machine, or the refusal."""
    try:
        return resolve(config)
    except ConfigError as error:
        return str(error)


@dataclass(frozen=True)
class Leaf:
    first: str
    second: str
    differs: Callable[[RunConfig], Any] | None
    """None: the second value must be refused."""
    given: tuple[str, ...] = ()
    """Words that the option needs to have an effect."""


FIXED = Leaf("", "other", None)
NO_SWITCH = Leaf("null", "true", None)

# Norms see bf16 only inside the sub-layers, and rounding shows only once gains have left 1.
BF16 = ("precision=bf16", "model.qk_norm=head", "optim.lr=0.1", "optim.warmup_steps=0")
SHARED_NORM = {
    "preset": FIXED,
    "name": FIXED,
    "gain": Leaf("true", "false", shapes),
    "bias": Leaf("true", "false", shapes),
    "unit_offset": Leaf("true", "false", weights),
    "eps": Leaf("1e-6", "1e-2", losses),
}
RUNNING = SHARED_NORM | {
    "momentum": Leaf("0.1", "0.5", validation),
    "running_var": Leaf("biased", "unbiased", validation, ("norm.momentum=1",)),
}
BOUNDED = {word: leaf for word, leaf in SHARED_NORM.items() if word != "eps"} | {
    "alpha": Leaf("0.5", "1", losses),
    "shift": Leaf("false", "true", shapes),
}
LENGTH = {
    "preset": FIXED,
    "name": FIXED,
    # No stream is so short that a sound eps would count.
    "eps": Leaf("1e-6", "10", losses),
    "radius": Leaf("1", "null", losses),
    "learn_radius": Leaf("false", "true", shapes),
}
WITHOUT_GAIN = SHARED_NORM | {"unit_offset": Leaf("false", "true", weights, ("norm.gain=true",))}
# A decayed gain is what unit_offset is for; by itself it only moves where the gain starts.
NORM_LEAVES: dict[str, dict[str, Leaf]] = {
    "rmsnorm": SHARED_NORM | {
        "eps_mode": Leaf("inside_ms", "outside_rms", losses, ("norm.eps=1e-2",)),
        "compute": Leaf("fp32", "input", losses, BF16),
        "rounding": Leaf("scale_then_cast", "cast_then_scale", losses, BF16),
    },
    "layernorm": SHARED_NORM | {"eps_mode": Leaf("inside", "outside", losses, ("norm.eps=1e-2",))},
    "batchnorm": RUNNING,
    "batchnorm_past": RUNNING,
    "batchnorm_position": RUNNING,
    "seednorm": {
        "preset": FIXED,
        "name": FIXED,
        "eps": SHARED_NORM["eps"],
        "alpha": Leaf("1", "0.5", losses),
        "unit_offset": SHARED_NORM["unit_offset"],
    },
    "gatednorm": SHARED_NORM | {
        "rank": Leaf("16", "8", shapes),
        "std": Leaf("0.02", "0.2", losses),
        "gate_scale": Leaf("1", "2", losses),
    },
    "bhyt": SHARED_NORM | {
        "lam": Leaf("2", "5", losses),
        "kappa": Leaf("10", "5", losses),
        "learn_lam": Leaf("false", "true", shapes),
    },
    "none": {"preset": FIXED, "name": FIXED},
    "pointwise": BOUNDED | {"function": Leaf("tanh", "erf", losses)},
    "dyt": BOUNDED,
    "derf": BOUNDED,
    "l2norm": LENGTH,
    "scalenorm": LENGTH,
    "prmsnorm": SHARED_NORM | {
        "fraction": Leaf("0.25", "0.5", losses),
        "count": Leaf("floor", "ceil", losses, ("norm.fraction=0.1",)),
    },
    "crmsnorm": {"preset": FIXED, "name": FIXED, "eps": Leaf("1e-6", "1e-2", losses)},
    "groupnorm": SHARED_NORM | {"groups": Leaf("2", "4", losses)},
    "zscore": WITHOUT_GAIN | {"sigma": Leaf("population", "sample", losses)},
    "minmax": WITHOUT_GAIN,
}  # fmt: skip
SHARED_PLACEMENT = {
    "name": FIXED,
    "embedding_norm": Leaf("null", "true", shapes),
    "final_norm": Leaf("null", "false", shapes),
}
PLACEMENT_LEAVES = {
    "pre": SHARED_PLACEMENT,
    "post": SHARED_PLACEMENT | {"final_norm": Leaf("null", "true", shapes)},
    "keel": SHARED_PLACEMENT
    | {"final_norm": Leaf("null", "true", shapes), "first_block": Leaf("attention_pre", "same", shapes)},
    "depth_scaled_sandwich": SHARED_PLACEMENT
    | {"c_attn": Leaf("0.283", "1", weights), "c_mlp": Leaf("0.432", "1", weights)},
    # Of the run's norm it has none; with qk_norm there is one for the switches.
    "ngpt": {
        "name": FIXED,
        "embedding_norm": Leaf("null", "true", shapes, ("model.qk_norm=head",)),
        "final_norm": Leaf("null", "true", shapes, ("model.qk_norm=head",)),
        "normalize_embeddings": Leaf("false", "true", losses, ("norm=none",)),
    },
    "mix_ln": SHARED_PLACEMENT | {"early_blocks": Leaf("null", "1", shapes)},
    "hybridnorm_star": SHARED_PLACEMENT | {"early_blocks": Leaf("null", "0", shapes)},
    # Schemes of one stream, and those that do more at its ends than a norm.
    **dict.fromkeys(("gpas", "parallel", "parallel_two_norms"), SHARED_PLACEMENT),
    "b2t": SHARED_PLACEMENT | {"final_norm": Leaf("null", "true", shapes)},
    **{
        name: {"name": FIXED, "embedding_norm": NO_SWITCH, "final_norm": NO_SWITCH}
        for name in ("resi_dual", "siamese", "x0_lambdas")
    },
}
SHARED_DATA = {
    "name": FIXED,
    "tokenizer": Leaf("bytes", "chars", corpus),
    "vocab_size": Leaf("300", "310", corpus, ("data.tokenizer=bpe", "data.max_tokens=9000")),
    "max_tokens": Leaf("4000", "5000", corpus),
    "seed": Leaf("0", "1", losses),
    "val_fraction": Leaf("0.05", "0.1", corpus),
}
DATA_LEAVES = {
    "stdlib": SHARED_DATA,
    "files": SHARED_DATA | {
        "path": Leaf(f"[{HERE / 'corpus.txt'}]", f"[{HERE / 'make_corpus.py'}]", corpus),
        "column": Leaf("text", "other", corpus, ("data.path=[two_columns.jsonl]",)),
    },
    # The hub's code on folders; on a hub: tests/data/test_hub.py.
    "hub": SHARED_DATA | {
        "name": Leaf("a_dataset", "another", corpus),
        "column": Leaf("text", "other", corpus),
        "subset": Leaf("one", "two", corpus, ("data.name=with_subsets",)),
        "split": Leaf("train", "test", corpus),
        "revision": Leaf("null", "main", corpus_or_refusal),
    },
    "shakespeare": SHARED_DATA,
    "tinystories": SHARED_DATA,
    "wikitext103": SHARED_DATA,
    "fineweb_edu": SHARED_DATA,
}  # fmt: skip
SHARED_OPTIM = {
    "name": FIXED,
    "lr": Leaf("1e-3", "2e-3", losses),
    "schedule": Leaf("cosine", "linear", losses, ("optim.warmup_steps=0",)),
    "warmup_steps": Leaf("0", "2", losses),
    "final_lr_fraction": Leaf("0.1", "0.5", losses),
    "decay_fraction": Leaf("0.3", "0.9", losses, ("optim.schedule=wsd",)),
    "clip": Leaf("null", "0.1", losses, ("optim=sgd",)),
    "weight_decay": Leaf("0.1", "1.0", losses),
    "decay": Leaf("matrices", "all", losses, ("optim.weight_decay=1",)),
}
OPTIM_LEAVES = {
    "adamw": SHARED_OPTIM | {
        "beta1": Leaf("0.9", "0.5", losses), "beta2": Leaf("0.95", "0.5", losses), "eps": Leaf("1e-8", "1e-2", losses),
    },
    "sgd": SHARED_OPTIM | {
        "momentum": Leaf("0.9", "0.5", losses), "nesterov": Leaf("false", "true", losses),
    },
}  # fmt: skip
RUN_LEAVES: dict[str, Leaf] = {
    "model.preset": FIXED,
    "model.depth": Leaf("1", "2", shapes),
    "model.width": Leaf("8", "16", shapes),
    "model.heads": Leaf("1", "2", losses),
    "model.context": Leaf("8", "16", losses),
    "model.positions": Leaf("learned", "rope", shapes),
    "model.rope_theta": Leaf("10000", "10", losses, ("model.positions=rope",)),
    "model.mlp": Leaf("gelu", "swiglu", shapes),
    "model.mlp_width": Leaf("16", "32", shapes),
    "model.bias": Leaf("true", "false", shapes),
    "model.tie_embeddings": Leaf("true", "false", shapes),
    "model.qk_norm": Leaf("head", "full", shapes),
    "train.steps": Leaf("3", "4", losses),
    "train.batch_size": Leaf("2", "4", losses),
    "train.accumulation": Leaf("1", "2", losses, ("norm=batchnorm",)),
    "train.log_every": Leaf("1", "2", paces),
    "train.checkpoint_every": Leaf("0", "1", checkpoints),
    "eval.every": Leaf("0", "2", eval_steps),
    "eval.sequences": Leaf("2", "4", validation),
    "tracking.wandb": Leaf("off", "offline", told_to_wandb),
    "tracking.project": Leaf("normlab", "other", told_to_wandb, ("tracking.wandb=offline",)),
    "tracking.entity": Leaf("null", "team", told_to_wandb, ("tracking.wandb=offline",)),
    "tracking.group": Leaf("null", "mine", told_to_wandb, ("tracking.wandb=offline",)),
    "tracking.job_type": Leaf("train", "study", told_to_wandb, ("tracking.wandb=offline",)),
    "tracking.tags": Leaf("[]", "[a,b]", told_to_wandb, ("tracking.wandb=offline",)),
    "tracking.layers": Leaf("false", "true", sent_to_wandb, ("tracking.wandb=offline",)),
    "stats.preset": FIXED,
    "stats.tiers": Leaf("[]", "[core]", inside, ("stats=off",)),
    "stats.also": Leaf("[]", "[resid_rms]", inside, ("stats=off",)),
    "stats.without": Leaf("[]", "[resid_rms]", inside),
    "stats.every": Leaf("1", "2", inside),
    "stats.extended_every": Leaf("1", "2", inside, ("stats=full",)),
    "stats.probe_share": Leaf("0.1", "1", probed, ("stats=full", "train.steps=100")),
    "run.name": Leaf("null", "mine", record("name")),
    "run.fresh": Leaf("false", "true", where),
    "seed": Leaf("0", "1", weights),
    "init": Leaf("gpt2", "xavier", weights),
    "device": Leaf("cpu", "cuda", resolved),
    "precision": Leaf("fp32", "bf16", losses),
    "compile": Leaf("off", "on", resolved),
    "deterministic": Leaf("true", "false", resolved),
    "results_dir": Leaf("results", "elsewhere", where),
    "plugins": Leaf("[]", f"[{HERE / 'plugins' / 'two_placements.py'}]", record("config.plugins")),
}


def rows() -> Iterator[tuple[str, str, Leaf]]:
    """Each leaf with the choice it belongs to, and its row."""
    for group, table in (
        ("norm", NORM_LEAVES), ("placement", PLACEMENT_LEAVES), ("data", DATA_LEAVES), ("optim", OPTIM_LEAVES),
    ):  # fmt: skip
        for name, options in table.items():
            yield from ((f"{group}={name}", f"{group}.{word}", leaf) for word, leaf in options.items())
    yield from (("", word, leaf) for word, leaf in RUN_LEAVES.items())


def known_leaves() -> set[tuple[str, str]]:
    """Every leaf that a run can have, with the choice it belongs to."""
    registries: dict[str, Any] = {
        "norm": load_norms(), "placement": load_placements(), "data": DATA, "optim": OPTIMIZERS,
    }  # fmt: skip
    found = set()
    for group, registry in registries.items():
        for name, kind in registry.items():
            # Plugins of other tests are held to their own.
            if not getattr(kind, "__module__", type(kind).__module__).startswith("normlab."):
                continue
            if group == "placement" and name not in PLACEMENT_LEAVES and type(kind).__name__ == "AlgebraPlacement":
                continue
            config = kind() if isinstance(kind, type) else kind
            found |= {(f"{group}={name}", f"{group}.{word}") for word in leaves(config)}
    default = compose_run([])
    found |= {("", word) for word in leaves(default) if word.partition(".")[0] not in registries}
    return found


def test_every_leaf_has_a_row() -> None:
    listed = {(choice, word) for choice, word, _ in rows()}
    assert listed == known_leaves()


def write_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folders for the leaves of corpora, and a folder in the place of every dataset with a word."""
    rows = '{"text": "one two three four five", "other": "six seven eight nine"}\n'
    many = "".join(
        f'{{"text": "{line}", "other": "{line[::-1]}"}}\n' for line in (HERE / "corpus.txt").read_text().splitlines()
    )
    subsets = (
        "---\nconfigs:\n- {config_name: one, data_files: a.jsonl}\n- {config_name: two, data_files: b.jsonl}\n---\n"
    )
    for name, text in {
        "two_columns.jsonl": rows * 40, "a_dataset/train.jsonl": many, "a_dataset/test.jsonl": rows * 40,
        "another/train.jsonl": rows * 40, "with_subsets/README.md": subsets, "with_subsets/a.jsonl": many,
        "with_subsets/b.jsonl": rows * 40,
    }.items():  # fmt: skip
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    for kind in DATA.values():
        if issubclass(kind, NamedData):
            monkeypatch.setattr(kind, "hub", {"name": "a_dataset"})


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "word", "leaf"), [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in rows()])
def test_leaf(
    choice: str, word: str, leaf: Leaf, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(monkeypatch)
    small = ["model.context=8", "model.width=16", "train.steps=4", "train.batch_size=4", "eval.sequences=4"]

    def config_with(value: str) -> RunConfig:
        # Options that are no part of a run's identity would otherwise find the other value's run, finished.
        place = "results" if word in ("results_dir", "run.fresh") else f"results_{value.encode().hex()[-40:]}"
        every = [w for w in [*words, *small] if not w.startswith("results_dir=")] + [f"results_dir={place}"]
        if choice:
            every = [w for w in every if not w.startswith(choice.partition("=")[0] + "=")] + [choice]
            if choice.startswith("data=") and choice != "data=files":
                every = [w for w in every if not w.startswith("data.path")]
            if choice == "data=hub":
                every.append("data.name=a_dataset")
        every = [w for w in every if not w.startswith(f"{word}=")]
        given = [w for w in leaf.given if w != choice and not (choice and w.startswith(choice.partition("=")[0] + "="))]
        return compose_run([*every, *given, f"{word}={value}"])

    if leaf.differs is None:
        with pytest.raises(NormlabError, match=word.partition(".")[0]):
            config_with(leaf.second)
        return
    first, second = (leaf.differs(config_with(value)) for value in (leaf.first, leaf.second))
    assert first != second
