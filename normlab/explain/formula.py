"""A placement's formula as statements: Python, as `normlab verify` compiles it (`Placement.formula`)."""

from __future__ import annotations

import ast


def parsed(formula: str) -> list[ast.stmt]:
    """Its statements, in order."""
    return [one for text in formula.split("; ") if text for one in ast.parse(text).body]


def choices(formula: str) -> list[str]:
    """The conditions by which it has two forms."""
    nodes = [node for one in parsed(formula) for node in ast.walk(one)]
    return list(dict.fromkeys(ast.unparse(node.test) for node in nodes if isinstance(node, ast.IfExp)))


def chosen(formula: str, first: bool) -> list[ast.stmt]:
    """Its statements where each condition holds, or where none does."""
    return [_Chosen(first).visit(one) for one in parsed(formula)]


def renamed(statements: list[ast.stmt], old: str, new: str) -> list[ast.stmt]:
    """The statements once more, with another name in place of one."""
    return [_Renamed(old, new).visit(ast.parse(ast.unparse(one)).body[0]) for one in statements]


def terms(value: ast.expr) -> list[ast.expr]:
    """What is added, or the two sides of a difference; the expression itself where it is neither."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return [*terms(value.left), *terms(value.right)]
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub):
        return [value.left, value.right]
    return [value]


def assigned(one: ast.stmt) -> list[str]:
    """The name that a statement gives a value to, alone in a list."""
    targets = one.targets if isinstance(one, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def value(one: ast.stmt) -> ast.expr:
    """What a statement assigns."""
    assert isinstance(one, ast.Assign), "a formula is made of assignments"
    return one.value


def is_read(name: str, statements: list[ast.stmt]) -> bool:
    """Whether what a name stands for now is read before it is set anew."""
    for one in statements:
        if any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value(one))):
            return True
        if name in assigned(one):
            return False
    return False


def pretty(node: ast.expr) -> str:
    """A factor as people write it: 2L for 2 * L, √l for sqrt(l)."""
    match node:
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            joint = "" if isinstance(left, ast.Constant) and isinstance(right, ast.Name) else " · "
            return f"{pretty(left)}{joint}{pretty(right)}"
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=power)):
            return f"{_grouped(left)}^{'¼' if power == 0.25 else power}"
        case ast.Call(func=ast.Name(id="sqrt"), args=[inner]):
            return f"√{_grouped(inner)}"
        case ast.Call(func=ast.Name(id="abs"), args=[inner]):
            return f"|{pretty(inner)}|"
        case _:
            return ast.unparse(node)


def _grouped(node: ast.expr) -> str:
    return pretty(node) if isinstance(node, (ast.Name, ast.Constant)) else f"({pretty(node)})"


class _Chosen(ast.NodeTransformer):
    """One side of each choice."""

    def __init__(self, first: bool):
        self.first = first

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        return self.visit(node.body if self.first else node.orelse)


class _Renamed(ast.NodeTransformer):
    """Another name in place of one."""

    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.new, node.ctx) if node.id == self.old else node
