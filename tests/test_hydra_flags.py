"""Hydra's flags, grammar and groups work in `train`, `sweep` and `verify`, and write no files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from normlab.base.errors import ConfigError
from normlab.cli.train import with_folder
from normlab.config.compose import UserConfigs, compose_grid, compose_run, compose_sweep
from normlab.config.schema import RunConfig
from normlab.studies.base import STUDIES, load_studies
from normlab.studies.run import Attempt
from support.plugins import NORM

Command = Callable[..., tuple[int, str, str]]

OVERRIDDEN = ["train", {"override norm": "layernorm"}, {"override model": "gpt2_nano"}, "_self_"]
CONFIGS: dict[str, Any] = {
    "own/experiment/deep.yaml": {"defaults": [{"override /placement": "peri"}], "model": {"depth": 3}},
    "own/myrun.yaml": {"defaults": OVERRIDDEN, "optim": {"lr": 0.002}},
    "own/norm/mine.yaml": {"defaults": ["rmsnorm", "_self_"], "preset": "mine", "eps": 0.5},
    "own/chosen.yaml": {"defaults": ["train", {"override norm": "mine"}, "_self_"]},
    "other/experiment/wide.yaml": {"model": {"width": 64}},
}
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("normlab.training.start", "train"),
    "sweep": ("normlab.sweeps.search", "make_plan"),
    "verify": ("normlab.verify.selection", "checks_of_run"),
}
"""For each command the function that receives the config or configs."""
HABITS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "a preset in --config-dir": (["norm=mine", "--config-dir", "own"], {"norm.eps": 0.5}),
    "-cd and -cn": (["-cd", "own", "-cn", "myrun", "init=xavier"], {"norm.name": "layernorm", "init": "xavier"}),
    "a defaults list with a preset": (["--config-dir=own", "--config-name=chosen"], {"norm.eps": 0.5}),
    "-cn and +experiment": (["-cd=own", "-cn=myrun", "+experiment=deep"], {"norm.name": "layernorm", "model.depth": 3}),
    "hydra.searchpath and --config-dir": (
        ["hydra.searchpath=[file://other]", "--config-dir=own", "norm=mine", "+experiment=wide"],
        {"norm.eps": 0.5, "model.width": 64},
    ),
}


@pytest.fixture(autouse=True)
def _config_folders(tmp_path: Path) -> None:
    """Write folders of configs into the working folder."""
    for name, content in CONFIGS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        head = "# @package _global_\n" if "experiment/" in name else ""
        path.write_text(head + OmegaConf.to_yaml(OmegaConf.create(content)))


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def collect_configs(command: str, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Return a list that receives the configs that a command would work on; the command exits then."""
    module, name = COMMANDS[command]
    configs: list[RunConfig] = []

    def collect(value: Any) -> None:
        if isinstance(value, RunConfig):
            configs.append(value)
        elif isinstance(value, list | tuple):
            for element in value:
                collect(element)

    def replacement(*arguments: Any, **_: Any) -> Any:
        collect(arguments)
        raise SystemExit(0)

    monkeypatch.setattr(f"{module}.{name}", replacement)
    return configs


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("command", "habit"), [*(("train", habit) for habit in HABITS), ("sweep", "-cd and -cn"), ("verify", "-cd and -cn")]
)
def test_commands_compose_the_same_run(
    habit: str, command: str, run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs, before = collect_configs(command, monkeypatch), files_below(tmp_path)
    arguments, expected = HABITS[habit]
    code, _, err = run_command(command, *arguments)
    assert (code, err) == (0, "")
    assert [{option: OmegaConf.select(OmegaConf.structured(config), option) for option in expected}
            for config in configs] == [expected]  # fmt: skip
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("command", [["sweep"], ["train", "--multirun"]])
def test_a_grid_of_configs_in_config_dir(
    command: list[str], run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = collect_configs("sweep", monkeypatch)
    grid = ["-cd=own", "-cn=myrun", "norm=mine,none", "+experiment=deep", "seed=range(2)", "--results-dir=kept"]
    assert run_command(*command, *grid)[0] == 0
    assert {config.results_dir for config in configs} == {"kept"}
    composed = [(config.norm.label, config.placement.name, config.model.depth, config.seed) for config in configs]
    assert composed == [(norm, "peri", 3, seed) for norm in ("mine", "none") for seed in (0, 1)]


def test_cfg_job_prints_the_config_without_running(run_command: Command, tmp_path: Path) -> None:
    before = files_below(tmp_path)
    code, out, err = run_command("train", "--cfg", "job", "-cd=own", "-cn=myrun", "+experiment=deep", "seed=3")
    assert (code, err) == (0, "")
    config = OmegaConf.create(out)
    assert (config.norm.name, config.model.depth, config.seed, config.optim.lr) == ("layernorm", 3, 3, 0.002)
    assert files_below(tmp_path) == before


def test_cfg_job_of_a_grid_prints_each_run(run_command: Command) -> None:
    code, out, _ = run_command("sweep", "norm=rmsnorm,none", "sweep.jobs=2", "-c", "job")
    assert code == 0
    printed = [(text.splitlines()[0], OmegaConf.create(text).norm.name) for text in out.split("---\n")]
    assert printed == [("# norm=rmsnorm", "rmsnorm"), ("# norm=none", "none")]


def test_cfg_optim_prints_how_each_parameter_is_updated(
    run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    before = files_below(tmp_path)
    overrides = ["norm=dyt", "placement=peri", "model.depth=3", "optim.groups.gains.output.lr=0.5", "init=gpt2"]
    code, out, err = run_command("train", *overrides, "optim.groups.scalars.decay=0.2", "--cfg", "optim")
    assert (code, err) == (0, "")
    lines = {line.split("  ")[0]: line.split()[1:] for line in out.splitlines()}
    sd = ["1e-08", "adamw", "normal,", "sd", "0.02"]
    assert lines["embed.tokens.weight"] == ["embed", "V", "x", "128", "0.001", "0.1", *sd]
    assert lines["blocks.0-2.mlp.up.weight"] == ["matrices", "512", "x", "128", "0.001", "0.1", *sd]
    assert lines["blocks.0-2.wiring.mlp.norms.out.affine.gain"] == [
        "gains.output",
        "128",
        "0.0005",
        "0",
        "1e-08",
        "adamw",
        "1",
    ]
    assert lines["head.close.alpha"] == ["scalars", "number", "0.001", "0.2", "1e-08", "adamw", "0.5"]
    assert out.endswith("\n\nlr: at the peak; decay: lr times this per step\n")
    assert files_below(tmp_path) == before
    scaled = ["norm=rmsnorm", "model.width=512", "model.depth=8", "model.heads=8", "model.scaling=completep"]
    _, out, _ = run_command("train", *scaled, "--cfg", "optim")
    assert out.endswith(
        "forward, by model.scaling=completep: each sub-layer times 0.25, logits times 0.5, q k of attention over 64, "
        "not over its root\n"
    )
    code, out, err = run_command("sweep", "model.heads=1", "model.width=128,131072", "--cfg", "optim")
    assert (code, err.count("\n")) == (2, 1)
    assert "(of the run model.width=131072)" in err


@pytest.mark.parametrize("argument", ["hydra/launcher=basic", "hydra.run.dir=made", "--config-path=x", "--nope", "-r"])
def test_what_has_no_effect_is_rejected(argument: str, run_command: Command, tmp_path: Path) -> None:
    before = files_below(tmp_path)
    code, out, err = run_command("train", argument)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert argument.partition("=")[0] in err
    assert files_below(tmp_path) == before


START = "defaults: [train, _self_]\n"
BOMB = "\n".join(
    ["a: &a [x]", *(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdef", "bcdefg", strict=True))]
)
HOSTILE: dict[str, tuple[str, str]] = {
    "a package": (
        f"{START}hydra: {{searchpath: ['pkg://foreign']}}",
        "mine.yaml: sets 'hydra', and a config file sets",
    ),
    "a folder": (f"{START}hydra: {{searchpath: ['file:///tmp']}}", "mine.yaml: sets 'hydra', and a config file sets"),
    "a launcher": ("defaults: [train, {override hydra/launcher: basic}]", "mine.yaml: sets 'override hydra/launcher'"),
    "a part of Hydra": ("defaults: [train, /hydra/job_logging/none, _self_]", "sets '/hydra/job_logging/none'"),
    "a package of options": (f"# @package hydra\n{START}", "mine.yaml: sets 'hydra'"),
    "a file above": ("defaults: [train, {override norm: ../../secret}]", "its defaults list names '../../secret'"),
    "a made name": ("defaults: [train, {override norm: '${a}${a}/x'}]", "its defaults list names '${a}${a}/x'"),
    "a variable": (START + "run: {name: '${oc.env:SECRET}'}", "reads the environment in '${oc.env:SECRET}'; write"),
    "a decoded variable": (
        START + "run: {name: '${oc.decode:${oc.env:SECRET}}'}",
        "reads the environment in '${oc.dec",
    ),
    "a variable in parts": (
        START + "run: {name: 'oc.e', project: '${${run.name}nv:SECRET}'}\ntracking: {project: '${oc.${x}:SECRET}'}",
        "error: ",
    ),
    "references": (f"{START}{BOMB}", "mine.yaml: has more than 131072 values"),
    "nested lists": (f"{START}a: {'[' * 9999}", "mine.yaml: nested too deeply"),
}
"""Configs of a stranger, and what the error has."""


@pytest.mark.few(4)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_strangers_config_only_sets_options(
    name: str, run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, message = HOSTILE[name]
    monkeypatch.setenv("SECRET", "the secret")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "__init__.py").write_text("open('MARKER', 'w')")
    (tmp_path / "own" / "mine.yaml").write_text(text)
    code, out, err = run_command("train", "-cd=own", "-cn=mine")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert "the secret" not in err
    assert not (tmp_path / "MARKER").exists()


@pytest.mark.parametrize("folder", [["-cd=own"], ["hydra.searchpath=[file://own]"], ["hydra.searchpath=[own]"]])
def test_a_config_is_a_file_of_its_folder(folder: list[str], run_command: Command, tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text("defaults: [rmsnorm, _self_]\nlabel: the secret")
    (tmp_path / "own" / "norm" / "linked.yaml").symlink_to("../../secret.yaml")
    code, _, err = run_command("train", *folder, "norm=linked")
    assert (code, err.count("\n")) == (2, 1)
    assert f"norm/linked.yaml: cannot be read (is a link to {tmp_path / 'secret.yaml'}, outside of" in err
    (tmp_path / "own" / "norm" / "sparse.yaml").touch()
    os.truncate(tmp_path / "own" / "norm" / "sparse.yaml", 2**40)
    code, _, err = run_command("train", *folder, "norm=sparse")
    assert (code, err.count("\n")) == (2, 1)
    assert "norm/sparse.yaml: cannot be read (has 1099511627776 bytes" in err


@pytest.mark.parametrize("override", ["run.name=${oc.env:SECRET}", "run.name='${oc.decode:${oc.env:SECRET}}'"])
def test_an_override_does_not_read_the_environment(
    override: str, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records, and so archives, would hold its value."""
    monkeypatch.setenv("SECRET", "the secret")
    code, _, err = run_command("train", override)
    assert (code, err.count("\n")) == (2, 1)
    assert "reads the environment; write the value itself" in err
    assert OmegaConf.create({"name": "${oc.env:SECRET}"}).name == "the secret"  # of another program of the process


TEXTS = ["2024_01_05", "1e3", "007", "true", "1.50", "inf", "a b", "a/b.txt", "-3"]
"""Texts that Hydra's grammar accepts without quotes; it reads most of them as numbers and booleans."""


@pytest.mark.parametrize("text", TEXTS)
def test_an_option_of_type_text_keeps_what_was_typed(text: str) -> None:
    config = compose_run([
        "data=files", f"data.path=[{text},x]", f"run.name={text}", f"results_dir={text}",
    ])  # fmt: skip
    data: Any = config.data
    assert (config.run.name, config.results_dir) == (text, text)
    assert data.path == [text, "x"]
    quoted: Any = compose_run(["data=hub", f"data.name='{text}'"]).data
    assert quoted.name == text
    assert [run.run.name for run in compose_grid([f"run.name={text},b, {text}"])] == [text, "b", text]
    assert compose_sweep([f"sweep.slurm.account={text}", "sweep.on=slurm"])[0].slurm.account == text


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_a_list_of_texts_of_a_plugin_keeps_what_was_typed(future: str, tmp_path: Path) -> None:
    """With the future import the type of an option is a text, and a class without it."""
    plugin = NORM.replace('"mine"', '"mine"\n    labels: list[str] = option(["a"], "Labels.")')
    (tmp_path / "mine.py").write_text(f"{future}from normlab.base.options import option\n{plugin}")
    norm: Any = compose_run([f"plugins=[{tmp_path / 'mine.py'}]", "norm=mine", "norm.labels=[1e3,007]"]).norm
    assert norm.labels == ["1e3", "007"]


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("'a,b'", ["a,b"]), ('"é"', ["é"]), ("null", [None]), ("a${seed}", ["a0"]), ("a\\,b", ["a,b"]),
        ("'it\\'s'", ["it's"]), ("range(2)", ["0", "1"]), ("choice(a,1)", ["a", "1"]), ("glob", ["glob"]),
    ],
)  # fmt: skip
def test_quotes_functions_and_interpolations_keep_hydras_meaning(typed: str, names: list[str | None]) -> None:
    assert [run.run.name for run in compose_grid([f"run.name={typed}"])] == names


def test_a_number_beside_a_quoted_comma_has_to_be_quoted() -> None:
    with pytest.raises(ConfigError, match="quote each text"):
        compose_run(["data=files", "data.path=['a,b',1e3]"])


def test_a_sweep_option_of_type_text_keeps_its_commas() -> None:
    options, _ = compose_sweep(["sweep.on=slurm", "sweep.slurm.partition=short,long"])
    assert options.slurm.partition == "short,long"
    with pytest.raises(ConfigError, match=r"sweep\.jobs=1,2: several values of a sweep option; choose one"):
        compose_sweep(["sweep.jobs=1,2"])


def test_another_program_of_the_process_reads_its_files_with_hydra(tmp_path: Path) -> None:
    compose_run([], UserConfigs(str(tmp_path / "own"), "myrun"))
    (tmp_path / "main.yaml").write_text("lr: 0.1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = hydra.compose("main", return_hydra_config=True)
    assert config.lr == 0.1
    assert str(tmp_path / "own") not in [source.path for source in config.hydra.runtime.config_sources]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "name",
    ["ü", "日本", "a,b", "a b", "a'b", 'a"b', "a=b", "{x}", "[x]", "(x)", "$x", "${x}", "\\${x}", "a\\", "1e3", "null"],
)
def test_results_dir_may_have_any_printable_name(name: str) -> None:
    assert compose_run(with_folder(["norm=none"], name)).results_dir == name
    load_studies()
    (_, _, composed), *_ = Attempt(STUDIES["norm_cost"], name).compose(range(1))
    assert {config.results_dir for _, config in composed} == {name}
