"""The entries of the catalogue, each with its mutants and its checks."""

import contextlib
import dataclasses
import importlib
import io
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest
from torch import nn

from mutants.code import TABLES, code_mutants, function_names
from mutants.mutant import Checks, Mutant
from mutants.norms import buffer_mutants, norm_mutants
from mutants.rows import SCHEDULES, init_mutant, row_mutants
from normlab.catalogue import sites
from normlab.catalogue.norms import base as norm_base
from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.optimizers.options import OPTIMIZERS, Orthogonal
from normlab.catalogue.placements import algebra, table
from normlab.catalogue.placements import base as placement_base
from normlab.catalogue.placements.algebra import EarlyBlocks, Row, SubLayer
from normlab.catalogue.placements.base import PLACEMENTS
from normlab.catalogue.placements.init_rules import INIT_RULES
from normlab.config import norms
from normlab.model.small import build_small, small_config
from normlab.verify import selection
from normlab.verify.check import Check
from normlab.verify.placements import formula_check
from normlab.verify.variants import LARGE_EPS, label_of

TESTS = Path(__file__).parents[3] / "tests"
sys.path.append(str(TESTS))

from support.init_rule_forms import placement_init_check, rule_checks  # noqa: E402
from support.norm_defaults import default_check  # noqa: E402


def norm_checks(*names: str) -> Iterator[Check]:
    for name in names:
        yield from default_check(name)
        yield from selection.checks_of_default_norm(name)


def placement_checks(*names: str) -> Iterator[Check]:
    for name in names:
        yield from placement_init_check(PLACEMENTS[name])
        yield from selection.checks_of_placement(PLACEMENTS[name], thorough=False)


def feature_rows() -> list[Row]:
    """Return rows that use every feature of a row, with a different number in every block."""
    return _feature_rows(algebra.Row)


@cache
def _feature_rows(row: type[Row]) -> list[Row]:
    """Return equal objects for one class of rows, because a name is registered once; a mutant has its own class."""
    sub = SubLayer(
        norms=("input", "output", "residual"),
        skip=lambda layer, depth: depth / 16,
        branch=lambda layer, depth: layer / depth,  # 1 in the last block only
        shrink=lambda layer, depth: max(1.0, layer / depth),
        scale=lambda layer, depth: 3 * layer + depth,
        out_gain=lambda layer, depth: layer + 2 * depth,
    )
    vector = dataclasses.replace(sub, scale_per_channel=True)
    gain = "[l + 2 * L - unit_offset] * D"
    initial_values = {
        "wiring.attn.scale": "3 * l + L",
        "wiring.mlp.scale": "[3 * l + L] * D",
        "wiring.attn.norms.out.affine.gain": gain,
        "wiring.mlp.norms.out.affine.gain": gain,
    }
    early = EarlyBlocks(
        blocks=table.quarter,
        condition="l <= L // 4",
        attn=SubLayer(norms=("input", "inner_attn")),
        mlp=SubLayer(norms=("input",)),
    )
    post, pre = SubLayer(norms=("residual",)), SubLayer(norms=("input",))
    formulas = (
        "x = N(L / 16 * x + scale * (l / L) * N(F(N(x))))",
        "x = x + W_out(N(heads(N(x)))) if l <= L // 4 else N(x + A(x)); "
        "x = x + M(N(x)) if l <= L // 4 else N(x + M(x))",
        "y = A(N(L * x / L)); h = x + y; x = (2 * M(N(h)) - (-1 * h) + h) / 2",
    )
    return [
        row(
            name="all_features", formula=formulas[0], source="", init="gpt2", attn=sub, mlp=vector,
            initial_values=initial_values, embedding_norm=True,
        ),
        row(name="early_blocks", formula=formulas[1], source="", init="gpt2", attn=post, mlp=post, early=early),
        row(name="other_forms", formula=formulas[2], source="", init="gpt2", attn=pre, mlp=pre),
    ]  # fmt: skip


ROWS_WITH_OPTIONS = ("rezero", "normformer", "keel", "depth_scaled_sandwich")


def algebra_checks(*names: str) -> Iterator[Check]:
    """Yield the checks of rows by name, and of the test rows."""
    for row in feature_rows():
        algebra.register_row(row)
        yield from selection.checks_of_placement(PLACEMENTS[row.name], thorough=False)
        yield _residual_options_check(row.name)
    yield from placement_checks(*names)


def _residual_options_check(name: str) -> Check:
    """Return the check of a row with all options of the residual sum, whose order in the sum matters."""
    placement = dataclasses.replace(PLACEMENTS[name], branch_warmup=3, branch_factor=0.7, residual_affine=True)
    norm = NORMS["rmsnorm"](eps=LARGE_EPS)  # pyright: ignore[reportCallIssue]
    return formula_check(build_small(small_config(norm, placement, depth=5)), f"placement {label_of(placement)}")


def affine_checks() -> Iterator[Check]:
    """Yield the checks of norms with and without gain and bias, and of a placement that sets initial gains."""
    yield from norm_checks("rmsnorm", "layernorm", "batchnorm", "crmsnorm")
    yield from placement_checks("depth_scaled_sandwich")


def test_checks(*names: str) -> Iterator[Check]:
    """Run files of tests, which compare with other implementations, in this process."""
    # This process has imported `support` already, and tests/conftest.py asks pytest to rewrite its asserts.
    options = ("-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main([*options, *(str(TESTS / name) for name in names)])
    claim = "equal other implementations"
    yield Check(" ".join(names), claim, passed=code == pytest.ExitCode.OK, result=str(code))


def checks_then_tests(checks: Checks, tests: tuple[str, ...]) -> Iterator[Check]:
    yield from checks()
    yield from test_checks(*tests)


STREAM_TESTS, RESIDUAL_TESTS = "placements/test_streams.py", "placements/test_residual_options.py"
ALSO_TESTED_BY: dict[str, tuple[str, ...]] = {
    "rmsnorm": ("norms/test_taper.py", "norms/test_rms_norm_kernel.py"),
    "layernorm": ("norms/test_taper.py", "norms/test_torch_and_public_code.py::test_layernorm_keeps_its_input_only"),
    "taper": ("norms/test_taper.py",),
    "gated_residual": (f"{STREAM_TESTS}::test_the_default_rank_is_that_of_the_class_at_its_width",),
    "identity_hc": (
        f"{STREAM_TESTS}::test_identity_hc_starts_as_hy4",
        f"{STREAM_TESTS}::test_ids_of_runs_without_the_later_options_stay",
    ),
    "sinkhorn": ("placements/test_sinkhorn.py",),
    "wiring": (f"{RESIDUAL_TESTS}::test_vectors_keep_the_dtype_of_the_stream",),
    "mixing": (f"{STREAM_TESTS}::test_another_mixing_starts_near_the_identity",),
    "formula_rewriting": (
        f"{RESIDUAL_TESTS}::test_affine_is_put_on_both_terms_of_a_sum",
        f"{RESIDUAL_TESTS}::test_a_factor_is_put_on_what_sub_layers_add",
    ),
}
"""Tests of what no check of `verify` compares: roundings, defaults of other code, second derivatives, unusual sums."""
SHARED: dict[str, Checks] = {
    "affine": affine_checks,
    "taper": partial(norm_checks, "rmsnorm", "layernorm"),
    "wiring": partial(algebra_checks, "pre", "rezero", "lns", "b2t"),
    "streams": partial(placement_checks, "hyper_connections", "identity_hc", "mhc", "gated_residual"),
    "identity_hc": partial(placement_checks, "identity_hc", "mhc"),
    "sinkhorn": partial(placement_checks, "mhc"),
    "mixing": partial(placement_checks, "mhc"),
    "algebra": partial(algebra_checks, *ROWS_WITH_OPTIONS),
    "formula_rewriting": partial(algebra_checks, *ROWS_WITH_OPTIONS),
}
"""Checks of files that several entries share."""


FUNCTIONS_OF_SITES = (
    "placed_norms",
    "norm_at",
    "_places",
    "_shape_inside",
    "check_norms",
    "_check_key",
    "without_defaults",
    "_have_norms",
)
NO_ENTRY = ("__init__", "base", "init_rules", "formula", "formula_functions")
"""Files without an entry of their own; the two of formulas compute the reference that modules are compared with."""


def catalogue() -> dict[str, tuple[list[Mutant], Checks]]:
    norm_base.load_all()
    placement_base.load_all()
    entries: dict[str, tuple[list[Mutant], Checks]] = {}
    owners: dict[str, list[str]] = {}
    for kind, known in (("norms", NORMS), ("placements", PLACEMENTS)):
        for name, entry in known.items():
            owners.setdefault((entry if isinstance(entry, type) else type(entry)).__module__, []).append(name)
        package = importlib.import_module(f"normlab.catalogue.{kind}")
        for path in sorted(Path(str(package.__file__)).parent.glob("*.py")):
            if path.stem in NO_ENTRY:
                continue
            module = importlib.import_module(f"normlab.catalogue.{kind}.{path.stem}")
            # The rows of the algebra have mutants of their own.
            names = [] if module is algebra else owners.get(module.__name__, [])
            if module is table:  # its functions are schedules, and its rows have mutants of their own
                for name, rows in SCHEDULES.items():
                    entries[name] = list(code_mutants(name, module, [name])), partial(placement_checks, *rows[:2])
                continue
            entry = path.stem if path.stem in SHARED else "/".join(names)
            default_checks = partial(norm_checks if kind == "norms" else placement_checks, *names)
            checks = SHARED.get(entry, default_checks)
            if entry in ALSO_TESTED_BY:
                checks = partial(checks_then_tests, checks, ALSO_TESTED_BY[entry])
            mutants = list(code_mutants(entry, module))
            for name in names:
                mutants += buffer_mutants(entry, _built(kind, name))
                mutants += [init_mutant(entry, name)] if kind == "placements" else norm_mutants(entry, name)
            entries[entry] = mutants, checks
    for row in table.ROWS:
        mutants = [*row_mutants(row), *buffer_mutants(row.name, _built("placements", row.name))]
        entries[row.name] = mutants, partial(placement_checks, row.name)
    entries |= _update_entries()
    of_sites = [*code_mutants("norm.at", sites), *code_mutants("norm.at", norms, FUNCTIONS_OF_SITES)]
    entries["norm.at"] = of_sites, partial(test_checks, "norms/test_sites.py")
    rules = importlib.import_module("normlab.catalogue.placements.init_rules")
    for rule in INIT_RULES:
        mutants = list(code_mutants(f"init {rule}", rules, [rule]))
        entries[f"init {rule}"] = mutants, partial(rule_checks, rule)
    tables = list(code_mutants("init roles", rules, TABLES[rules.__name__]))
    entries["init roles"] = tables, lambda: (c for rule in INIT_RULES for c in rule_checks(rule))
    return entries


def _update_entries() -> dict[str, tuple[list[Mutant], Checks]]:
    """Return an entry for each update, by the optimisers that share it, and one for what several updates call."""
    module = importlib.import_module("normlab.catalogue.optimizers.updates")
    optimizers: dict[tuple[str, ...], list[str]] = {}
    for name, update in module.UPDATES.items():
        functions = tuple(function.__name__ for function in (update.single, update.stacked, update.coefficients))
        optimizers.setdefault(functions, []).append(name)
    of_entry = {"/".join(names): functions for functions, names in optimizers.items()}
    of_updates = {function for functions in of_entry.values() for function in functions}
    of_entry["updates"] = tuple(name for name in function_names(module) if name not in of_updates)
    entries: dict[str, tuple[list[Mutant], Checks]] = {}
    for entry, functions in of_entry.items():
        tests = ["train/test_optim.py"]
        kind = OPTIMIZERS.get(entry.partition("/")[0])
        if kind is None or issubclass(kind, Orthogonal):
            tests.append("train/test_muon.py")
        entries[entry] = list(code_mutants(entry, module, functions)), partial(test_checks, *tests)
    return entries


def _built(kind: str, name: str) -> nn.Module:
    if kind == "norms":
        return NORMS[name]().build(16)  # pyright: ignore[reportCallIssue]
    norm = NORMS["layernorm"]()  # pyright: ignore[reportCallIssue]

    def make_norm(width: int, site: str) -> nn.Module:
        return norm.build(width)

    return nn.ModuleList(PLACEMENTS[name].wire(layer, 5, 16, make_norm) for layer in range(5))
