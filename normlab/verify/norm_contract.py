"""Check a norm's declarations, and that its module works in a pack.

A norm declares its parameters and their initial values, causality and invariances. A pack is a stack of runs under
`torch.func.vmap`, which forbids reading a number from a tensor and branching on it.

Shapes: R runs, B batch, T time, D width.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from normlab.base.options import plain_tree
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.placements.base import PLACEMENTS
from normlab.model.modules import build_norm
from normlab.model.small import TIME, hashed_numbers, small_config
from normlab.verify.check import Check, LargestError, check_equal, check_no_problems, fails_on_error
from normlab.verify.norms import TOLERANCES, Size, batch_size, input_of, module_of, parameters_and_buffers
from normlab.verify.signed_error import signed_error_check
from normlab.verify.variants import is_valid, label_of, option_fields, other_values, variants

RUNS = 2
INPUT_SIZES = [10.0**power for power in (0, *range(-15, 0, 3), *range(3, 16, 3))]
"""Factors of the input, 1 first: a function may be flat at one size and not at another."""


def contract_checks(norm: NormConfig, subject: str, width: int, sizes: Sequence[Size]) -> Iterator[Check]:
    """Yield the checks of a norm's declarations and module, causality also at `sizes`."""
    yield causality_check(norm, subject, width, sizes)
    yield parameter_check(norm, subject)
    yield options_check(norm, subject, width)
    yield invariance_check(norm, subject, width)
    yield from initial_values_check(norm, subject, width)
    yield from running_statistics_check(norm, subject, width)
    yield pack_check(norm, subject, width)
    yield signed_error_check(norm, subject, width)


@fails_on_error("no output depends on a later token")
def causality_check(norm: NormConfig, subject: str, width: int, sizes: Sequence[Size]) -> Check:
    """Check that in training the last token changes earlier outputs only if not `norm.causal`."""
    changes: dict[str, float] = {}
    for variant in variants(norm, width):
        # An option may decide whether the norm is causal.
        if variant.causal == norm.causal:
            changes[label_of(variant)] = _change_by_last_token(variant, (batch_size(norm), TIME, width))
    for batch, time, wide in sizes:
        if time > 1:
            changes[f"B = {batch}, T = {time}, D = {wide}"] = _change_by_last_token(norm, (batch, time, wide))
    claim, expected = "no output depends on a later token", "no change"
    if not norm.causal:
        claim, expected = "outputs depend on later tokens in training", "a change"
    problems: list[str] = []
    for location, change in changes.items():
        if (change == 0) != norm.causal:
            problems.append(f"expected {expected} of earlier outputs, found {change:.1e} for {location}")
            break
    return check_no_problems(subject, claim, problems, f"largest change {max(changes.values()):.1e}")


def _change_by_last_token(norm: NormConfig, size: Size) -> float:
    """Return the largest change of earlier outputs by the last token, in training mode."""
    batch, time, width = size
    x = input_of(width, batch=batch, time=time)
    changed = x.clone()
    changed[:, -1] = 0.7 - 2 * changed[:, -1]  # neither the size nor the mean nor the square stays the same
    before, after = (module_of(norm, width).train()(y).detach() for y in (x, changed))
    return float((before - after)[:, :-1].abs().max())


@fails_on_error("parameters: {norm.parameters}")
def parameter_check(norm: NormConfig, subject: str) -> Check:
    default = type(norm)()  # pyright: ignore[reportCallIssue]
    width = small_config(default, PLACEMENTS["pre"]).model.width
    count = sum(parameter.numel() for parameter in build_norm(default, width).parameters())
    try:
        declared = eval(norm.parameters, {"__builtins__": {}}, {"D": width})  # noqa: S307
    except Exception as error:  # a plugin's expression may raise anything
        declared = error
    return check_equal(subject, f"parameters: {norm.parameters}", declared, count, f"at D = {width}")


@fails_on_error("every option has an effect")
def options_check(norm: NormConfig, subject: str, width: int) -> Check:
    """Check that every option changes an output, a parameter or a buffer of some variant, or of one of the default."""
    fields = option_fields(norm)
    unused: list[str] = []
    for field in fields:
        if not (_has_effect(norm, field, width) or _has_effect(norm, field, 3 * width)):
            unused.append(field.name)
    return options_have_effect(subject, [field.name for field in fields], unused)


def options_have_effect(subject: str, names: Sequence[str], unused: Sequence[str]) -> Check:
    """Return the check that none of a norm's or placement's options is without effect."""
    problems: list[str] = []
    if unused:
        problems.append(f"expected an effect, found none, for {', '.join(unused)}")
    return check_no_problems(subject, "every option has an effect", problems, ", ".join(names))


def _has_effect(norm: NormConfig, field: dataclasses.Field[Any], width: int) -> bool:
    # The norm's own options may allow no other value of this one.
    for base in chain(variants(norm, width), variants(type(norm)(), width)):  # pyright: ignore[reportCallIssue]
        before = _all_numbers(base, width)
        for changed in other_values(base, field, width):
            after = _all_numbers(changed, width)
            if len(before) != len(after) or not all(map(torch.equal, before, after)):
                return True
    return False


def _all_numbers(norm: NormConfig, width: int) -> list[Tensor]:
    """Return all parameters, buffers and outputs of a norm, in each precision and both modes."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        numbers = [parameter.detach() for parameter in build_norm(norm, width).parameters()]
    for dtype in TOLERANCES:
        module = module_of(norm, width, dtype)
        for scale in (1.0, 1e-3):
            x = input_of(width, scale).to(dtype)
            numbers += [module.train()(x).detach(), *(buffer.clone() for buffer in module.buffers())]
            numbers += [module.eval()(x).detach()]
        numbers += [parameter.detach() for parameter in module.parameters()]
    return numbers


@fails_on_error("is invariant to what it declares")
@torch.no_grad()
def invariance_check(norm: NormConfig, subject: str, width: int) -> Check:
    """Check that `invariant_to` lists exactly the invariances of the output in training.

    A declared invariance is tested with an eps too small to matter. An invariance that is not declared is tested at
    many sizes, because a bounded function is flat at most of them.
    """
    has_eps = hasattr(norm, "eps")
    tested = norm
    if has_eps:
        tiny = dataclasses.replace(norm, eps=1e-15)  # pyright: ignore[reportCallIssue]
        if is_valid(tiny, width):
            tested = tiny
    module = module_of(tested, width).train()
    # At a size below 1 the eps itself would change the output.
    sizes = [size for size in INPUT_SIZES if size >= 1 or not has_eps]
    x = input_of(width)
    wrong = []
    for name, changed in {"scale": 3 * x, "shift": x + 2}.items():
        for size in sizes:
            y = module(size * x)
            change = float((module(size * changed) - y).abs().max() / y.abs().max())
            if name in norm.invariances:
                if not change <= 1e-9:
                    wrong.append(f"expected no change with the {name}, found {change:.1e} (tolerance 1e-09)")
                break
            if not change < 1e-6:
                break
        else:
            wrong.append(f"{name} is not in `invariant_to`")
    claim = f"is invariant to {' and '.join(norm.invariances) or 'nothing'}"
    return check_no_problems(subject, claim, wrong)


@fails_on_error("has its declared initial values")
def initial_values_check(norm: NormConfig, subject: str, width: int) -> Iterator[Check]:
    """Check the initial parameters and buffers of each variant against `initial_values`."""
    largest, declared, names = LargestError(1e-6), norm.all_initial_values(), set[str]()
    for variant in variants(norm, width):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            initial = parameters_and_buffers(build_norm(variant, width))
            torch.default_generator.manual_seed(0)
            undeclared = [name for name in initial if name not in declared]
            if undeclared:
                owner = type(norm).__name__
                result = f"{', '.join(undeclared)}: not in `initial_values` of {owner}; add an expression for each"
                yield Check(subject, "declares its initial values", passed=False, result=result)
                return
            for name, value in initial.items():
                location = f"{name} of {label_of(variant)}"
                compare_initial(largest, value, declared[name], {**plain_tree(variant), "D": width}, location)
            names |= initial.keys()
    for absent in declared.keys() - names:
        largest.fail(f"expected {absent}, which is in `initial_values`, found it with none of the norm's options")
    if declared:
        yield largest.check(subject, "has its declared initial values")


def compare_initial(
    largest: LargestError, value: Tensor, text: str, variables: Mapping[str, Any], location: str
) -> None:
    """Compare an initial value with an expression of `initial_values`, by relative error."""
    names = {"sqrt": math.sqrt, "ln": math.log, "max": max, "range": range, "normal": torch.randn, **variables}
    try:
        expected = torch.as_tensor(eval(text, {"__builtins__": {}, **names}), dtype=torch.float64)  # noqa: S307
    except Exception as error:  # a plugin's expression may raise anything
        reason = f"cannot be evaluated ({type(error).__name__}: {error}); it may use {', '.join(names)}"
        largest.fail(f"`{text}` of {location} {reason}")
        return
    largest.compare(value, expected, location, float(expected.abs().max()) or 1.0)


@fails_on_error("updates its running statistics from the batch")
def running_statistics_check(norm: NormConfig, subject: str, width: int) -> Iterator[Check]:
    """Check that the momentum moves running mean and variance towards those of the batch."""
    if not norm.batch_statistics:
        return
    largest = LargestError(1e-10)
    for variant in variants(norm, width):
        options = plain_tree(variant)
        if not {"momentum", "running_var"} <= options.keys():
            continue
        for shape in ((3, 5), (1, 1), (1, 2)):
            module = build_norm(variant, width).double().train()
            x = (hashed_numbers("kept", *shape, width) + 0.5).requires_grad_()
            module(x)
            tokens = x.detach().flatten(0, 1)
            correction = int(options["running_var"] == "unbiased" and len(tokens) > 1)
            batch = {"running_mean": tokens.mean(0), "running_var": tokens.var(0, correction=correction)}
            # A running mean starts at 0, and a running variance at 1.
            for start, (name, value) in enumerate(batch.items()):
                location = f"{name} of {label_of(variant)}"
                expected = (1 - options["momentum"]) * start + options["momentum"] * value
                buffer = module.get_buffer(name)
                largest.compare(buffer, expected, location)
                if buffer.requires_grad:
                    largest.fail(f"{location} keeps the graph of every batch")
    if largest.count:
        yield largest.check(subject, "updates its running statistics from the batch")


@fails_on_error("gives the same output in a pack of runs, and leaves its input unchanged")
def pack_check(norm: NormConfig, subject: str, width: int) -> Check:
    """Check that packed and single runs have equal outputs, and that the input is unchanged."""
    largest = LargestError(1e-12)
    for variant in variants(norm, width):
        modules = [module_of(variant, width).train() for _ in range(RUNS)]
        with torch.no_grad():
            for run, module in enumerate(modules):
                for name, parameter in module.named_parameters():
                    parameter.add_(0.1 * run * hashed_numbers(f"run/{name}", *parameter.shape))
        x_RBTD = hashed_numbers("pack", RUNS, batch_size(norm), 6, width) + 0.5
        before = x_RBTD.clone()
        try:
            packed_RBTD = _outputs_of_pack(modules, x_RBTD)
        except RuntimeError as error:  # torch cannot batch an operation of the module
            largest.fail(f"{label_of(variant)}: {' '.join(str(error).split()).partition('.')[0]}")
            continue
        for run, module in enumerate(modules):
            largest.compare(packed_RBTD[run], module(x_RBTD[run]), label_of(variant))
        if not torch.equal(x_RBTD, before):
            largest.fail(f"expected the input unchanged, found it changed by {label_of(variant)}")
    return largest.check(subject, "gives the same output in a pack of runs, and leaves its input unchanged")


def _outputs_of_pack(modules: list[nn.Module], x_RBTD: Tensor) -> Tensor:
    """Return the outputs of modules for an input each, computed as those of a pack, (R, B, T, D)."""
    params, buffers = stack_module_state(modules)

    def call(params: dict[str, Tensor], buffers: dict[str, Tensor], x_BTD: Tensor) -> Tensor:
        return functional_call(modules[0], (params, buffers), (x_BTD,))

    return vmap(call, randomness="same")(params, buffers, x_RBTD)
