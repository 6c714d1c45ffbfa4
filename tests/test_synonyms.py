"""A name that papers, tables of normlab or other libraries use leads to the value of the option."""

from collections.abc import Callable, Iterator

import pytest

from normlab.base.errors import did_you_mean
from normlab.base.plugins import plugin_file
from normlab.catalogue import entries as catalogue

Command = Callable[..., tuple[int, str, str]]

VALUES = {
    "norm": [entry["name"] for entry in catalogue.norms()],
    "placement": [entry["name"] for entry in catalogue.placements()],
    "data": [entry["name"] for entry in catalogue.data()],
    "optim": [entry["name"] for entry in catalogue.optim()],
    "model.qk_norm": ["off", "head", "full"],
    "precision": ["auto", "fp32", "tf32", "bf16", "fp16"],
    "model.positions": ["learned", "rope"],
}


PLUGIN_KINDS = {"norms": "norm", "placements": "placement"}
"""What a plugin's entry of a list is registered as; other tests register plugins."""


def spellings(title: str) -> Iterator[str]:
    """Yield a title as people write it: with hyphens, spaces, underscores or nothing, in upper and in lower case."""
    for mark in ("-", " ", "_", ""):
        spelled = title.replace("-", mark).replace(" ", mark)
        yield from (spelled, spelled.lower(), spelled.upper())


TITLES = {option: catalogue.titles(option) for option in catalogue.KINDS} | {
    "model.qk_norm": {"head": "per head", "full": "over all heads"}
}


@pytest.mark.parametrize("kind", ["norms", "placements", "data", "optim", "init", "stats"])
def test_each_entry_has_a_title_of_its_own(kind: str) -> None:
    """It is the name in papers, so it equals the name of the entry only where its source writes it so."""
    titles: dict[str, str] = {}
    for entry in catalogue.ENTRIES[kind]():
        if "preset_of" not in entry and plugin_file(PLUGIN_KINDS.get(kind, ""), entry["name"]) is None:
            titles[entry["name"]] = entry["title"]
    assert all(titles.values())
    assert len(set(titles.values())) == len(titles)
    same = {name for name, title in titles.items() if name == title}
    assert same == {"parallel", "nanochat", "sharpness"} & titles.keys()


@pytest.mark.parametrize("option", catalogue.KINDS)
def test_the_titles_of_the_values_of_an_option_are_those_of_the_entries(option: str) -> None:
    entries = catalogue.entries(catalogue.KINDS[option])
    assert TITLES[option] == {entry["name"]: entry["title"] for entry in entries if "preset_of" not in entry}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option, titles in TITLES.items() for value in titles]
)
def test_each_title_of_a_table_leads_to_its_value(option: str, value: str) -> None:
    for spelled in spellings(TITLES[option][value]):
        hint = did_you_mean(spelled, VALUES[option], TITLES[option])
        assert hint == f" (did you mean {value!r}?)", spelled


@pytest.mark.parametrize("option", ["norm", "placement"])
def test_each_listed_name_leads_to_itself_in_any_spelling(option: str) -> None:
    for value in VALUES[option]:
        for spelled in spellings(value.replace("_", " ")):
            assert did_you_mean(spelled, VALUES[option]) == f" (did you mean {value!r}?)", spelled


@pytest.mark.parametrize(
    ("option", "names", "value"),
    [
        ("placement", ["Pre-LN", "preln", "pre_norm"], "pre"),
        ("placement", ["Post-LN", "post-LayerNorm"], "post"),
        ("placement", ["Peri-LN", "peri-norm"], "peri"),
        ("norm", ["LN", "layer_norm"], "layernorm"),
        ("norm", ["identity", "off", "null"], "none"),
        ("precision", ["float32", "torch.float32", "float", "32", "32-true", "FP32"], "fp32"),
        ("precision", ["float16", "half", "torch.half", "16-mixed"], "fp16"),
        ("precision", ["bfloat16", "torch.bfloat16", "bf16-mixed"], "bf16"),
        ("model.positions", ["rotary", "RoPE"], "rope"),
        ("model.qk_norm", ["none", "false"], "off"),
    ],
)
def test_a_name_of_other_code_leads_to_the_value(option: str, names: list[str], value: str) -> None:
    for name in names:
        assert did_you_mean(name, VALUES[option]) == f" (did you mean {value!r}?)", name


@pytest.mark.parametrize(
    ("option", "name"),
    [("precision", "fp64"), ("precision", "fp8"), ("placement", "none"), ("model.positions", "none")],
)
def test_a_name_of_something_that_is_not_here_leads_nowhere(option: str, name: str) -> None:
    assert did_you_mean(name, VALUES[option]) == ""


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["train", "placement=pre-norm"], "pre"),
        (["train", "norm=LayerNorm"], "layernorm"),
        (["train", "precision=float32"], "fp32"),
        (["train", "model.positions=rotary"], "rope"),
        (["list", "placements", "pre-norm"], "pre"),
        (["list", "norms", "no norm"], "none"),
        (["list", "stats", "Effective rank"], "erank"),
        (["list", "init", "tiny-init"], "tinyinit"),
        (["explain", "--norm", "RMSNorm"], "rmsnorm"),
    ],
)
def test_commands_suggest_the_value(arguments: list[str], nearest: str, run_command: Command) -> None:
    code, out, err = run_command(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"did you mean {nearest!r}" in err
