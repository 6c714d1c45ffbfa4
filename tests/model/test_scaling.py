"""Depth and width transfer: the model against one with scaled weights, and the factors of every group."""

import copy
import math

import pytest
import torch

from normlab.base.errors import ConfigError
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.model.groups import check_parameters, groups_of, parameter_rows
from normlab.model.init import build_model

SMALL = ("model=gpt2_nano", "model.width=16", "model.heads=2", "model.tie_embeddings=false", "norm=layernorm")
HEAD_WIDTH = 8


@pytest.mark.parametrize("rule", ["mup", "completep"])
def test_model_equals_one_whose_weights_have_the_factors(rule: str) -> None:
    base = ("model.base_width=4", *(["model.base_depth=3"] if rule == "completep" else []))
    scaled = build_model(
        compose_run([*SMALL, "model.depth=6", f"model.scaling={rule}", *base, "init=gpt2"]), 20
    ).double()
    with torch.no_grad():
        for p in scaled.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64), alpha=0.2)
    plain = build_model(compose_run([*SMALL, "model.depth=6", "init=gpt2"]), 20).double()
    weights = copy.deepcopy(scaled.state_dict())
    for name, weight in weights.items():
        if ".attn.q." in name:
            weight *= 1 / HEAD_WIDTH / (1 / math.sqrt(HEAD_WIDTH))
        elif rule == "completep" and (".attn.out." in name or ".mlp.down." in name):
            weight /= 6 / 3
        elif name == "head.weight":
            weight /= 16 / 4
    plain.load_state_dict(weights)
    tokens = torch.arange(14).view(2, 7)
    torch.testing.assert_close(scaled(tokens), plain(tokens), atol=1e-12, rtol=1e-12)


EMBED, GAIN, FINAL, MATRIX, BIAS = (
    "embed.tokens.weight", "blocks.0-5.wiring.attn.norms.in.affine.gain", "head.close.affine.gain",
    "blocks.0-5.mlp.up.weight", "blocks.0-5.mlp.up.bias",
)  # fmt: skip
# What `configure_optimizers` and `__init__` of EleutherAI/nanoGPT-mup at 3904404 give for a width of 4 and a depth of 2
# times the base: learning rate, decay, eps and initial standard deviation, with lr=0.01, wd=0.1, eps=1e-8, std=0.02.
EXPECTED = {
    "mup": {
        EMBED: (0.01, 0.1, 2.5e-9, 0.02), GAIN: (0.01, 0, 2.5e-9, None), FINAL: (0.01, 0, 2.5e-9, None),
        MATRIX: (0.0025, 0.1, 2.5e-9, 0.01), BIAS: (0.01, 0, 2.5e-9, None),
    },
    "completep": {
        EMBED: (0.01, 0.1, 2.5e-9, 0.02), GAIN: (0.01, 0, 1.25e-9, None), FINAL: (0.01, 0, 2.5e-9, None),
        MATRIX: (0.0025, 0.4, 1.25e-9, 0.01), BIAS: (0.01, 0, 1.25e-9, None),
    },
}  # fmt: skip


@pytest.mark.parametrize("rule", EXPECTED)
def test_factors_are_those_of_the_public_code(rule: str) -> None:
    base = ("model.base_width=4", *(["model.base_depth=3"] if rule == "completep" else []))
    config = compose_run([*SMALL, "model.depth=6", f"model.scaling={rule}", *base, "optim.lr=0.01"])
    rows = {row.parameter: row for row in parameter_rows(config, build_model(config, 20))}
    for name, (lr, decay, eps, sd) in EXPECTED[rule].items():
        row = rows[name]
        assert (row.lr, row.decay, row.eps) == pytest.approx((lr, decay, eps), rel=1e-12)
        if sd is not None:
            assert row.init == f"normal, sd {sd:g}"


def gradient_sizes(config: RunConfig) -> dict[str, float]:
    """Return the root mean square of the initial gradients of each group of parameters."""
    model = build_model(config, 50).double()
    tokens = torch.randint(0, 50, (16, config.model.context + 1), generator=torch.Generator().manual_seed(1))
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    squares: dict[str, list[float]] = {}
    groups = groups_of(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        squares.setdefault(groups[name], []).append(float(parameter.grad.square().mean()))
    return {group: math.sqrt(sum(values) / len(values)) for group, values in squares.items()}


@pytest.mark.parametrize(("rule", "width", "depth"), [("mup", 128, 2), ("completep", 32, 8), ("completep", 128, 8)])
def test_eps_has_the_factor_of_the_gradients(rule: str, width: int, depth: int) -> None:
    """So that it limits as many updates as in the small model; the smallest factor that it may lack is 4."""
    base = ["model.base_width=32", *(["model.base_depth=2"] if rule == "completep" else [])]
    common = ["model=gpt2_nano", "model.context=32", "model.tie_embeddings=false", "norm=layernorm", *base]
    small, large = (
        compose_run(
            [*common, f"model.scaling={rule}", f"model.width={w}", f"model.heads={w // 16}", f"model.depth={d}"]
        )
        for w, d in ((32, 2), (width, depth))
    )
    before, after = gradient_sizes(small), gradient_sizes(large)
    assert set(before) == {"embed", "head", "matrices", "biases", "gains.input", "gains.final"}
    for group, size in before.items():
        assert after[group] / size == pytest.approx(large.model.factors_of(group).eps, rel=0.35)


def test_widths_transfer_with_a_norm_anywhere() -> None:
    config = compose_run([*SMALL, "model.scaling=mup", "placement=post", "init=gpt2"])
    assert config.model.factors_of("matrices").lr == 1 / config.model.width_ratio


def test_a_decay_that_the_learning_rate_does_not_multiply_is_that_of_the_small_model() -> None:
    overrides = [*SMALL, "model.scaling=completep", "model.base_width=4", "optim.weight_decay=0.1"]
    for mode, expected in (("proportional", 0.1 * 4), ("independent", 0.1)):
        config = compose_run([*overrides, f"optim.decay_mode={mode}", "model.width=16"])
        own = config.optim.of_group("matrices", config.model.factors_of("matrices"))
        assert own.weight_decay == pytest.approx(expected)


def test_norms_with_matrices_have_no_rule_of_transfer() -> None:
    with pytest.raises(ConfigError, match="no rule for the matrices of norm=gatednorm"):
        check_parameters(compose_run([*SMALL, "model.scaling=mup", "norm=gatednorm"]))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.scaling=completep", "placement=post"], "placement=post has norms or factors on its sums"),
        (["model.scaling=completep", "placement=peri"], "placement=peri has norms or factors on its sums"),
        (["model.scaling=completep", "init=gpt2_scaled"], "scales the init rule itself; choose init=gpt2"),
        (["placement=ngpt", "norm=none"], "has no rule for the wiring of placement=ngpt"),
        (["placement=mhc"], "has no rule for the wiring of placement=mhc"),
        (["optim=muon"], "its learning rates are those of optim=adamw"),
        (["init=xavier"], "scales the init rule itself"),
        (["model.value_embed=true"], "has no rule for model.value_embed=true"),
        (["model.base_depth=2"], "model.base_depth=2"),
    ],
)
def test_what_the_rule_was_not_derived_for_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compose_run([*SMALL, "model.scaling=mup", *overrides])


@pytest.mark.parametrize(
    ("overrides", "warnings"),
    [
        (
            ["model.width=128", "model.depth=1", "model.scaling=completep"],
            [
                "model.base_width=256: above model.width=128; the base is the smaller model",
                "model.base_depth=2: above model.depth=1; the base is the smaller model",
            ],
        ),
        (["model.width=256", "model.depth=2", "model.scaling=completep"], []),
        (
            ["optim.decay_mode=independent", "optim.lr=1e-3"],
            [
                "optim.decay_mode=independent: a step at the peak takes up to 10% of a weight, as a decay of 100 "
                "with proportional; lower optim.weight_decay or that of a group"
            ],
        ),
        (
            [
                "optim.decay_mode=independent",
                "optim.weight_decay=0",
                "optim.groups.gains.input.decay=0.5",
                "optim.lr=1",
            ],
            [
                "optim.decay_mode=independent: a step at the peak takes up to 50% of a weight, as a decay of 0.5 "
                "with proportional; lower optim.weight_decay or that of a group"
            ],
        ),
        (["optim.decay_mode=independent", "optim.weight_decay=1e-4"], []),
    ],
)
def test_a_likely_mistake_is_a_warning(overrides: list[str], warnings: list[str]) -> None:
    assert compose_run(["placement=pre", "norm=rmsnorm", *overrides]).warnings() == warnings
