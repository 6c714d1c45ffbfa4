"""Norms, options and init rules that a placement rejects or warns about."""

import json
import re
from collections.abc import Callable

import pytest

from normlab.base.errors import ConfigError
from normlab.base.options import plain_tree
from normlab.catalogue.placements.base import PLACEMENTS
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.catalogue.placements.init_rules import INIT_RULES
from normlab.config.compose import compose_run
from normlab.config.recorded import config_from_record
from normlab.config.schema import RunConfig
from normlab.model.init import build_model
from normlab.verify import init_laws

Command = Callable[..., tuple[int, str, str]]

load_placements()


def test_a_norm_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run(["placement=rezero"])
    assert str(caught.value) == ("placement=rezero: has no norms, so norm=rmsnorm has no effect; set norm=none")
    for overrides in (["norm=none"], ["model.qk_norm=head"], ["placement.final_norm=true"]):
        compose_run(["placement=rezero", *overrides])


@pytest.mark.parametrize("overrides", [["model.qk_norm=head"], ["model.qk_norm=full", "placement=ngpt"]])
def test_qk_norm_without_a_norm_is_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run(["norm=none", *overrides])
    assert str(caught.value) == f"{overrides[0]}: has no effect with norm=none; leave it out, or change norm"


NO_NORM = "has no effect with norm=none; leave it out or choose a norm"
FIXED_ENDS = "does not have this option, because the ends of the stream are part of its definition"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("norm=none placement.final_norm=false", NO_NORM),
        ("norm=none placement.embedding_norm=true", NO_NORM),
        ("norm=none placement=rezero placement.final_norm=true", NO_NORM),
        ("model.depth=8 norm=none placement=mix_ln placement.early_blocks=1", NO_NORM),
        ("norm=none placement=parallel placement.final_norm=true", NO_NORM),
        (
            "placement=resi_dual placement.embedding_norm=true",
            f"resi_dual {FIXED_ENDS} (y = x; x = x + N(y)); leave it out, or null if a recipe sets it",
        ),
        (
            "placement=x0_lambdas placement.final_norm=false",
            f"x0_lambdas {FIXED_ENDS} (x = N(x); x0 = x; x = N(x)); leave it out, or null if a recipe sets it",
        ),
        (
            "model.depth=8 placement=mix_ln placement.early_blocks=9",
            "is more than model.depth=8; choose at most 8, or raise model.depth",
        ),
    ],
)
@pytest.mark.parametrize("command", ["verify", "train"])
def test_an_unused_option_of_a_placement_is_refused(
    command: str, overrides: str, problem: str, run_command: Command
) -> None:
    *_, last = overrides.split()
    assert run_command(command, *overrides.split()) == (2, "", f"error: {last}: {problem}\n")


@pytest.mark.parametrize(
    "overrides",
    [
        "norm=none",
        "norm=none placement=post",
        "norm=none placement=mix_ln model.depth=8",
        "placement=mix_ln placement.early_blocks=0 model.depth=4",
        "placement=mix_ln placement.early_blocks=4 model.depth=4",
        "placement=hybridnorm_star placement.early_blocks=0",
        "placement=mix_ln placement.early_blocks=2 model.depth=8",
        "placement=hybridnorm_star placement.early_blocks=1",
        "placement=pre placement.final_norm=true placement.embedding_norm=false",
    ],
)
def test_a_placements_own_setting_and_a_change_of_it_are_accepted(overrides: str) -> None:
    compose_run(overrides.split())


def test_an_old_record_with_an_unused_switch_can_be_read() -> None:
    config = compose_run(["placement.final_norm=false"])
    tree = plain_tree(config) | {"norm": plain_tree(compose_run(["norm=none"]).norm)}
    before = config_from_record(json.loads(json.dumps(tree)))
    assert (before.norm.name, before.placement) == ("none", config.placement)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["placement=post"], None),
        (["placement=post", "init=gpt2"], r"init=gpt2 is not the rule of placement=post \(xavier\): .*2002.04745"),
        (["placement=deepnorm", "init=xavier"], r"\(deepnorm\): beta = .*2203.00555"),
        (["placement=deepnorm", "init=deepnorm"], None),
        (["placement=peri", "init=gpt2_scaled"], r"the first gradients grow"),
        (["placement=sandwich", "init=smallinit_scaled"], r"\(gpt2\): .*the first gradients grow with depth"),
        (["placement=res_post", "init=smallinit_scaled"], r"\(gpt2\): .*the first gradients grow with depth"),
        (["placement=res_post", "init=depth_scaled"], None),
        (["placement=post", "init=depth_scaled"], r"\(xavier\): .*2002.04745"),
        (["placement=lns", "init=depth_scaled"], r"\(gpt2\): 1 / sqrt\(l\) already scales .*\(arXiv:2502.05795"),
        (["placement=lns", "init=smallinit_scaled"], r"\(gpt2\): 1 / sqrt\(l\) already scales"),
        (["placement=pre", "init=xavier"], None),
        (["norm=none", "placement=pre", "init=xavier"], r"is wrong with norm=none: .* grows exponentially with depth"),
        (["norm=none", "placement=post"], r"init=xavier is wrong with norm=none"),
        (["norm=none", "placement=mix_ln", "init=xavier"], r"init=xavier is wrong with norm=none"),
        (["norm=none", "placement=pre"], None),
        (["norm=none", "placement=lns", "init=xavier"], None),
        (["norm=none", "placement=layerscale", "init=xavier"], None),
        (["norm=none", "placement=rezero"], None),
    ],
)
def test_an_incompatible_init_is_a_warning(overrides: list[str], warning: str | None) -> None:
    found: RunConfig = compose_run(overrides)
    if warning is None:
        assert found.warnings() == []
    else:
        assert re.search(warning, found.warnings()[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("placement", ["peri", "res_post"])
@pytest.mark.parametrize(
    ("rule", "grows"), [("gpt2", 0.0), ("gpt2_scaled", 0.5), ("smallinit", 0.0), ("smallinit_scaled", 0.5)]
)
def test_first_gradients_grow_with_scaled_outputs_under_a_branch_norm(placement: str, rule: str, grows: float) -> None:
    """The norm divides by a branch that is smaller by sqrt(2L), so its gradient is larger by sqrt(2L)."""
    depths = [4, 16]
    first = [init_laws.profile(placement, rule, depth).first for depth in depths]
    assert init_laws.slope(depths, first) == pytest.approx(grows, abs=0.3)


@pytest.mark.exhaustive
def test_without_norms_the_stream_explodes_under_xavier_exactly_where_a_warning_says_so() -> None:
    for placement in ("pre", "post", "mix_ln", "lns", "layerscale", "rezero"):
        overrides = ["norm=none", f"placement={placement}", "init=xavier", "model.depth=24", "train.batch_size=2"]
        config = compose_run(overrides)
        model = build_model(config, init_laws.VOCAB_SIZE)
        assert (init_laws.measure(config, model).stream > 100) == bool(config.warnings()), placement


def test_depth_scaled_has_last_gradients_as_small_as_gpt2_under_post() -> None:
    last = {rule: init_laws.profile("post", rule, 8).last for rule in ("gpt2", "depth_scaled", "xavier")}
    assert last["depth_scaled"] == pytest.approx(last["gpt2"], rel=0.15)
    assert last["xavier"] > 3 * last["depth_scaled"]


def test_every_incompatible_init_is_a_rule() -> None:
    for placement in PLACEMENTS.values():
        assert set(placement.incompatible_inits) <= {*INIT_RULES, "other"}
        assert placement.init in INIT_RULES
