"""Check a norm's module against its own `reference`, in three precisions and for inputs of extreme size.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from normlab.model.small import BATCH, TIME, WIDTHS, fill, hashed_numbers, restored_buffers
from normlab.norms.affine import Affine
from normlab.norms.base import NormConfig
from normlab.verify.check import Check, LargestError
from normlab.verify.variants import is_valid, label_of, option_fields, other_values, variants

SCALES = (1.0, 1e-8, 1e4, 0.0)
"""Factors of the input."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Relative to the largest number in the reference's output or gradient, in float64 for the same input."""


def norm_checks(norm: NormConfig, subject: str, width: int) -> Iterator[Check]:
    """Yield the checks of a norm against its reference and its declarations."""
    yield from oracle_checks(norm, subject, width)
    yield from rounding_check(norm, subject, width)
    yield causality_check(norm, subject, width)
    yield parameter_check(norm, subject, width)
    yield options_check(norm, subject, width)


def batch_size(norm: NormConfig) -> int:
    """Return the number of sequences; with two, a batch's centred values are -1 and 1 for every input."""
    return BATCH + 1 if norm.batch_statistics else BATCH


def input_of(width: int, scale: float = 1.0, *, batch: int = BATCH, time: int = TIME) -> Tensor:
    """Return tokens whose channels have a nonzero mean, shape (B, T, D), in float64."""
    return (hashed_numbers("x", batch, time, width) + 0.5) * scale


def module_of(norm: NormConfig, width: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the norm's module with hashed parameters and buffers: float64, else float32, as in a run."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = norm.build(width)
    fill(module, "norm")
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.add_(0.3 * hashed_numbers(f"buffer/{name}", *buffer.shape).abs().to(buffer.dtype))
    return module.double() if dtype == torch.float64 else module.float()


def tolerances(norm: NormConfig) -> dict[torch.dtype, float]:
    """Return `TOLERANCES`, four times wider where the norm computes in bfloat16 and so rounds at each step."""
    narrow = getattr(norm, "compute", "fp32") == "input"
    return {d: 4 * tolerance if narrow and d == torch.bfloat16 else tolerance for d, tolerance in TOLERANCES.items()}


def oracle_checks(norm: NormConfig, subject: str, width: int, *, with_variants: bool = True) -> Iterator[Check]:
    """Compare values and gradients, in training and evaluation, for every variant and scale in each precision.

    Args:
        norm: The norm with its options.
        subject: The subject of the checks.
        width: D.
        with_variants: Whether to compare the norm with other values of its options too.
    """
    for dtype, tolerance in TOLERANCES.items():
        largest, narrow = LargestError(tolerance), LargestError(4 * tolerance)
        for variant in variants(norm, width) if with_variants else [norm]:
            compared = Comparison(variant, width, dtype)
            target = narrow if tolerances(variant)[dtype] > tolerance else largest
            for training, scale in product((True, False), SCALES):
                location = f"{label_of(variant)}, x times {scale:g}, {'training' if training else 'evaluation'}"
                try:
                    for name, error in compared.errors(scale, training):
                        target.add(error, f"{location}: {name}")
                except NotImplementedError:
                    # Without a reference there is no oracle: the check does not count as a comparison.
                    claim = "is held against something"
                    yield Check(subject=subject, claim=claim, passed=False, result="no reference")
                    return
        narrow_passed = narrow.passed or not narrow.count
        yield Check(
            subject=subject,
            claim=f"is {norm.oracle}, in {str(dtype).removeprefix('torch.')}",
            oracle=norm.oracle_kind,
            passed=largest.passed and narrow_passed,
            result=str(largest) if narrow_passed else f"with compute=input {narrow}",
        )


class Comparison:
    """A norm's module in one precision beside its reference in float64, both with the same weights."""

    def __init__(self, norm: NormConfig, width: int, dtype: torch.dtype):
        self.norm, self.width, self.dtype = norm, width, dtype
        self.module = module_of(norm, width, dtype)
        exact = copy.deepcopy(self.module).double()
        self.parameters = list(exact.parameters())
        self.weights = dict(exact.named_parameters()) | dict(exact.named_buffers())
        self.expected: dict[Any, list[Tensor]] = {}
        """The reference's output and gradients, by its name, the scale and the shape of x."""
        self.names = ["the output", "the gradient of x"]
        self.names += [f"the gradient of {name}" for name, _ in exact.named_parameters()]

    def errors(
        self, scale: float, training: bool, *, batch: int | None = None, time: int = TIME
    ) -> Iterator[tuple[str, float]]:
        """Yield the relative error of the output and of each gradient, with its name.

        Args:
            scale: A factor of the input.
            training: Whether to compare in training mode.
            batch: The number of sequences; None for a small input.
            time: T.

        Raises:
            NotImplementedError: The norm has no reference.
        """
        norm, width, dtype = self.norm, self.width, self.dtype
        if getattr(norm, "eps", 1) == 0 and (scale == 0 or width // (getattr(norm, "groups", 1) or 1) < 3):
            # The formula is 0 / 0; or, with two channels, the centred values are -1 and 1 and the gradient is zero, so
            # that there is no scale to compare an error with.
            return
        x = input_of(width, scale, batch=batch or batch_size(norm), time=time).to(dtype)
        if batch is not None:
            x[0, 0, 0] = 0  # a bounded function is steepest here, and flat at most other numbers
        same = type(norm).reference_evaluated is NormConfig.reference_evaluated
        reference = norm.reference if training or same else norm.reference_evaluated

        def expected_for(x: Tensor) -> list[Tensor]:
            return _output_and_gradients(lambda y: reference(y, self.weights), x, self.parameters)

        key = reference.__name__, scale, x.shape
        if key not in self.expected:
            self.expected[key] = expected_for(x.double())
        expected = self.expected[key]
        with restored_buffers(self.module):
            found = _output_and_gradients(self.module.train(training), x, list(self.module.parameters()))
        if found[0].dtype != dtype:
            yield f"the output is {found[0].dtype}", float("inf")
        rounding = 4 * _working_eps(dtype) * max(1.0, scale)
        perturbed: list[Tensor] = []
        for index, name in enumerate(self.names):
            value, exact = found[index], expected[index]
            if not exact.isfinite().all():
                # The formula is undefined here, and the eps exists to prevent that.
                yield f"{name} is not finite", 0.0 if value.isfinite().all() else float("inf")
                continue
            difference, size = float((value.double() - exact).abs().max()), float(exact.abs().max())
            error = difference / (size + rounding / TOLERANCES[dtype])
            if not error <= TOLERANCES[dtype]:
                # Add what the formula itself makes of a change in the last digit of x.
                perturbed = perturbed or expected_for(_perturbed(x))
                change = 8 * float((perturbed[index] - exact).abs().nan_to_num(0.0).max())
                error = difference / (size + (rounding + change) / TOLERANCES[dtype])
            yield name, error


def _working_eps(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def _perturbed(x: Tensor) -> Tensor:
    """Return x in float64 with the last digit of the working precision changed at random."""
    return x.double() * (1 + _working_eps(x.dtype) * hashed_numbers("nudge", *x.shape).sign())


def _output_and_gradients(
    forward: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]
) -> list[Tensor]:
    """Return the output, and the gradients of a fixed weighted sum of it for x and the parameters."""
    x = x.detach().requires_grad_()
    y = forward(x)
    # bfloat16 weights are exact in every precision.
    loss = (y.double() * hashed_numbers("cotangent", *y.shape).bfloat16().double()).sum()
    grads = torch.autograd.grad(loss, [x, *parameters], allow_unused=True)
    pairs = zip(grads, [x, *parameters], strict=True)
    return [y.detach(), *(torch.zeros_like(p) if grad is None else grad for grad, p in pairs)]


def rounding_check(norm: NormConfig, subject: str, width: int) -> Iterator[Check]:
    """Check that each bfloat16 output is the number next to the reference's, so that it is rounded once.

    Options that round before the gain or compute in bfloat16 must round more often.
    """
    wrong, count = [], 0
    for variant in variants(norm, width):
        compared, x = Comparison(variant, width, torch.bfloat16), input_of(width).bfloat16()
        module = compared.module.train()
        try:
            expected = variant.reference(x.double(), compared.weights)
        except NotImplementedError:
            return
        often = getattr(variant, "rounding", "") == "cast_then_scale" or getattr(variant, "compute", "") == "input"
        allowed = expected.abs() / 256 + 1e-4 * expected.abs().max()
        count += 1
        affine = getattr(module, "affine", None)
        gain = affine.effective_gain(x.dtype) if isinstance(affine, Affine) else None
        if gain is not None and gain.dtype != x.dtype:
            wrong.append(f"the gain of {label_of(variant)}")
        if bool(((module(x).double() - expected).abs() <= allowed).all()) == often:
            wrong.append(label_of(variant))
    result = f"not so: {'; '.join(wrong)}" if wrong else f"{count} variants"
    claim = "rounds a bfloat16 input once, or as its options say"
    yield Check(subject=subject, claim=claim, passed=not wrong, result=result)


def change_by_last_token(norm: NormConfig, width: int, batch: int | None = None, time: int = TIME) -> float:
    """Return the largest change of an earlier output when the last token changes, in training mode."""
    x = input_of(width, batch=batch or batch_size(norm), time=time)
    changed = x.clone()
    changed[:, -1] = 0.7 - 2 * changed[:, -1]  # neither the size nor the mean nor the square stays the same
    before, after = (module_of(norm, width).train()(y).detach() for y in (x, changed))
    return float((before - after)[:, :-1].abs().max())


def causality_check(norm: NormConfig, subject: str, width: int) -> Check:
    """Check that in training another last token changes an earlier output only if the norm declares so."""
    largest = 0.0
    for variant in variants(norm, width):
        if variant.causal != norm.causal:
            continue
        change = change_by_last_token(variant, width)
        if not variant.causal and change == 0:
            result = f"{label_of(variant)}: they do not"
            return Check(subject=subject, claim="outputs depend on later tokens", passed=False, result=result)
        largest = max(largest, change)
    claim = (
        "no output depends on a later token"
        if norm.causal
        else "outputs depend on later tokens in training, as declared"
    )
    passed = (largest == 0) == norm.causal
    return Check(subject=subject, claim=claim, passed=passed, result=f"largest change {largest:.1e}")


def parameter_check(norm: NormConfig, subject: str, width: int) -> Check:
    """Check the declared number of parameters with default options, at a width that these accept."""
    default = type(norm)()  # pyright: ignore[reportCallIssue]
    widths = (width, *range(WIDTHS[0], WIDTHS[-1] + 1))
    width = next((candidate for candidate in widths if is_valid(default, candidate)), width)
    count = sum(parameter.numel() for parameter in default.build(width).parameters())
    try:
        declared = eval(norm.parameters, {"__builtins__": {}}, {"D": width})  # noqa: S307
    except Exception as error:  # a plugin's expression may raise anything
        result = f"{norm.parameters!r}: {error}"
        return Check(subject=subject, claim="declares how many numbers it learns", passed=False, result=result)
    result = f"{count} at D = {width}"
    return Check(subject=subject, claim=f"learns {norm.parameters} numbers", passed=count == declared, result=result)


def options_check(norm: NormConfig, subject: str, width: int) -> Check:
    """Check that every option changes an output in some precision, a parameter or a buffer, from some variant.

    A unit offset, for example, has an effect only with a gain.
    """
    fields = option_fields(norm)
    unused = [f.name for f in fields if not any(_has_effect(norm, f, width) for width in (width, 3 * width))]
    result = f"without effect: {', '.join(unused)}" if unused else ", ".join(field.name for field in fields)
    return Check(subject=subject, claim="every option has an effect", passed=not unused, result=result)


def _has_effect(norm: NormConfig, field: dataclasses.Field[Any], width: int) -> bool:
    for base in variants(norm, width):
        before = _all_numbers(base, width)
        if any(_differ(before, _all_numbers(changed, width)) for changed in other_values(base, field, width)):
            return True
    return False


def _all_numbers(norm: NormConfig, width: int) -> list[Tensor]:
    """Return all parameters, buffers and outputs of a norm, in each precision and both modes."""
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


def _differ(first: list[Tensor], second: list[Tensor]) -> bool:
    if [tensor.shape for tensor in first] != [tensor.shape for tensor in second]:
        return True
    return not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
