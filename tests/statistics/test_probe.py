"""The probe statistics against reference implementations, and the schedule of probes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian

from normlab.base.errors import ConfigError
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.catalogue.statistics.statistic import PROBE, TIERS
from normlab.config.compose import compose_run
from normlab.model.attention import attend, sdpa
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.model.instrument import main_stream
from normlab.training.measure.probe import Probe, largest_eigenvalue
from normlab.training.measure.schedule import probe_steps
from support.cadences import CADENCES, bits, trained
from support.measured_steps import VOCAB, case

NAMES = frozenset(name for name, entry in STATISTICS.items() if entry.tier == PROBE)


def probed(placement: str, *overrides: str) -> tuple[dict[Any, float], GPT, Tensor, Tensor, dict[str, Tensor]]:
    runs = case(placement, 1, "model.width=8", "model.heads=1", "model.mlp_width=8", "model.context=6", *overrides)
    model = build_model(runs.configs[0], VOCAB).double()
    tokens = torch.randint(0, VOCAB, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    preconditioner = {name: p.detach().abs() + 0.1 for name, p in model.named_parameters()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measurement = Probe(model, NAMES, tokens[0], tokens[1], preconditioner)()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    blocks: list[Any] = list(model.blocks)
    assert all(block.attn.kernel is sdpa for block in blocks)
    assert model.training
    return (
        dict(zip(map(tuple, measurement.columns), measurement.values.tolist(), strict=True)),
        model,
        tokens[0],
        tokens[1],
        preconditioner,
    )


def loss_of(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def test_sharpness_equals_the_full_hessian() -> None:
    measured, model, tokens, targets, preconditioner = probed("pre", "model.depth=1", "norm=rmsnorm")
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        block.attn.kernel = attend
    named = dict(model.named_parameters())
    flat = torch.cat([p.detach().flatten() for p in named.values()])
    shapes = [(name, p.shape, p.numel()) for name, p in named.items() if name != "head.weight"]

    def of(vector: Tensor) -> Tensor:
        parts = vector.split([size for *_, size in shapes])
        params = {name: part.view(shape) for part, (name, shape, _) in zip(parts, shapes, strict=True)}
        logits = functional_call(model, params, (tokens,))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    full_hessian = hessian(of)(flat).detach()
    assert measured["sharpness", "", 2] == pytest.approx(torch.linalg.eigvalsh(full_hessian)[-1].item(), rel=1e-2)
    roots = torch.cat([preconditioner[name].flatten() for name, *_ in shapes]).rsqrt()
    scaled = roots[:, None] * full_hessian * roots
    assert measured["sharpness_pre", "", 2] == pytest.approx(torch.linalg.eigvalsh(scaled)[-1].item(), rel=1e-2)


@pytest.mark.parametrize("placement", ["pre", "resi_dual"])
def test_layer_drop_equals_the_loss_without_the_block(placement: str) -> None:
    measured, model, tokens, targets, _ = probed(placement, "model.depth=3", "norm=layernorm")
    full_loss = loss_of(model, tokens, targets).item()
    blocks = list(model.blocks)
    for layer in (1, 2, 3):
        model.blocks = nn.ModuleList(blocks[: layer - 1] + blocks[layer:])
        expected = loss_of(model, tokens, targets).item() - full_loss
        assert measured["layer_drop", "", layer] == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_erank_and_angular_equal_their_formulas() -> None:
    measured, model, tokens, _, _ = probed("pre", "model.depth=3", "norm=layernorm")
    streams: list[Tensor] = []
    for part in (*model.blocks, model.head):
        part.register_forward_pre_hook(lambda m, a: streams.append(a[0]))
    model(tokens)
    for layer, x in enumerate(streams, start=1):
        values = torch.linalg.eigvalsh(torch.cov(x.detach().flatten(0, 1).T)).clamp(min=1e-300)
        shares = values / values.sum()
        assert measured["erank", "", layer] == pytest.approx((-(shares * shares.log()).sum()).exp().item(), rel=1e-5)
        for apart in range(1, 5 - layer):
            cosine = nn.functional.cosine_similarity(x, streams[layer - 1 + apart], dim=-1)
            expected = (cosine.arccos() / math.pi).mean().item()
            assert measured["angular", str(apart), layer] == pytest.approx(expected, rel=1e-5)
    assert ("angular", "3", 2) not in measured
    # The order of the columns does not depend on that of a set of names, which differs between processes.
    assert list(dict.fromkeys(name for name, *_ in measured))[:4] == ["layer_drop", "angular", "erank", "jac_gain"]


def test_matrix_norms_equal_their_formulas() -> None:
    measured, model, *_ = probed("pre", "model.depth=2", "norm=rmsnorm")
    for name, p in model.named_parameters():
        if p.dim() == 2 and name.startswith("blocks.0."):
            values = torch.linalg.svdvals(p.detach())
            site = name.removeprefix("blocks.0.")
            assert measured["spec_norm", site, 1] == pytest.approx(values[0].item(), rel=1e-6)
            assert measured["stable_rank", site, 1] == pytest.approx(
                (values.square().sum() / values[0] ** 2).item(), rel=1e-6
            )


@pytest.mark.parametrize("placement", ["pre", "post", "x0_lambdas", "siamese"])
def test_jacobian_gain_is_with_respect_to_the_blocks_input(placement: str) -> None:
    """Other tensors that a placement carries are constants."""
    measured, model, tokens, _, _ = probed(placement, "model.depth=3", "norm=rmsnorm")
    stream, streams = model.embed(tokens), list[Any]()
    for block in model.blocks:
        streams.append(stream)
        stream = block(stream)
    for layer, given in enumerate(streams, start=1):
        x, *others = [each.detach() for each in ((given,) if isinstance(given, Tensor) else given)]

        def last(x: Tensor, others: list[Tensor] = others, layer: int = layer) -> Tensor:
            stream: Any = (x, *others) if others else x
            for block in model.blocks[layer - 1 :]:
                stream = block(stream)
            return main_stream(stream)

        output, vjp, *_ = torch.func.vjp(last, x)
        generator, gain = torch.Generator().manual_seed(0), 0.0
        for _ in range(4):
            v = torch.randn(output.shape, generator=generator).to(output)
            gain += (vjp(v)[0].square().sum() / v.square().sum()).item() / 4
        assert measured["jac_gain", "", layer] == pytest.approx(gain, rel=1e-5), layer


def test_lanczos_finds_the_largest_eigenvalue_of_a_known_matrix() -> None:
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))[0]
    values = torch.linspace(-30, 10, 60, dtype=torch.float64)
    values[-1] = 12.5
    matrix = basis @ torch.diag(values) @ basis.T
    found = largest_eigenvalue(lambda v: [matrix @ v[0]], [torch.zeros(60, dtype=torch.float64)], most=60)
    assert found == pytest.approx(12.5, rel=1e-2)
    assert largest_eigenvalue(lambda v: [3 * v[0]], [torch.zeros(1, dtype=torch.float64)]) == pytest.approx(3)
    assert largest_eigenvalue(lambda v: [0 * v[0]], [torch.zeros(4, dtype=torch.float64)]) == 0
    assert math.isnan(largest_eigenvalue(lambda v: [math.nan * v[0]], [torch.zeros(4, dtype=torch.float64)]))


def test_a_run_is_probed_at_its_start_half_and_end() -> None:
    assert probe_steps(compose_run(["stats=full", "train.steps=100"])) == {0, 50, 100}
    assert probe_steps(compose_run(["stats=full", "train.steps=0"])) == {0}
    assert probe_steps(compose_run(["stats=core"])) == frozenset()


@pytest.mark.exhaustive
def test_probes_do_not_change_the_bits_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = ("train.steps=120", "model.depth=2", "train.batch_size=8", "norm=batchnorm")
    folder = trained(tmp_path / "probed", "stats=full", *plain)
    lines = [line for line in capfd.readouterr().err.splitlines() if "probe after" in line]
    assert [line.partition(" took")[0] for line in lines] == [
        f"normlab: probe after step {step}" for step in (0, 60, 120)
    ]
    assert bits(folder) == bits(trained(tmp_path / "never", *CADENCES["never"], *plain))
    parts, damaged = folder.statistics.read(PROBE)
    assert sorted(step for part in parts for step in part.steps) == [0, 60, 120]
    assert damaged == 0
    assert all(("sharpness_pre" in part) == (0 not in part.steps) for part in parts)


@pytest.mark.exhaustive
def test_diverging_run_diverges_with_probes_too(tmp_path: Path) -> None:
    overrides = ("stats=full", "train.steps=60", "train.log_every=60", "optim.lr=1e30")
    folder = trained(tmp_path, *overrides, "train.batch_size=8")
    assert folder.state() == "diverged"
    broken = folder.status()["diverged"]["step"]
    for tier in TIERS:
        for part in folder.statistics.read(tier)[0]:
            assert max(part.steps.tolist(), default=0) <= broken


@pytest.mark.exhaustive
def test_sharpness_pre_needs_adam_and_an_update(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sharpness_pre: has no effect with optim=sgd"):
        compose_run(["optim=sgd", "stats.also=[sharpness_pre]"])
    overrides = (
        "stats=off",
        "stats.also=[sharpness_pre]",
        "train.steps=60",
        "train.batch_size=8",
    )
    (part,), _ = trained(tmp_path, *overrides).statistics.read(PROBE)
    assert part.names() == ["sharpness_pre"]
    assert 0 not in part.steps
    parts, _ = trained(tmp_path / "sgd", "optim=sgd", "stats=full", "train.steps=1").statistics.read(PROBE)
    assert parts
    assert not any("sharpness_pre" in part for part in parts)
