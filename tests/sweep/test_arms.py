"""Arms: named sets of overrides that multiply with a grid."""

from collections.abc import Callable

import pytest

from normlab.base.errors import ConfigError
from normlab.base.options import plain_tree
from normlab.config.arms import SweepDesign, design_of
from normlab.config.compose import compose_run, compose_sweep
from normlab.store.plans import read_plan
from normlab.sweeps.files import write_plan
from normlab.sweeps.plan import PlannedSweep, make_plan

ARMS = "arm=[pre: placement=pre, qk: placement=pre model.qk_norm=head, peri-2: placement=peri optim.lr=1e-2,3e-2]"


def test_arms_multiply_with_the_grid() -> None:
    """Each config is that of a run with the arm's overrides; an arm's own grid replaces that of the others."""
    _, runs = compose_sweep(["optim.lr=1e-3,3e-3", ARMS, "seed=0,1"])
    expected = [
        ([f"arm={name}", f"optim.lr={lr}", f"seed={seed}"], [*own, f"optim.lr={lr}", f"seed={seed}"])
        for name, own, rates in (
            ("pre", ["placement=pre"], ("0.001", "0.003")),
            ("qk", ["placement=pre", "model.qk_norm=head"], ("0.001", "0.003")),
            ("peri-2", ["placement=peri"], ("0.01", "0.03")),
        )
        for lr in rates
        for seed in (0, 1)
    ]
    assert [varied for varied, _ in runs] == [varied for varied, _ in expected]
    assert [plain_tree(config) for _, config in runs] == [plain_tree(compose_run(own)) for _, own in expected]


def test_several_recipes_are_arms() -> None:
    names, shared = ["nanochat", "modded_track3"], ["model=llama_nano", "optim.lr=0.01"]
    _, runs = compose_sweep([f"recipe={', '.join(names)}", *shared])
    assert [varied for varied, _ in runs] == [[f"arm={name}"] for name in names]
    expected = [plain_tree(compose_run([f"recipe={name}", *shared])) for name in names]
    assert [plain_tree(config) for _, config in runs] == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["arm=[a: placement=pre, b: placement=peri]", "placement=post,pre"],
            "placement=post,pre: every arm sets",
        ),
        (["arm=pre"], "arm=pre: not a list of arms; write 'arm=["),
        (["arm=[placement=pre, peri: placement=peri]"], "not a list of arms"),
        (["arm=[]"], "not a list of arms"),
        (["arm=[a: placement=pre, a: placement=peri]"], "two arms have the name a"),
        (["arm=[a: placement=pre]", "arm=[b: placement=peri]"], "a sweep has one list of arms"),
        (
            ["arm=[a: plugins=[x.py], b: placement=pre]"],
            "plugins=[x.py]: is for all arms; write it outside of arm=[...]",
        ),
        (["arm=[a: sweep.pack=2]"], "sweep.pack=2: is for all arms"),
        (
            ["arm=[pre: placement=pre peri: placement=peri]"],
            "arm pre: there is no comma before the next arm; write ', peri:'",
        ),
        (
            ["arm=[pre: placement=pre, peri placement=peri]"],
            "arm pre: 'peri' has no value and no colon; write 'peri=VALUE' or ', peri: OPTION=VALUE'",
        ),
        (["arm=[pre: placement=pre : placement=peri]"], "arm pre: ':' follows no name; write ', NAME: OPTION=VALUE'"),
        (
            ["arm=[a: norm=rmsnorm seed=0 norm=dyt]"],
            "arm a: sets norm twice, norm=rmsnorm and norm=dyt; leave one of them out",
        ),
        (["arm=[a: placement=pre,]"], "arm=[a: placement=pre,]: has a comma after the last arm; leave it out"),
        (["arm=[, a: placement=pre]"], "has a comma before the first arm; leave it out"),
        (
            ["arm=[a: placement=pre , , b: placement=peri]"],
            "has nothing between two commas after 'a: placement=pre'; leave one comma out",
        ),
        (["arm=[a: placement=per]"], "placement=per: unknown placement"),
        (["model.scaling=none,mup", "model.base_width=32"], "(of the run model.scaling=none)"),
        (["optim=muon,adamw", "optim.qkv=heads"], "(of the run optim=adamw)"),
    ],
)
def test_errors(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_sweep(texts)
    assert message in str(error.value)


def test_quotes_and_brackets_hold_separators_together() -> None:
    _, runs = compose_sweep(["""arm=[a: run.name="x, y" stats.also=[token_cos, angular], b: run.name='c: d']"""])
    assert [(varied, config.run.name) for varied, config in runs] == [(["arm=a"], "x, y"), (["arm=b"], "c: d")]
    assert runs[0][1].stats.also == ["token_cos", "angular"]


def test_the_arms_of_a_stored_sweep_keep_their_names(overrides: list[str]) -> None:
    def planned(arms: str) -> PlannedSweep:
        return make_plan(*compose_sweep([*overrides, "sweep.name=x", arms]))

    first = planned("arm=[pre: placement=pre, peri: placement=peri]")
    first.folder.mkdir(parents=True)
    write_plan(first.folder, first.plan)
    assert planned("arm=[peri: placement=peri, pre: placement=pre]").plan == first.plan
    with pytest.raises(ConfigError, match=r"sweep.name=x: its arm pre is called peri here; keep its name, or choose"):
        planned("arm=[peri: placement=pre, pre: placement=peri]")


def test_a_plan_records_what_its_command_sets(overrides: list[str]) -> None:
    """The options of each arm and of all arms; runs that are added keep those of the arms before."""
    arms = "arm=[pre: placement=pre optim.groups={embed:{lr:2}}, peri: placement=peri init=gpt2]"
    command = [*overrides, "+model.bias=false", "seed=0,1", "sweep.name=x"]
    design = design_of([*command, arms])
    assert design.arms == {"pre": ["placement", "optim.groups"], "peri": ["placement", "init"]}
    assert {"model.bias", "seed"} <= {*design.shared}
    assert not any(option.startswith("sweep.") for option in design.shared)
    assert list(design_of(["recipe=nanochat,modded_track3"]).arms) == ["nanochat", "modded_track3"]
    assert design_of(overrides).arms == {}

    first = make_plan(*compose_sweep([*command, arms]), design=design)
    first.folder.mkdir(parents=True)
    write_plan(first.folder, first.plan)
    assert read_plan(first.folder).design == design
    more = f"{arms[:-1]}, post: placement=post]"
    added = design_of([*command, more, "eval.ema=0.9"])
    extended = make_plan(*compose_sweep([*command, more]), extend=True, design=added).plan.design
    assert extended == SweepDesign([*design.shared, "eval.ema"], design.arms | {"post": ["placement"]})


def test_one_run_has_no_arms(run_command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = run_command("train", ARMS, "--cfg", "job")
    assert code == 0, err  # it prints the config of each run of a grid
    code, _, err = run_command("train", ARMS)
    assert (code, err.count("\n")) == (2, 1)
    assert "is for normlab sweep only; give the overrides of one arm" in err


@pytest.mark.parametrize(
    ("own", "shared", "names"),
    [
        ("a: placement=pre, b: placement=peri init=gpt2", "init=auto", "gpt2_scaled (a); gpt2 (b)"),
        ("a: init=xavier, b: placement=peri", "placement=pre", "xavier (a); gpt2 (b)"),
        ("a: placement=pre, b: placement=peri", "init=gpt2", ""),
        ("a: placement=pre, b: placement=peri", "init=gpt2,xavier", ""),
    ],
)
def test_init_rules_that_only_arms_differ_in_are_named(own: str, shared: str, names: str, overrides: list[str]) -> None:
    planned = make_plan(*compose_sweep([*overrides, f"arm=[{own}]", shared]))
    found = [warning for warning in planned.warnings if "init rules" in warning]
    assert [names] * bool(names) == [warning.partition("rules: ")[2].partition("; init=")[0] for warning in found]


def test_equal_arms_and_their_init_rules_are_named(overrides: list[str]) -> None:
    arms = "arm=[pre: placement=pre, peri: placement=peri, same: placement=pre]"
    planned = make_plan(*compose_sweep([*overrides, arms, "init=auto"]))
    assert [run.arm for run in planned.plan.runs] == ["pre", "peri"]
    assert "arm=same: is the same run as arm=pre, and is trained once" in planned.warnings
    assert any(
        warning.startswith("the arms also differ in their init rules: gpt2_scaled (pre); gpt2 (peri)")
        for warning in planned.warnings
    )
