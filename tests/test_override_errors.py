"""Malformed overrides: the message has no word of Hydra or OmegaConf, and what it tells to write composes a run."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from normlab.base.errors import ConfigError
from normlab.catalogue import entries as catalogue
from normlab.config.compose import UserConfigs, compose_run, compose_sweep
from normlab.config.override_errors import all_options

Command = Callable[..., tuple[int, str, str]]

OF_RUNS = """
norm=[] norm=null norm=1 norm=true norm=??? norm=${x} norm=${seed} norm=${ norm={a:b} norm='rmsnorm norm="rmsnorm
norm=rmsnorm, norm=,rmsnorm norm=a=b norm=a/b norm=../x norm= norm norm:rmsnorm +norm=rmsnorm ++norm=rmsnorm ~norm
+norm=[rmsnorm] norm@x=rmsnorm norm@=rmsnorm norm@norm:foo=rmsnorm @norm=rmsnorm /norm=rmsnorm norm/=rmsnorm norm/a=3
norm.=rmsnorm .norm=rmsnorm norm..eps=1 norm.eps.x=3 norm.nope=1 norm.name=x norm.eps=null norm.eps=[1]
placement={x:y} placement=null placement.final_norm=x model=[1,2] model={depth:x} model={depths:3} +model={x:3}
model=${model} model.depth=null model.depth=[1,2] model.depth={a:1} model.depth=two model.depth= model.depth=???
model.depth=${nope} model.depth=${oc.env:NOPE} model.depth=${model.depth} model.depth=${a model.depth==3 model.depth@x=3
model.depth=0x10 model.depth=1e3 model.depth=$(1) model.bias=none model._target_=x +model.foo=3 =3 = 3 0=1 [1]=2 {a:b}
seed=${oc.decode:x} seed=${nosuch:1} seed=range( seed=range() seed=range(a) seed=choice() seed=foo(1) seed=interval(0,1)
seed=glob(*) seed=tag(a,1) seed=sort(a,1) seed=bool(x) seed=json_str(x) seed=extend_list(1) seed=null seed=1.5
optim=[adamw,sgd] optim={x:1} optim=null optim.lr=null optim.lr=true optim.lr={x:1} optim.lr=[1] optim.lr=.
optim.lr.x=3 optim.groups=3 optim.groups=null optim.groups=[1] optim.groups.x=3 optim.groups.gains=3 optim.clip=none
train=3 train=null train=[1] train={steps:x} train.steps={} train.steps=[] train.keep={a:1} train.keep=[1, eval=off
tracking=off tracking.project=[a] tracking.entity={x:y} run=foo run=null run.name=[1] run.name={a:b} run.fresh=maybe
run.fresh=null run.fresh=[true] run.name={ run.name=(a) run.name=a=b run.name=# stats.also=x stats.also={a:b}
stats.also=null stats.also=[null] stats.also=[${x}] stats.also=extend_list(x) stats.also=[[x]] init=[gpt2] init={a:b}
init=null device=null device=[cpu] results_dir=null results_dir=[a] results_dir={} recipe=null recipe=[a,b]
recipe={a:b} +recipe=nanochat plugins=[ plugins={a:b} +experiment=x experiment=x hydra.searchpath=x
hydra.searchpath=null hydra.searchpath=[nosuch://x] data={path:x} data.path={a:b} defaults=[x] foo.bar=3 +foo.bar={a:1}
"""
"""Malformed overrides of a run: types, lists, dicts, prefixes, packages, quotes, functions, interpolation."""
OF_SWEEPS = """
sweep=x sweep=null sweep={name:x} sweep.nam=x sweep.jobs=x sweep.jobs=[1] sweep.jobs={a:1} sweep.jobs=${x}
sweep.jobs=??? sweep.jobs=' sweep.pack=[1] sweep.pack={a:b} sweep.pack=null sweep.slurm=3 sweep.slurm=null
sweep.slurm.foo=1 sweep.slurm.extra=x sweep.slurm.extra={a:b} sweep.slurm.extra=[null] sweep.slurm.gpus.x=3
sweep.on=null sweep.on=[slurm] sweep.name=[a] sweep.name={a:b} sweep.name=${x} ~sweep.jobs +sweep.foo=2 sweep@x.jobs=3
norm=[rmsnorm,layernorm] placement=[pre,post] model=[gpt2_nano] optim.lr=[1e-3,1e-2] norm=rmsnorm,null norm=rmsnorm,[a]
norm=rmsnorm,{a:b} norm=glob(*) norm=choice([rmsnorm],dyt) seed=interval(0,1) seed=range(1,2,3,4) optim.lr=1e-3,x
arm=x arm=[] arm=[pre] arm=[a:norm=rmsnorm] arm={a:b}
"""
FOREIGN = re.compile(
    r"Hydra|hydra(?!\.searchpath)|OmegaConf|DictConfig|ListConfig|Optional|[Ss]tructured|subclass|mandatory|[Mm]erg"
    r"|[Ii]nterpolation|dereferenc|NoneType|[a-z]Config\b|[a-z]Options\b|'(str|int|list|dict)'|type '?\w+'?$|ValueType"
    r"|ConfigLoader|config group|full_key|object_type|defaults list|composing|Glob\(|Traceback|\.py\b(?!\])"
    r"|site-packages"
)
"""Vocabulary of Hydra, OmegaConf and Python."""


@pytest.mark.parametrize(
    ("compose", "typed"),
    [*((compose_run, typed) for typed in OF_RUNS.split()), *((compose_sweep, typed) for typed in OF_SWEEPS.split())],
)
def test_the_message_is_in_our_own_words(compose: Callable[..., object], typed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([typed])
    message = str(caught.value)
    assert FOREIGN.search(message.replace(typed, "")) is None
    assert typed.lstrip("+~").partition("=")[0].partition("[")[0] in message


FOLLOWED = {
    "norm=[rmsnorm,layernorm]": "norm=rmsnorm,layernorm",
    "placement=[pre,post]": "placement=pre,post",
    "model=[gpt2_nano]": "model=gpt2_nano",
    "optim.lr=[1e-3,1e-2]": "optim.lr=1e-3,1e-2",
    "seed=[1,2]": "seed=1,2",
    "+norm=[rmsnorm]": "norm=rmsnorm",
    "model.depth = 3": "model.depth=3",
    "model.depth==3": "model.depth=3",
    "stats.also=erank": "stats.also=[erank]",
    "train.keep=(1,2)": "train.keep=[1,2]",
    "run.name=a=b": r"run.name='a=b'",
    "run.name=é": "run.name='é'",
    "run.name=[a]": "run.name=a",
    "seed=range(a)": "seed=range(3)",
    "seed=0:3": "seed=range(0,3)",
    "optim.warmup_steps=0:9:3": "optim.warmup_steps=range(0,9,3)",
    "sweep.jobs=[1,2]": "sweep.jobs=1",
    "rmsnorm": "norm=rmsnorm",
    "seed=interval(0,1)": "norm=rmsnorm,layernorm",
}
"""For each malformed override, one that its message tells to write."""


@pytest.mark.parametrize(("typed", "written"), FOLLOWED.items())
def test_what_the_message_tells_to_write_composes(typed: str, written: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_sweep([typed])
    message = str(caught.value)
    assert written in message or shlex.quote(written) in message
    compose_sweep([written])


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("norm@x=1", "norm@x=1: @x has no meaning here; leave @x out"),
        ("norm@=rmsnorm", "norm@=rmsnorm: @ has no meaning here; leave @ out"),
        ("model.depth@x=3", "model.depth@x=3: @x has no meaning here; leave @x out"),
        ("+norm=rmsnrm", "+norm=rmsnrm: norm is chosen already; leave + out"),
        ("++norm=rmsnorm", "++norm=rmsnorm: norm is chosen already; leave ++ out"),
        ("sweep.jobs=0:3", "sweep.jobs=0:3: must be a whole number, or null"),
    ],
)
def test_no_value_is_repeated_that_may_be_wrong_too(typed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        compose_sweep([typed])


DIGITS = "1" * 5000
"""More digits than Python reads as an integer."""


@pytest.mark.parametrize(
    "typed",
    [f"seed={DIGITS}", f"optim.lr={DIGITS}", f"train.keep=[{DIGITS}]", f"seed=range({DIGITS})", f"norm={DIGITS}"],
)
def test_a_number_of_thousands_of_digits_is_out_of_range(typed: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(typed)}: has a whole number .* at most {2**63 - 1}, "):
        compose_sweep([typed])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"seed: {DIGITS}", "has a whole number of thousands of digits"),
        (f"optim: {{lr: {2**1024}}}", "has a whole number that is too large for a float"),
        (f"seed: {2**1024}", "is outside the range of int64"),
    ],
)
def test_a_number_of_a_config_file_is_out_of_range(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    with pytest.raises(ConfigError, match=message):
        compose_run(["+experiment=mine"], UserConfigs(folder=str(tmp_path)))


@pytest.mark.parametrize("pack", [0, 10**9 + 1, 2**63])
def test_a_pack_has_a_range(pack: int) -> None:
    with pytest.raises(ConfigError, match=f"^sweep.pack={pack}: choose auto, off, or a number from 1 to 1000000000$"):
        compose_sweep([f"sweep.pack={pack}"])


def test_the_list_of_an_option_is_told_to_a_run() -> None:
    with pytest.raises(ConfigError, match=r"train.keep=1,2: several values .* write a list: train.keep=\[1,2\]$"):
        compose_run(["train.keep=1,2"])
    assert compose_run(["train.keep=[1,2]"]).train.keep == [1, 2]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("seed=range(1,2,0)", "the step of a range must not be 0; set another step"),
        ("seed=shuffle(range(1,2,0))", "the step of a range must not be 0; set another step"),
        ("optim.lr=range(0.1,1,0.0)", "the step of a range must not be 0; set another step"),
        ("norm=range(2)", "takes names and no range of numbers; write them as in norm=a,b"),
    ],
)
def test_a_range_that_names_no_values(typed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(typed)}: {re.escape(message)}$"):
        compose_sweep([typed])


LISTS = ["train.keep", "stats.also", "stats.tiers", "plugins", "sweep.slurm.extra", "hydra.searchpath"]


@pytest.mark.parametrize("option", LISTS)
@pytest.mark.parametrize("value", ["none", "null", "off", ""])
def test_no_value_of_a_list_is_the_empty_list(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option}={value} \(did you mean '\[\]'\?\): (must be|not a list)"):
        compose_sweep([f"{option}={value}"])
    compose_sweep([f"{option}=[]", *(["sweep.on=slurm"] if "slurm" in option else [])])


NULLABLE = [
    "optim.clip", "optim.qk_clip", "optim.warmup_steps", "model.mlp_width", "model.attn_softcap", "eval.ema",
    "data.seed", "data.max_tokens", "deterministic", "norm.taper_steps", "placement.final_norm", "sweep.jobs",
    "model.rope_theta",
]  # fmt: skip


@pytest.mark.parametrize("option", NULLABLE)
@pytest.mark.parametrize("value", ["none", "None", "auto"])
def test_no_value_is_null(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option}={value} \(did you mean 'null'\?\): must be .*, or null$"):
        compose_sweep([f"{option}={value}"])
    compose_sweep([f"{option}=null"])


def test_a_limit_names_null() -> None:
    """Other code turns clipping off by 0."""
    with pytest.raises(ConfigError, match=r"^optim.clip=0.0: must be greater than 0, or null$"):
        compose_run(["optim.clip=0"])


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        (["norm=dyt", "norm.epps=1"], "norm.eps"),
        (["norm=dyt", "norm.depth=1"], "model.depth"),
        (["norm.epps=1"], "norm.eps"),
        (["optim.groups.gians.input.lr=1"], "optim.groups.gains"),
        (["model.width_=3"], "model.width"),
    ],
)
def test_the_nearest_option_is_one_that_the_chosen_class_has(typed: list[str], nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_run(typed)
    assert f"did you mean '{nearest}'" in str(caught.value)
    assert any(option.startswith(nearest) for option in all_options())


def test_the_nearest_option_of_another_choice_names_the_choices() -> None:
    message = r"has no option 'betas' \(did you mean 'optim.beta2' of optim=adamw, hyperball, lion, muon, normuon\?\): "
    with pytest.raises(ConfigError, match=message):
        compose_run(["optim=sgd", "optim.betas=[0.9,0.9]"])


@pytest.mark.parametrize(
    ("typed", "beginning"),
    [
        (
            "data.path=my.txt",
            "belongs to data=files; set data=files, or choose an option of the chosen data: max_tokens",
        ),
        ("data.column=a", "belongs to data=hub; set data=hub, or "),
        ("norm=none norm.momentum=0.2", "is an option of norm=batchnorm, .*; set one of these, or leave it out$"),
        ("optim.ns_steps=5", "is an option of optim=hyperball, muon, normuon; set one of these, or choose an "),
        ("placement.iterations=3", "belongs to placement=mhc; set placement=mhc, or "),
    ],
)
def test_an_option_of_another_choice_names_that_choice(typed: str, beginning: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{typed.split()[-1]}: {beginning}"):
        compose_run(typed.split())


def test_the_named_choice_has_the_option() -> None:
    compose_run(["data.path=my.txt", "data=files"])
    compose_run(["placement.iterations=3", "placement=mhc"])


@pytest.mark.parametrize("typed", ["placement.x=3", "optim.groups.x=3", "norm.zzz=1", "sweep.slurm.foo=1", "foo.bar=3"])
def test_an_option_like_no_other_gets_no_suggestion(typed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose_sweep([typed])
    assert "did you mean" not in str(caught.value)


def test_an_option_that_is_given_twice_is_a_warning(run_command: Command, overrides: list[str]) -> None:
    """It is no error, because scripts append their arguments to their own overrides."""
    for command in (["train"], ["sweep", "--dry-run"]):
        code, _, err = run_command(
            *command, *overrides, "train.steps=0", "norm=rmsnorm", "norm=dyt", "seed=0", "seed=0"
        )
        warnings = [line for line in err.splitlines() if "comes later" in line]
        assert code == 0
        assert warnings == [
            "warning: train.steps=12: has no effect, because train.steps=0 comes later; leave train.steps=12 out",
            "warning: norm=rmsnorm: has no effect, because norm=dyt comes later; leave norm=rmsnorm out",
        ]


@pytest.mark.parametrize(
    "typed",
    ["model=gpt2_nano model", "norm=rmsnorm norm=(", "seed=0 seed=1 arm=[a", "seed=0 seed=1 optim.lr=search(1)"],
)
def test_no_order_is_a_warning_before_a_malformed_override(typed: str, run_command: Command) -> None:
    code, out, err = run_command("sweep", *typed.split(), "norm=none,dyt")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")


def test_an_option_that_is_given_twice_is_a_warning_beside_a_search(run_command: Command) -> None:
    arguments = ["sweep", "optim.lr=search(1e-4,1e-1)", "seed=until(norm=none,max=8)", "norm=dyt", "norm=nope"]
    warning = "warning: norm=dyt: has no effect, because norm=nope comes later; leave norm=dyt out\n"
    assert run_command(*arguments)[2].startswith(warning)


@pytest.mark.parametrize("arguments", [["sweep"], ["sweep", "sweep.jobs=2"], ["train", "--multirun"]])
def test_a_sweep_of_nothing_says_what_it_needs(arguments: list[str], run_command: Command) -> None:
    code, out, err = run_command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "give one several values, such as norm=rmsnorm,layernorm seed=0,1" in err
    compose_sweep(["norm=rmsnorm,layernorm", "seed=0,1"])


def with_choices() -> Iterator[tuple[str, str]]:
    """Yield each choice that `normlab list` prints, after its option and the override that has the option."""
    groups = {"": [{"name": "", "options": catalogue.options()}], "norm": catalogue.norms()}
    groups |= {"placement": catalogue.placements(), "optim": catalogue.optim(), "data": catalogue.data()}
    for group, entries in groups.items():
        for entry in entries:
            for option in entry.get("options", ()):
                name = option.get("option") or option["name"]
                for choice in option.get("choices", ()):
                    yield f"{group}={entry['name']} {group}.{name}" if group else name, choice


def message_of(overrides: list[str]) -> str:
    """Return the message of the error about some overrides; "" if there is none."""
    try:
        compose_sweep(overrides)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.few(12)
@pytest.mark.parametrize("option", sorted({option for option, _ in with_choices()}))
def test_each_choice_in_a_list_is_one(option: str) -> None:
    """A choice may contradict other options; then the message names these, and not the choices."""
    choices = [choice for each, choice in with_choices() if each == option]
    *chosen, name = option.split()
    for choice in choices:
        assert "choose one of" not in message_of([*chosen, f"{name}={choice}"])
        with pytest.raises(ConfigError, match=re.escape(f"did you mean {choice!r}")):
            compose_sweep([*chosen, f"{name}={choice.upper()}"])


def test_the_table_of_options_prints_their_choices(run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # a line for each option
    lines = {line.split()[0]: line for line in run_command("list", "options")[1].splitlines() if line}
    for entry in catalogue.options():
        if choices := entry.get("choices"):
            assert lines[entry["name"]].endswith(f" ({', '.join(choices)})")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lr=${normlab.power:0,-1}", "optim.lr=nan: must be a finite number"),
        ("model.embed_scale=${normlab.power:-2,0.5}", "model.embed_scale=nan: must be a finite number"),
        ("model.embed_scale=${normlab.power:10,1000}", "model.embed_scale=nan: must be a finite number"),
        ("model.embed_scale=${normlab.power:a,1}", "model.embed_scale=nan: must be a finite number"),
        ("model.heads=${normlab.divide:4,0}", "model.heads=0: must be at least 1"),
        ("model.heads=${normlab.divide:a,2}", "model.heads=0: must be at least 1"),
    ],
)
def test_a_function_of_a_reference_gives_no_value_where_it_has_none(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_run([override])
    assert str(error.value) == said


def test_a_config_file_without_a_defaults_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("norm: {eps: 1e-3}\n")
    for more in ([], ["model=gpt2_nano"], ["train.steps=3"]):
        with pytest.raises(ConfigError) as error:
            compose_run(more, UserConfigs(str(tmp_path), "my"))
        assert str(error.value) == "--config-name: not a config of a run; start its defaults list with train"
