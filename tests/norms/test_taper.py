"""TaperNorm: `norm.taper_steps` of rmsnorm and layernorm."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from normlab.base.errors import ConfigError
from normlab.catalogue.norms.base import NORMS, load_all
from normlab.catalogue.norms.taper import Taper
from normlab.config.compose import compose_run
from normlab.model.init import build_model
from normlab.verify.signed_error import signed_error_check
from support.small_steps import config_of

load_all()
WIDTH, WARMUP, STEPS = 6, 3, 4
BLOCKS = "norm=rmsnorm", "norm.taper_warmup=0", "norm.taper_steps=1"


class Paper:
    """Equations of section 3 in numpy, for one norm: a gate, two averages until it falls, and a second gain."""

    def __init__(self) -> None:
        self.average = np.zeros(2)
        self.second = np.zeros(WIDTH)

    def output(self, x: np.ndarray, t: int, gain: np.ndarray, change: np.ndarray, *, centred: bool) -> np.ndarray:
        h = x - x.mean(-1, keepdims=True) if centred else x
        r = np.sqrt(np.square(h).mean(-1, keepdims=True))
        if t <= WARMUP:
            energy = np.square(h * gain).sum(-1)
            self.average = 0.99 * self.average + 0.01 * np.array([(energy / r[..., 0]).mean(), energy.mean()])
            self.second = gain
        # Both averages started at 0, which their ratio does not show.
        c = self.average[0] / self.average[1]
        g = 1.0 if t <= WARMUP else 0.5 * (1 + math.cos(math.pi * min(1, (t - WARMUP) / STEPS)))
        return g * h / r * gain + (1 - g) * c * h * (self.second + change)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_every_update_follows_the_paper(name: str, unit_offset: bool) -> None:
    kind: Any = NORMS[name]
    options = kind(eps=0.0, taper_warmup=WARMUP, taper_steps=STEPS, unit_offset=unit_offset, bias=True)
    norm, paper, generator = options.build(WIDTH).double(), Paper(), torch.Generator().manual_seed(0)
    for t in range(WARMUP + STEPS + 3):
        norm.taper.taper_updates.fill_(t)
        with torch.no_grad():  # an update of the optimiser; the second gain has no gradient before the taper
            norm.affine.gain.add_(0.1 * torch.randn(WIDTH, generator=generator))
            norm.affine.bias.add_(0.1 * torch.randn(WIDTH, generator=generator))
            norm.taper.gain.add_(0.1 * (t > WARMUP) * torch.randn(WIDTH, generator=generator))
        x = torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64) + 0.5
        gain = norm.affine.gain.detach().numpy() + unit_offset
        change = norm.taper.gain.detach().numpy()
        expected = paper.output(x.numpy(), t, gain, change, centred=name == "layernorm") + norm.affine.bias.tolist()
        for is_training in (True, False):
            found = norm.train(is_training)(x).detach()
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_without_a_gain_there_is_one_map_without_a_second_gain() -> None:
    options: Any = NORMS["rmsnorm"]
    norm, paper = options(eps=0.0, taper_warmup=WARMUP, taper_steps=STEPS, gain=False).build(WIDTH).double(), Paper()
    assert [*norm.parameters()] == []
    for t in range(WARMUP + STEPS + 1):
        norm.taper.taper_updates.fill_(t)
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        expected = paper.output(x.numpy(), t, np.ones(WIDTH), np.zeros(WIDTH), centred=False)
        np.testing.assert_allclose(norm(x), expected, rtol=0, atol=1e-12)


def test_what_is_measured_keeps_no_graph() -> None:
    norm: Any = compose_run(["norm=rmsnorm", "norm.taper_steps=1"]).norm.build(WIDTH)
    for _ in range(2):
        norm(torch.randn(2, WIDTH, requires_grad=True))
    assert [name for name, buffer in norm.named_buffers() if buffer.requires_grad] == []


@pytest.mark.parametrize(("name", "taper", "expected"), [
    ("rmsnorm", {}, ("scale",)), ("rmsnorm", {"taper_steps": 3}, ()), ("layernorm", {}, ("scale", "shift")),
    ("layernorm", {"taper_steps": 3}, ("shift",)),
])  # fmt: skip
def test_invariances(name: str, taper: dict[str, int], expected: tuple[str, ...]) -> None:
    kind: Any = NORMS[name]
    assert (norm := kind(**taper)).invariances == expected
    assert norm.changing == ((100, 103) if taper else (0, 0))


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_its_factors_are_rounded_in_no_direction(name: str) -> None:
    kind: Any = NORMS[name]
    assert signed_error_check(kind(taper_steps=3), name, 2048).passed


@pytest.mark.parametrize("rounding", ["scale_then_cast", "cast_then_scale"])
def test_bfloat16_is_rounded_as_without_a_taper(rounding: str) -> None:
    """Before the taper, and after it, where the linear map is in place of the norm."""
    kind: Any = NORMS["rmsnorm"]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, WIDTH, generator=generator).bfloat16()
    norm, plain = (kind(rounding=rounding, bias=True, **taper).build(WIDTH) for taper in ({"taper_steps": 1}, {}))
    with torch.no_grad():
        for mine, theirs in zip(
            (norm.affine.gain, norm.affine.bias), (plain.affine.gain, plain.affine.bias), strict=True
        ):
            theirs.copy_(mine.add_(torch.randn(WIDTH, generator=generator)))
    assert torch.equal(norm(x), plain(x))
    norm.taper.taper_updates.fill_(101)
    constant = float(norm.taper.moments.double()[0] / norm.taper.moments.double()[1])
    linear, gain, bias = constant * x.float(), plain.affine.gain, plain.affine.bias
    if rounding == "cast_then_scale":
        linear, gain, bias = linear.bfloat16(), gain.bfloat16(), bias.bfloat16()
    assert torch.equal(norm.eval()(x), (linear * gain + bias).bfloat16())


def test_the_constant_is_the_least_squares_one() -> None:
    norm: Any = compose_run(["norm=rmsnorm", "norm.taper_warmup=0", "norm.taper_steps=1"]).norm.build(WIDTH).double()
    with torch.no_grad():
        norm.affine.gain.copy_(torch.linspace(0.5, 2, WIDTH))
    x = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    normed = norm(x).detach()
    norm.taper.taper_updates.fill_(1)
    linear = norm.eval()(x).detach()
    theirs = np.linalg.lstsq((x * norm.affine.gain.detach()).reshape(-1, 1).numpy(), normed.flatten().numpy())[0]
    torch.testing.assert_close(linear, x * norm.affine.gain.detach() * theirs[0], atol=1e-12, rtol=0)


def tapers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Taper)]


@pytest.mark.parametrize(
    ("overrides", "count"),
    [(["placement=pre"], 4), (["placement=peri", "model.qk_norm=head"], 12), (["placement=resi_dual"], 4)],
)
def test_the_norm_before_the_output_matrix_stays(overrides: list[str], count: int) -> None:
    model = build_model(config_of(*BLOCKS, *overrides, "model.depth=2"), 16)
    assert len(tapers(model)) == count
    assert tapers(model.head) == []


def test_a_tapered_block_reads_no_statistics_of_tokens() -> None:
    """The sub-layers' inputs are then proportional to the stream; the logits are still those of a bounded vector."""
    model = build_model(config_of(*BLOCKS, "placement=pre", "model.depth=1"), 16).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("taper_updates"):
            buffer.fill_(1)
    block: Any = model.blocks[0]
    norm, close = block.wiring.attn.norms["in"], model.head.close
    assert close is not None
    x = torch.randn(4, model.embed.tokens.weight.shape[1])
    torch.testing.assert_close(norm(3 * x), 3 * norm(x))
    torch.testing.assert_close(close(3 * x), close(x), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["norm.taper_warmup=5"], "norm.taper_warmup=5: has no effect with norm.taper_steps=null; leave it out"),
        (["norm.taper_steps=5", "norm.compute=input"], "norm.compute=input: norm.taper_steps is measured and"),
        (["norm.taper_steps=0"], "norm.taper_steps"),
    ],
)
def test_options_that_contradict(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        compose_run(["norm=rmsnorm", *overrides])


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["train.steps=120"], ""),
        (["train.steps=119"], "norm=rmsnorm: changes until update 120, and train.steps=119"),
        (
            ["train.steps=120", "placement=post"],
            "norm=rmsnorm: after its taper nothing bounds the logits, because placement=post",
        ),
        (["train.steps=120", "placement=post", "placement.final_norm=true"], ""),
    ],
)
def test_warnings(overrides: list[str], warning: str) -> None:
    found = compose_run(["norm=rmsnorm", "norm.taper_steps=20", "placement=pre", *overrides]).warnings()
    assert [line[: len(warning)] for line in found] == [warning] * bool(warning)
