"""A norm's formula as mathematics: fractions, roots and powers, for the page's MathML."""

from __future__ import annotations

import ast
import re
from typing import Any

Tree = list[Any]
"""A MathML element: its name, then its children; a text stands for itself."""

GREEK = {
    "eps": "\N{GREEK SMALL LETTER EPSILON}", "gain": "\N{GREEK SMALL LETTER GAMMA}",
    "gamma": "\N{GREEK SMALL LETTER GAMMA}", "bias": "\N{GREEK SMALL LETTER BETA}",
    "beta": "\N{GREEK SMALL LETTER BETA}", "alpha": "\N{GREEK SMALL LETTER ALPHA}",
    "lam": "\N{GREEK SMALL LETTER LAMDA}", "kappa": "\N{GREEK SMALL LETTER KAPPA}",
    "sigma": "\N{GREEK SMALL LETTER SIGMA}",
}  # fmt: skip
"""What stands for a name; the gain and the bias as every paper has them."""
SIGNS = {ast.Add: "+", ast.Sub: "\N{MINUS SIGN}", ast.Mult: "\N{MIDDLE DOT}", ast.MatMult: "\N{MIDDLE DOT}"}
LENGTH = "length"


def mathematics(formula: str) -> Tree | None:
    """A formula of the catalogue as a tree; nothing where it is made of words too.

    What follows a comma outside all brackets, as `over the last axis`, is words: it is left out.
    """
    text = re.split(r", (?![^(]*\))", formula)[0].replace("^", "**").replace(" . ", " @ ")
    text = re.sub(r"\|(\w+)\|", rf"{LENGTH}(\1)", text)
    try:
        return ["math", _of(ast.parse(text, mode="eval").body)]
    except (SyntaxError, TypeError):
        return None


def _of(node: ast.AST) -> Tree:
    match node:
        case ast.Name(id=name):
            base, _, index = name.partition("_")
            shown = ["mi", GREEK.get(base, base)]
            return ["msub", shown, ["mi", index]] if index else shown
        case ast.Constant(value=value):
            return ["mn", str(value)]
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return ["mfrac", _of(left), _of(right)]
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return ["msup", _of(left), _of(right)]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS:
            return ["mrow", _factor(left, op), ["mo", SIGNS[type(op)]], _factor(right, op)]
        case ast.Call(func=ast.Name(id="sqrt"), args=[inner]):
            return ["msqrt", _of(inner)]
        case ast.Call(func=ast.Name(id=name), args=[inner]) if name == LENGTH:
            return ["mrow", ["mo", "\N{DOUBLE VERTICAL LINE}"], _of(inner), ["mo", "\N{DOUBLE VERTICAL LINE}"]]
        case ast.Call(func=function, args=arguments):
            listed = [part for one in arguments for part in (["mo", ","], _of(one))][1:]
            return ["mrow", _of(function), ["mo", "("], *listed, ["mo", ")"]]
    raise TypeError(f"{ast.dump(node)} has no sign")


def _factor(node: ast.expr, of: ast.operator) -> Tree:
    """An operand, in brackets where it is a sum that is multiplied."""
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub))
    if is_sum and isinstance(of, (ast.Mult, ast.MatMult)):
        return ["mrow", ["mo", "("], _of(node), ["mo", ")"]]
    return _of(node)
