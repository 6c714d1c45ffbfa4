"""Every core statistic against a reference implementation: single, accumulated, stacked and compiled."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from normlab.catalogue.statistics.profiles import StatisticColumn
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.catalogue.statistics.statistic import CORE
from normlab.config.memory import STACK_BYTES
from normlab.model.instrument import Observation, select
from normlab.model.statistics import compute
from support.measured_steps import case

MEASURED = {name for name, entry in STATISTICS.items() if entry.tier == CORE and entry.derive is None}


@pytest.mark.few(3)
@pytest.mark.parametrize("runs", [1, 3], ids=["single", "stacked"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
def test_every_statistic_equals_the_reference(placement: str, accumulation: int, runs: int, dtype: torch.dtype) -> None:
    setup = case(placement, runs, "norm=layernorm", dtype=dtype, accumulation=accumulation)
    compare(setup.measured(3), setup.expected(3, placement), 1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("runs", [1, 3], ids=["single", "stacked"])
def test_statistics_of_layers_that_do_not_fit_into_one_stack_are_the_same(
    runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = case("peri", runs, "norm=layernorm", accumulation=2)
    together = setup.measured(2)
    monkeypatch.setitem(STACK_BYTES, "cpu", 1)
    compare(setup.measured(2), together, 1e-14)


def test_norms_of_autocast_tensors_equal_those_of_their_values() -> None:
    """Tensors of several dtypes are in one stack, in float32."""
    tensors = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    tensors[1] = tensors[1].bfloat16()
    selection = select(frozenset({"resid_rms", "resid_absmax"}))
    observations = [Observation("resid", "", (x,), layer) for layer, x in enumerate(tensors)]
    found = compute(selection, observations, together=True)
    for layer, x in enumerate(tensors):
        rms, largest = (found[StatisticColumn(name, "", layer)].item() for name in ("resid_rms", "resid_absmax"))
        assert rms == pytest.approx(x.double().square().mean().item(), rel=1e-6)
        assert largest == x.abs().max().item()


def test_statistics_of_a_pass_in_autocast_are_those_of_its_tensors() -> None:
    """Their products of matrices are not rounded to bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x_BTD = torch.randn(2, 9, 8, generator=generator).bfloat16()
    q_BHTK, k_BHTK = torch.randn(2, 2, 2, 9, 4, generator=generator).bfloat16()
    of = {"resid": (x_BTD,), "norm": (x_BTD, 2 * x_BTD), "attention": (q_BHTK, k_BHTK, 0.5)}
    observations = [Observation(kind, "", tensors, 1) for kind, tensors in of.items()]
    selection = select(frozenset(name for name, entry in STATISTICS.items() if entry.of in of and entry.value))
    for together in (False, True):
        expected = compute(selection, observations, together=together)
        with torch.autocast("cpu", torch.bfloat16):
            found = compute(selection, observations, together=together)
        assert len(found) > 3
        assert all(torch.equal(found[column], value) for column, value in expected.items())


@pytest.mark.parametrize("runs", [1, 3], ids=["single", "stacked"])
@pytest.mark.parametrize("placement", ["mhc", "resi_dual"])
def test_statistics_of_streams_are_those_of_each_stream(placement: str, runs: int) -> None:
    setup = case(placement, runs, "stats.tiers=[]", "stats.also=[stream_rms,stream_cos]")
    tokens, _ = setup.batch(0)
    for found, model, of_run in zip(setup.measured(1), setup.models(), tokens, strict=True):
        stream, expected = model.embed(of_run), dict[Any, float]()
        for layer, segment in enumerate([*model.blocks, model.head], start=1):
            streams = stream.unbind(2) if isinstance(stream, torch.Tensor) else stream
            total = sum(streams[1:], start=streams[0])
            for number, x in enumerate(streams):
                cosine = torch.nn.functional.cosine_similarity(x, total, dim=-1)
                expected["stream_rms", str(number), layer] = x.square().mean().sqrt().item()
                expected["stream_cos", str(number), layer] = cosine.mean().item()
            stream = segment(stream)
        assert len(expected) == 2 * 4 * (4 if placement == "mhc" else 2)
        compare([found], [expected], 1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize("runs", [1, 3], ids=["single", "stacked"])
def test_every_compiled_statistic_equals_the_reference(runs: int) -> None:
    torch.compiler.reset()
    setup = case(
        "peri", runs, "norm=rmsnorm", "norm.unit_offset=true", dtype=torch.float32, accumulation=4, compiled=True
    )
    compare(setup.measured(2), setup.expected(2, "peri"), 1e-5)


def compare(found: Sequence[dict[Any, float]], expected: Sequence[dict[Any, float]], tolerance: float) -> None:
    for values, references in zip(found, expected, strict=True):
        assert values.keys() == references.keys()
        for name in {key[0] for key in references}:
            # Relative to the statistic's largest value: the mean of values around 0 has their rounding error.
            largest = max(abs(value) for key, value in references.items() if key[0] == name)
            for key in (key for key in references if key[0] == name):
                slack = tolerance * min(largest, 1)
                if name == "update_norm" and tolerance > 1e-6:  # the updated weight is rounded too
                    slack += 1.2e-7 * references["param_norm", *key[1:]]
                assert values[key] == pytest.approx(references[key], rel=tolerance, abs=slack), key
