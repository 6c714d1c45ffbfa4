"""A model against its placement's formula, and whether it sees later tokens.

Shapes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normlab.config import RunConfig
from normlab.model.gpt import GPT
from normlab.placements.algebra import AlgebraPlacement
from normlab.verify.by_hand import ByHand, Mismatch
from normlab.verify.check import Check, Worst
from normlab.verify.small import BATCH, TIME, VOCAB, built, numbers, tokens

EXACT = 1e-9
"""Relative tolerance in float64, of a whole model's logits and gradients."""


def formula_check(config: RunConfig, of: str) -> Check:
    """Logits, and the gradient with respect to every parameter, are those of the placement's formula.

    Args:
        config: Small enough to be computed slowly.
        of: What the check is said to be of.
    """
    model, norms = built(config)
    worst = Worst(EXACT)
    # A row of the algebra is an identity of the algebra's own; a scheme that is a class of its own rests on itself.
    kind = "identity" if isinstance(config.placement, AlgebraPlacement) else "self"
    told = {"of": of, "check": f"computes {config.placement.formula}", "kind": kind}
    try:
        by_hand = ByHand(config, model, norms, tokens())
        pairs = _outcomes(model, by_hand)
    except Mismatch as error:
        return Check(**told, passed=False, seen=str(error))
    # Some gradients are zero but for rounding (keys' biases, to the softmax): they are held to the largest of all.
    largest = max(float(theirs.abs().max()) for _, _, theirs in pairs)
    for name, ours, theirs in pairs:
        scale = max(float(theirs.abs().max()), 1e-3 * largest)
        worst.add(float((ours - theirs).abs().max()) / scale, name)
    return Check(**told, passed=worst.passed, seen=str(worst))


def _outcomes(model: GPT, by_hand: ByHand) -> list[tuple[str, Tensor, Tensor]]:
    weight_BTV = numbers("cotangent", BATCH, TIME, VOCAB)
    params = dict(model.named_parameters())
    found = []
    for forward in (model, by_hand):
        logits_BTV = forward(tokens())
        grads = torch.autograd.grad((logits_BTV * weight_BTV).sum(), list(params.values()), allow_unused=True)
        # One that the formula does not use shows as a gradient that is not there.
        found.append([logits_BTV.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)])
    return list(zip(["the logits", *(f"the gradient of {name}" for name in params)], *found, strict=True))


def norms_check(config: RunConfig, of: str) -> Check:
    """There is a norm in the model just where the placement says so."""
    _, norms = built(config)
    says = config.placement.has_norms(config.model.depth)
    check = f"has {'norms' if says else 'no norm of the run'}"
    return Check(of=of, check=check, passed=bool(norms) == says, seen=f"{len(norms)} at depth {config.model.depth}")


def causality_check(config: RunConfig, of: str) -> Check:
    """In training mode, another token at the end moves no logit before it: unless the norm says that it does."""
    model, _ = built(config)
    causal = config.norm.causal
    check = "no logit moves with a later token" if causal else "later tokens are seen in training, as is said"
    first = tokens()
    last = first.clone()
    last[:, -1] = (last[:, -1] + 1) % VOCAB
    with torch.no_grad():
        difference = (logits_of(model, first) - logits_of(model, last))[:, :-1].abs().max().item()
    moved = difference > 1e-12
    return Check(of=of, check=check, passed=moved != causal, seen=f"largest change {difference:.1e}")


def evaluation_check(config: RunConfig, of: str) -> Iterator[Check]:
    """In evaluation the logits are those of training, to the last bit: but where the norm is another one then."""
    if config.norm.batch_statistics:
        return
    model, _ = built(config)
    with torch.no_grad():
        trained, evaluated = (logits_of(model, tokens(), training=training) for training in (True, False))
    difference = float((trained - evaluated).abs().max())
    check = "computes the same in evaluation"
    yield Check(of=of, check=check, passed=difference == 0, seen=f"largest difference {difference:.1e}")


def logits_of(model: nn.Module, tokens_BT: Tensor, *, training: bool = True) -> Tensor:
    """In training mode, if not told otherwise, buffers put back."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    logits_BTV = model.train(training)(tokens_BT)
    for name, buffer in before.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, buffer)
    return logits_BTV
