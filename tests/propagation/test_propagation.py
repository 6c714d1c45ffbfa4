"""`normlab propagation`: its measurements, compared with hooks and with a step of torch's optimiser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from normlab.config.compose import compose_grid, compose_run
from normlab.model.init import build_model
from normlab.placements.init_rules import INIT_RULES
from normlab.propagation.measure import VOCAB, measure, measure_rows, zipf_tokens
from normlab.propagation.render import power_laws, slope, table_row, write_page
from normlab.report.tables import render_table

Command = Callable[..., tuple[int, str, str]]
SMALL = ["model.depth=3", "model.width=32", "model.heads=2", "model.context=16", "train.batch_size=4"]


@pytest.mark.parametrize("placement", ["pre", "post", "siamese"])
def test_a_signal_equals_what_hooks_measure(placement: str) -> None:
    config = compose_run([*SMALL, f"placement={placement}", "norm=layernorm"])
    signal, _, _ = measure(config)
    model = build_model(config, VOCAB).double()
    outputs: list[torch.Tensor] = []

    def record(module: object, inputs: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        outputs.append(output if isinstance(output, torch.Tensor) else output[0])

    for segment in (model.embed, *model.blocks):
        segment.register_forward_hook(record)
    tokens = zipf_tokens(4, 17, config.seed)
    loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    rms = [x.square().mean().sqrt().item() for x in outputs]
    assert signal.loss == pytest.approx(loss.item(), rel=1e-5)
    assert [signal.embedded, *signal.stream] == pytest.approx(rms, rel=1e-5)
    for layer, block in enumerate(model.blocks):
        grads = {name: parameter.grad for name, parameter in block.named_parameters() if parameter.grad is not None}
        assert signal.gradient[layer] == pytest.approx(grads["mlp.down.weight"].norm().item(), rel=1e-4)
        assert signal.block_gradient[layer] == pytest.approx(
            math.sqrt(sum(grad.square().sum().item() for grad in grads.values())), rel=1e-4
        )


@pytest.mark.parametrize(
    ("placement", "added", "factor"),
    [
        ("pre", "{}", None),
        ("post", "{}", None),  # before the norm of the stream
        ("deepnorm", "{}", None),  # without the factor on the stream
        ("peri", "wiring.{}.norms.out", None),
        ("siamese", "{}", lambda layer: (2 * layer) ** -0.5),
        ("parallel", "{}", None),
    ],
)
def test_a_branch_is_compared_with_the_stream_that_enters_its_block(
    placement: str, added: str, factor: Callable[[int], float] | None
) -> None:
    config = compose_run([*SMALL, f"placement={placement}", "model.depth=3", "init=xavier"])
    signal, _, _ = measure(config)
    model = build_model(config, VOCAB).double()
    streams: list[float] = []
    branches: dict[str, list[float]] = {"attn": [], "mlp": []}

    def rms(x: torch.Tensor) -> float:
        return x.square().mean().sqrt().item()

    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda _, inputs: streams.append(rms(inputs[0] if isinstance(inputs[0], torch.Tensor) else inputs[0][0]))
        )
        for name, sizes in branches.items():
            module = block.get_submodule(added.format(name))
            module.register_forward_hook(lambda _, __, branch, sizes=sizes: sizes.append(rms(branch)))
    model(zipf_tokens(4, 17, config.seed)[:, :-1])
    for name, sizes in branches.items():
        factors = [1.0 if factor is None else factor(layer) for layer in (1, 2, 3)]
        expected = [f * branch / stream for f, branch, stream in zip(factors, sizes, streams, strict=True)]
        assert getattr(signal, f"{name}_ratio") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("overrides", [[], ["norm=none", "placement=ngpt"]])
def test_the_update_equals_that_of_torchs_optimizer(overrides: list[str]) -> None:
    config = compose_run([*SMALL, "optim.lr=1e-2", "optim.weight_decay=0.5", *overrides])
    (row,) = measure_rows([config], 1)
    _, model, grads = measure(config)
    matrices = {name: p for name, p in model.named_parameters() if name.startswith("blocks.1.") and p.dim() == 2}
    before = {name: p.detach().clone() for name, p in matrices.items()}
    optimizer = torch.optim.AdamW(matrices.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    for name, parameter in matrices.items():
        parameter.grad = grads[name]
    optimizer.step()
    with torch.no_grad():
        config.placement.project(matrices)
    moved = sum((matrices[name].detach() - before[name]).square().sum().item() for name in matrices)
    size = sum(before[name].square().sum().item() for name in matrices)
    assert row["update"][1] == pytest.approx(math.sqrt(moved / size), rel=1e-4)


def test_weights_of_zero_have_no_relative_update(
    run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INIT_RULES, "zeros", lambda weight: 0.0)
    overrides = [*SMALL, "init=zeros"]
    code, out, err = run_command("propagation", *overrides, "--json")
    (row,) = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert (code, err) == (0, "")
    assert row["update"] == row["attn_ratio"] == row["mlp_ratio"] == [None] * 3
    assert row["stream"] == row["gradient"] == [0.0] * 3
    code, out, err = run_command("propagation", *overrides, "-o", str(tmp_path / "page.html"))
    assert (code, err) == (0, "")
    assert "update, last" in out
    assert "not finite" in out


def test_seeds_are_averaged() -> None:
    config = compose_run(SMALL)
    (row,) = measure_rows([config], 3)
    alone = [measure(compose_run([*SMALL, f"seed={seed}"]))[0] for seed in range(3)]
    assert row["gradient"] == pytest.approx([sum(s.gradient[i] for s in alone) / 3 for i in range(3)])
    assert len({s.loss for s in alone}) == 3


def test_tokens_follow_zipfs_law() -> None:
    counts = torch.bincount(zipf_tokens(400, 500, 0).flatten(), minlength=VOCAB)
    weights = 1 / torch.arange(1, VOCAB + 1)
    expected = 200_000 * weights / weights.sum()
    assert ((counts - expected).abs() < 6 * expected.sqrt()).all()


def test_the_slope_is_the_exponent() -> None:
    assert slope([6, 12, 24], [2 * depth**-0.5 for depth in (6, 12, 24)]) == pytest.approx(-0.5)


def test_a_grid_is_every_combination(run_command: Command) -> None:
    overrides = [*SMALL[1:], "placement=pre,post", "model.depth=1,2,4", "init=xavier"]
    assert len(compose_grid(overrides)) == 6
    code, out, err = run_command("propagation", *overrides, "--json")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert [(row["placement"], row["depth"]) for row in rows] == [(p, d) for p in ("pre", "post") for d in (1, 2, 4)]
    assert all(len(row["stream"]) == row["depth"] for row in rows)
    code, out, _ = run_command("propagation", *overrides)
    assert code == 0
    assert re.search(r"rmsnorm post \(init xavier\), L = 1, 2, 4: stream ~ L\^-?0.00, first gradient ~ L\^", out)
    assert [line.split(":")[0] for line in power_laws(rows)] == [line.split(":")[0] for line in out.splitlines()[-2:]]


@pytest.mark.parametrize(
    ("grid", "option", "values"),
    [
        (["model.width=16,32"], "model.width", [16, 32]),
        (["norm.eps=1e-6,1e-1"], "norm.eps", [1e-6, 0.1]),
        (["placement=mix_ln", "placement.early_blocks=null,1"], "placement.early_blocks", [None, 1]),
        (["seed=0,1", "norm=rmsnorm,layernorm"], "seed", [0, 1]),
    ],
)
def test_rows_show_the_option_that_differs(
    grid: list[str], option: str, values: list[float | None], tmp_path: Path
) -> None:
    rows = list(measure_rows(compose_grid([*SMALL[2:], "model.depth=1,2", "model.heads=2", *grid]), 1))
    assert {tuple(row["overrides"]) for row in rows} == {(option,)}
    assert {row["overrides"][option] for row in rows} == set(values)
    assert {table_row(row)[option] for row in rows} == {str(value) for value in values}
    lines = list(power_laws(rows))
    assert len(lines) == len(rows) // 2
    assert all(any(f"{option}={value} (" in line for line in lines) for value in values)
    assert all(": stream" in line and ", L = 1, 2:" in line for line in lines)
    write_page(rows, page := tmp_path / "page.html")
    assert all(f"{option}={value}" in page.read_text() for value in values)


def test_an_option_that_equals_its_default_at_one_depth() -> None:
    grid = [*SMALL[2:], "placement=mix_ln", "model.depth=4,8"]
    two, default = (list(measure_rows(compose_grid([*grid, *more]), 1)) for more in (["placement.early_blocks=2"], []))
    assert [row["overrides"] for row in two] == [{}, {}]
    assert two[0] != default[0]
    assert two[1] == default[1]  # of eight blocks two are mix_ln's default


def test_a_narrow_table_keeps_norm_placement_and_depth() -> None:
    rows = [
        table_row(row) for row in measure_rows(compose_grid([*SMALL[1:], "model.depth=1,2", "placement=pre,post"]), 1)
    ]
    for width in (80, 100, 120):
        heading = render_table(rows, width).splitlines()[0].split()
        assert heading[:3] == ["norm", "placement", "depth"]


def test_a_stream_that_overflows_is_reported_with_its_block(run_command: Command) -> None:
    overrides = [*SMALL[1:], "norm=none", "placement=keel", "model.depth=16", "init=smallinit"]
    code, out, _ = run_command("propagation", *overrides)
    (row,) = json.loads(run_command("propagation", *overrides, "--json")[1])
    (config,) = compose_grid(overrides)
    finite = [math.isfinite(size) for size in measure(config)[0].stream]
    block = finite.index(False) + 1
    assert 0 < block < 16
    assert row["stream"].index(None) + 1 == block
    assert row["loss"] is None
    assert code == 0
    line = f"none keel (init smallinit), L = 16: the stream is not finite from block {block} on"
    assert out.splitlines()[-1] == line
    assert "nan" not in out


def test_the_page_loads_no_other_files(run_command: Command, tmp_path: Path) -> None:
    page = tmp_path / "a folder" / "profiles.html"
    code, _, err = run_command("propagation", *SMALL, "placement=pre,peri", "-o", str(page))
    assert (code, err) == (0, "")
    text = page.read_text()
    assert "rmsnorm peri (init gpt2), depth 3" in text
    assert "RMS of the residual stream after each layer" in text
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="http', text)


@pytest.mark.parametrize(
    "overrides", [["--seeds", "0"], ["placement=pre,pst"], ["model.depth=0"], ["-o", "/proc/x/y.html"]]
)
def test_an_error_is_one_line(overrides: list[str], run_command: Command) -> None:
    code, _, err = run_command("propagation", *SMALL[1:], *overrides)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_page_is_html_by_its_name(tmp_path: Path, run_command: Command) -> None:
    code, out, err = run_command("propagation", *SMALL, "-o", str(tmp_path / "page.png"))
    assert code == 2
    assert "page.png: a page is HTML" in err
    assert not out
    assert not list(tmp_path.iterdir())
