"""The chunked loss against torch's loss of all logits: values, gradients, statistics, and the size of its tensors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normlab.catalogue.statistics.statistic import CORE
from normlab.model import chunked_loss
from normlab.model.attention import attend, sdpa
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.model.instrument import select
from normlab.model.runner import ModelRunner, SingleRun, StackedRuns, attention_by
from support.small_steps import config_of

VOCAB, BATCH, TIME = 199, 3, 16
ALL_LOGITS = VOCAB * BATCH * TIME
MODELS = {
    "tied": ["norm=layernorm", "model.tie_embeddings=true"],
    "untied": ["norm=layernorm", "model.tie_embeddings=false"],
    "scaled logits": ["norm=none", "placement=ngpt", "model.tie_embeddings=false"],
    "batch norm": ["norm=batchnorm"],
    "two streams": ["norm=rmsnorm", "placement=resi_dual"],
}
Values = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7 tokens, which do not divide the 48 tokens of a batch."""
    monkeypatch.setattr(chunked_loss, "LARGE_LOGITS", 7 * VOCAB)
    torch.compiler.reset()  # torch compiles a function for eight models at most


def models_of(name: str, runs: int = 1) -> list[GPT]:
    return [build_model(config_of(*MODELS[name], f"seed={seed}"), VOCAB).double() for seed in range(runs)]


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(VOCAB, (*shape, BATCH, TIME + 1), generator=torch.Generator().manual_seed(0))
    return text[..., :-1], text[..., 1:]


def plain_loss(model: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, Values]:
    """Return the loss and the gradients of the model's own logits, by torch."""
    model = copy.deepcopy(model).train()
    loss = F.cross_entropy(model(tokens).flatten(0, 1).to(torch.float64), targets.flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients(runner: ModelRunner, loss: torch.Tensor) -> Values:
    grads = torch.autograd.grad(loss.sum(), list(runner.params.values()), materialize_grads=True)
    return dict(zip(runner.params, grads, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["eager", "compiled"]
)
def test_loss_and_gradients_of_a_single_run(name: str, compiled: bool) -> None:
    (model,), (tokens, targets) = models_of(name), batch()
    runner = SingleRun(copy.deepcopy(model), compiled=compiled)
    runner.train(True)
    loss, (expected, expected_grads) = runner.loss(tokens, targets).loss, plain_loss(model, tokens, targets)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    for parameter, grad in gradients(runner, loss).items():
        torch.testing.assert_close(
            grad, expected_grads[parameter], atol=1e-10, rtol=0, msg=lambda m, n=parameter: n + m
        )
    with torch.no_grad():
        torch.testing.assert_close(runner.loss(tokens, targets).loss, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["eager", "compiled"]
)
def test_loss_and_gradients_of_stacked_runs(name: str, compiled: bool) -> None:
    models, (tokens, targets) = models_of(name, 3), batch(3)
    pack = StackedRuns(copy.deepcopy(models), compiled=compiled)
    pack.train(True)
    losses = pack.loss(tokens, targets).loss
    grads = gradients(pack, losses)
    for r, model in enumerate(models):
        expected, expected_grads = plain_loss(model, tokens[r], targets[r])
        torch.testing.assert_close(losses[r], expected, atol=1e-10, rtol=0)
        for parameter, grad in expected_grads.items():
            torch.testing.assert_close(grads[parameter][r], grad, atol=1e-10, rtol=0)


@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["eager", "compiled"]
)
def test_measured_pass(stacked: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics and tapped gradients are those of all logits at once; the loss is that of a plain pass."""
    selection = select(config_of().stats.names(CORE) | {"logz", "logz2", "logit_mean", "logit_absmax"})
    results = []
    for limit in (7 * VOCAB, ALL_LOGITS):
        monkeypatch.setattr(chunked_loss, "LARGE_LOGITS", limit)
        models, (tokens, targets) = models_of("tied", 2), batch(*[2] * stacked)
        use = compiled and limit < ALL_LOGITS
        runner = StackedRuns(models, compiled=use) if stacked else SingleRun(models[0], compiled=use)
        runner.train(True)
        output = runner.loss(tokens, targets, selection, taps=True)
        values = {column: v for column, v in output.statistics.items() if column.layer == len(runner.model.blocks) + 1}
        results.append((values, torch.autograd.grad(output.loss.sum(), output.taps)))
        if not use:
            torch.testing.assert_close(output.loss, runner.loss(tokens, targets).loss, atol=0, rtol=0)
    assert {"logz", "logz2", "logit_mean", "logit_absmax"} <= {column.statistic for column in results[0][0]}
    torch.testing.assert_close(*results, atol=1e-10, rtol=0)


@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
def test_bf16_autocast(stacked: bool) -> None:
    """In bfloat16 the chunks differ from all logits at once by less than bfloat16 does from float64."""
    models, (tokens, targets) = models_of("tied", 2), batch(*[2] * stacked)
    halves = [copy.deepcopy(model).float() for model in models]
    runner = StackedRuns(halves, compiled=False) if stacked else SingleRun(halves[0], compiled=False)
    runner.train(True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = runner.loss(tokens, targets).loss
    assert loss.dtype == torch.float32
    grads = gradients(runner, loss)
    for r, model in enumerate(models if stacked else models[:1]):
        one = (tokens[r], targets[r]) if stacked else (tokens, targets)
        (exact_loss, exact), half = plain_loss(model, *one), copy.deepcopy(model).float()
        with attention_by(half, attend if stacked else sdpa), torch.autocast("cpu", torch.bfloat16):
            rounded_loss, rounded = plain_loss(half, *one)
        torch.testing.assert_close((loss[r] if stacked else loss).double(), rounded_loss, atol=1e-5, rtol=0)
        assert (rounded_loss - exact_loss).abs() < 1e-2
        for name, grad in grads.items():
            assert grad.dtype == torch.float32
            error = (grad[r] if stacked else grad).double() - rounded[name]
            assert error.norm() <= (rounded[name].double() - exact[name]).norm() + 1e-9, name


class Sizes(TorchDispatchMode):
    """Records the number of values of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(x.numel() for x in tree_leaves(output) if isinstance(x, torch.Tensor))])
        return output


@pytest.mark.parametrize(("limit", "exists"), [(7 * VOCAB, False), (ALL_LOGITS, True)], ids=["chunked", "at once"])
@pytest.mark.parametrize("runs", [1, 2])
def test_tensors_of_all_logits_do_not_exist(
    limit: int, exists: bool, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "LARGE_LOGITS", limit)
    models = models_of("tied", runs)
    runner = SingleRun(models[0], compiled=False) if runs == 1 else StackedRuns(models, compiled=False)
    with Sizes() as sizes:
        gradients(runner, runner.loss(*batch(*runner.run_shape)).loss)
    largest_state = runs * max(p.numel() for p in models[0].parameters())
    assert (sizes.largest >= runs * ALL_LOGITS) == exists
    assert exists or sizes.largest <= max(largest_state, limit)
