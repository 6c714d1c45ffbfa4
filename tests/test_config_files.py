"""A config file and the command line read the same value from the same text."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from normlab.config.compose import compose_run
from normlab.config.hydra_flags import show_config
from normlab.errors import ConfigError
from normlab.options import plain_tree

TYPES = {
    "run.name": ("text or null", ["1e3", "010", "off", "true", "null", "1_000", "2024-01-05", "3"]),
    "tracking.project": ("text", ["yes", "0x10", "1:30", ".5", "5.", "+7", "NULL2", "1.50"]),
    "tracking.tags": ("list of texts", ["[1e3]", "[off,010]", "[]", "[a]", "[null2]", "['1e3']", '["off"]', "[on]"]),
    "data.path": ("any", ["010", "off", "1e3", "[010,1_0]", "a.txt", "'1e3'", "[off]", "2024_01_05"]),
    "compile": ("one of several", ["off", "on", "auto", "'off'", '"on"', "off", "on", "off"]),
    "seed": ("int", ["010", "1_000", "0", "7", "+7", "00", "9007199254740993", "'8'"]),
    "optim.warmup_steps": ("int or null", ["null", "NULL", "010", "3", "0", "1_0", "'4'", "+5"]),
    "optim.lr": ("float", ["1e-3", ".5", "5.", "010", "1_0.5", "3", "1.5E-3", "'1e-3'"]),
    "optim.clip": ("float or null", ["null", "1e1", "010", "Null", "2", "0.1", "'1'", "1_0"]),
    "model.bias": ("bool", ["off", "on", "yes", "No", "TRUE", "0", "1", "'off'"]),
    "deterministic": ("bool or null", ["null", "off", "on", "yes", "False", "0", "1", "'true'"]),
    "norm.gain": ("bool of a norm", ["true", "on", "1", "yes", "True", "y", "on", "true"]),
    "norm.eps": ("float of a norm", ["1e-3", ".5", "1_0", "010", "0", "1e-12", "'1e-3'", "5."]),
}
"""Texts for an option of each type."""

REJECTED = [
    "seed=0x10",
    "seed=1:30",
    "seed=1e3",
    "optim.lr=0b1",
    "norm.gain=2",
    "norm.gain='2'",
    "model.bias=1.0",
    "compile=no",
]
"""Numbers and booleans of YAML that are not values of these options."""


def compose_file(settings: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the config of a file with these texts as values."""
    tree: dict[str, list[str]] = {}
    for option, text in settings.items():
        section, _, name = option.rpartition(".")
        tree.setdefault(section, []).append(f"{name}: {text}")
    lines = ["defaults: [train, {override data: files}, _self_]", *tree.pop("", [])]
    lines += [line for section, options in tree.items() for line in (f"{section}:", *(f"  {each}" for each in options))]
    (folder / "own.yaml").write_text("\n".join(lines))
    return plain_tree(compose_run([f"--config-dir={folder}", "--config-name=own"]))


@pytest.mark.parametrize("index", range(8))
def test_a_config_file_and_the_command_line_read_the_same_values(index: int, tmp_path: Path) -> None:
    settings = {option: texts[index] for option, (_, texts) in TYPES.items()}
    from_file = compose_file(settings, tmp_path)
    assert from_file == plain_tree(compose_run(["data=files", *(f"{key}={text}" for key, text in settings.items())]))
    assert from_file["run"]["name"] == (None if settings["run.name"] == "null" else settings["run.name"])
    assert from_file["seed"] == int(settings["seed"].strip("'"))


@pytest.mark.parametrize("override", REJECTED)
def test_a_config_file_and_the_command_line_reject_the_same_values(override: str, tmp_path: Path) -> None:
    option, _, text = override.partition("=")
    with pytest.raises(ConfigError):
        compose_file({option: text, "data.path": "a.txt"}, tmp_path)
    with pytest.raises(ConfigError):
        compose_run([override])


def test_a_preset_called_off_can_be_chosen_in_a_defaults_list(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [train, {override stats: off}, _self_]")
    config = compose_run([f"--config-dir={tmp_path}", "--config-name=own"])
    assert config.stats.preset == "off"


def test_options_of_hydra_keep_their_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = "job: {env_set: {A: 1}}, job_logging: {version: 1, disable_existing_loggers: off}"
    (tmp_path / "own.yaml").write_text(f"defaults: [train, _self_]\nhydra: {{{settings}}}\n")
    assert show_config([f"--config-dir={tmp_path}", "--config-name=own", "--cfg=hydra"])
    printed = OmegaConf.create(capsys.readouterr().out).hydra
    assert printed.job_logging.version == 1
    assert printed.job_logging.disable_existing_loggers is False


@pytest.mark.parametrize("name", ["experiment/marked", "own"])
def test_a_config_file_may_start_with_a_byte_order_mark(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.yaml"
    path.parent.mkdir(exist_ok=True)
    defaults = "" if "/" in name else "defaults: [train, _self_]\n"
    path.write_text(f"# @package _global_\n{defaults}seed: 3\nrun: {{name: é}}\n", encoding="utf-8-sig")
    chosen = f"+{name.replace('/', '=')}" if "/" in name else f"--config-name={name}"
    config = compose_run([f"--config-dir={tmp_path}", chosen])
    assert (config.seed, config.run.name) == (3, "é")


@pytest.mark.parametrize(
    ("where", "form"),
    [
        *(("command line", form) for form in ("{folder}", "file://{folder}")),
        *(("primary config", form) for form in ("{folder}", "file://{folder}", "file://${{oc.env:FOLDER}}")),
    ],
)
def test_folders_of_hydras_searchpath_are_read_as_texts_too(
    where: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "named.yaml").write_text("# @package _global_\nrun: {name: 1e3}\nseed: 010\n")
    monkeypatch.setenv("FOLDER", str(folder))
    quoted = '"' + form.format(folder=folder) + '"'
    (tmp_path / "own.yaml").write_text(f"defaults: [train, _self_]\nhydra: {{searchpath: [{quoted}, 'pkg://none']}}\n")
    arguments = {
        "command line": [f"hydra.searchpath=[{quoted},pkg://none]"],
        "primary config": [f"--config-dir={tmp_path}", "--config-name=own"],
    }[where]
    config = compose_run([*arguments, "+experiment=named"])
    assert (config.run.name, config.seed) == ("1e3", 10)


def test_another_program_of_the_process_reads_its_files_with_hydra(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [train, _self_]\n")
    compose_run([f"--config-dir={tmp_path}", "--config-name=own"])
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "main.yaml").write_text("lr: 0.1\n")
    with hydra.initialize_config_dir(str(tmp_path / "theirs"), version_base="1.3"):
        config = hydra.compose("main", return_hydra_config=True)
    assert config.lr == 0.1
    assert str(tmp_path) not in [source.path for source in config.hydra.runtime.config_sources]


@pytest.mark.parametrize("text", ["seed: 1\nseed: 2\n", "seed: [1\n"])
def test_an_error_in_yaml_names_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{re.escape(os.fspath(path))} line [23]: not valid YAML"):
        compose_run([f"--config-dir={tmp_path}", "--config-name=own"])
