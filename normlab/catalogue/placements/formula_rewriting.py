"""Rewrites the formula of a placement for an option that changes each sum of the stream and a sub-layer's output.

A formula is a sequence of assignments (`formula.py`), which Python can parse. One that does not parse is returned as it
is, and `normlab verify` reports it.
"""

import ast

from normlab.catalogue.placements.formula import SUB_LAYERS


def with_factor(formula: str, factor: str) -> str:
    """Return a formula in which what the sub-layers add is multiplied by a factor."""
    try:
        tree = ast.parse(formula)
    except SyntaxError:
        return formula
    return ast.unparse(_Growth(factor).visit(tree)).replace("\n", "; ")


def with_affine(formula: str) -> str:
    """Return a formula in which both terms of each sum have a learned shift and scale."""
    try:
        tree = ast.parse(formula)
    except SyntaxError:
        return formula
    _Affine().add_to(tree)
    return ast.unparse(tree).replace("\n", "; ")


class _Growth(ast.NodeTransformer):
    """Multiplies the terms that hold a sub-layer, or a whole expression without terms, such as N(F(x))."""

    def __init__(self, factor: str):
        self.factor = ast.parse(factor, mode="eval").body

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        operations = [part for part in ast.walk(node.value) if isinstance(part, ast.BinOp)]
        # Without terms, as in f = F(x), the whole value is what a later statement adds.
        if any(map(_holds_sub_layer, operations)):
            node.value = self.visit(node.value)
        else:
            node.value = self._term(node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        node.left, node.right = self._term(node.left), self._term(node.right)
        return node

    def _term(self, node: ast.expr) -> ast.expr:
        if _is_sum(node):
            return self.visit(node)
        # A sum times a number, or over one: the factor belongs to the term of the sum that has a sub-layer.
        match node:
            case ast.BinOp(left, ast.Mult() | ast.Div() as op, right) if _is_sum(left) and not _holds_sub_layer(right):
                return ast.BinOp(self.visit(left), op, right)
            case ast.BinOp(left, ast.Mult() as op, right) if _is_sum(right) and not _holds_sub_layer(left):
                return ast.BinOp(left, op, self.visit(right))
        if _holds_sub_layer(node):
            return ast.BinOp(node, ast.Mult(), self.factor)
        return node


def _holds_sub_layer(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) and part.id in SUB_LAYERS for part in ast.walk(node))


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)


class _Affine:
    """Writes (stream + bias) * scale + (output + bias) * scale for each sum of the stream and a sub-layer's output."""

    def __init__(self) -> None:
        self.outputs: dict[str, str] = {}
        """The names that hold the output of a sub-layer, such as f in `f = F(x)`, with the sub-layer."""

    def add_to(self, formula: ast.Module) -> None:
        for statement in formula.body:
            if not isinstance(statement, ast.Assign):
                continue
            value, name = statement.value, ast.unparse(statement.targets[0])
            statement.value = self._with_sum(value)
            holds_output = self._names_of_sub_layers(value) and ast.unparse(statement.value) == ast.unparse(value)
            sub_layer = self._sub_layer(value) if holds_output else None
            self.outputs.pop(name, None)
            if sub_layer is not None:
                self.outputs[name] = sub_layer

    def _with_sum(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.IfExp):
            return ast.IfExp(node.test, self._with_sum(node.body), self._with_sum(node.orelse))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "N":
            return ast.Call(node.func, [self._with_sum(node.args[0])], [])
        skip, branch = self._terms(node)
        if skip is None or branch is None:
            return node
        sub_layer = self._sub_layer(branch)
        # In a formula with F the parameters have their names in the module of one sub-layer.
        prefix = f"{sub_layer}_" if sub_layer else ""
        terms: list[str] = []
        for term, tree in (("skip", skip), ("branch", branch)):
            terms.append(f"({ast.unparse(tree)} + {prefix}{term}_bias) * {prefix}{term}_scale")
        return ast.parse(" + ".join(terms), mode="eval").body

    def _terms(self, node: ast.expr) -> tuple[ast.expr | None, ast.expr | None]:
        """Return the parts of a sum without and with a sub-layer, None where there is no such part."""
        if not self._names_of_sub_layers(node):
            return node, None
        match node:
            case ast.BinOp(left, ast.Add() | ast.Sub() as op, right):
                (skip, branch), (other_skip, other_branch) = self._terms(left), self._terms(right)
                return _combined(skip, op, other_skip), _combined(branch, op, other_branch)
            case ast.BinOp(left, ast.Mult() | ast.Div() as op, right) if not self._names_of_sub_layers(right):
                skip, branch = self._terms(left)
                return skip and ast.BinOp(skip, op, right), branch and ast.BinOp(branch, op, right)
            case ast.BinOp(left, ast.Mult() as op, right) if not self._names_of_sub_layers(left):
                skip, branch = self._terms(right)
                return skip and ast.BinOp(left, op, skip), branch and ast.BinOp(left, op, branch)
            case ast.UnaryOp(ast.USub() as op, operand):
                skip, branch = self._terms(operand)
                return skip and ast.UnaryOp(op, skip), branch and ast.UnaryOp(op, branch)
        return None, node

    def _sub_layer(self, branch: ast.expr) -> str:
        name = self._names_of_sub_layers(branch)[0]
        return self.outputs.get(name, SUB_LAYERS.get(name, ""))

    def _names_of_sub_layers(self, node: ast.expr) -> list[str]:
        """Return the functions that end a sub-layer, and the names that hold their output; the outermost one first."""
        names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
        return [name for name in names if name in SUB_LAYERS or name in self.outputs]


def _combined(left: ast.expr | None, op: ast.Add | ast.Sub, right: ast.expr | None) -> ast.expr | None:
    """Return the sum or the difference of two parts, either of which may be missing."""
    if right is None:
        return left
    if left is not None:
        return ast.BinOp(left, op, right)
    return right if isinstance(op, ast.Add) else ast.UnaryOp(ast.USub(), right)
