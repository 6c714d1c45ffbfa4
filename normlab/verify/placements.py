"""Check a placement's small models against its formula, and its other declarations.

A formula is evaluated with the model's own parameters, so it does not cover their initial values.

Shapes: B batch, T time, D width, V vocabulary.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor, nn

from normlab.base.errors import ConfigError
from normlab.base.options import plain_tree
from normlab.catalogue.norms.base import NORMS, NormConfig
from normlab.catalogue.placements.algebra import AlgebraPlacement
from normlab.catalogue.placements.base import Placement, projects
from normlab.catalogue.placements.table import ROWS
from normlab.catalogue.placements.wiring import Branch
from normlab.catalogue.sites import SITES
from normlab.model.modules import build_norm, build_wiring
from normlab.model.small import (
    VOCAB,
    SmallModel,
    build_small,
    extra_parameters,
    fill,
    hashed_numbers,
    restored_buffers,
    small_config,
    tokens,
)
from normlab.verify.check import Check, LargestError, check_equal, check_no_problems, fails_on_error
from normlab.verify.norm_contract import compare_initial
from normlab.verify.norms import with_gradients
from normlab.verify.reference_model import FormulaMismatch, ReferenceModel, record_norm_order
from normlab.verify.variants import option_fields, other_values

TOLERANCE = 1e-9
"""Relative, in float64, for the logits and gradients of a complete model."""
AXES = {"rows": -1, "columns": -2}
"""The axis along which the vectors of a matrix lie."""
DEPTHS = (1, 2, 5, 18, 19, 24, 25)
"""Depths of the models; LayerScale's initial value changes after 18 and after 24 blocks."""


@fails_on_error("computes {small.config.placement.full_formula}")
def formula_check(small: SmallModel, subject: str) -> Check:
    """Check the logits and every parameter's gradient against the placement's formula."""
    placement, model = small.config.placement, small.gpt
    # A row of the algebra is an identity of the algebra; any other placement is compared with its own formula.
    reference_kind = "identity" if isinstance(placement, AlgebraPlacement) else "self"
    claim = f"computes {placement.full_formula}"
    with record_norm_order(model, list(small.norms)) as norm_order:
        model_results = _logits_and_gradients(model.train(), model)
    reference = ReferenceModel(small.config, model, norm_order)
    try:
        expected = _logits_and_gradients(reference, model)
    except FormulaMismatch as error:
        return Check(subject, claim, passed=False, result=str(error), reference_kind=reference_kind)
    for norm, site in reference.sites:
        made_for = small.norms[norm].site
        if made_for != site:
            result = f"the wiring makes a norm for site {made_for!r}, and in the formula it is at {site!r}"
            return Check(subject, claim, passed=False, result=result, reference_kind=reference_kind)
    largest = LargestError(TOLERANCE)
    # Some gradients are zero up to rounding (key biases, which the softmax cancels), so no scale is much smaller than
    # the largest one.
    least_scale = 1e-3 * max(float(value.abs().max()) for value in expected.values())
    for name, value in expected.items():
        scale = max(float(value.abs().max()), least_scale)
        largest.compare(model_results[name], value, name, scale)
    return largest.check(subject, claim, reference_kind)


def _logits_and_gradients(forward: Callable[[Tensor], Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the logits, and the gradient of a fixed weighted sum of them for each parameter."""
    parameters = dict(model.named_parameters())
    names = ["the logits", *(f"the gradient of {name}" for name in parameters)]
    return dict(zip(names, with_gradients(forward(tokens()), list(parameters.values())), strict=True))


@fails_on_error("has norms at the declared sites")
def norms_check(small: SmallModel, subject: str) -> Check:
    """Check that the model has norms at the sites that the placement declares, and at no others."""
    depth = small.config.model.depth
    declared = Counter((placed.site, placed.layer) for placed in small.config.placed_norms)
    built = Counter((placed.site, placed.layer) for placed in small.norms.values())
    claim = "has norms at the declared sites" if declared else "has no norm of the run"
    problems: list[str] = []
    for site, layer in {**declared, **built}:
        if declared[site, layer] != built[site, layer]:
            block = "" if layer is None else f" of block {layer}"
            problems.append(f"{site}{block}: declared {declared[site, layer]}, built {built[site, layer]}")
    return check_no_problems(subject, claim, problems[:4], f"{len(small.norms)} at depth {depth}")


@fails_on_error("no logit depends on a later token")
@torch.no_grad()
def logits_checks(small: SmallModel, subject: str) -> Iterator[Check]:
    """Check causality, and that evaluation equals training, as the norm declares.

    In training a change of the last token changes earlier logits only if the norm is not causal. Logits in evaluation
    equal those in training bit for bit, unless the norm has batch statistics.
    """
    is_causal = all(norm.causal for norm in small.config.norms)
    claim, expected = "no logit depends on a later token", "no change of earlier logits"
    if not is_causal:
        claim, expected = "logits depend on later tokens in training", "a change of earlier logits"
    before, after = tokens(), tokens()
    after[:, -1] = (after[:, -1] + 1) % VOCAB
    logits = _logits_of(small.gpt, before)
    change = float((logits - _logits_of(small.gpt, after))[:, :-1].abs().max())
    problems: list[str] = []
    if (change > 1e-12) == is_causal:
        problems.append(f"expected {expected}, found {change:.1e} (tolerance 1e-12)")
    yield check_no_problems(subject, claim, problems, f"largest change {change:.1e}")
    # Batch statistics are those of the batch in training, and running ones in evaluation.
    if small.config.batch_statistics:
        return
    change = float((logits - _logits_of(small.gpt, before, training=False)).abs().max())
    problems = []
    if change != 0:
        problems.append(f"expected the logits of training, found a difference of {change:.1e}")
    yield check_no_problems(subject, "computes the same in evaluation", problems, "largest difference 0.0e+00")


def _logits_of(model: nn.Module, tokens_BT: Tensor, *, training: bool = True) -> Tensor:
    """Return the logits in training or evaluation mode, and leave the buffers unchanged."""
    with restored_buffers(model):
        return model.train(training)(tokens_BT)


@fails_on_error("has its declared initial values")
def wiring_check(placement: Placement, subject: str) -> Iterator[Check]:
    """Check names and initial values of parameters outside norms and linear layers, also with other options."""
    largest = LargestError(1e-6)
    depths = DEPTHS if placement.initial_values else DEPTHS[:3]
    # The placement at each depth, and each value of its options at one depth.
    cases = [(placement, depth) for depth in depths]
    for field in option_fields(placement):
        cases += [(variant, DEPTHS[2]) for variant in other_values(placement, field, 1)]
    for (variant, depth), norm in product(cases, _norms_for(placement)):
        small = build_small(small_config(norm, variant, depth=depth, mlp="swiglu"), filled=False)
        model, declared = small.config.model, variant.initial_values
        sizes = {"L": depth, "D": model.width, "M": model.mlp_width, "H": model.heads, "V": VOCAB}
        variables = plain_tree(variant) | plain_tree(norm) | sizes
        of_norms: set[Tensor] = set()
        for module in small.norms:
            of_norms.update(module.parameters())
        names: set[str] = set()
        for layer, name, value in extra_parameters(small.gpt):
            if name in declared:
                location = f"{name}, block {layer} of {depth}"
                compare_initial(largest, value, declared[name], {**variables, "l": layer}, location)
            # A norm declares its own parameters, unless the placement changes their initial values.
            if name in declared or value not in of_norms:
                names.add(name)
        if names != declared.keys():
            yield check_equal(subject, "declares every parameter", sorted(declared), sorted(names))
            return
    if placement.initial_values:
        yield largest.check(subject, "has its declared initial values")


@fails_on_error("keeps its stream in float32 under autocast to bf16")
@torch.no_grad()
def autocast_check(small: SmallModel, subject: str) -> Check:
    """Check that a float32 stream is read, mixed and added to in float32, also where autocast is to bf16."""
    results = []
    for dtype in (torch.float64, torch.float32):
        model = copy.deepcopy(small.gpt).to(dtype)
        with torch.autocast("cpu", torch.bfloat16):  # autocast does not change float64
            stream = model.embed(tokens())
            for wiring in [block.get_submodule("wiring") for block in model.blocks]:
                stream = wiring(stream, Branch(torch.tanh), Branch(torch.tanh))
            results.append(model.head(stream, "read"))
    expected, actual = results
    # One rounding to bf16 would be an error of 4e-3.
    largest = LargestError(1e-4)
    largest.compare(actual, expected, "what the head reads", float(expected.abs().max()))
    return largest.check(subject, "keeps its stream in float32 under autocast to bf16")


@fails_on_error("has its factors in all blocks, in the stream's dtype")
def factor_check(placement: Placement, subject: str) -> Iterator[Check]:
    """Check that all blocks have a factor if it is not 1 in one of them: they share a graph.

    A factor must not widen the dtype of the stream.
    """
    if not isinstance(placement, AlgebraPlacement):
        return
    wrong, norm = [], _norms_for(placement)[0]

    def make_norm(width: int, site: str) -> nn.Module:
        return build_norm(norm, width)

    x_BTD = hashed_numbers("stream", 1, 2, 16).bfloat16()
    for depth in DEPTHS:
        wirings = [build_wiring(placement, layer, depth, 16, make_norm) for layer in range(depth)]
        for layer, (wiring, subs) in enumerate(zip(wirings, placement.layers(depth), strict=True), start=1):
            # A factor of 1 is left out only if it is 1 in each block.
            for part, sub in zip(("attn", "mlp"), subs, strict=True):
                for name, factor in zip(("skip", "branch", "shrink"), sub.factors, strict=True):
                    is_needed = any(factor(number, depth) != 1 for number in range(1, depth + 1))
                    if is_needed != (wiring.get_submodule(part).get_buffer(name) is not None):
                        wrong.append(f"{part}.{name} of block {layer} of {depth}")
            if wiring(x_BTD, Branch(torch.neg), Branch(torch.neg)).dtype != x_BTD.dtype:
                wrong.append(f"the stream's dtype after block {layer} of {depth}")
    yield check_no_problems(subject, "has its factors in all blocks, in the stream's dtype", wrong[:4])


@fails_on_error("keeps bfloat16 inside its sub-layers, and rounds no more than necessary")
def inside_check(placement: Placement, subject: str) -> Iterator[Check]:
    """Check that modules inside sub-layers keep the dtype and round only as often as necessary.

    Queries and keys are rounded once; hidden activations and logits twice, because their factor is rounded too.
    """
    parts = {
        "queries and keys": (placement.qk_transform(2, 8), (2, 2, 6, 8), 1),
        "hidden activations": (placement.hidden_transform("up", 16, 32), (2, 6, 32), 2),
        "logits": (placement.logits_transform(VOCAB, 16), (2, 6, VOCAB), 2),
    }
    for name, (module, shape, roundings) in parts.items():
        if module is None:
            continue
        fill(module, name)
        x = hashed_numbers(name, *shape).bfloat16()
        y = module(x).detach()
        expected = copy.deepcopy(module).double()(x.double()).detach()
        # A number of 8 bits is rounded by at most 1/256 of its size.
        allowed = roundings / 256 * expected.abs()
        is_close = y.dtype == x.dtype and bool(((y - expected).abs() <= allowed).all())
        claim = f"keeps bfloat16 in the {name}, and rounds no more than necessary"
        result = str(y.dtype).removeprefix("torch.")
        problems: list[str] = []
        if not is_close:
            problems.append(f"expected bfloat16 numbers next to those of float64, found others in {result}")
        yield check_no_problems(subject, claim, problems, result)


def ends_check(placement: Placement, subject: str) -> Iterator[Check]:
    """Check that a row has a norm before the LM head exactly if its blocks do not end in one.

    The formula covers one block; the model's ends are set by switches, which this check compares with the formula.
    """
    if placement.name not in {row.name for row in ROWS}:
        return
    last_expression = placement.formula.rpartition(" = ")[2].rpartition(" else ")[2]
    is_needed = "N(" in placement.formula and not last_expression.startswith("N(")
    article, formula = ("a", "x = N(x)") if is_needed else ("no", "nothing")
    claim = f"has {article} norm before the LM head, and none on the embeddings"
    result = f"{placement.embedding_formula or 'nothing'}, {placement.head_formula or 'nothing'}"
    is_consistent = bool(placement.head_formula) == is_needed and not placement.embedding_formula
    problems: list[str] = []
    if not is_consistent:
        problems.append(f"expected nothing, {formula}; found {result}")
    yield check_no_problems(subject, claim, problems, result)


@fails_on_error("keeps its matrices at unit length")
def unit_length_check(placement: Placement, subject: str) -> Iterator[Check]:
    """Check that the projection gives its matrices unit length and changes no other weight."""
    if not projects(placement):
        return
    largest = LargestError(1e-12)
    config = small_config(_norms_for(placement)[0], placement, depth=2, mlp="swiglu", tie_embeddings=False)
    # With an axis of two runs, because all runs of a pack are projected by one call.
    weights: dict[str, Tensor] = {}
    for name, weight in build_small(config).gpt.named_parameters():
        weights[name] = hashed_numbers(name, 2, *weight.shape)
    projected = {name: weight.clone() for name, weight in weights.items()}
    placement.project(projected)
    for name, weight in weights.items():
        matrix = name.removesuffix(".weight").rpartition(".")[2]
        expected = weight
        for vectors, names in placement.unit_length.items():
            if matrix in names.split():
                expected = weight / torch.linalg.vector_norm(weight, dim=AXES[vectors], keepdim=True)
                break
        largest.compare(projected[name], expected, name)
    yield largest.check(subject, "keeps its matrices at unit length")


def _norms_for(placement: Placement) -> list[NormConfig]:
    """Return norm=none, so that no norm has parameters, or norms with gains if required."""
    no_norm = NORMS["none"]()  # pyright: ignore[reportCallIssue]
    try:
        for site in SITES:
            placement.check_norm(site, no_norm)
    except ConfigError:
        return [NORMS["rmsnorm"](unit_offset=offset) for offset in (False, True)]  # pyright: ignore[reportCallIssue]
    return [no_norm]
