"""What `normlab list norms` says of presets and options is so of the modules that they build."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import erf

from normlab import catalogue
from normlab.launch import compose_run

WIDTH = 12
Command = Callable[..., tuple[int, str, str]]
NORMS = catalogue.norms()
PRESETS = [entry for entry in NORMS if "preset_of" in entry]
TOLD = [([f"norm={entry['name']}"], entry["formula"]) for entry in PRESETS] + [
    ([f"norm={norm['name']}", f"norm.{word}"], formula)
    for norm in NORMS
    if "preset_of" not in norm
    for word, formula in norm["formulas"].items()
]


@pytest.mark.parametrize(("words", "formula"), TOLD, ids=lambda told: told if isinstance(told, str) else told[-1])
def test_a_formula_is_what_the_module_computes(words: list[str], formula: str) -> None:
    without_eps = "norm.eps_mode=none" in words
    options = compose_run([*words, *(["norm.eps=0"] if without_eps else [])]).norm
    if hasattr(options, "eps") and not without_eps:
        options = dataclasses.replace(options, eps=0.3)  # pyright: ignore[reportCallIssue]
    norm = options.build(WIDTH).double()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.from_numpy(rng.normal(size=tuple(parameter.shape))))
    x = rng.normal(1.0, 0.5, size=(5, WIDTH))
    spread = int(getattr(options, "sigma", "") == "sample")
    names = {
        "x": x, "eps": getattr(options, "eps", None), "sqrt": np.sqrt, "tanh": np.tanh, "erf": erf, "max": np.maximum,
        "mean": lambda v: v.mean(-1, keepdims=True), "sum": lambda v: v.sum(-1, keepdims=True),
        "var": lambda v: v.var(-1, keepdims=True), "sigma": lambda v: v.std(-1, ddof=spread, keepdims=True),
        "mean_batch": lambda v: v.mean(0), "var_batch": lambda v: v.var(0),
    }  # fmt: skip
    learned = {name.removeprefix("affine."): value.numpy() for name, value in norm.state_dict().items()}
    expected = eval(formula.replace("^", "**"), learned | names)  # noqa: S307  (the package's own text)
    np.testing.assert_allclose(norm(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-9)
    for word in ("gain", "bias"):
        assert (word in learned) == (word in formula)


def test_the_formulas_are_those_of_all_the_choices() -> None:
    for norm in NORMS:
        for option in norm.get("options", ()):
            if option["option"] == "eps_mode":
                others = {f"eps_mode={choice}" for choice in option["choices"]} - {f"eps_mode={option['default']}"}
                assert norm["formulas"].keys() == others


@pytest.mark.parametrize("entry", PRESETS, ids=lambda entry: entry["name"])
def test_a_preset_learns_what_it_is_said_to(entry: catalogue.Entry) -> None:
    norm = compose_run([f"norm={entry['name']}"]).norm.build(WIDTH)
    told = eval(entry["parameters"], {"D": WIDTH})  # noqa: S307  (the same)
    assert sum(parameter.numel() for parameter in norm.parameters()) == told


@pytest.mark.parametrize(
    ("parameters", "more", "told"),
    [("0", 2, "2 * D"), ("D", 1, "2 * D"), ("2 * D + 1", -2, "1"), ("2 * D + 1", -1, "D + 1"), ("D", -1, "0")],
)
def test_vectors_are_added_to_what_is_learned(parameters: str, more: int, told: str) -> None:
    assert catalogue._with_vectors(parameters, more) == told


def test_a_preset_is_shown_as_its_norm_is(run_command: Command) -> None:
    out = " ".join(run_command("list", "norms", "rmsnorm_paper")[1].split())
    for said in (
        "formula x / (sqrt(mean(x^2)) + eps) * gain learns D numbers", "starts at affine.gain",
        "causal in training too",
        "preset of rmsnorm", "sets eps=1.0e-08, eps_mode=outside_rms", "pitfalls - x / (rms(x) + eps) written with pow",
    ):  # fmt: skip
        assert said in out
    assert "not in training" in run_command("list", "norms", "batchnorm_biased_var")[1]
    out = " ".join(run_command("list", "norms", "layernorm")[1].split())
    assert "eps_mode=outside: (x - mean(x)) / (sqrt(var(x)) + eps) * gain + bias" in out


def test_the_table_shows_where_a_presets_formula_is_another(
    run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    rows = {line.split()[0]: line for line in run_command("list", "norms")[1].splitlines()}
    assert " x / sqrt(sum(x^2) + eps) " in rows["rmsnorm_sum_of_squares"]
    assert " rmsnorm with eps=1.0e-06" in rows["rmsnorm_llama"]
