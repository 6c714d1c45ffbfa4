"""The z-loss: its gradient is that of the written sum, and the loss is without it; alone, packed, in chunks."""

import copy

import pytest
import torch

from normlab.config.compose import compose_run
from normlab.model import chunked_loss
from normlab.model.init import build_model
from normlab.model.runner import SingleRun, StackedRuns

VOCAB, Z = 24, 0.3


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_gradient_is_that_of_the_written_sum_and_the_loss_is_without_it(
    stacked: bool, chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose_run(["model=gpt2_nano", "model.context=8", f"model.z_loss={Z}", "model.logit_softcap=4"])
    models = [build_model(config, VOCAB).double() for _ in range(1 + stacked)]
    if chunked:
        monkeypatch.setattr(chunked_loss, "LARGE_LOGITS", VOCAB * 5)
    plain = copy.deepcopy(models[0])
    drawn = torch.randint(VOCAB, (2, 3, 8), generator=torch.Generator().manual_seed(0))
    tokens, targets = drawn
    logits = plain(tokens).flatten(0, 1)
    assert logits.abs().max() < 4
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
    (loss + Z * logits.logsumexp(-1).square().mean()).backward()
    runner = StackedRuns(models, compiled=False) if stacked else SingleRun(models[0], compiled=False)
    if stacked:
        tokens, targets = tokens.expand(2, -1, -1), targets.expand(2, -1, -1)
    found = runner.loss(tokens, targets).loss
    torch.testing.assert_close(found, loss.detach().expand_as(found), atol=1e-12, rtol=1e-12)
    gradients = torch.autograd.grad(found.sum(), list(runner.params.values()))
    for name, gradient in zip(runner.params, gradients, strict=True):
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(gradient[-1] if stacked else gradient, expected, atol=1e-12, rtol=1e-10)
