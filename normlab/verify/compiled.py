"""Check a block as a GPU trains it: compiled and in bf16 autocast, against its formula in float64.

The other checks hold the block to its formula, uncompiled and to more digits. This one detects errors of the compiler
and of the device.

Shapes: B batch, T time, V vocabulary.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.base.errors import ConfigError, counted
from normlab.config.schema import RunConfig
from normlab.model.attention import Attention, sdpa
from normlab.model.runner import SingleRun
from normlab.model.small import SmallModel, build_small, hashed_numbers, shrink, tokens
from normlab.training.machine import (
    KINDS_OF_BLOCKS,
    TOO_MANY_GRAPHS,
    RuntimeSettings,
    convert_torch_errors,
    gpu_of,
    resolve,
)
from normlab.verify.check import Check, LargestError, check_no_problems, fails_on_error
from normlab.verify.norms import with_gradients
from normlab.verify.reference_model import FormulaMismatch, ReferenceModel, record_norm_order

BATCH, TIME, WIDTH = 8, 16, 64
"""Size of the model, large enough that batch norms and norms of a few channels are well-conditioned."""
ROUNDOFF = 2.0**-8
"""Unit roundoff of bf16, which has a significand of 8 bits."""
DEPTH = 8
"""Number of blocks whose graphs are counted: at most the number that torch compiles by default."""
CHANGES = 4
"""Number of random changes of the weights."""
TOLERANCE = 4.0
"""Largest error, in units of the formula's own change; `bf16_check` derives it."""


@fails_on_error("compiled, bf16: equals its formula")
def compiled_check(config: RunConfig, subject: str) -> Check:
    """Check the block of a run, compiled and in bf16, on the device of the run.

    The check is skipped where torch cannot compile (a CPU without a C++ compiler) or the GPU has no bf16.
    """
    claim = "compiled, bf16: equals its formula"
    try:
        settings = resolve(dataclasses.replace(config, precision="bf16", compile="on"))
    except ConfigError as error:
        return Check(subject, claim, passed=True, result=str(error), skipped=True)
    if settings.device == "cuda" and not gpu_of().has_bf16:
        return Check(subject, claim, passed=True, result=f"{settings.device_name} has no bf16", skipped=True)
    torch.compiler.reset()  # the graphs of an earlier model count towards the recompile limit
    return bf16_check(build_small(shrink(config, width=WIDTH, context=TIME)), subject, settings)


@fails_on_error("its blocks share their compiled code")
def graphs_check(config: RunConfig, subject: str) -> Check:
    """Check that the number of compiled graphs does not grow with the depth; this needs no compiler.

    A Python number in a block is part of its graph, and torch compiles a function a few times only.
    """
    torch.compiler.reset()
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model = dataclasses.replace(config.model, depth=DEPTH)
    small = build_small(shrink(dataclasses.replace(config, model=model)))
    claim, most = "its blocks share their compiled code", 2 + KINDS_OF_BLOCKS  # of the embeddings and the head, too
    # torch would log a traceback if the block failed while it is compiled.
    small.gpt.train()(tokens())
    try:
        with convert_torch_errors():
            SingleRun(small.gpt.train(), compiled=True, backend=count).loss(tokens(), tokens())
    except ConfigError as error:
        return Check(subject, claim, passed=False, result=str(error))
    result = f"{counted(len(graphs), 'graph')} at depth {DEPTH}"
    problems: list[str] = []
    if len(graphs) > most:
        problems.append(f"expected at most {most} graphs, found {result}: {TOO_MANY_GRAPHS}")
    return check_no_problems(subject, claim, problems, result)


def bf16_check(small: SmallModel, subject: str, settings: RuntimeSettings) -> Check:
    """Check the loss and every gradient of a model in bf16 autocast against its placement's formula in float64.

    For each tensor g (the loss, and the gradient of each parameter)

        max |g_bf16 - g| <= 4 (max |g_changed - g| + u/2 max |g_all|),  u = 2^-8,

    where g_changed is the formula with every weight w replaced by w (1 + u) or w (1 - u), at random; its maximum is
    over 4 such changes, and g_all are all gradients (for the loss: the loss). The bound is no multiple of the error
    without the compiler: a wrong block has a large error there too.

    Why 4: a product W x in bf16 autocast rounds W, x, the result and, in the backward pass, its gradient. Each rounding
    changes a number by at most u times its size, so its effect is about that of the change of W at most. Four
    independent effects of one size add up to twice that size; another factor of 2 is for the few random changes. The
    last term is for gradients that nearly cancel, such as those of key biases. Calibration: without the compiler, every
    norm and placement of the catalogue has at most 2.2 of these 4 units at depths 4 and 24, and most have 0.2 to 0.6.

    The check is skipped if the bound of the median tensor is 200 % or more: a wrong sign would pass.
    """
    compiled = "compiled" if settings.compile == "on" else "not compiled"
    claim = f"{compiled}, bf16, on {settings.device_name}: equals {small.config.placement.full_formula}"
    try:
        expected = _of_formula(small)
        changes = [_of_formula(_with_changed_weights(small, number)) for number in range(CHANGES)]
    except FormulaMismatch as error:
        return Check(subject, claim, passed=False, result=str(error))
    try:
        with convert_torch_errors():
            actual = _as_trained(small, settings)
    except ConfigError as error:
        return Check(subject, claim, passed=False, result=str(error))
    largest_gradient = max(_size(value) for name, value in expected.items() if name != "the loss")
    largest, relative = LargestError(TOLERANCE), []
    for name, value in expected.items():
        change = max(_size(changed[name] - value) for changed in changes)
        size_of_all = _size(value) if name == "the loss" else largest_gradient
        unit = change + ROUNDOFF / 2 * size_of_all
        largest.compare(actual[name].cpu(), value, name, unit)
        relative.append(unit / max(_size(value), ROUNDOFF * largest_gradient))
    check, percent = largest.check(subject, claim), 100 * median(relative)
    unit = f"unit: the formula's change by bf16 rounding, {percent:.1f} % of the median tensor"
    if percent * TOLERANCE >= 200:
        return dataclasses.replace(check, passed=True, result=f"too ill-conditioned; {unit}", skipped=True)
    return dataclasses.replace(check, result=f"{check.result}; {unit}")


def _size(value: Tensor) -> float:
    """Return the largest absolute value."""
    return float(value.abs().max())


def _of_formula(small: SmallModel) -> dict[str, Tensor]:
    """Return the loss and gradients of the formula, in float64 on the CPU."""
    with record_norm_order(small.gpt, list(small.norms)) as norm_order, torch.no_grad():
        small.gpt.train()(tokens(BATCH, TIME))
    logits_BTV = ReferenceModel(small.config, small.gpt, norm_order)(tokens(BATCH, TIME))
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), _targets().flatten())
    return _with_names(loss, dict(small.gpt.named_parameters()))


def _as_trained(small: SmallModel, settings: RuntimeSettings) -> dict[str, Tensor]:
    """Return the loss and gradients of a training step: float32 weights, bf16 autocast, on the device."""
    model = copy.deepcopy(small.gpt).float().to(settings.torch_device)
    # The small model computes its attention without a fused kernel; a run trains with torch's.
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = sdpa
    runner = SingleRun(model, compiled=settings.compile == "on")
    runner.train(True)
    with settings.autocast()():
        device = settings.torch_device
        loss = runner.loss(tokens(BATCH, TIME).to(device), _targets().to(device)).loss
    return _with_names(loss, runner.params)


def _targets() -> Tensor:
    """Return the next token of each, and the first one for the last."""
    return tokens(BATCH, TIME).roll(-1, 1)


def _with_names(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = ["the loss", *(f"the gradient of {name}" for name in parameters)]
    return dict(zip(names, with_gradients(loss, list(parameters.values())), strict=True))


@torch.no_grad()
def _with_changed_weights(small: SmallModel, number: int) -> SmallModel:
    """Return a copy of a model with each parameter multiplied by 1 + u or 1 - u, at random."""
    changed = copy.deepcopy(small)
    for name, parameter in changed.gpt.named_parameters():
        parameter.mul_(1 + ROUNDOFF * hashed_numbers(f"change {number}/{name}", *parameter.shape).sign())
    return changed
