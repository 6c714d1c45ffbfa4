"""The extended statistics against slow reference implementations and known values."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.statistics.profiles import Layout, Profiles, StatisticColumn
from normlab.catalogue.statistics.registry import STATISTICS, values_of
from normlab.catalogue.statistics.statistic import EXTENDED
from normlab.model import attention
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.training.measure import extended
from normlab.training.measure.extended import ExtendedPass, gradient_noise
from normlab.training.optim import coefficients_of, hyperparameters_at
from support.cadences import CADENCES, bits, trained
from support.measured_steps import VOCAB, case
from support.reference_statistics import where

NAMES = frozenset(name for name, entry in STATISTICS.items() if entry.tier == EXTENDED and entry.derive is None)


def extended_statistics(
    placement: str, *overrides: str, steps: int = 2, independent: bool = True
) -> tuple[dict[Any, float], GPT, Any]:
    """Return the extended statistics of a model after some steps, the model, and the optimiser."""
    (measured,), (model,), optimizer = extended_statistics_of_runs(
        placement, 1, *overrides, steps=steps, independent=independent
    )
    return measured, model, optimizer


def extended_statistics_of_runs(
    placement: str, count: int, *overrides: str, steps: int = 2, independent: bool = True
) -> tuple[list[dict[Any, float]], list[GPT], Any]:
    """Return the extended statistics of each run after some steps, the models in their state, and the optimiser."""
    runs = case(placement, count, *overrides)
    models = runs.models()
    step = runs.step_of(models)
    for number in range(steps):
        tokens, targets = (x.expand(count, -1, -1) for x in case(placement, 1, *overrides).batch(number))
        hypers = [hyperparameters_at(config.optim, 50, number) for config in runs.configs]
        if count == 1:
            step(tokens[0], targets[0], hypers)
        else:
            step(tokens, targets, coefficients_of([hypers], number + 1))
    tokens, targets = batch(placement, *overrides)
    options = [config.optim for config in runs.configs]
    extended_pass = ExtendedPass(step.runner, NAMES, tokens, targets, step.optimizer, options, independent=independent)
    state = step.runner.params | step.runner.buffers
    before = copy.deepcopy({name: tensor.detach() for name, tensor in state.items()})
    measurement = extended_pass(steps)
    after = step.runner.params | step.runner.buffers
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    for index, model in enumerate(models if count > 1 else ()):
        single = build_model(runs.configs[index], VOCAB).double()
        single.load_state_dict({name: tensor[index] for name, tensor in before.items()}, strict=False)
        models[index] = single.train(model.training)
    values = measurement.values.reshape(-1, count).T.tolist()
    return [dict(zip(map(tuple, measurement.columns), run, strict=True)) for run in values], models, step.optimizer


def batch(placement: str, *overrides: str) -> tuple[Tensor, Tensor]:
    tokens, targets = case(placement, 1, *overrides).batch(99)
    return tokens[0, :5], targets[0, :5]


@pytest.mark.parametrize(
    "overrides",
    [(), ("model.qk_norm=head", "model.positions=rope"), ("model.attn_softcap=0.1",)],
    ids=["plain", "qk", "softcap"],
)
def test_attention_statistics_equal_a_loop_over_queries(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, model, _ = extended_statistics("pre", "norm=rmsnorm", *overrides)
    tokens, _ = batch("pre")
    calls: list[tuple[Tensor, Tensor, float]] = []
    cap = (lambda z: 0.1 * torch.tanh(z / 0.1)) if "model.attn_softcap=0.1" in overrides else (lambda z: z)
    real, with_softcap = nn.functional.scaled_dot_product_attention, attention.attend

    def listening(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        calls.append((q.detach(), k.detach(), scale))
        return real(q, k, v, is_causal=is_causal, scale=scale)

    def listening_with_softcap(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float) -> Tensor:
        calls.append((q.detach(), k.detach(), scale))
        return with_softcap(q, k, v, scale, softcap)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", listening)
    monkeypatch.setattr(attention, "attend", listening_with_softcap)
    model(tokens)
    for place, (q, k, scale) in enumerate(calls, start=1):
        largest, entropies, sinks = -math.inf, [], []
        examples, heads, length, _ = q.shape
        for head in range(heads):
            of_head = []
            for example in range(examples):
                for query in range(length):
                    z = cap(scale * k[example, head, : query + 1] @ q[example, head, query])
                    p = z.exp() / z.exp().sum()
                    largest = max(largest, z.max().item())
                    of_head.append(-(p * p.log()).sum().item())
                    if query:
                        sinks.append(p[0].item())
            entropies.append(sum(of_head) / len(of_head))
        expected = {
            "attn_logit_max": largest, "attn_entropy": sum(entropies) / heads, "attn_entropy_min": min(entropies),
            "attn_sink": sum(sinks) / len(sinks),
        }  # fmt: skip
        for name, value in expected.items():
            assert measured[name, "", place] == pytest.approx(value, rel=1e-9), name


def test_the_stream_and_the_hidden_activations_equal_their_formulas() -> None:
    measured, model, _ = extended_statistics("peri", "norm=rmsnorm")
    tokens, _ = batch("peri")
    blocks: list[Any] = list(model.blocks)
    streams, hidden = [], []
    handles = [part.register_forward_pre_hook(lambda m, a: streams.append(a[0])) for part in (*blocks, model.head)]
    handles += [b.mlp.down.register_forward_pre_hook(lambda m, a: hidden.append(a[0])) for b in blocks]
    model(tokens)
    for handle in handles:
        handle.remove()
    for place, x in enumerate(streams, start=1):
        flat = x.detach().flatten(0, 1)
        count = len(flat)
        s = flat.square().mean(0).sqrt()
        cosines = nn.functional.cosine_similarity(flat[:, None], flat[None], dim=-1)
        values = torch.linalg.eigvalsh(torch.cov(flat.T, correction=0))
        expected = {
            "neuron_kurt": (s.pow(4).mean() / s.square().mean().square()).item(),
            "token_cos": ((cosines.sum() - cosines.trace()) / (count * (count - 1))).item(),
            "part_ratio": (values.sum().square() / values.square().sum()).item(),
        }
        for name, value in expected.items():
            assert measured[name, "", place] == pytest.approx(value, rel=1e-9), name
    for place, h in enumerate(hidden, start=1):
        mean = h.detach().abs().flatten(0, 1).mean(0)
        assert measured["dead_frac", "", place] == (mean < mean.mean() / 1000).double().mean().item()


@pytest.mark.few(3)
@pytest.mark.parametrize("limit", [extended.GRADIENT_NUMBERS, 1], ids=["together", "one by one"])
@pytest.mark.parametrize("overrides", [(), ("model=llama_nano", "model.qk_norm=head")], ids=["gpt2", "llama"])
@pytest.mark.parametrize("count", [1, 3], ids=["single", "stacked"])
def test_gradient_statistics_equal_a_loop_over_examples(
    count: int, overrides: tuple[str, ...], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extended, "GRADIENT_NUMBERS", limit)
    by_run, models, _ = extended_statistics_of_runs("pre", count, "norm=layernorm", *overrides)
    tokens, targets = batch("pre")
    for measured, model in zip(by_run, models, strict=True):
        rows = []
        for example in range(len(tokens)):
            loss = nn.functional.cross_entropy(model(tokens[example : example + 1])[0], targets[example])
            rows.append(torch.autograd.grad(loss, list(model.parameters())))
        depth, examples = len(model.blocks), len(tokens)
        for index, (name, p) in enumerate(model.named_parameters()):
            grads = torch.stack([row[index].flatten() for row in rows])
            mean = grads.mean(0)
            # The textbook's unbiased estimates of the covariance's trace and of the squared mean.
            trace = ((grads - mean).square().sum() / (examples - 1)).item()
            square = mean.square().sum().item() - trace / examples
            site, place = where(name, depth)
            # Relative to the trace: the squared mean is a difference.
            near: dict[str, Any] = {"rel": 1e-10, "abs": 1e-10 * trace + 1e-25}
            assert measured["gns_trace", site, place] == pytest.approx(trace, **near), name
            assert measured["gns_square", site, place] == pytest.approx(square, **near), name
            if p.dim() == 2:
                cosine = nn.functional.cosine_similarity(p.detach().flatten(), mean, dim=0).item()
                assert measured["radial_cos", site, place] == pytest.approx(cosine, rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize("norm", ["rmsnorm", "batchnorm"])
def test_statistics_of_stacked_runs_equal_those_of_each_run(norm: str) -> None:
    """Also with batch statistics, and with an optimiser that has averaged."""
    options = {"independent": norm != "batchnorm"}
    stacked, *_ = extended_statistics_of_runs("peri", 2, f"norm={norm}", **options)
    single, *_ = extended_statistics_of_runs("peri", 1, f"norm={norm}", **options)
    assert stacked[0].keys() == single[0].keys()
    for key, value in single[0].items():
        assert stacked[0][key] == pytest.approx(value, rel=1e-7, abs=1e-12), key
    assert stacked[0] != pytest.approx(stacked[1], rel=1e-3)


def test_the_noise_scale_is_a_ratio_of_means_and_not_a_mean_of_ratios() -> None:
    """Gradients of 8 examples with |G|^2 = 1 and tr(S) = 100: the noise scale is 100 examples."""
    generator = np.random.default_rng(0)
    steps, count, width = 2000, 8, 100
    mean = generator.normal(size=width)
    mean /= np.linalg.norm(mean)
    grads = mean + generator.normal(size=(steps, count, width)) * np.sqrt(100 / width)
    squares = torch.tensor((grads**2).sum(2).mean(1)), torch.tensor((grads.mean(1) ** 2).sum(1))
    trace, square = gradient_noise(*squares, count)
    layout, order = Layout.of([StatisticColumn("gns_trace", "w", 1), StatisticColumn("gns_square", "w", 1)], 1, {})
    values = torch.stack([trace, square], 1).numpy()[:, order]
    scale = values_of(Profiles(layout, np.arange(steps), values), "gns")["w"][:, 1]
    # Over the later 1000 steps the standard errors are 0.06 of |G|^2 and 0.17 of tr(S).
    assert scale[-1] == pytest.approx(100, rel=0.2)
    ratios = values[:, 0] / values[:, 1]
    assert (ratios < 0).mean() > 0.2
    assert abs(ratios.mean() - 100) > 50
    # Window by window, by numpy alone.
    expected = [values[stop // 2 : stop].mean(0) for stop in range(1, steps + 1)]
    expected = [trace / square if square > 0 else np.nan for trace, square in expected]
    np.testing.assert_allclose(scale, expected, rtol=1e-12)


def test_noise_scale_of_all_parameters_sums_over_them() -> None:
    columns = [StatisticColumn(name, site, 1) for name in ("gns_trace", "gns_square") for site in ("v", "w")]
    layout, order = Layout.of(columns, 1, {})
    scale = values_of(Profiles(layout, np.arange(2), np.array([[6.0, 2, 1, -1], [6, 2, 3, -1]])[:, order]), "gns")
    assert (scale["v"][1, 1], scale["all"][1]) == (2, 8 / 2)
    assert np.isnan([scale["w"][0, 1], scale["all"][0]]).all()  # |G|^2 is -1, and 0


def test_radial_cosines_are_zero_exactly_where_a_norm_follows_the_weight() -> None:
    """With a norm after the weight only eps depends on the weight's size; without one the loss depends on it."""
    peri, *_ = extended_statistics("peri", "norm=rmsnorm", "norm.eps=1e-12", "model.qk_norm=head")
    pre, *_ = extended_statistics("pre", "norm=rmsnorm")
    followed = {"attn.out.weight", "mlp.down.weight", "attn.q.weight", "attn.k.weight"}
    for (name, site, _), value in peri.items():
        if name == "radial_cos" and site in followed:
            assert abs(value) < 1e-9, site
        elif name == "radial_cos" and site.startswith(("attn", "mlp")) and site != "attn.v.weight":
            assert abs(value) > 1e-5, site
    assert all(abs(pre["radial_cos", site, place]) > 1e-5 for site in followed for place in (1, 2, 3))


def test_adam_statistics_equal_torch_adamw() -> None:
    """From the same state torch's AdamW moves a weight by lr times the measured update."""
    measured, model, optimizer = extended_statistics(
        "pre", "norm=rmsnorm", "model.bias=false", "optim.weight_decay=0", steps=4
    )
    for name, p in model.named_parameters():
        if p.dim() != 2 or not name.startswith("blocks."):
            continue
        weight = p.detach().clone().requires_grad_()
        other = torch.optim.AdamW([weight], lr=1.0, betas=(0.0, 0.0), eps=1e-8, weight_decay=0)
        # One step of a torch optimiser whose averages are set to ours, before they are averaged once more with 0.
        weight.grad = torch.zeros_like(weight)
        other.step()
        state, count = other.state[weight], optimizer.count.item()
        state["step"].fill_(count - 1)
        state["exp_avg"].copy_(optimizer.moments["mean"][name] / 0.9)
        state["exp_avg_sq"].copy_(optimizer.moments["square"][name] / 0.95)
        other.param_groups[0]["betas"] = (0.9, 0.95)
        before = weight.detach().clone()
        other.step()
        moved = (weight.detach() - before).square().mean().sqrt().item()
        site, place = where(name, len(model.blocks))
        assert measured["adam_rms", site, place] == pytest.approx(moved, rel=1e-6), name
        root = (optimizer.moments["square"][name] / (1 - 0.95**count)).sqrt()
        assert measured["adam_eps_frac", site, place] == (root < 1e-7).double().mean().item()


def test_norm_with_batch_statistics_has_no_per_example_statistics() -> None:
    measured, *_ = extended_statistics("pre", "norm=batchnorm", independent=False)
    assert not any(name.startswith("gns") for name, _, _ in measured)
    assert any(name == "radial_cos" for name, _, _ in measured)
    assert NORMS["batchnorm"].batch_statistics


@pytest.mark.parametrize("context", [1, 2, 300])
def test_statistics_are_finite_for_one_token_and_for_many(context: int) -> None:
    runs = case("pre", 1, f"model.context={context}")
    (model,) = runs.models()
    step = runs.step_of([model])
    step.optimizer.count.fill_(1)
    tokens = torch.randint(0, VOCAB, (2, context), generator=torch.Generator().manual_seed(0))
    measurement = ExtendedPass(step.runner, NAMES, tokens, tokens, step.optimizer, [runs.configs[0].optim])(1)
    values = dict(zip(map(tuple, measurement.columns), measurement.values.tolist(), strict=True))
    assert all(math.isfinite(value) for (name, _, _), value in values.items() if name != "adam_rms")
    if context == 1:
        assert values["attn_entropy", "", 1] == 0
        assert values["attn_sink", "", 1] == 1


def test_run_with_all_statistics_has_the_same_bits(tmp_path: Path) -> None:
    overrides = ("stats.tiers=[core,extended]", "stats.extended_every=7", "optim.lr=1e-2")
    folder = trained(tmp_path / "full", *overrides)
    assert bits(folder) == bits(trained(tmp_path / "never", *CADENCES["never"], "optim.lr=1e-2"))
    (first, closer), damaged = folder.statistics.read(EXTENDED)
    assert (first.steps.tolist(), closer.steps.tolist(), damaged) == ([0], [7, 14], 0)
    assert set(closer.names()) == NAMES
    assert NAMES - set(first.names()) == {"adam_rms", "adam_eps_frac"}  # nothing has been updated yet
