"""Statistics with a known value."""

import math

import pytest
import torch

from normlab.catalogue.statistics.registry import STATISTICS
from normlab.model.init import build_model
from normlab.model.instrument import Collector, observe, select
from normlab.model.statistics import compute
from normlab.model.views import View
from normlab.training.optim import hyperparameters_at
from support.measured_steps import VOCAB, case

WIDTH = 4096
NAMES = frozenset(STATISTICS)


def of_stream(x: torch.Tensor) -> dict[str, float]:
    with Collector(select(NAMES)) as collector:
        observe("resid", "", x)
    values = compute(collector.selection, collector.observations)
    statistics = {column.statistic: value.item() for column, value in values.items()}
    return statistics | {"resid_rms": math.sqrt(statistics["resid_rms"])}  # merged as its square


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_a_gaussian_has_kurtosis_3_and_uniform_energy_1() -> None:
    statistics = of_stream(3 * gaussian(64, 32, WIDTH))
    assert statistics["resid_rms"] == pytest.approx(3, rel=1e-3)
    assert statistics["resid_kurt"] == pytest.approx(3, rel=1e-3)  # 3 - 6 / (D + 2), and its deviation is 0.002
    assert statistics["resid_uniform"] == pytest.approx(1, abs=4 * math.sqrt(2 / (64 * 32)))
    assert statistics["resid_nonfinite"] == 0


def test_single_channel_has_kurtosis_d_and_ones_have_uniform_energy_d() -> None:
    one_hot = torch.zeros(2, 3, WIDTH)
    one_hot[..., 7] = -5
    statistics = of_stream(one_hot)
    assert statistics["resid_kurt"] == pytest.approx(WIDTH)
    assert statistics["resid_absmax"] == 5
    assert statistics["resid_uniform"] == pytest.approx(1)
    assert of_stream(torch.full((2, 3, WIDTH), -0.1))["resid_uniform"] == pytest.approx(WIDTH, rel=1e-5)


@pytest.mark.parametrize("size", [1e-15, 1e-8, 1e8, 1e15])
def test_ratios_do_not_depend_on_size(size: float) -> None:
    x = gaussian(4, 8, 64)
    plain, scaled = of_stream(x), of_stream(x * size)
    for name in ("resid_kurt", "resid_uniform", "neuron_kurt", "part_ratio", "token_cos"):
        assert scaled[name] == pytest.approx(plain[name], rel=1e-4), name
    assert View(x * size).cosine(View(x * size)).tolist() == [[pytest.approx(1, rel=1e-5)] * 8] * 4


def test_zeros_have_zero_statistics_and_nonfinite_tokens_are_counted() -> None:
    zeros = torch.zeros(2, 3, 8)
    assert set(of_stream(zeros).values()) == {0}
    assert View(zeros).cosine(View(zeros)).abs().max() == 0
    broken = torch.ones(2, 5, 8)
    broken[0, 0, 0], broken[1, 2, 3], broken[1, 3, 3] = math.nan, math.inf, -math.inf
    assert of_stream(broken)["resid_nonfinite"] == pytest.approx(0.3)


def test_orthogonal_and_opposite_vectors() -> None:
    x, y = torch.eye(8)[None, :1], torch.eye(8)[None, 1:2]
    for after, cosine in ((x, 1), (y, 0), (-3 * x, -1), (x + y, math.sqrt(0.5))):
        assert View(x).cosine(View(after)).item() == pytest.approx(cosine, abs=1e-6)


@pytest.mark.parametrize("placement", ["post", "peri"])
def test_stream_rms_at_initialisation_follows_the_placement(placement: str) -> None:
    """It equals the gain with post-norm, and grows as the root of 2 per block with peri-norm."""
    runs = case(placement, 1, "model.depth=24", "model.width=64", "model.context=32", "norm=rmsnorm")
    model = build_model(runs.configs[0], VOCAB).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if placement == "post" and name.endswith("gain"):
                p.fill_(1.5)
    statistics = step_statistics(runs, model)
    sizes = [statistics["resid_rms", "", layer] for layer in range(1, 26)]
    if placement == "post":
        assert sizes[1:] == pytest.approx([1.5] * 24, rel=1e-3)
    else:
        assert sizes[1:] == pytest.approx([math.sqrt(2 * block) for block in range(1, 25)], rel=0.1)
        assert [statistics["attn_rms", "", layer] for layer in range(1, 25)] == pytest.approx([1.0] * 24, rel=1e-2)


def step_statistics(runs, model) -> dict:
    step = runs.step_of([model])
    tokens, targets = runs.batch(0)
    out = step(tokens[0], targets[0], [hyperparameters_at(runs.configs[0].optim, 50, 0)], measured=True)
    return dict(zip(map(tuple, out.measured.columns), out.measured.values.tolist(), strict=True))
