#!/usr/bin/env python3
"""Break every entry of the catalogue, and see that the checks of `normlab verify` that concern it fail.

    .venv/bin/python scripts/mutate_catalogue.py [--only rmsnorm,deepnorm] [--list] [--json] [--workers 2]

A mutant is an entry with one thing wrong, as public code has had it wrong:

- in the code of a norm, a wiring or an init rule: eps dropped, moved through the root or times a width; a term, a
  factor, a root, a cast or a statement dropped; a sign or an exponent flipped; a mean for a sum; a number changed; an
  axis or a kind of variance changed; one stream or branch in another's place; a norm skipped or applied twice; a
  parameter shared that should not be; a stop-gradient dropped; a condition turned round;
- in a row of the algebra: a norm at another site, one missing, one too many; a factor of depth that is another;
- in any placement: the init rule of another;
- in a built module: a buffer that is all zeros, as after a round trip through the meta device.

What a class says of itself, and the reference that it is held against, are left alone: a mutant differs from them.
Each runs in a process of its own; an exception is a mutant that is seen. So is a minute without an answer, or a process
that dies; these are killed by no check, and are counted apart. Those that nothing sees are printed, and are an error
unless EQUIVALENT says why they compute the same. So is a line there that is no mutant any more, or one that is seen.

It does not break the defaults of options (the references take them as they are given) or the names of things.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import math
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from normlab.init_rules import INIT_RULES
from normlab.norms import base as norm_base
from normlab.norms.base import NORMS
from normlab.placements import algebra
from normlab.placements import base as placement_base
from normlab.placements.algebra import Early, Row, Schedule, SubLayer, one, quarter
from normlab.placements.base import PLACEMENTS
from normlab.source import HELD_AGAINST
from normlab.verify import init_rules as init_rule_checks
from normlab.verify import run
from normlab.verify.check import Check
from normlab.verify.small import config_of

SECONDS = 60
"""A mutant's checks may take so long."""
NO_ANSWER, DIED = "no answer", "its process ended"
"""What begins the text of a mutant that no check saw, but that is not alive."""

Checks = Callable[[], Iterator[Check]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """An entry with one thing wrong."""

    entry: str
    text: str
    """What is wrong: the line as it is now, or the fields of a row. A key of EQUIVALENT."""
    apply: Callable[[], None]
    """Breaks the entry, in the process that calls it."""


AS_IT_IS = "nothing is wrong"
"""The text of what should not be seen."""

# Mutants of code


@dataclass(frozen=True, slots=True)
class Site:
    """A node of the tree, and how another is put in its place."""

    node: ast.AST
    owner: ast.AST
    field: str
    index: int | None
    line: ast.stmt
    """The statement that it stands in."""
    names: frozenset[str]
    """Those of the function that it stands in."""

    def put(self, node: ast.AST) -> None:
        """Put a node where this one is."""
        if self.index is None:
            setattr(self.owner, self.field, node)
        else:
            getattr(self.owner, self.field)[self.index] = node


TURNED = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Div,),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Lt: (ast.GtE, ast.LtE), ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE), ast.GtE: (ast.Lt, ast.Gt), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.And: (ast.Or,), ast.Or: (ast.And,),
}  # fmt: skip
"""Operators, and what each is taken for."""
SWAPPED = {
    "mean": ("sum",), "sum": ("mean",), "square": ("abs",), "sqrt": ("square",), "rsqrt": ("sqrt", "reciprocal"),
    "amin": ("amax",), "amax": ("amin",), "zeros": ("ones",), "ones": ("zeros",), "tanh": ("sigmoid", "atan"),
    "erf": ("tanh",), "sigmoid": ("tanh",), "silu": ("relu", "gelu", "sigmoid"), "log1p": ("log",), "expm1": ("exp",),
    "floor": ("ceil",), "ceil": ("floor",), "min": ("max",), "max": ("min",), "tril": ("triu",), "sin": ("tan",),
    "log": ("log2",), "atan": ("tanh",), "fan_in": ("fan_out",), "fan_out": ("fan_in",), "depth": ("layer", "width"),
    "width": ("depth",), "layer": ("depth",),
}  # fmt: skip
"""Functions and sizes by name, and what each is taken for."""
IDEMPOTENT = ("tuple", "set", "frozenset", "float", "whole", "odd", "unit")
"""Functions that change nothing the second time."""
COMMUTATIVE = ("max", "min", "torch.promote_types", "torch.maximum")
"""Functions whose arguments have no order."""
LEFT_ALONE = ("validate", "fits", "refuse_idle", "definition", "register_row", "factors", "numbers", "early",
              "formula", "starts", "holds_norm", "all_sub_layers", "layers", "all_starts", *HELD_AGAINST)  # fmt: skip
"""Functions in which nothing is computed that a run computes, or that a mutant is held against."""
TABLES = {"normlab.norms.pointwise": ("FUNCTIONS",), "normlab.placements.ngpt": ("ROWS", "COLUMNS")}
TABLES["normlab.init_rules"] = ("OUTPUTS", "EMBEDDINGS", "UNSCALED")
"""Tables outside functions that decide what is computed."""


def code_mutants(entry: str, module: ModuleType, only: Iterable[str] = (), but: Iterable[str] = ()) -> Iterator[Mutant]:
    """The module's code as it is, and every mutant of it, one node changed in each.

    Args:
        entry: What they are said to be of.
        module: Whose source is mutated.
        only: Names of functions; all in which something is computed, unless given.
        but: Those that are left out.
    """
    tree = ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))
    seen = {ast.unparse(tree)}
    yield Mutant(entry, AS_IT_IS, partial(install, module, ast.unparse(tree)))
    for site in list(_sites(tree, module.__name__, frozenset(only), frozenset(but))):
        before = _text(site.line)
        for other in _others(site):
            site.put(other)
            text = f"{before}  ->  {'pass' if isinstance(other, ast.Pass) else _text(site.line)}"
            source = ast.unparse(ast.fix_missing_locations(tree))
            site.put(site.node)
            if source not in seen:
                seen.add(source)
                yield Mutant(entry, text, partial(install, module, source))


def _text(line: ast.AST) -> str:
    """A statement, of one with a body the head."""
    return ast.unparse(line).splitlines()[0]


def _sites(tree: ast.Module, module: str, only: frozenset[str], but: frozenset[str]) -> Iterator[Site]:
    """The nodes that may be changed."""
    for statement in tree.body:
        table = {ast.unparse(target) for target in _targets(statement)} & set(TABLES.get(module, ()))
        if table and (not only or table & only):
            yield from _below(statement, statement, frozenset())
        for function in _functions(statement):
            if function.name not in {*LEFT_ALONE, *but} and (not only or function.name in only):
                nodes = list(ast.walk(function))
                names = {node.id for node in nodes if isinstance(node, ast.Name)}
                names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
                yield from _lines(function, frozenset(names))


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def _functions(statement: ast.stmt) -> Iterator[ast.FunctionDef]:
    for node in [statement, *getattr(statement, "body", [])]:
        if isinstance(node, ast.FunctionDef) and (node is statement or isinstance(statement, ast.ClassDef)):
            yield node


def _lines(owner: ast.AST, names: frozenset[str]) -> Iterator[Site]:
    """The statements of a body and of the bodies in it, and what each is made of."""
    for name in ("body", "orelse", "cases"):
        for index, line in enumerate(getattr(owner, name, [])):
            if isinstance(line, ast.match_case):
                yield from _lines(line, names)
            elif not _is_text(line) and "super()" not in _text(line):
                yield Site(line, owner, name, index, line, names)
                if not isinstance(line, ast.FunctionDef):
                    yield from _below(line, line, names)
                yield from _lines(line, names)


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def _below(node: ast.AST, line: ast.stmt, names: frozenset[str]) -> Iterator[Site]:
    """The expressions under a node; not those of the statements under it, nor what is there for the types alone."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "ctx", "type_params"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.stmt, ast.match_case)):
                yield Site(child, node, name, index, line, names)
                if not _is_plain(child):
                    yield from _below(child, line, names)


def _is_plain(node: ast.AST) -> bool:
    """Whether a node is a size or a dtype of a tensor: what is asked of one of its kind is asked of all."""
    return isinstance(node, ast.Attribute) and node.attr in ("shape", "dtype", "device", "numel", "dim")


def _others(site: Site) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    node = site.node
    if isinstance(node, ast.stmt):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
            yield ast.Pass()
        return
    for kind in TURNED.get(type(node), ()):
        yield kind()
    match node:
        case ast.BinOp(left, op, right):
            yield from (left, right)
            if isinstance(op, (ast.Sub, ast.Div)):
                yield ast.BinOp(right, op, left)
            if isinstance(op, ast.Pow):
                yield ast.BinOp(left, op, ast.UnaryOp(ast.USub(), right))
                yield ast.BinOp(left, op, ast.BinOp(right, ast.Div(), ast.Constant(2)))
            yield from _eps_moved(node)
        case ast.BoolOp(_, values):
            yield from values
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            yield from (ast.Constant(other) for other in {value + 1, -value} - {value})
        case ast.Attribute(owner, name):
            yield from (ast.Attribute(owner, other, node.ctx) for other in SWAPPED.get(name, ()))
            if name == "eps":
                yield from (_parsed(text) for text in ("0.0", "self.eps * 16", "self.eps / 16", "self.eps ** 2"))
        case ast.Name(name) if isinstance(node.ctx, ast.Load):
            yield from (ast.Name(other, node.ctx) for other in _alike(name, site.names))
        case ast.Tuple(values) | ast.List(values) if len(values) > 1 and isinstance(node.ctx, ast.Load):
            yield from (ast.Tuple(values[:at] + values[at + 1 :], node.ctx) for at in range(len(values)))
        case ast.Dict(keys, values):
            yield from (ast.Dict(keys, _rotated(values, at)) for at in range(len(values)))
        case ast.Call():
            yield from _calls(node)
    if isinstance(site.owner, ast.If) and site.field == "test":
        yield from (ast.Constant(True), ast.Constant(False))


def _rotated(values: list[ast.expr], at: int) -> list[ast.expr]:
    """One value of a table taken from its neighbour."""
    return [*values[:at], values[at - 1], *values[at + 1 :]]


def _calls(call: ast.Call) -> Iterator[ast.expr]:
    """Not called, called twice, without one of its arguments, or with one in another's place."""
    method = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) not in ("torch", "F", "nn", "math")
    name = ast.unparse(call.func)
    if isinstance(call.func, ast.Attribute) and method and ast.unparse(call.func.value) != "self":
        # torch computes in the wider of two dtypes, and a parameter's is never narrower than what a norm works in.
        if not (call.func.attr == "to" and ast.unparse(call.func.value).startswith("self.")):
            yield call.func.value
        if call.func.attr == "to":
            return
    if len(call.args) == 1 and name != "working_dtype":
        yield call.args[0]
        again = isinstance(call.func, (ast.Name, ast.Subscript)) or name.startswith("self.")
        if again and name not in IDEMPOTENT:
            yield ast.Call(call.func, [call], call.keywords)
    for at in range(1, len(call.args) if name not in COMMUTATIVE else 0):
        swapped = [*call.args[: at - 1], call.args[at], call.args[at - 1], *call.args[at + 1 :]]
        yield ast.Call(call.func, swapped, call.keywords)
    for at in range(len(call.keywords)):
        if call.keywords[at].arg == "device":
            continue  # there is one
        yield ast.Call(call.func, call.args, call.keywords[:at] + call.keywords[at + 1 :])
    if ast.unparse(call.func).endswith("vector_norm"):
        yield ast.Call(call.func, call.args, [*call.keywords, ast.keyword("ord", ast.Constant(1))])
    if ast.unparse(call.func) == "torch.rsqrt" and isinstance(call.args[0], ast.BinOp):
        inner, eps = ast.unparse(call.args[0].left), ast.unparse(call.args[0].right)
        yield _parsed(f"(torch.sqrt({inner}) + {eps}).reciprocal()")
    if ast.unparse(call.func).endswith(".clamp") and [k.arg for k in call.keywords] == ["min"]:
        assert isinstance(call.func, ast.Attribute)
        yield ast.BinOp(call.func.value, ast.Add(), call.keywords[0].value)
        yield ast.Call(call.func, [], [ast.keyword("max", call.keywords[0].value)])


def _eps_moved(node: ast.BinOp) -> Iterator[ast.expr]:
    """From beside a root into it."""
    if isinstance(node.op, ast.Add) and ast.unparse(node.right) == "self.eps":
        left = ast.unparse(node.left)
        yield _parsed(f"torch.sqrt(torch.square({left}) + self.eps)")
        yield _parsed(f"({left}).clamp(min=self.eps)")


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


KINDS = ({"attn", "mlp"}, {"layer", "depth", "width"}, {"q", "k", "v"}, {"heads", "head_width"}, {"up", "down"})
"""Names of the same kind that are no tensors."""


def _alike(name: str, names: frozenset[str]) -> set[str]:
    """Names of the same function that could stand there: of tensors of the same shape, or of the same kind."""
    shape = name.rpartition("_")[2]
    if shape == "BTD":
        return {other for other in names if other.endswith(f"_{shape}") and other != name}
    return {other for kind in KINDS if name in kind for other in kind & names if other != name}


def install(module: ModuleType, source: str) -> None:
    """Run a mutated source in its module, and let what other modules have taken from it be the mutant's."""
    for known, of in ((NORMS, lambda entry: entry), (PLACEMENTS, type)):
        for name in [name for name, entry in known.items() if of(entry).__module__ == module.__name__]:
            del known[name]
    exec(compile(source, "<mutant>", "exec"), vars(module))  # noqa: S102
    for other in [other for name, other in list(sys.modules.items()) if name.startswith("normlab.")]:
        for name, value in list(vars(other).items()):
            if getattr(value, "__module__", "") == module.__name__ and hasattr(value, "__qualname__"):
                setattr(other, name, vars(module).get(value.__qualname__, value))


# Mutants of rows


def one_and_a_half(layer: int, depth: int) -> float:
    """A factor that is there too often."""
    return 1.5


FACTORS: dict[str, Schedule] = {
    "1": one,
    "3/2": one_and_a_half,
    "L ** (1/4)": lambda layer, depth: depth**0.25,
    "(2 * L) ** (-1/4)": lambda layer, depth: (2 * depth) ** -0.25,
    "(2 * L) ** (1/2)": lambda layer, depth: (2 * depth) ** 0.5,
    "(8 * L) ** (1/4)": lambda layer, depth: (8 * depth) ** 0.25,
    "(2 * l) ** (1/4)": lambda layer, depth: (2 * layer) ** 0.25,
    "sqrt(L)": lambda layer, depth: math.sqrt(depth),
    "sqrt(2 * l)": lambda layer, depth: math.sqrt(2 * layer),
    "sqrt(l + 1)": lambda layer, depth: math.sqrt(layer + 1),
    "sqrt(l - 1)": lambda layer, depth: math.sqrt(layer - 1),
    "1 / sqrt(l)": lambda layer, depth: 1 / math.sqrt(layer),
    "l": lambda layer, depth: layer,
}
"""Those that a factor of depth is taken for."""
STARTS: dict[str, Schedule | None] = {"none": None, "0": algebra.zero, "1": one, "0.1": lambda layer, depth: 0.1}
"""Those of a learned factor."""
SITES = {"attn": ("in", "out", "res", "q", "k", "v", "attn_inner"), "mlp": ("in", "out", "res", "mlp_inner")}


def row_mutants(row: Row) -> Iterator[Mutant]:
    """Every mutant of a row of the algebra, one field changed in each."""

    def mutant(text: str, **fields: Any) -> Mutant:
        return Mutant(row.name, text, partial(_set_row, dataclasses.replace(row, **fields)))

    for name in ("head_scale", "shared_scale", "embedding_norm", "final_norm"):
        yield mutant(f"row: {name}={not getattr(row, name)}", **{name: not getattr(row, name)})
    yield mutant(f"row: init={_wrong_init(row.init)}", init=_wrong_init(row.init))
    if row.attn != row.mlp:
        yield mutant("row: attn and mlp are exchanged", attn=row.mlp, mlp=row.attn)
    for part in ("attn", "mlp"):
        for text, sub in _sub_layers(getattr(row, part), part):
            yield mutant(f"row: {part} {text}", **{part: sub})
    if row.early is None:
        return
    early = row.early
    for text, blocks in (("one less", lambda depth: early.blocks(depth) - 1), ("all", lambda depth: depth)):
        yield mutant(f"row: {text} are early", early=dataclasses.replace(early, blocks=blocks))
    yield mutant(
        "row: one more is early", early=dataclasses.replace(early, blocks=lambda depth: early.blocks(depth) + 1)
    )
    late = {"attn": early.attn, "mlp": early.mlp, "early": dataclasses.replace(early, attn=row.attn, mlp=row.mlp)}
    yield mutant("row: early and late are exchanged", **late)
    for part in ("attn", "mlp"):
        for text, sub in _sub_layers(getattr(early, part), part):
            yield mutant(f"row: early {part} {text}", early=dataclasses.replace(early, **{part: sub}))


def _set_row(row: Row) -> None:
    algebra._ROWS_BY_NAME[row.name] = row


def init_mutant(entry: str, name: str) -> Mutant:
    """A placement that is no row, with another init rule."""
    scheme = type(PLACEMENTS[name])
    wrong = _wrong_init(scheme.init)
    return Mutant(entry, f"{name}: init={wrong}", lambda: setattr(scheme, "init", wrong))


def _wrong_init(init: str) -> str:
    """What is taken where nobody thinks of it: GPT-2's; its other one where that is right."""
    return "gpt2_scaled" if init == "gpt2" else "gpt2"


def _sub_layers(sub: SubLayer, part: str) -> Iterator[tuple[str, SubLayer]]:
    """A sub-layer with one thing wrong, in words and as it is then."""
    for site in SITES[part]:
        rest = tuple(other for other in sub.norms if other != site)
        if site not in sub.norms:
            yield f"has a norm at {site}", dataclasses.replace(sub, norms=(*sub.norms, site))
            continue
        yield f"lacks {site}", dataclasses.replace(sub, norms=rest)
        for other in SITES[part]:
            if other not in sub.norms:
                yield f"has {other} for {site}", dataclasses.replace(sub, norms=(*rest, other))
    for name in ("skip", "branch", "shrink"):
        now = _numbers(getattr(sub, name))
        for text, factor in FACTORS.items():
            if _numbers(factor) != now and (now != _numbers(one) or text in ("3/2", "sqrt(2 * l)")):
                yield f"{name}={text}", dataclasses.replace(sub, **{name: factor})
    for text, start in STARTS.items():
        if (start is None) != (sub.scale is None) or (start and sub.scale and _numbers(start) != _numbers(sub.scale)):
            yield f"scale={text}", dataclasses.replace(sub, scale=start)
    if sub.scale is not None:
        yield "has its scale the other way", dataclasses.replace(sub, scale_per_channel=not sub.scale_per_channel)


def _numbers(schedule: Schedule) -> list[float]:
    """What a schedule gives; nothing where it cannot."""
    try:
        return [schedule(layer, depth) for depth in (1, 2, 5, 24) for layer in range(1, depth + 1)]
    except ValueError:
        return []


def _uses(row: Row) -> set[str]:
    """The schedules of a row, by their names."""
    used: set[Any] = {row.early.blocks} if row.early is not None else set()
    for sub in row.all_sub_layers:
        used |= {*sub.factors, sub.scale, sub.out_gain} - {None}
    return {schedule.__name__ for schedule in used}


SCHEDULES: dict[str, list[str]] = {}
"""Functions of depth, and the rows that have them."""
for _row in algebra.ROWS:
    for _name in sorted(_uses(_row)):
        SCHEDULES.setdefault(_name, []).append(_row.name)


# Mutants of buffers


def buffer_mutants(entry: str, model: nn.Module) -> Iterator[Mutant]:
    """Each buffer of a module's own class zero, as `to_empty` may leave what no checkpoint and no init fills."""
    kinds = {(type(module), name) for module in model.modules() for name, _ in module.named_buffers(recurse=False)}
    for kind, name in sorted(kinds, key=str):
        yield Mutant(entry, f"buffer: {kind.__name__}.{name} is all zeros", partial(_lose, kind, name))


def _lose(kind: type[nn.Module], lost: str) -> None:
    def register(self: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        if name == lost and tensor is not None:
            tensor = torch.zeros_like(tensor)
        nn.Module.register_buffer(self, name, tensor, persistent)

    kind.register_buffer = register


# Entries


def norm_checks(*names: str) -> Iterator[Check]:
    """Those of norms by their names, with a mutant in place."""
    for name in names:
        norm = NORMS[name]()  # pyright: ignore[reportCallIssue]
        yield from run.of_norm(norm, config_of(norm, PLACEMENTS["pre"]).model.width)


def placement_checks(*names: str) -> Iterator[Check]:
    """Those of placements."""
    for name in names:
        yield from run.of_placement(PLACEMENTS[name], thorough=False)


@cache
def made_up() -> list[Row]:
    """Rows with all that a row can have, each number its own in every block: the catalogue's have some of it."""
    sub = SubLayer(
        norms=("in", "out", "res"),
        skip=lambda layer, depth: depth / 16,
        branch=lambda layer, depth: layer / (depth + 1),
        shrink=lambda layer, depth: max(1.0, layer / depth),
        scale=lambda layer, depth: 3 * layer + depth,
        out_gain=lambda layer, depth: layer + 2 * depth,
    )
    vector = dataclasses.replace(sub, scale_per_channel=True)
    gain = "[l + 2 * L - unit_offset] * D"
    starts = {
        "wiring.attn.scale": "3 * l + L",
        "wiring.mlp.scale": "[3 * l + L] * D",
        "wiring.attn.norms.out.affine.gain": gain,
        "wiring.mlp.norms.out.affine.gain": gain,
    }
    early = Early(
        blocks=quarter, condition="l <= L // 4", attn=SubLayer(norms=("in", "attn_inner")), mlp=SubLayer(norms=("in",))
    )
    post = SubLayer(norms=("res",))
    formulas = (
        "x = N(L / 16 * x + scale * (l / (L + 1)) * N(F(N(x))))",
        "x = x + W_out(N(heads(N(x)))) if l <= L // 4 else N(x + A(x)); "
        "x = x + M(N(x)) if l <= L // 4 else N(x + M(x))",
    )
    return [
        Row(name="whole", formula=formulas[0], source="", init="gpt2", attn=sub, mlp=vector, starts=starts),
        Row(name="first", formula=formulas[1], source="", init="gpt2", attn=post, mlp=post, early=early),
    ]


def algebra_checks(*names: str) -> Iterator[Check]:
    """Those of rows by their names, and of the ones made up."""
    for row in made_up():
        algebra.register_row(row)
        yield from run.of_placement(PLACEMENTS[row.name], thorough=False)
    yield from placement_checks(*names)


def affine_checks() -> Iterator[Check]:
    """Those of norms, and of a placement that starts gains."""
    yield from norm_checks("rmsnorm", "layernorm", "batchnorm")
    yield from placement_checks("depth_scaled_sandwich")


SHARED: dict[str, Checks] = {
    "affine": affine_checks,
    "wiring": partial(algebra_checks, "rezero", "lns"),
    "streams": partial(placement_checks, "residual", "siamese"),
    "algebra": partial(algebra_checks, "rezero", "normformer"),
}
"""Files that are of no entry alone, and whose checks they are seen by."""


def catalogue() -> dict[str, tuple[list[Mutant], Checks]]:
    """Every entry, its mutants, and the checks that concern it."""
    norm_base.load_all()
    placement_base.load_all()
    found: dict[str, tuple[list[Mutant], Checks]] = {}
    owners: dict[str, list[str]] = {}
    for kind, known in (("norms", NORMS), ("placements", PLACEMENTS)):
        for name, entry in known.items():
            owners.setdefault((entry if isinstance(entry, type) else type(entry)).__module__, []).append(name)
        package = importlib.import_module(f"normlab.{kind}")
        for path in sorted(Path(str(package.__file__)).parent.glob("*.py")):
            if path.stem in ("__init__", "base"):
                continue
            module = importlib.import_module(f"normlab.{kind}.{path.stem}")
            names = owners.get(module.__name__, [])
            entry = path.stem if path.stem in SHARED else "/".join(names)
            checks = partial(norm_checks if kind == "norms" else placement_checks, *names)
            schedules = SCHEDULES if module is algebra else {}
            mutants = list(code_mutants(entry, module, but=schedules))
            for name, rows in schedules.items():
                found[name] = list(code_mutants(name, module, [name])), partial(placement_checks, *rows[:2])
            if names and entry not in SHARED:
                mutants += buffer_mutants(entry, _built(kind, names[0]))
                mutants += [init_mutant(entry, name) for name in names if kind == "placements"]
            found[entry] = mutants, SHARED.get(entry, checks)
    for row in algebra.ROWS:
        mutants = [*row_mutants(row), *buffer_mutants(row.name, _built("placements", row.name))]
        found[row.name] = mutants, partial(placement_checks, row.name)
    rules = importlib.import_module("normlab.init_rules")
    for rule in INIT_RULES:
        mutants = list(code_mutants(f"init {rule}", rules, [rule]))
        found[f"init {rule}"] = mutants, partial(init_rule_checks.rule_checks, rule)
    tables = list(code_mutants("init roles", rules, TABLES[rules.__name__]))
    found["init roles"] = tables, lambda: (c for rule in INIT_RULES for c in init_rule_checks.rule_checks(rule))
    return found


def _built(kind: str, name: str) -> nn.Module:
    if kind == "norms":
        return NORMS[name]().build(16)  # pyright: ignore[reportCallIssue]
    make_norm = NORMS["layernorm"]().build  # pyright: ignore[reportCallIssue]
    return nn.ModuleList(PLACEMENTS[name].wire(layer, 5, 16, make_norm) for layer in range(5))


# Running them


def seen_by(mutant: Mutant, checks: Checks) -> str:
    """What sees the mutant; an empty text where nothing does. Breaks this process's catalogue."""
    try:
        mutant.apply()
        failed = next((check for check in checks() if not check.passed), None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{failed.check}: {failed.seen}" if failed else ""


def judge(cases: list[tuple[Mutant, Checks]], workers: int = 2) -> list[str]:
    """What sees each mutant, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    found = [""] * len(cases)
    waiting = list(enumerate(cases))[::-1]
    running: dict[Any, tuple[int, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            number, (mutant, checks) = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_tell, args=(theirs, mutant, checks))
            process.start()
            theirs.close()
            running[ours] = number, process, time.monotonic() + SECONDS
        ready = wait(list(running), timeout=1)
        for pipe, (number, process, deadline) in list(running.items()):
            if pipe in ready:
                try:
                    found[number] = pipe.recv()
                except EOFError:
                    found[number] = DIED
            elif time.monotonic() > deadline:
                process.kill()
                found[number] = f"{NO_ANSWER} in {SECONDS} s"
            else:
                continue
            process.join()
            pipe.close()
            del running[pipe]
    return found


def _tell(pipe: Any, mutant: Mutant, checks: Checks) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        torch.set_num_threads(1)
        pipe.send(seen_by(mutant, checks))


NO_SCALE = "there is no scale to be shared"
SCALES_OF_ATTENTION = "the MLP's is replaced by attention's, which both share"
LAST_OF_ONE = "a vector has one axis, which is its last"
EITHER_WAY = "two neighbouring axes change places, whichever is named first"
COUNTS = (
    "weights_TT = x_TD.new_ones(steps, steps).tril() / torch.arange(1, steps + 1, device=x_TD.device)",
    "count_T1 = torch.arange(2, len(own_TD) + 1, device=x_TND.device, dtype=x_TND.dtype)",
)
"""Of batchnorm_past, as is JOINED: lines of which a mutant computes the same."""
JOINED = "return y_TND.unflatten(1, (len(like), *like.shape[2:-1]))"
EQUIVALENT: dict[tuple[str, str], str] = {
    **{
        (row.name, "row: shared_scale=True"): NO_SCALE
        for row in algebra.ROWS
        if row.attn.scale is None and row.mlp.scale is None
    },
    **{
        ("rezero", f"row: mlp {text}"): SCALES_OF_ATTENTION
        for text in ("scale=none", "scale=1", "scale=0.1", "has its scale the other way")
    },
    (
        "streams",
        "return (x_BTD, x_BTD.clone())  ->  return (x_BTD, x_BTD)",
    ): "the copy is for the compiler; neither stream is written in place",
    ("sub_ln", "row: attn and mlp are exchanged"): "a block's inner sites are those of both, and the rest is alike",
    (
        "quarter",
        "return depth // 4  ->  return depth / 4",
    ): "a block's number is whole: it is at most L / 4 where it is at most its floor",
    (
        "algebra",
        "return frozenset(attn.norms + mlp.norms) & set(INNER_SITES)  ->  return frozenset(attn.norms + mlp.norms)",
    ): "a block asks for those inside it by their names",
    (
        "seednorm",
        "alpha_D, beta_D, gamma_D = (vector.to(work_D.dtype) for vector in (self.alpha, self.beta, self.gamma))  ->  "
        "alpha_D, beta_D, gamma_D = (vector for vector in (self.alpha, self.beta, self.gamma))",
    ): "torch computes in the wider of two dtypes, which is never a parameter's",
    (
        "batchnorm",
        "self.keep(mean_D, var_D, x_D.numel() // x_D.shape[-1])  ->  "
        "self.keep(mean_D, var_D, x_D.numel() / x_D.shape[-1])",
    ): "the count of numbers is a multiple of the width",
    **{("batchnorm_past", f"{line}.unsqueeze(1)  ->  {line}.unsqueeze(-1)"): LAST_OF_ONE for line in COUNTS},
    (
        "batchnorm_past",
        "x_TD = x_D.movedim(1, 0) if x_D.dim() > 2 else x_D  ->  x_TD = x_D.movedim(0, 1) if x_D.dim() > 2 else x_D",
    ): EITHER_WAY,
    ("batchnorm_past", f"{JOINED}.movedim(0, 1)  ->  {JOINED}.movedim(1, 0)"): EITHER_WAY,
    (
        "batchnorm_past",
        "between_TD = (own_TD[1:] - mean_TD[:-1]).square() * ((count_T1 - 1) / count_T1)  ->  "
        "between_TD = (mean_TD[:-1] - own_TD[1:]).square() * ((count_T1 - 1) / count_T1)",
    ): "the square of a difference and of its negative",
    (
        "pointwise",
        "return torch.where(x >= 0, half(x.clamp(min=0)), -half((-x).clamp(min=0)))  ->  "
        "return torch.where(x > 0, half(x.clamp(min=0)), -half((-x).clamp(min=0)))",
    ): "at 0 either half is 0, and so is the slope of each",
    **{("groupnorm", f"self.fits(width)  ->  {text}"): "a config has asked before" for text in ("pass", "width")},
}
"""Mutants that compute what the entry does, and why: by entry and the mutant's text."""


def verdict(entry: str, mutants: list[Mutant], seen: list[str]) -> dict[str, Any]:
    """Counts, and what is wrong: survivors without a reason, reasons without a survivor, and what is sound but seen."""
    alive = [mutant.text for mutant, by in zip(mutants, seen, strict=True) if not by and mutant.text != AS_IT_IS]
    unsound = [by for mutant, by in zip(mutants, seen, strict=True) if by and mutant.text == AS_IT_IS]
    told = [text for of, text in EQUIVALENT if of == entry]
    survivors = [text for text in alive if text not in told]
    count = sum(mutant.text != AS_IT_IS for mutant in mutants)
    return {
        "entry": entry, "mutants": count, "killed": count - len(alive),
        "no_answer": sum(by.startswith(NO_ANSWER) for by in seen), "died": seen.count(DIED), "survived": len(survivors),
        "equivalent": len(alive) - len(survivors), "survivors": survivors, "unsound": unsound,
        "stale": [text for text in told if text not in alive],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", default="", help="entries, separated by commas; all, unless given")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    parser.add_argument("--json", action="store_true", help="print a JSON object an entry")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    begun = time.monotonic()
    found = catalogue()
    chosen = [name for name in options.only.split(",") if name] or list(found)
    if unknown := set(chosen) - set(found):
        parser.error(f"no entry {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    if options.list:
        print("\n".join(f"{name}: {mutant.text}" for name in chosen for mutant in found[name][0]))
        return 0
    bad, total = False, Counter()
    if not options.json:
        print(f"{'entry':<28} {'mutants':>8} {'killed':>8} {'survived':>8} {'equivalent':>10}")
    for name in chosen:
        mutants, checks = found[name]
        told = verdict(name, mutants, judge([(mutant, checks) for mutant in mutants], options.workers))
        total.update({key: value for key, value in told.items() if isinstance(value, int)})
        bad |= any(told[kind] for kind in WRONG)
        print(json.dumps(told) if options.json else _line(told), flush=True)
    if not options.json:
        print(_line({"entry": f"all, in {time.monotonic() - begun:.0f} s", **total}))
    return int(bad)


WRONG = {
    "survivors": "SURVIVES",
    "stale": "STALE, a reason without a survivor:",
    "unsound": "SEEN, WITH NOTHING WRONG:",
}


def _line(told: dict[str, Any]) -> str:
    counts = f"{told['mutants']:>8} {told['killed']:>8} {told['survived']:>8} {told['equivalent']:>10}"
    wrong = [f"  {word} {text}" for kind, word in WRONG.items() for text in told.get(kind, ())]
    unseen = told["no_answer"], told["died"]
    if any(unseen) or "survivors" not in told:  # of all entries always
        counts += f"  of the killed {unseen[0]} by no answer in {SECONDS} s, {unseen[1]} by a dead process"
    return "\n".join([f"{told['entry']:<28} {counts}", *wrong])


if __name__ == "__main__":
    sys.exit(main())
