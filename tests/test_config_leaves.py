"""Every option has an effect: each row names two values of an option and a result that must differ.

An option without a row fails, so no option can be added that nothing reads. `normlab verify` checks this for the
options of norms and placements.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from normlab.base.errors import ConfigError, DataError
from normlab.base.options import flatten_options
from normlab.catalogue.corpora import DATA, NamedData
from normlab.catalogue.optimizers.options import GROUPS, OPTIMIZERS
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.data.corpus import open_corpus
from normlab.model.init import build_model
from normlab.tracking.payloads import labels_of
from normlab.tracking.uploads import mode_of
from normlab.training.machine import check_run, resolve
from normlab.training.start import TrainingResult, train

HERE = Path(__file__).parent


# The results that are compared.


def losses(config: RunConfig) -> Any:
    """Return the training losses of a short run."""
    return [row["loss"] for row in train(config, trackers=[]).folder.rows().rows if "loss" in row]


def ema_losses(config: RunConfig) -> Any:
    """Return the validation losses of the mean of the weights in a short run."""
    return [row["loss_ema"] for row in train(config, trackers=[]).folder.rows("eval").rows]


def losses_beside_another(config: RunConfig) -> Any:
    """Return the training losses of a short run in whose results folder another run has made two steps."""
    shorter = replace(config.train, steps=2, start_from=None)
    options = {"run": replace(config.run, name="another"), "optim": replace(config.optim, lr=0.1)}
    train(replace(config, train=shorter, **options), trackers=[])
    return losses(config)


def validation(config: RunConfig) -> Any:
    """Return the validation losses of a short run."""
    return [row["loss"] for row in train(config, trackers=[]).folder.rows("eval").rows]


def weights(config: RunConfig) -> Any:
    """Return the initial weights."""
    return [p.tolist() for p in build_model(config, 20).parameters()]


def shapes(config: RunConfig) -> Any:
    """Return the shape of each parameter."""
    return {name: tuple(p.shape) for name, p in build_model(config, 20).named_parameters()}


def eval_steps(config: RunConfig) -> Any:
    return [row["step"] for row in train(config, trackers=[]).folder.rows("eval").rows]


def checkpoints(config: RunConfig) -> Any:
    return sorted(path.name for path in (train(config, trackers=[]).folder.path / "checkpoints").iterdir())


def kept(config: RunConfig) -> Any:
    folder = train(config, trackers=[]).folder.path / "weights"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def paces(config: RunConfig) -> Any:
    return [row["step"] for row in train(config, trackers=[]).folder.rows("pace").rows]


def statistics(config: RunConfig) -> Any:
    """Return the measured statistics and their steps."""
    arrays = train(config, trackers=[]).folder.statistics
    return [(part.names(), part.steps.tolist()) for tier in ("core", "extended") for part in arrays.read(tier)[0]]


def corpus(config: RunConfig) -> Any:
    run = train(config, trackers=[]).folder.run()["corpus"]
    return run["sha256"], run["val_tokens"]


def corpus_or_error(config: RunConfig) -> Any:
    """Return the hash of the corpus, or the error."""
    try:
        return open_corpus(config.data).sha256
    except DataError as error:
        return str(error)


def checked(config: RunConfig) -> Any:
    """Return the error about a run that this machine cannot train, or about its model."""
    try:
        return check_run(config)
    except ConfigError as error:
        return str(error)


def record(key: str) -> Callable[[RunConfig], Any]:
    """Return a function that reads a value of run.json."""

    def read(config: RunConfig) -> Any:
        tree: Any = train(config, trackers=[]).folder.run()
        for part in key.split("."):
            tree = tree[part]
        return tree

    return read


def run_folder(config: RunConfig) -> Any:
    train(config, trackers=[])
    outcome: TrainingResult = train(config, trackers=[])
    return str(outcome.folder.path)


def followers(config: RunConfig) -> Any:
    """Return the mode in which W&B receives the run while it trains."""
    return mode_of(config.tracking.wandb)


def wandb_labels(config: RunConfig) -> Any:
    """Return the labels of the run at W&B, and where it is sent."""
    run = train(config, trackers=[]).folder.run()
    return labels_of(run, None), run["config"]["tracking"]["project"], run["config"]["tracking"]["entity"]


def resolved(config: RunConfig) -> Any:
    """Return the resolved machine settings, or the error."""
    try:
        return resolve(config)
    except ConfigError as error:
        return str(error)


@dataclass(frozen=True)
class Row:
    first: str
    second: str
    differs: Callable[[RunConfig], Any]
    """The result that must differ."""
    requires: tuple[str, ...] = ()
    """Overrides without which the option has no effect."""


SHARED_DATA = {
    "tokenizer": Row("bytes", "chars", corpus),
    "vocab_size": Row("300", "310", corpus, ("data.tokenizer=bpe", "data.max_tokens=9000")),
    "max_tokens": Row("4000", "5000", corpus),
    "seed": Row("0", "1", losses),
    "val_fraction": Row("0.05", "0.1", corpus),
}
DATA_ROWS = {
    "stdlib": SHARED_DATA,
    "reference": SHARED_DATA,
    "files": SHARED_DATA | {
        "path": Row(f"[{HERE / 'corpus.txt'}]", f"[{HERE / 'conftest.py'}]", corpus),
    },
    # These run the code of the hub on folders; tests/data/test_hub.py uses a server.
    "hub": SHARED_DATA | {
        "name": Row("a_dataset", "another", corpus),
        "column": Row("text", "other", corpus),
        "subset": Row("one", "two", corpus, ("data.name=with_subsets",)),
        "split": Row("train", "test", corpus),
        "revision": Row("null", "main", corpus_or_error),
    },
    "shakespeare": SHARED_DATA,
    "tinystories": SHARED_DATA,
    "wikitext103": SHARED_DATA,
    "fineweb_edu": SHARED_DATA,
}  # fmt: skip
SHARED_OPTIM = {
    "lr": Row("1e-3", "2e-3", losses),
    "schedule": Row("cosine", "linear", losses, ("optim.warmup_steps=0",)),
    "warmup_steps": Row("0", "2", losses),
    "final_lr_fraction": Row("0.1", "0.5", losses),
    "decay_fraction": Row("0.3", "0.9", losses, ("optim.schedule=wsd",)),
    "clip": Row("null", "0.1", losses, ("optim=sgd",)),
    "weight_decay": Row("0.1", "1.0", losses),
    "decay": Row("matrices", "all", losses, ("optim.weight_decay=1",)),
    "decay_mode": Row("proportional", "independent", losses, ("optim.weight_decay=0.1",)),
    "qk_clip": Row("null", "1e-3", losses),
}
GROUPS_WITH: dict[str, tuple[str, ...]] = {
    "head": ("model.tie_embeddings=false",),
    "gains.output": ("placement=peri",),
    "gains.qk": ("model.qk_norm=head",),
    "scalars": ("norm=dyt",),
    "norm_matrices": ("norm=gatednorm",),
}
"""The overrides without which a model has no parameter of a group."""
SHARED_OPTIM |= {
    f"groups.{group}.{option}": Row(*values, losses, GROUPS_WITH.get(group, ()))
    for group in GROUPS
    for option, values in {"lr": ("1", "100"), "decay": ("0", "1e3")}.items()
}
SHARED_OPTIM["groups.vacant"] = Row("false", "true", checked, ("optim.groups.norm_matrices.lr=2",))
ADAM = {"beta1": Row("0.9", "0.5", losses), "beta2": Row("0.95", "0.5", losses), "eps": Row("1e-8", "1e-2", losses)}
ORTHOGONAL = SHARED_OPTIM | ADAM | {
    "momentum": Row("0.95", "0.5", losses), "nesterov": Row("true", "false", losses),
    "ns_steps": Row("5", "2", losses), "qkv": Row("apart", "together", losses),
    "heads": Row("1", "2", losses, ("optim.qkv=heads",)),
    "polynomial": Row("fast", "convergent", losses),
}  # fmt: skip
MUON = ORTHOGONAL | {"scale": Row("rms", "shape", losses)}
OPTIM_ROWS = {
    "adamw": SHARED_OPTIM | ADAM,
    "lion": SHARED_OPTIM | {"beta1": Row("0.9", "0.5", losses), "beta2": Row("0.99", "0.5", losses)},
    "muon": MUON,
    "normuon": MUON | {"row_decay": Row("0.95", "0.5", losses)},
    "hyperball": {name: row for name, row in ORTHOGONAL.items() if name != "qk_clip"},
    "sgd": SHARED_OPTIM | {
        "momentum": Row("0.9", "0.5", losses), "nesterov": Row("false", "true", losses),
    },
}  # fmt: skip
RUN_ROWS: dict[str, Row] = {
    "model.depth": Row("1", "2", shapes),
    "model.width": Row("8", "16", shapes),
    "model.heads": Row("1", "2", losses),
    "model.context": Row("8", "16", losses),
    "model.positions": Row("learned", "rope", shapes),
    "model.rope_theta": Row("10000", "10", losses, ("model.positions=rope",)),
    "model.mlp": Row("gelu", "swiglu", shapes),
    "model.rope_fraction": Row("1", "0.5", losses, ("model.positions=rope",)),
    "model.mlp_width": Row("16", "32", shapes),
    "model.bias": Row("true", "false", shapes),
    "model.tie_embeddings": Row("true", "false", shapes),
    "model.qk_norm": Row("head", "full", shapes),
    "model.qk_norm_after_rope": Row("false", "true", losses, ("model.qk_norm=head", "model.positions=rope")),
    "model.qk_scale": Row("1", "2", losses, ("model.qk_norm=head",)),
    "model.attn_gate": Row("head", "channel", shapes),
    "model.attn_softcap": Row("null", "0.001", losses),
    "model.value_residual": Row("fixed", "learned", shapes, ("model.depth=2",)),
    "model.value_embed": Row("false", "true", shapes),
    "model.v_norm": Row("false", "true", losses),
    "model.embed_scale": Row("1", "3", losses),
    "model.logit_softcap": Row("null", "0.1", losses),
    "model.scaling": Row("mup", "completep", losses),
    "model.base_width": Row("4", "8", losses, ("model.scaling=mup",)),
    "model.base_depth": Row("1", "2", losses, ("model.scaling=completep",)),
    "model.z_loss": Row("0", "1", losses),
    "train.steps": Row("3", "4", losses),
    "train.tokens_per_parameter": Row("0.1", "0.2", losses),
    "train.batch_size": Row("2", "4", losses),
    "train.accumulation": Row("1", "2", losses, ("norm=batchnorm",)),
    "train.log_every": Row("1", "2", paces),
    "train.checkpoint_every": Row("0", "1", checkpoints),
    "train.keep": Row("[]", "[1]", kept),
    "eval.every": Row("0", "2", eval_steps),
    "eval.sequences": Row("2", "4", validation),
    "eval.ema": Row("0.5", "0.9", ema_losses),
    "tracking.wandb": Row("off", "offline", followers),
    "tracking.project": Row("normlab", "other", wandb_labels),
    "tracking.entity": Row("null", "team", wandb_labels),
    "stats.tiers": Row("[]", "[core]", statistics, ("stats=off",)),
    "stats.also": Row("[]", "[resid_rms]", statistics, ("stats=off",)),
    "stats.every": Row("1", "2", statistics),
    "stats.extended_every": Row("1", "2", statistics, ("stats.tiers=[core,extended]",)),
    "run.name": Row("null", "mine", record("name")),
    "run.fresh": Row("false", "true", run_folder),
    "seed": Row("0", "1", weights),
    "init": Row("gpt2", "xavier", weights),
    "device": Row("cpu", "cuda", resolved),
    "devices": Row("1", "2", resolved),
    "precision": Row("fp32", "bf16", losses),
    "compile": Row("off", "on", resolved),
    "train.graph": Row("off", "on", resolved),
    "train.start_from": Row("null", "another@2", losses_beside_another),
    "deterministic": Row("true", "false", resolved),
    "results_dir": Row("results", "elsewhere", run_folder),
    "plugins": Row("[]", f"[{HERE / 'plugins' / 'two_placements.py'}]", record("config.plugins")),
}


def rows() -> Iterator[tuple[str, str, Row]]:
    """Yield the group choice of each option, its name, and its row."""
    for group, table in (("data", DATA_ROWS), ("optim", OPTIM_ROWS)):
        for name, options in table.items():
            yield from ((f"{group}={name}", f"{group}.{option}", row) for option, row in options.items())
    yield from (("", option, row) for option, row in RUN_ROWS.items())


def all_options() -> set[tuple[str, str]]:
    """Return the group choice and the name of every option of a run; the group choices set names and presets."""
    registries: dict[str, Any] = {"data": DATA, "optim": OPTIMIZERS}
    options: set[tuple[str, str]] = set()
    for group, registry in registries.items():
        for name, kind in registry.items():
            options |= {(f"{group}={name}", f"{group}.{option}") for option in flatten_options(kind())}
    others = {*registries, "norm", "placement"}
    options |= {("", option) for option in flatten_options(compose_run([])) if option.partition(".")[0] not in others}
    kept = {("", "run.name"), ("data=hub", "data.name")}
    return {pair for pair in options if pair in kept or not pair[1].endswith((".name", ".preset"))}


def test_every_option_has_a_row() -> None:
    listed = {(choice, option) for choice, option, _ in rows()}
    assert listed == all_options() - {("optim=hyperball", "optim.qk_clip")}
    with pytest.raises(ConfigError, match="contradicts optim=hyperball"):
        compose_run(["optim=hyperball", "optim.qk_clip=1e-3"])


def write_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write files for the corpora, and replace every named dataset of the hub by a folder."""
    rows = '{"text": "one two three four five", "other": "six seven eight nine"}\n'
    many = "".join(
        f'{{"text": "{line}", "other": "{line[::-1]}"}}\n' for line in (HERE / "corpus.txt").read_text().splitlines()
    )
    subsets = (
        "---\nconfigs:\n- {config_name: one, data_files: a.jsonl}\n- {config_name: two, data_files: b.jsonl}\n---\n"
    )
    for name, text in {
        "a_dataset/train.jsonl": many, "a_dataset/test.jsonl": rows * 40,
        "another/train.jsonl": rows * 40, "with_subsets/README.md": subsets, "with_subsets/a.jsonl": many,
        "with_subsets/b.jsonl": rows * 40,
    }.items():  # fmt: skip
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    for kind in DATA.values():
        if issubclass(kind, NamedData):
            monkeypatch.setattr(kind, "hub", {"name": "a_dataset"})


@pytest.mark.exhaustive
@pytest.mark.parametrize(("choice", "option", "row"), [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in rows()])
def test_option_has_an_effect(
    choice: str, option: str, row: Row, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(monkeypatch)
    small = ["model.context=8", "model.width=16", "train.steps=4", "train.batch_size=4", "eval.sequences=4"]

    def config_with(value: str) -> RunConfig:
        # An option outside the identity keeps the run id, so each value needs its own results folder.
        folder = "results" if option in ("results_dir", "run.fresh") else f"results_{value.encode().hex()[-40:]}"
        replaced = ["results_dir=", f"{option}="]
        if choice:
            replaced.append(choice.partition("=")[0] + "=")
        if choice.startswith("data=") and choice != "data=files":
            replaced.append("data.path")
        # Only one of the two may set the number of steps.
        if option == "train.tokens_per_parameter":
            replaced.append("train.steps=")
        kept = [override for override in [*overrides, *small] if not override.startswith(tuple(replaced))]
        kept += [f"results_dir={folder}"] * (option != "results_dir") + [choice] * bool(choice)
        if choice == "data=hub" and option != "data.name":
            kept.append("data.name=a_dataset")
        kept += [override for override in row.requires if not override.startswith(tuple(replaced))]
        return compose_run([*kept, f"{option}={value}"])

    first, second = (row.differs(config_with(value)) for value in (row.first, row.second))
    assert first != second
