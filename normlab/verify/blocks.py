"""Check a small model against its placement's formula, and which logits later tokens change.

Shapes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from normlab.model.small import BATCH, TIME, VOCAB, SmallModel, hashed_numbers, restored_buffers, tokens
from normlab.placements.algebra import AlgebraPlacement
from normlab.verify.check import Check, LargestError
from normlab.verify.reference_model import FormulaMismatch, ReferenceModel, record_norm_order

TOLERANCE = 1e-9
"""Relative, in float64, for the logits and gradients of a complete model."""


def formula_check(small: SmallModel, subject: str) -> Check:
    """Check that the logits and every parameter's gradient are those of the placement's formula."""
    placement, model = small.config.placement, small.gpt
    # A row of the algebra is an identity of the algebra; any other placement is compared with its own formula.
    oracle = "identity" if isinstance(placement, AlgebraPlacement) else "self"
    claim = f"computes {placement.formula}"
    with record_norm_order(model, small.norms) as norm_order:
        model_results = _logits_and_gradients(model.train(), model)
    try:
        expected = _logits_and_gradients(ReferenceModel(small.config, model, norm_order), model)
    except FormulaMismatch as error:
        return Check(subject=subject, claim=claim, oracle=oracle, passed=False, result=str(error))
    largest = LargestError(TOLERANCE)
    # Some gradients are zero up to rounding (key biases, which the softmax cancels): their scale is the largest one's.
    least_scale = 1e-3 * max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        scale = max(float(value.abs().max()), least_scale)
        largest.add(float((model_results[name] - value).abs().max()) / scale, name)
    return largest.check(subject, claim, oracle)


def _logits_and_gradients(forward: Callable[[Tensor], Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the logits and the gradient of a fixed weighted sum of them for each parameter, zero where unused."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    logits_BTV = forward(tokens())
    loss = (logits_BTV * hashed_numbers("cotangent", BATCH, TIME, VOCAB)).sum()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    filled = (torch.zeros(()) if gradient is None else gradient for gradient in gradients)
    named = zip((f"the gradient of {name}" for name in names), filled, strict=True)
    return {"the logits": logits_BTV.detach(), **dict(named)}


def norms_check(small: SmallModel, subject: str) -> Check:
    """Check that the model has a norm exactly if the placement declares one."""
    declared = small.config.placement.has_norms(small.config.model.depth)
    claim = f"has {'norms' if declared else 'no norm of the run'}"
    result = f"{len(small.norms)} at depth {small.config.model.depth}"
    return Check(subject=subject, claim=claim, passed=bool(small.norms) == declared, result=result)


@torch.no_grad()
def logits_checks(small: SmallModel, subject: str) -> Iterator[Check]:
    """Check which logits depend on later tokens, and that evaluation equals training, as the norm declares.

    In training another last token changes an earlier logit only with a norm that is not causal. Logits in evaluation
    equal those in training bit for bit, unless the norm has batch statistics.
    """
    norm = small.config.norm
    claim = "no logit depends on a later token" if norm.causal else "logits depend on later tokens in training"
    before, after = tokens(), tokens()
    after[:, -1] = (after[:, -1] + 1) % VOCAB
    logits = _logits_of(small.gpt, before)
    change = float((logits - _logits_of(small.gpt, after))[:, :-1].abs().max())
    passed = (change > 1e-12) != norm.causal
    yield Check(subject=subject, claim=claim, passed=passed, result=f"largest change {change:.1e}")
    if not norm.batch_statistics:
        change = float((logits - _logits_of(small.gpt, before, training=False)).abs().max())
        claim = "computes the same in evaluation"
        yield Check(subject=subject, claim=claim, passed=change == 0, result=f"largest difference {change:.1e}")


def _logits_of(model: nn.Module, tokens_BT: Tensor, *, training: bool = True) -> Tensor:
    """Return the logits in training or evaluation mode, and leave the buffers unchanged."""
    with restored_buffers(model):
        return model.train(training)(tokens_BT)
