"""The catalogue of norms agrees with the modules: formulas, parameter counts and presets."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from scipy.special import erf
from torch._subclasses.fake_tensor import FakeTensorMode

from normlab.catalogue import entries as catalogue
from normlab.config.compose import compose_run
from normlab.data.tokenizers import BytesTokenizer
from normlab.hf.classes import class_of
from normlab.model.init import build_model
from normlab.studies.base import STUDIES, load_studies
from normlab.studies.measures import FinalLoss

ROOT = Path(__file__).parents[1]
WIDTH = 12
Command = Callable[..., tuple[int, str, str]]
NORMS = catalogue.norms()
PRESETS = [entry for entry in NORMS if "preset_of" in entry]
FORMULAS = [([f"norm={entry['name']}"], entry["formula"]) for entry in PRESETS] + [
    ([f"norm={norm['name']}", *(f"norm.{override}" for override in overrides.split(", "))], formula)
    for norm in NORMS
    if "preset_of" not in norm
    for overrides, formula in norm["formulas"].items()
]


@pytest.mark.few(8)
@pytest.mark.parametrize(
    ("overrides", "formula"), FORMULAS, ids=lambda value: value if isinstance(value, str) else value[-1]
)
def test_module_computes_its_formula(overrides: list[str], formula: str) -> None:
    without_eps = "norm.eps_mode=none" in overrides
    options = compose_run([*overrides, *(["norm.eps=0"] if without_eps else [])]).norm
    if hasattr(options, "eps") and not without_eps:
        options = dataclasses.replace(options, eps=0.3)  # pyright: ignore[reportCallIssue]
    norm = options.build(WIDTH).double()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.from_numpy(rng.normal(size=tuple(parameter.shape))))
    x = rng.normal(1.0, 0.5, size=(5, WIDTH))
    ddof = int(getattr(options, "sigma", "") == "sample")
    names = {
        "x": x, "eps": getattr(options, "eps", None), "sqrt": np.sqrt, "tanh": np.tanh, "erf": erf, "max": np.maximum,
        "mean": lambda v: v.mean(-1, keepdims=True), "sum": lambda v: v.sum(-1, keepdims=True),
        "var": lambda v: v.var(-1, keepdims=True), "sigma": lambda v: v.std(-1, ddof=ddof, keepdims=True),
        "mean_batch": lambda v: v.mean(0), "var_batch": lambda v: v.var(0),
    }  # fmt: skip
    learned = {name.removeprefix("affine."): value.numpy() for name, value in norm.state_dict().items()}
    expected = eval(formula.replace("^", "**"), learned | names)  # noqa: S307  (a formula of the package)
    np.testing.assert_allclose(norm(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-9)
    for name in ("gain", "bias"):
        assert (name in learned) == (name in formula)


@pytest.mark.few(4)
@pytest.mark.parametrize("entry", NORMS, ids=lambda entry: entry["name"])
def test_listed_initial_values_are_those_of_the_module(entry: catalogue.Entry) -> None:
    """The expressions give the module's numbers, with the names of the options as a plugin writes them."""
    options = compose_run([f"norm={entry['name']}"]).norm
    state = options.build(WIDTH).state_dict()
    assert entry["initial_values"].keys() == state.keys()
    for name, expression in entry["initial_values"].items():
        if "normal" not in expression:
            value = eval(expression, dataclasses.asdict(options) | {"D": WIDTH, "sqrt": np.sqrt})  # noqa: S307
            np.testing.assert_allclose(state[name].numpy(), value, rtol=1e-7)


def test_a_note_below_a_table_begins_with_the_name_of_its_entry(run_command: Command) -> None:
    text = " ".join(run_command("list", "placements")[1].split())
    for entry in catalogue.placements():
        if entry.get("note"):
            assert f" {entry['name']}: {entry['note']}" in text


def test_an_entry_of_a_placement_names_the_redundant_norms_of_a_model(run_command: Command) -> None:
    model = ("model=llama_nano", "model.qk_norm=head", "model.v_norm=true")
    text = " ".join(run_command("list", "placements", "peri", *model)[1].split())
    assert "redundant norms attn.in: later norms cancel its scale" in text
    assert f"can hold its gain (norm=rmsnorm {' '.join(model)})" in text
    (entry,) = json.loads(run_command("list", "placements", "peri", "--json")[1])
    assert entry["redundant_norms"] == []
    _, text, err = run_command("list", "placements", "peri", "norm=rmsnorm", "norm=dyt")
    assert "norm=dyt" in text
    assert err == "warning: norm=rmsnorm: has no effect, because norm=dyt comes later; leave norm=rmsnorm out\n"


@pytest.mark.parametrize("words", [("peri", "placement=pre"), ("peri", "seed=1"), ("model.depth=2",)])
def test_an_override_without_effect_on_an_entry_is_an_error(words: tuple[str, ...], run_command: Command) -> None:
    code, _, err = run_command("list", "placements", *words)
    assert (code, err.startswith(f"error: {words[-1]}: has no effect")) == (2, True)


def test_the_estimators_of_the_studies_are_listed(run_command: Command) -> None:
    """All that the studies of the package use, with a sentence each; other tests register studies of their own."""
    listed = {row["name"]: row for row in json.loads(run_command("list", "estimators", "--json")[1])}
    load_studies()
    for study in STUDIES.values():
        for claim in study.claims:
            used = {type(claim.estimator), type(getattr(claim.estimator, "measure", FinalLoss()))}
            assert {kind.__name__ for kind in used if kind.__module__.startswith("normlab.")} <= listed.keys()
    assert all(row["computes"].endswith((".", ":")) for row in listed.values())
    assert not {"Estimator", "Measure"} & listed.keys()


def test_the_file_of_the_catalogue_is_that_of_the_declarations() -> None:
    # In a process of its own, because other tests register plugins.
    script = "import write_catalogue as written; print(written.as_json(written.declared_entries()), end='')"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "prove")])}
    declared = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    ).stdout
    assert declared == catalogue.FILE.read_text(), "run scripts/prove/write_catalogue.py"


@pytest.mark.parametrize("entry", PRESETS, ids=lambda entry: entry["name"])
def test_preset_has_the_listed_number_of_parameters(entry: catalogue.Entry) -> None:
    norm = compose_run([f"norm={entry['name']}"]).norm.build(WIDTH)
    expected = eval(entry["parameters"], {"D": WIDTH})  # noqa: S307  (a count of the package)
    assert sum(parameter.numel() for parameter in norm.parameters()) == expected


# The presets of models.

GPT2_TOKENS = 50_257
"""Tokens of GPT-2's tokenizer."""


def parameters_of(preset: str, *overrides: str, vocab_size: int = BytesTokenizer.vocab_size) -> dict[str, int]:
    """Return the numbers of parameters of a preset, of its blocks and of all, without allocating them."""
    config = compose_run([f"model={preset}", *overrides])
    with FakeTensorMode():
        model = build_model(config, vocab_size)
    blocks, everything = (sum(each.numel() for each in part.parameters()) for part in (model.blocks, model))
    return {"blocks": blocks, "everything": everything}


@pytest.mark.few(2)
@pytest.mark.parametrize("entry", catalogue.models(), ids=lambda entry: entry["name"])
def test_a_preset_of_a_model_has_the_parameters_of_its_description(entry: catalogue.Entry) -> None:
    """With bytes, unless the description names the tokenizer of GPT-2."""
    blocks = re.search(r"(\d+)M parameters in the blocks", entry["about"])
    if blocks:
        assert round(parameters_of(entry["name"])["blocks"] / 1e6) == int(blocks[1])
    if with_tokenizer := re.search(r"(\d+)M with its tokenizer", entry["about"]):
        of_preset = parameters_of(entry["name"], vocab_size=GPT2_TOKENS)
        assert round(of_preset["everything"] / 1e6) == int(with_tokenizer[1])


@pytest.mark.exhaustive
def test_gpt2_small_is_gpt2_with_the_overrides_of_its_description() -> None:
    """All options of transformers are equal, but for its dropout, and so is the number of parameters."""
    (about,) = (entry["about"] for entry in catalogue.models() if entry["name"] == "gpt2_124m")
    overrides = re.findall(r"\b[a-z.]+=\w+", about)
    assert overrides == ["norm=layernorm_gpt2", "data.tokenizer=gpt2"]
    with_tokenizer, with_bytes = re.findall(r"(\d+)M", about)
    small = parameters_of("gpt2_124m", *overrides, vocab_size=GPT2_TOKENS)
    theirs = transformers.GPT2Config()
    with torch.device("meta"):
        reference = transformers.GPT2LMHeadModel(theirs)
    assert small["everything"] == sum(each.numel() for each in reference.parameters())
    assert round(small["everything"] / 1e6) == int(with_tokenizer)
    assert round(parameters_of("gpt2_124m", *overrides)["everything"] / 1e6) == int(with_bytes)
    config = compose_run(["model=gpt2_124m", *overrides])
    ours = class_of(config).write_options(config)
    assert class_of(config).name == "GPT2LMHeadModel"
    assert ours.pop("n_inner") == 4 * theirs.n_embd
    assert {name for name, value in ours.items() if value != getattr(theirs, name)} == {
        "resid_pdrop", "embd_pdrop", "attn_pdrop",
    }  # fmt: skip
