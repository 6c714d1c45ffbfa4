"""A padded output matrix changes no loss and no gradient, and its zero rows never reach the softmax."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from normlab.catalogue.statistics.statistic import CORE
from normlab.model import chunked_loss, gpt
from normlab.model.init import build_model
from normlab.model.instrument import select
from normlab.model.runner import ModelRunner, SingleRun, StackedRuns
from support.small_steps import config_of

VOCAB = 199
PADDED = 256
MODELS = {
    "tied": ["norm=layernorm"],
    "untied": ["norm=layernorm", "model.tie_embeddings=false"],
    "scaled logits": ["norm=none", "placement=ngpt", "model.tie_embeddings=false"],
}


class Widths(TorchDispatchMode):
    """Records the last axis of the results of matrix products, and of what enters a softmax over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[int] = set()
        self.softmax: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name()
        if name in ("aten::mm", "aten::addmm", "aten::bmm"):
            self.products.add(result.shape[-1])
        elif name == "aten::_log_softmax":
            self.softmax.add(args[0].shape[-1])
        return result


def results_of(runner: ModelRunner, widths: Widths | None = None) -> dict[str, torch.Tensor]:
    """Return the loss, all gradients and the statistics of the logits; `widths` records."""
    shape = (*runner.run_shape, 3, 17)
    text = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(0))
    selection = select(config_of().stats.names(CORE) | {"logz", "logit_mean", "logit_absmax"})
    with widths or nullcontext():  # torch compiles nothing under a mode
        output = runner.loss(text[..., :-1], text[..., 1:], selection)
        grads = torch.autograd.grad(output.loss.sum(), list(runner.params.values()), materialize_grads=True)
    last = max(column.layer for column in output.statistics)
    statistics = {f"{column}": value for column, value in output.statistics.items() if column.layer == last}
    assert statistics
    return statistics | {"loss": output.loss} | dict(zip(runner.params, grads, strict=True))


@pytest.mark.few(3)
@pytest.mark.parametrize("chunk", [7 * VOCAB, 2**26], ids=["chunks", "at once"])
@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(name: str, runs: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "LARGE_LOGITS", chunk)
    models = [build_model(config_of(*MODELS[name], f"seed={seed}"), VOCAB).double() for seed in range(runs)]
    runner = SingleRun(models[0], compiled=False) if runs == 1 else StackedRuns(models, compiled=False)
    runner.train(True)
    plain = results_of(runner, widths := Widths())
    assert PADDED not in widths.products
    monkeypatch.setattr(gpt, "padding_of", lambda weight: -len(weight) % 64)
    padded = results_of(runner, widths := Widths())
    assert PADDED in widths.products
    assert widths.softmax == {VOCAB}
    torch.testing.assert_close(padded, plain, rtol=1e-12, atol=1e-12)
    assert all(padded[name].shape == p.shape for name, p in runner.params.items())


@pytest.mark.parametrize(
    ("device", "rows", "padding"),
    [("cpu", 50_257, 0), ("cuda", 50_257, 47), ("cuda", 50_304, 0), ("cuda", 257, 0), ("cuda", 128_256, 0)],
)
def test_only_large_matrices_on_a_gpu_are_padded(device: str, rows: int, padding: int) -> None:
    class Weight:
        is_cuda = device == "cuda"

        def __len__(self) -> int:
            return rows

    assert gpt.padding_of(Weight()) == padding  # pyright: ignore[reportArgumentType]
