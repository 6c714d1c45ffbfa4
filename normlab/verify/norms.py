"""Check a norm's module against its `reference`, in three precisions, at many input sizes.

Shapes: B batch, T time, D width.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from normlab.base.plugins import COUNTER
from normlab.catalogue.norms.affine import Affine, working_dtype
from normlab.catalogue.norms.base import NormConfig
from normlab.config.schema import RunConfig
from normlab.model.modules import build_norm
from normlab.model.small import BATCH, TIME, WIDTHS, fill, hashed_numbers, restored_buffers
from normlab.verify.check import Check, LargestError, check_no_problems, fails_on_error
from normlab.verify.variants import is_valid, label_of, variants

SCALES = (1.0, 1e-8, 1e4, 0.0)
"""Factors of the input."""
LARGE_SCALES = (1.0, 12.0)
"""Factors of the input at sizes like those of a run."""
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Tolerances, relative to the largest number in the reference's output or gradient, in float64 for the same input."""
LONG_TIME, WIDTH_FACTOR = 40, 20
"""The context, and the factor of the width, that every norm is checked at."""
MAX_NUMBERS = 2**16
"""The most numbers in a batch; a run with more is checked with fewer tokens."""
NO_REFERENCE = "no reference"

Size = tuple[int, int, int]
"""B, T and D."""


def batch_size(norm: NormConfig) -> int:
    """Return the number of sequences in a batch.

    It is 3 with batch statistics, because two normalised values are always -1 and 1.
    """
    return BATCH + 1 if norm.batch_statistics else BATCH


def large_sizes(norm: NormConfig, width: int) -> list[Size]:
    """Return the larger sizes for the checks: long and wide, one sequence, one token."""
    candidates = (WIDTH_FACTOR * width, *reversed(WIDTHS))
    wide = next((candidate for candidate in candidates if is_valid(norm, candidate)), width)
    return [(batch_size(norm), LONG_TIME, wide), (1, LONG_TIME, wide), (1, 1, wide)]


def size_of_run(config: RunConfig) -> Size:
    """Return the size of a run's micro-batch, limited to `MAX_NUMBERS` numbers."""
    model, train = config.model, config.train
    tokens = max(TIME, MAX_NUMBERS // model.width)
    time = min(model.context, tokens)
    return max(1, min(train.batch_size // train.accumulation, tokens // time)), time, model.width


def input_of(width: int, scale: float = 1.0, *, batch: int = BATCH, time: int = TIME) -> Tensor:
    """Return tokens whose channels have a nonzero mean, shape (B, T, D), in float64."""
    return (hashed_numbers("x", batch, time, width) + 0.5) * scale


def module_of(norm: NormConfig, width: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return the norm's module with hashed parameters and buffers, in float64 or else float32."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = build_norm(norm, width)
    fill(module, "norm")
    for name, buffer in module.named_buffers():
        if name.endswith(COUNTER):
            buffer.fill_(sum(norm.changing) / 2)
        elif buffer.is_floating_point():
            buffer.add_(0.3 * hashed_numbers(f"buffer/{name}", *buffer.shape).abs().to(buffer.dtype))
    return module.double() if dtype == torch.float64 else module.float()


def parameters_and_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def reference_checks(norm: NormConfig, subject: str, width: int, sizes: Sequence[Size]) -> Iterator[Check]:
    """Yield the checks of a norm against its reference; one failed check without a reference."""
    independence = independence_check(norm, subject, width)
    yield independence
    if independence.result != NO_REFERENCE:
        yield from oracle_checks(norm, subject, variants(norm, width), width, sizes)
        yield rounding_check(norm, subject, width)
        yield shape_check(norm, subject, width)


@fails_on_error("has a reference that does not call its module")
def independence_check(norm: NormConfig, subject: str, width: int) -> Check:
    """Check that a norm's references do not call the norm's own modules."""
    circular: list[str] = []
    for variant in variants(norm, width):
        module, calls = module_of(variant, width), list[str]()
        with ExitStack() as patches:
            for kind in {type(part) for part in module.modules()}:
                patches.enter_context(patch.object(kind, "forward", _recording(kind, calls)))
            try:
                for reference in (variant.reference, variant.reference_in_eval):
                    reference(input_of(width), parameters_and_buffers(module))
            except NotImplementedError:
                circular = [NO_REFERENCE]
                break
        circular += [f"{name} of {label_of(variant)} is called" for name in calls[:1]]
    claim = "has a reference that does not call its module"
    return check_no_problems(subject, claim, circular)


def _recording(kind: type[nn.Module], calls: list[str]) -> Callable[..., Any]:
    forward = kind.forward

    def recording(*args: Any, **options: Any) -> Any:
        calls.append(kind.__name__)
        return forward(*args, **options)

    return recording


def oracle_checks(
    norm: NormConfig, subject: str, compared: Sequence[NormConfig], width: int, sizes: Sequence[Size] = ()
) -> Iterator[Check]:
    """Compare values and gradients in training and evaluation, in each precision.

    The variants of the norm in `compared` are compared at every scale, at a small size; the norm itself at `sizes`.
    """
    for dtype in TOLERANCES:
        yield _oracle_check(norm, subject, compared, width, sizes, str(dtype).removeprefix("torch."))


@fails_on_error("equals {norm.verified_by}, in {precision}")
def _oracle_check(
    norm: NormConfig, subject: str, compared: Sequence[NormConfig], width: int, sizes: Sequence[Size], precision: str
) -> Check:
    """Compare values and gradients in one precision, the name of a dtype of torch."""
    dtype = getattr(torch, precision)
    largest = LargestError(TOLERANCES[dtype])
    for variant in compared:
        comparison = ReferenceComparison(variant, width, dtype)
        for scale in SCALES:
            comparison.add_errors(largest, scale, label_of(variant))
    for batch, time, wide in sizes:
        comparison = ReferenceComparison(norm, wide, dtype)
        scales = LARGE_SCALES
        if batch == 1:  # the first two tokens, centred, are -1 and 1: a larger x leaves no gradient
            scales = LARGE_SCALES[:1]
        for scale in scales:
            comparison.add_errors(largest, scale, f"B = {batch}, T = {time}, D = {wide}", (batch, time))
    return largest.check(subject, f"equals {norm.verified_by}, in {precision}", norm.reference_kind)


class ReferenceComparison:
    """A norm's module in one precision, and its reference in float64 with the same weights."""

    def __init__(self, norm: NormConfig, width: int, dtype: torch.dtype):
        self.norm, self.width, self.dtype = norm, width, dtype
        self.module = module_of(norm, width, dtype)
        exact = copy.deepcopy(self.module).double()
        self.parameters = list(exact.parameters())
        self.weights = parameters_and_buffers(exact)
        self.names = ["the output", "the gradient of x"]
        self.names += [f"the gradient of {name}" for name, _ in exact.named_parameters()]
        # A norm that computes in bfloat16 rounds at each step, so its errors count a quarter.
        self.error_weight = 0.25 if getattr(norm, "compute", "fp32") == "input" and dtype == torch.bfloat16 else 1.0

    def add_errors(self, largest: LargestError, scale: float, label: str, size: tuple[int, int] | None = None) -> None:
        """Add the relative errors of the output and the gradients, in training and evaluation.

        The input is multiplied by `scale`; `size` is B and T, or None for a small input.
        """
        norm, width = self.norm, self.width
        channels = width // (getattr(norm, "groups", 1) or 1)
        if getattr(norm, "eps", 1) == 0 and (scale == 0 or channels < 3):
            # The formula is 0 / 0; or, with two channels, the centred values are -1 and 1 and the gradient is zero, so
            # that there is no scale to compare an error with.
            return
        batch, time = size or (batch_size(norm), TIME)
        x = input_of(width, scale, batch=batch, time=time).to(self.dtype)
        if size is not None:
            x[0, 0, 0] = 0  # a bounded function is steepest here, and flat at most other numbers
        expected = self._expected(norm.reference, x.double())
        eps = torch.finfo(working_dtype(self.dtype)).eps
        rounding = 4 * eps * max(1.0, scale)
        # Most norms compute the same in evaluation, so that the expected values of training serve for both.
        for training in (True, False):
            reference = norm.reference if training else norm.reference_in_eval
            if not training and type(norm).reference_in_eval is not NormConfig.reference_in_eval:
                expected = self._expected(reference, x.double())
            location = f"{label}, x times {scale:g}, {'training' if training else 'evaluation'}"
            with restored_buffers(self.module):
                result = _output_and_gradients(self.module.train(training), x, list(self.module.parameters()))
            if result[0].dtype != self.dtype:
                largest.fail(f"expected an output in {self.dtype}, found {result[0].dtype}, for {location}")
            perturbed: list[Tensor] = []
            for index, (name, value, exact) in enumerate(zip(self.names, result, expected, strict=True)):
                if index > 0 and time == 1 and self.dtype != torch.float64:
                    break  # one token's gradient may be a small difference of large numbers
                if not exact.isfinite().all():
                    # The formula is undefined here, and the eps exists to prevent that.
                    if not value.isfinite().all():
                        largest.fail(f"expected finite numbers, found others, for {location}: {name}")
                    continue
                difference, unit = float((value.double() - exact).abs().max()), float(exact.abs().max())
                allowed = rounding
                if not self.error_weight * difference <= TOLERANCES[self.dtype] * unit + rounding:
                    # Allow the change of the formula itself under random changes in the last digit of x.
                    changed_x = x.double() * (1 + eps * hashed_numbers("nudge", *x.shape).sign())
                    perturbed = perturbed or self._expected(reference, changed_x)
                    change = 8 * float((perturbed[index] - exact).abs().nan_to_num(0.0).max())
                    allowed += change
                scale_of_error = (unit + allowed / TOLERANCES[self.dtype]) / self.error_weight
                largest.compare(value, exact, f"{location}: {name}", scale_of_error)

    def _expected(self, reference: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
        return _output_and_gradients(lambda y: reference(y, self.weights), x, self.parameters)


def _output_and_gradients(
    forward: Callable[[Tensor], Tensor], x: Tensor, parameters: list[nn.Parameter]
) -> list[Tensor]:
    """Return the output, and gradients of a fixed weighted sum of it for x and the parameters."""
    x = x.detach().requires_grad_()
    return with_gradients(forward(x), [x, *parameters])


def with_gradients(y: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return y, and the gradient of a fixed weighted sum of y for each input, or zeros."""
    # bfloat16 weights are exact in every precision.
    loss = (y.double() * hashed_numbers("cotangent", *y.shape).bfloat16().double()).sum()
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    results = [y.detach()]
    for gradient, x in zip(gradients, inputs, strict=True):
        results.append(torch.zeros_like(x) if gradient is None else gradient)
    return results


@fails_on_error("rounds a bfloat16 input once, or as its options say")
def rounding_check(norm: NormConfig, subject: str, width: int) -> Check:
    """Check that each bfloat16 output is rounded once: it is next to the reference's number.

    Options that round before the gain or compute in bfloat16 must round more often.
    """
    wrong = []
    for variant in variants(norm, width):
        compared, x = ReferenceComparison(variant, width, torch.bfloat16), input_of(width).bfloat16()
        module = compared.module.train()
        expected = variant.reference(x.double(), compared.weights)
        rounds_often = getattr(variant, "rounding", "") == "cast_then_scale"
        rounds_often = rounds_often or getattr(variant, "compute", "") == "input"
        # A number next to the reference's: 1/256 of it, or a little more than 0 where it is nearly 0.
        allowed = expected.abs() / 256 + 1e-4 * expected.abs().max()
        affine = getattr(module, "affine", None)
        gain = affine.effective_gain(x.dtype) if isinstance(affine, Affine) else None
        if gain is not None and gain.dtype != x.dtype:
            wrong.append(f"the gain of {label_of(variant)}")
        if bool(((module(x).double() - expected).abs() <= allowed).all()) == rounds_often:
            wrong.append(label_of(variant))
    claim = "rounds a bfloat16 input once, or as its options say"
    return check_no_problems(subject, claim, wrong)


@fails_on_error("accepts any number of axes, and one channel")
def shape_check(norm: NormConfig, subject: str, width: int) -> Check:
    """Check that a norm accepts any number of leading axes and a single channel, in float64."""
    largest = LargestError(1e-10)
    for size in (width, 1, 2):
        x = hashed_numbers("shapes", 2, 6, size) + 0.5
        for variant in variants(norm, width):
            if getattr(variant, "eps", 1) == 0 or not is_valid(variant, size):
                continue  # with eps=0 one token without variance is 0 / 0
            module = build_norm(variant, size)
            weights = {name: value.detach().double() for name, value in parameters_and_buffers(module).items()}
            for y, training in product((x[0], x.unflatten(1, (3, 2)), x[:, :1]), (True, False)):
                reference = variant.reference if training else variant.reference_in_eval
                expected = reference(y, weights)
                with restored_buffers(module):
                    result = module.train(training)(y).detach()
                if not expected.isfinite().all():
                    expected = 0 * result  # where the formula is 0 / 0, the eps makes the result finite
                    result = expected
                mode = "training" if training else "evaluation"
                largest.compare(result, expected, f"shape {tuple(y.shape)} of {label_of(variant)} in {mode}")
    return largest.check(subject, "accepts any number of axes, and one channel")
