"""The config of a record equals the composed one, and `validate` resolves the data seed from `seed`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from normlab.base.errors import ConfigError
from normlab.base.options import plain_tree
from normlab.config.compose import UserConfigs, compose_grid, compose_run, compose_sweep
from normlab.config.recorded import config_from_record
from normlab.config.searches import read_until
from normlab.data.corpus import open_corpus
from normlab.model.init import build_model
from normlab.training.build import build_parts
from normlab.training.machine import resolve
from normlab.training.start import open_runs

CORPUS = Path(__file__).with_name("corpus.txt")


def test_data_seed_equals_seed_unless_set() -> None:
    """This holds in one run and in a grid; the record has the resolved number."""
    grid = compose_grid(["seed=range(3)"])
    assert [(config.seed, config.data.seed) for config in grid] == [(0, 0), (1, 1), (2, 2)]
    crossed = compose_grid(["seed=1,2", "data.seed=0,1"])
    assert [(config.seed, config.data.seed) for config in crossed] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    fixed = compose_run(["seed=5", "data.seed=0"])
    assert (fixed.seed, fixed.data.seed, config_from_record(plain_tree(fixed)).data.seed) == (5, 0, 0)


def test_identity_has_the_resolved_data_seed() -> None:
    """Setting data.seed to its default keeps the run id; arms with one seed share their data."""
    default, explicit, different = (compose_run(["seed=3", *more]) for more in ((), ("data.seed=3",), ("data.seed=0",)))
    assert default.config_hash == explicit.config_hash != different.config_hash
    assert compose_run(["seed=0"]).config_hash == compose_run(["data.seed=0"]).config_hash
    assert {
        config.data.seed for config in compose_grid(["norm=rmsnorm,layernorm", "placement=pre,post", "seed=4"])
    } == {4}


def test_seed_changes_the_order_of_the_data() -> None:
    def first_batch(*overrides: str) -> torch.Tensor:
        config = compose_run(["model=gpt2_nano", "device=cpu", "data=files", f"data.path=[{CORPUS}]", *overrides])
        settings, corpus = resolve(config), open_corpus(config.data)
        parts = build_parts(open_runs([config], settings, corpus), settings, corpus)
        return parts.inputs.batches.batch(0)[0]

    assert not torch.equal(first_batch("seed=0"), first_batch("seed=1"))
    assert torch.equal(first_batch("seed=0"), first_batch("seed=1", "data.seed=0"))


@pytest.fixture
def tree() -> dict[str, Any]:
    return plain_tree(compose_run(["norm=batchnorm", "optim=sgd", "data=files", "data.path=[a,b]", "run.name=x"]))


def test_record_round_trips(tree: dict[str, Any]) -> None:
    assert plain_tree(config_from_record(tree)) == tree


def test_an_absent_option_has_its_default(tree: dict[str, Any]) -> None:
    """A later version adds options, which the records of this one lack."""
    del tree["seed"], tree["tracking"], tree["norm"]["eps"]
    config = config_from_record(tree)
    norm: Any = config.norm
    assert (config.seed, config.tracking.wandb, norm.eps) == (0, "auto", 1e-5)


@pytest.mark.parametrize("option", ["norm", "norm.name"])
def test_missing_name_is_rejected(tree: dict[str, Any], option: str) -> None:
    group, _, name = option.partition(".")
    del (tree[group] if name else tree)[name or group]
    with pytest.raises(ConfigError):
        config_from_record(tree)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("norm.name", -1.5), ("norm.eps", "x"), ("norm.gain", 1), ("norm.gain", [[]]), ("model", []), ("model", "x"),
        ("model.context", None), ("model.depth", 2.0), ("model.depth", True), ("data.name", {}), ("init", -1.5),
        ("plugins", "x"), ("placement", []), ("seed", None), ("optim.lr", True),
    ],
)  # fmt: skip
def test_value_of_another_type_is_rejected(tree: dict[str, Any], option: str, value: Any) -> None:
    group, _, name = option.partition(".")
    (tree[group] if name else tree)[name or group] = value
    with pytest.raises(ConfigError):
        config_from_record(tree)


LONG = "1" + "0" * 310
"""Digits of a whole number that no float holds."""


@pytest.mark.parametrize("value", [LONG, f"-{LONG}", str(2**63), "9" * 5000], ids=["1e310", "-1e310", "2^63", "9e5000"])
@pytest.mark.parametrize("option", ["train.steps", "model.rope_theta", "norm.taper_steps", "optim.warmup_steps"])
def test_a_number_that_no_int64_or_float_holds_is_an_error_of_its_option(option: str, value: str) -> None:
    if option == "model.rope_theta" and value == str(2**63):
        value = LONG
    with pytest.raises(ConfigError) as caught:
        compose_run(["model.positions=rope", f"{option}={value}"])
    assert str(caught.value).startswith(f"{option}={value[:20]}")


@pytest.mark.parametrize(
    "override",
    [
        "seed=range(nan)",
        "seed=range(0,10,nan)",
        "seed=shuffle(range(1e23))",
        "seed=shuffle(range(inf))",
        f"seed=range({LONG})",
    ],
)
def test_a_range_without_an_end_is_an_error(override: str) -> None:
    with pytest.raises(ConfigError, match=r"must be finite|more than 10000 runs"):
        compose_sweep([override])


@pytest.mark.parametrize(
    "override", [f"sweep.pack={'9' * 5000}", f"sweep.jobs={LONG}", f"sweep.timeout_minutes={LONG}"]
)
def test_a_huge_option_of_a_sweep_is_an_error(override: str) -> None:
    with pytest.raises(ConfigError, match="sweep"):
        compose_sweep([override])


def test_steps_in_text_and_counts_of_seeds_have_limits() -> None:
    with pytest.raises(ConfigError, match="must be log or a list"):
        compose_run([f"train.keep=['{'9' * 5000}']"])
    with pytest.raises(ConfigError, match="from 4 to 10000"):
        read_until([f"seed=until(placement=pre,max={'9' * 5000})"])


@pytest.mark.parametrize(
    "model",
    [
        ["model=gpt2_nano"],
        ["model=llama_nano", "model.depth=3"],
        ["model=gpt2_nano", "model.attn_gate=head", "model.mlp_width=20"],
        ["model=gpt2_nano", "model.attn_gate=channel", "model.tie_embeddings=false"],
    ],
    ids=" ".join,
)
def test_tokens_per_parameter_counts_the_matrices_of_the_blocks(model: list[str]) -> None:
    """The steps are those of the weights that the built model has; the batch is 8 sequences of 32 tokens."""
    config = compose_run([*model, "model.context=32", "train.tokens_per_parameter=2.5"])
    blocks = build_model(config, 257).blocks
    weights = sum(parameter.numel() for parameter in blocks.parameters() if parameter.ndim == 2)
    assert config.train.steps == round(2.5 * weights / (8 * 32))
    # The record has both options, and another run of as many steps is the same run.
    assert config_from_record(plain_tree(config)).train == config.train
    same = compose_run([*model, "model.context=32", f"train.steps={config.train.steps}"])
    assert same.config_hash == config.config_hash


def test_tokens_per_parameter_and_the_steps_of_a_file(tmp_path: Path) -> None:
    """A command cannot leave out what a file sets, but it can take back a number of tokens."""
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\ntrain: {steps: 30}\nmodel: {width: 32}\n")
    mine = UserConfigs(str(tmp_path), "mine")
    with pytest.raises(
        ConfigError, match=r"train.steps=30: train.tokens_per_parameter=20 sets it to \d+ for [\d,]+ weights"
    ):
        compose_run(["train.tokens_per_parameter=20"], mine)
    (tmp_path / "mine.yaml").write_text("defaults: [train, _self_]\ntrain: {tokens_per_parameter: 20}\n")
    assert compose_run(["train.steps=30", "train.tokens_per_parameter=null"], mine).train.steps == 30


def test_tokens_per_parameter_makes_at_least_one_step() -> None:
    assert compose_run(["model=gpt2_nano", "train.tokens_per_parameter=1e-3"]).train.steps == 1


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["train.steps=100"], r"^train.steps=100: train.tokens_per_parameter=20 sets it too; leave one of them out$"),
        (["train.steps=500"], r"^train.steps=500: train.tokens_per_parameter=20 sets it too; leave one of them out$"),
        (
            ["train.batch_size=1", "model.context=1", "model.depth=5000"],
            r"parameter=20: makes 1,228,800,000 steps, more",
        ),
    ],
)
def test_tokens_per_parameter_that_contradicts_is_an_error(overrides: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        compose_run(["model=gpt2_nano", "train.tokens_per_parameter=20", *overrides])
