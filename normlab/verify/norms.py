"""A norm's module against its own `reference`, in three precisions and at the ends of the range.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normlab.norms.affine import Affine
from normlab.norms.base import NormConfig
from normlab.verify.check import Check, Worst
from normlab.verify.small import BATCH, TIME, WIDTHS, fill, numbers
from normlab.verify.variants import LABELS, allowed, called, others, variants

SCALES = (1.0, 1e-8, 1e4, 0.0)
"""What x is multiplied by."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of the largest number in the output, or in the gradient, of the reference in float64 on the same x."""


def norm_checks(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """Everything that is checked of one norm, alone."""
    yield from oracle_checks(norm, of, width)
    yield from rounding_check(norm, of, width)
    yield causality_check(norm, of, width)
    yield parameter_check(norm, of, width)
    yield from option_checks(norm, of, width)


def sequences(norm: NormConfig) -> int:
    """How many a norm is tried with: of a batch of two, its mean taken off, -1 and 1 are left whatever they were."""
    return BATCH + 1 if norm.batch_statistics else BATCH


def input_of(width: int, scale: float = 1.0, *, batch: int = BATCH, time: int = TIME) -> Tensor:
    """Tokens whose channels have a mean, shape (B, T, D), in float64."""
    return (numbers("x", batch, time, width) + 0.5) * scale


def module_of(norm: NormConfig, width: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The norm's module, its parameters not where they start; they stay in float32 under bfloat16, as in a run."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = norm.build(width)
    fill(module, "norm")
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.add_(0.3 * numbers(f"buffer/{name}", *buffer.shape).abs().to(buffer.dtype))
    return module.double() if dtype == torch.float64 else module.float()


def tolerances(norm: NormConfig) -> dict[torch.dtype, float]:
    """As `TOLERANCES`; more of a norm that is told to compute in a narrow input's dtype, and so rounds at each step."""
    rounds = getattr(norm, "compute", "fp32") == "input"
    return {d: 4 * each if rounds and d == torch.bfloat16 else each for d, each in TOLERANCES.items()}


def oracle_checks(norm: NormConfig, of: str, width: int, *, alone: bool = False) -> Iterator[Check]:
    """Values and gradients, training and evaluation, for every variant and scale, in each precision.

    Args:
        norm: The norm, its options as they are.
        of: What the checks are said to be of.
        width: D.
        alone: Whether to leave the variants of its options out.
    """
    told = {"of": of, "kind": norm.oracle_kind}
    for dtype, tolerance in TOLERANCES.items():
        precision = str(dtype).removeprefix("torch.")
        check, worst = f"is {norm.oracle}, in {precision}", Worst(tolerance)
        wide = Worst(4 * tolerance)
        for each in [norm] if alone else variants(norm, width):
            narrow = tolerances(each)[dtype] > tolerance
            for training in (True, False):
                for scale in SCALES:
                    at = f"{called(each)}, x times {scale:g}, {'training' if training else 'evaluation'}"
                    try:
                        found = list(errors(each, width, scale, dtype, training))
                    except NotImplementedError:
                        # Of no kind: it is not compared, and is not counted among what is.
                        yield Check(of=of, check="is held against something", passed=False, seen="no reference")
                        return
                    for what, error in found:
                        (wide if narrow else worst).add(error, f"{at}: {what}")
        seen = str(worst) if wide.passed or not wide.count else f"with compute=input {wide}"
        yield Check(**told, check=check, passed=worst.passed and (wide.passed or not wide.count), seen=seen)


def errors(
    norm: NormConfig,
    width: int,
    scale: float,
    dtype: torch.dtype,
    training: bool,
    *,
    batch: int | None = None,
    time: int = TIME,
) -> Iterator[tuple[str, float]]:
    """How far the output and each gradient are from the reference's, beside their size; of an input of a size."""
    if getattr(norm, "eps", 1) == 0 and (scale == 0 or width // (getattr(norm, "groups", 1) or 1) < 3):
        # 0 / 0, by the formula; two channels less their mean are -1 and 1 whatever they were, and the gradient is 0,
        # of which rounding leaves what a small x is divided by: there is no size to hold an error against.
        return
    module = module_of(norm, width, dtype).train(training)
    x = input_of(width, scale, batch=batch or sequences(norm), time=time).to(dtype)
    if batch is not None:
        x[0, 0, 0] = 0  # where a bounded function is steepest: of many numbers some are where nothing is left of it
    exact = copy.deepcopy(module).double()
    weights = dict(exact.named_parameters()) | dict(exact.named_buffers())
    reference = norm.reference if training else norm.reference_evaluated
    parameters = list(exact.parameters())
    theirs, nudged = (_outcome(lambda y: reference(y, weights), y, parameters) for y in (x.double(), _nudged(x)))
    ours = _outcome(module, x, list(module.parameters()))
    if ours[0].dtype != dtype:
        yield f"the output is {ours[0].dtype}", float("inf")
    names = ["the output", "the gradient of x", *(f"the gradient of {name}" for name, _ in module.named_parameters())]
    rounding = 4 * _working_eps(dtype) * max(1.0, scale)
    for name, a, b, moved in zip(names, ours, theirs, nudged, strict=True):
        if not b.isfinite().all():
            # The reference is not defined here, and an eps is there to mend that.
            yield f"{name} is not finite", 0.0 if a.isfinite().all() else float("inf")
            continue
        # Beside its size: what the formula itself makes of a last digit of x, and a last digit of numbers such as x.
        unavoidable = rounding + 8 * float((moved - b).abs().nan_to_num(0.0).max())
        size = float(b.abs().max()) + unavoidable / TOLERANCES[dtype]
        yield name, float((a.double() - b).abs().max()) / size


def rounding_check(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """A bfloat16 input is rounded once, at the end: each output is the number next to the reference's.

    One that is told to round before the gain, or to compute in bfloat16, is not so near.
    """
    wrong, count = [], 0
    for each in variants(norm, width):
        module, x = module_of(each, width, torch.bfloat16).train(), input_of(width).bfloat16()
        exact = copy.deepcopy(module).double()
        weights = dict(exact.named_parameters()) | dict(exact.named_buffers())
        try:
            theirs = each.reference(x.double(), weights)
        except NotImplementedError:
            return
        often = getattr(each, "rounding", "") == "cast_then_scale" or getattr(each, "compute", "") == "input"
        allowed = theirs.abs() / 256 + 1e-4 * theirs.abs().max()
        count += 1
        affine = getattr(module, "affine", None)
        gain = affine.effective_gain(x.dtype) if isinstance(affine, Affine) else None
        if gain is not None and gain.dtype != x.dtype:
            wrong.append(f"the gain of {called(each)}")
        if bool(((module(x).double() - theirs).abs() <= allowed).all()) == often:
            wrong.append(called(each))
    seen = f"otherwise: {'; '.join(wrong)}" if wrong else f"{count} variants"
    yield Check(of=of, check="rounds a bfloat16 input once, or where it is told to", passed=not wrong, seen=seen)


def _working_eps(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _nudged(x: Tensor) -> Tensor:
    """X in float64, the last digit that a norm works with changed at random."""
    return x.double() * (1 + _working_eps(x.dtype) * numbers("nudge", *x.shape).sign())


def _outcome(forward: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The output, and the gradients of a fixed sum of it with respect to x and the parameters."""
    x = x.detach().requires_grad_()
    y = forward(x)
    # In few digits, so that it is the same to a narrow output.
    loss = (y.double() * numbers("cotangent", *y.shape).bfloat16().double()).sum()
    grads = torch.autograd.grad(loss, [x, *parameters], allow_unused=True)
    pairs = zip(grads, [x, *parameters], strict=True)
    return [y.detach(), *(torch.zeros_like(p) if grad is None else grad for grad, p in pairs)]


def change_by_last(norm: NormConfig, width: int, batch: int | None = None, time: int = TIME) -> float:
    """In training mode, the most that another last token changes an earlier output."""
    x = input_of(width, batch=batch or sequences(norm), time=time)
    later = x.clone()
    later[:, -1] = 0.7 - 2 * later[:, -1]  # neither its size nor its mean nor its square is the same
    first, last = (module_of(norm, width).train()(y).detach() for y in (x, later))
    return float((first - last)[:, :-1].abs().max())


def causality_check(norm: NormConfig, of: str, width: int) -> Check:
    """In training mode, another last token changes no earlier output: unless the norm says that it does."""
    change = 0.0
    for each in variants(norm, width):
        if each.causal != norm.causal:
            continue
        found = change_by_last(each, width)
        if not each.causal and found == 0:
            return Check(of=of, check="later tokens are seen", passed=False, seen=f"{called(each)}: they are not")
        change = max(change, found)
    check = "no output moves with a later token" if norm.causal else "later tokens are seen in training, as is said"
    return Check(of=of, check=check, passed=(change == 0) == norm.causal, seen=f"largest change {change:.1e}")


def parameter_check(norm: NormConfig, of: str, width: int) -> Check:
    """It learns as many numbers as it says, with the options that it has by default, at a width that fits these."""
    default = type(norm)()  # pyright: ignore[reportCallIssue]
    widths = (width, *range(WIDTHS[0], WIDTHS[-1] + 1))
    width = next((each for each in widths if allowed(default, each)), width)
    count = sum(parameter.numel() for parameter in default.build(width).parameters())
    try:
        told = eval(norm.parameters, {"__builtins__": {}}, {"D": width})  # noqa: S307
    except Exception as error:
        return Check(of=of, check="says how many numbers it learns", passed=False, seen=f"{norm.parameters!r}: {error}")
    return Check(of=of, check=f"learns {norm.parameters} numbers", passed=count == told, seen=f"{count} at D = {width}")


def option_checks(norm: NormConfig, of: str, width: int) -> Iterator[Check]:
    """Every option changes something: what is computed in some precision, what is learned, or what is kept.

    It need not from the defaults alone: a unit offset is one where there is a gain.
    """
    fields = [field for field in dataclasses.fields(norm) if field.name not in LABELS]
    idle = [field.name for field in fields if not any(_has_effect(norm, field, width) for width in (width, 3 * width))]
    seen = f"without: {', '.join(idle)}" if idle else ", ".join(field.name for field in fields)
    yield Check(of=of, check="every option has an effect", passed=not idle, seen=seen)


def _has_effect(norm: NormConfig, field: dataclasses.Field[Any], width: int) -> bool:
    for base in variants(norm, width):
        before = _everything(base, width)
        if any(_differ(before, _everything(other, width)) for other in others(base, field, width)):
            return True
    return False


def _everything(norm: NormConfig, width: int) -> list[Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        found = [parameter.detach() for parameter in norm.build(width).parameters()]
    for dtype in TOLERANCES:
        module = module_of(norm, width, dtype)
        for scale in (1.0, 1e-3):
            x = input_of(width, scale).to(dtype)
            found += [module.train()(x).detach(), *(buffer.clone() for buffer in module.buffers())]
            found += [module.eval()(x).detach()]
        found += [parameter.detach() for parameter in module.parameters()]
    return found


def _differ(one: list[Tensor], other: list[Tensor]) -> bool:
    if [each.shape for each in one] != [each.shape for each in other]:
        return True
    return not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
