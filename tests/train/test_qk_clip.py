"""QK-Clip: the largest score of each head after an update, against scores computed here; where it has no effect."""

import pytest
import torch
from torch import Tensor

from normlab.base.errors import ConfigError
from normlab.model.attention import attend
from normlab.model.gpt import GPT
from normlab.model.init import build_model
from normlab.model.runner import SingleRun, attention_by
from normlab.training.optim import hyperparameters_at
from support.small_steps import VOCAB, config_of, cyclic_batch, step_of


def largest_scores(model: GPT, tokens: Tensor) -> Tensor:
    """Return the largest scaled product of a query and an earlier key, for each block and head, (L, H)."""
    largest: list[Tensor] = []

    def record(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        products = torch.einsum("bhtk,bhsk->bhts", q, k) * scale
        earlier = torch.ones(q.shape[-2], k.shape[-2]).tril() > 0
        largest.append(products[:, :, earlier].amax((0, 2)))
        return attend(q, k, v, scale)

    with torch.no_grad(), attention_by(model, record):
        model(tokens)
    return torch.stack(largest)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("overrides", [(), ("model=llama_nano", "placement=post")], ids=["gpt2", "llama"])
def test_heads_above_the_limit_are_scaled_down_to_it(overrides: tuple[str, ...], accumulation: int) -> None:
    tokens, targets = (x[0] for x in cyclic_batch(torch.Generator().manual_seed(0), 1))
    options = (*overrides, "model.depth=3", "init=xavier", "optim.lr=1e-30")
    before = largest_scores(build_model(config_of(*options), VOCAB).double(), tokens)
    low, high = before.flatten().sort().values[before.numel() // 2 - 1 :][:2]
    limit = ((low + high) / 2).item()  # no score, which rounding would put on either side
    config = config_of(*options, f"optim.qk_clip={limit}")
    runner = SingleRun(build_model(config, VOCAB).double(), compiled=False)
    old = {name: p.detach().clone() for name, p in runner.params.items()}
    step = step_of(config, runner)
    step.accumulation = accumulation
    step(tokens, targets, [hyperparameters_at(config.optim, 50, 0)])
    after = largest_scores(runner.model, tokens)
    # The input of the first block does not depend on the scores; that of the others does.
    torch.testing.assert_close(after[0], before[0].clamp(max=limit), atol=1e-12, rtol=1e-12)
    changed = {name for name, p in runner.params.items() if (p - old[name]).abs().max() > 1e-20}
    leaves = {name.split(".attn.")[-1].partition(".")[0] for name in changed}
    assert leaves == {"q", "k"}
    clipped_blocks = {int(name.split(".")[1]) for name in changed}
    assert clipped_blocks == set((before > limit).any(1).nonzero().flatten().tolist())


@pytest.mark.parametrize("override", ["model.qk_norm=head", "placement=hybridnorm", "placement=ngpt norm=none"])
def test_normalised_queries_have_no_effect(override: str) -> None:
    with pytest.raises(ConfigError, match=r"optim\.qk_clip=100\.0: has no effect with"):
        config_of("optim.qk_clip=100", *override.split())
