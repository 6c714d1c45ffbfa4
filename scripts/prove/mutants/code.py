"""Mutants of source code: each changes one node of a module's syntax tree."""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

from mutants.mutant import UNCHANGED, Mutant
from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.placements import algebra, table
from normlab.catalogue.placements.base import PLACEMENTS

REFERENCES = ("reference", "reference_affine", "reference_in_eval", "reference_taper")
"""Methods that are the reference implementation of a norm."""


@dataclass(frozen=True, slots=True)
class Site:
    """A node of the tree and its position in the parent."""

    node: ast.AST
    owner: ast.AST
    field: str
    index: int | None
    line: ast.stmt
    names: frozenset[str]
    """The names in the function that contains it."""

    def put(self, node: ast.AST) -> None:
        """Replace the node at this position."""
        if self.index is None:
            setattr(self.owner, self.field, node)
        else:
            getattr(self.owner, self.field)[self.index] = node


OPERATORS = {
    ast.Add: (ast.Sub,), ast.Sub: (ast.Add,), ast.Mult: (ast.Div,), ast.Div: (ast.Mult,), ast.FloorDiv: (ast.Div,),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Lt: (ast.GtE, ast.LtE), ast.LtE: (ast.Gt, ast.Lt),
    ast.Gt: (ast.LtE, ast.GtE), ast.GtE: (ast.Lt, ast.Gt), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.And: (ast.Or,), ast.Or: (ast.And,),
}  # fmt: skip
FUNCTIONS = {
    "mean": ("sum",), "sum": ("mean",), "square": ("abs",), "sqrt": ("square",), "rsqrt": ("sqrt", "reciprocal"),
    "amin": ("amax",), "amax": ("amin",), "zeros": ("ones",), "ones": ("zeros",), "tanh": ("sigmoid", "atan"),
    "erf": ("tanh",), "sigmoid": ("tanh",), "silu": ("relu", "gelu", "sigmoid"), "log1p": ("log",), "expm1": ("exp",),
    "floor": ("ceil",), "ceil": ("floor",), "min": ("max",), "max": ("min",), "tril": ("triu",), "sin": ("tan",),
    "log": ("log2",), "atan": ("tanh",), "fan_in": ("fan_out",), "fan_out": ("fan_in",), "depth": ("layer", "width"),
    "width": ("depth",), "layer": ("depth",),
}  # fmt: skip
"""Names of functions and sizes, and their replacements."""
IDEMPOTENT = ("tuple", "set", "frozenset", "float", "odd", "unit", "parameter")
"""Functions with no effect when applied twice."""
COMMUTATIVE = ("max", "min", "torch.promote_types", "torch.maximum")
"""Functions that ignore the order of their arguments."""
EXCLUDED = ("validate", "check_width", "check_norm", "check_streams", "reject_unused_options", "without_defaults",
              "register_row", "factors", "early",
              "formula", "weights_formula", "initial_values", "has_free_branches", "has_standard_matrices",
              "is_plain_sum", "all_sub_layers", "_without_norms", "layers",
              "all_initial_values",
              "matmul_flops", "matmul_weights", "kept_numbers", "kept_with_input", "streams_in_tensors",
              "is_parallel",
              "parameters", *REFERENCES)  # fmt: skip
"""Functions outside a run's computation, and functions that mutants are compared with."""
TABLES = {"normlab.catalogue.norms.pointwise": ("FUNCTIONS",), "normlab.catalogue.placements.ngpt": ("ROWS", "COLUMNS")}
TABLES["normlab.catalogue.placements.init_rules"] = ("OUTPUTS", "EMBEDDINGS", "UNSCALED")
"""Tables outside functions that a run's computation uses."""


def code_mutants(entry: str, module: ModuleType, only: Iterable[str] = ()) -> Iterator[Mutant]:
    """Yield the unchanged module and every mutant of it, with one node changed in each.

    Args:
        entry: The entry of the mutants.
        module: The module to mutate.
        only: Names of functions; by default all except `EXCLUDED`.
    """
    tree = _tree(module)
    sources = {ast.unparse(tree)}
    yield Mutant(entry, UNCHANGED, partial(install, module, ast.unparse(tree)))
    for site in list(_sites(tree, module.__name__, frozenset(only))):
        before = _text(site.line)
        for replacement in _replacements(site):
            site.put(replacement)
            text = f"{before}  ->  {'pass' if isinstance(replacement, ast.Pass) else _text(site.line)}"
            source = ast.unparse(ast.fix_missing_locations(tree))
            site.put(site.node)
            if source not in sources:
                sources.add(source)
                yield Mutant(entry, text, partial(install, module, source))


def function_names(module: ModuleType) -> list[str]:
    """Return the names of a module's functions and of its classes' methods."""
    return [function.name for statement in _tree(module).body for function in _functions(statement)]


def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))


def _text(line: ast.AST) -> str:
    return ast.unparse(line).splitlines()[0]


def _sites(tree: ast.Module, module: str, only: frozenset[str]) -> Iterator[Site]:
    for statement in tree.body:
        table = {ast.unparse(target) for target in _targets(statement)} & set(TABLES.get(module, ()))
        if table and (not only or table & only):
            yield from _below(statement, statement, frozenset())
        for function in _functions(statement):
            if function.name not in EXCLUDED and (not only or function.name in only):
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
    """Yield the statements of a body, of nested bodies, and their expressions."""
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
    """Yield the expressions under a node, without those in nested statements and in type annotations."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "ctx", "type_params"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.stmt, ast.match_case)):
                yield Site(child, node, name, index, line, names)
                if not _is_plain(child):
                    yield from _below(child, line, names)


def _is_plain(node: ast.AST) -> bool:
    """Return whether a node is a property that all tensors of an expression share."""
    return isinstance(node, ast.Attribute) and node.attr in ("shape", "dtype", "device", "numel", "dim")


def _replacements(site: Site) -> Iterator[ast.AST]:
    node = site.node
    if isinstance(node, ast.stmt):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
            yield ast.Pass()
        return
    for kind in OPERATORS.get(type(node), ()):
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
            negated = set() if isinstance(site.owner, ast.UnaryOp) else {-value}  # its sign is dropped there
            yield from (ast.Constant(other) for other in ({value + 1} | negated) - {value})
        case ast.Attribute(owner, name):
            yield from (ast.Attribute(owner, other, node.ctx) for other in FUNCTIONS.get(name, ()))
            if name == "eps":
                yield from (_parsed(text) for text in ("0.0", "self.eps * 16", "self.eps / 16", "self.eps ** 2"))
        case ast.Name(name) if isinstance(node.ctx, ast.Load):
            yield from (ast.Name(other, node.ctx) for other in _similar_names(name, site.names))
        case ast.Tuple(values) | ast.List(values) if len(values) > 1 and isinstance(node.ctx, ast.Load):
            yield from (ast.Tuple(values[:at] + values[at + 1 :], node.ctx) for at in range(len(values)))
        case ast.Dict(keys, values):
            yield from (ast.Dict(keys, _rotated(values, at)) for at in range(len(values)))
        case ast.Call():
            yield from _calls(node)
    if isinstance(site.owner, ast.If) and site.field == "test":
        yield from (ast.Constant(True), ast.Constant(False))


def _rotated(values: list[ast.expr], at: int) -> list[ast.expr]:
    """Replace one value of a table by its neighbour."""
    return [*values[:at], values[at - 1], *values[at + 1 :]]


def _calls(call: ast.Call) -> Iterator[ast.expr]:
    """Drop the call, repeat it, drop an argument, or swap two arguments."""
    method = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) not in ("torch", "F", "nn", "math")
    name = ast.unparse(call.func)
    if isinstance(call.func, ast.Attribute) and method and ast.unparse(call.func.value) != "self":
        # A parameter's dtype is never narrower than the working dtype, and torch computes in the wider one.
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
            continue  # only the CPU is checked
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
    """Move eps from outside a root into it."""
    if isinstance(node.op, ast.Add) and ast.unparse(node.right) == "self.eps":
        left = ast.unparse(node.left)
        yield _parsed(f"torch.sqrt(torch.square({left}) + self.eps)")
        yield _parsed(f"({left}).clamp(min=self.eps)")


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


KINDS = ({"attn", "mlp"}, {"layer", "depth", "width"}, {"q", "k", "v"}, {"heads", "head_width"}, {"up", "down"})
"""Groups of names that can replace each other."""


def _similar_names(name: str, names: frozenset[str]) -> set[str]:
    """Return other names of the same function with the same shape suffix or kind."""
    shape = name.rpartition("_")[2]
    if shape == "BTD":
        return {other for other in names if other.endswith(f"_{shape}") and other != name}
    return {other for kind in KINDS if name in kind for other in kind & names if other != name}


def install(module: ModuleType, source: str) -> None:
    """Execute a mutated source in its module, and replace what other modules import from it.

    The table registers its rows again, because a mutated `algebra` has no rows and a mutated table has other rows.
    Modules with subclasses of the mutated classes are loaded again.
    """
    if module is table:
        for row in table.ROWS:
            del PLACEMENTS[row.name], algebra.ROWS_BY_NAME[row.name]
    for known, of in ((NORMS, lambda entry: entry), (PLACEMENTS, type)):
        for name in [name for name, entry in known.items() if of(entry).__module__ == module.__name__]:
            del known[name]
    tables = {name: value for name, value in vars(module).items() if isinstance(value, dict) and name.isupper()}
    exec(compile(source, "<mutant>", "exec"), vars(module))  # noqa: S102
    for name, old in tables.items():  # other modules hold the dictionary itself
        new = vars(module)[name]
        if new is not old:
            old.clear()
            old.update(new)
            setattr(module, name, old)
    for other in [other for name, other in list(sys.modules.items()) if name.startswith("normlab.")]:
        for name, value in list(vars(other).items()):
            if getattr(value, "__module__", "") == module.__name__ and hasattr(value, "__qualname__"):
                setattr(other, name, vars(module).get(value.__qualname__, value))
    dependents = {
        algebra.__name__: [table.__name__],
        "normlab.catalogue.norms.affine": sorted({kind.__module__ for kind in NORMS.values()}),
        "normlab.catalogue.norms.taper": ["normlab.catalogue.norms.layernorm", "normlab.catalogue.norms.rmsnorm"],
        "normlab.catalogue.placements.streams": [
            f"normlab.catalogue.placements.{name}" for name in ("hyper", "identity_hc", "mhc", "gated_residual")
        ],
        "normlab.catalogue.placements.identity_hc": ["normlab.catalogue.placements.mhc"],
        "normlab.catalogue.placements.wiring": [
            "normlab.catalogue.placements.one_stream",
            "normlab.catalogue.placements.two_streams",
        ],
    }
    for dependent in dependents.get(module.__name__, ()):
        importlib.reload(importlib.import_module(dependent))
