"""Convert a norm's formula to MathML: fractions, roots and powers."""

from __future__ import annotations

import ast
import re
from typing import Any

Tree = list[Any]
"""A MathML element: its name, then its children, which are elements or texts."""

GREEK = {
    "eps": "\N{GREEK SMALL LETTER EPSILON}", "gain": "\N{GREEK SMALL LETTER GAMMA}",
    "gamma": "\N{GREEK SMALL LETTER GAMMA}", "bias": "\N{GREEK SMALL LETTER BETA}",
    "beta": "\N{GREEK SMALL LETTER BETA}", "alpha": "\N{GREEK SMALL LETTER ALPHA}",
    "lam": "\N{GREEK SMALL LETTER LAMDA}", "kappa": "\N{GREEK SMALL LETTER KAPPA}",
    "sigma": "\N{GREEK SMALL LETTER SIGMA}",
}  # fmt: skip
"""Symbols of names; the gain is gamma and the bias is beta, as in the papers."""
SIGNS = {ast.Add: "+", ast.Sub: "\N{MINUS SIGN}", ast.Mult: "\N{MIDDLE DOT}", ast.MatMult: "\N{MIDDLE DOT}"}
LENGTH = "length"


def mathematics(formula: str) -> Tree | None:
    """Return the MathML of a formula, or None if the formula contains prose.

    Text after a comma outside brackets, such as `over the last axis`, is left out.
    """
    text = re.split(r", (?![^(]*\))", formula)[0].replace("^", "**").replace(" . ", " @ ")
    text = re.sub(r"\|(\w+)\|", rf"{LENGTH}(\1)", text)
    try:
        return ["math", _element(ast.parse(text, mode="eval").body)]
    except (SyntaxError, TypeError):
        return None


def _element(node: ast.AST) -> Tree:
    match node:
        case ast.Name(id=name):
            base, _, index = name.partition("_")
            symbol = ["mi", GREEK.get(base, base)]
            return ["msub", symbol, ["mi", index]] if index else symbol
        case ast.Constant(value=value):
            return ["mn", str(value)]
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return ["mfrac", _element(left), _element(right)]
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return ["msup", _element(left), _element(right)]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS:
            return ["mrow", _operand(left, op), ["mo", SIGNS[type(op)]], _operand(right, op)]
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument]):
            return ["msqrt", _element(argument)]
        case ast.Call(func=ast.Name(id=name), args=[argument]) if name == LENGTH:
            return ["mrow", ["mo", "\N{DOUBLE VERTICAL LINE}"], _element(argument), ["mo", "\N{DOUBLE VERTICAL LINE}"]]
        case ast.Call(func=function, args=arguments):
            parts = [part for argument in arguments for part in (["mo", ","], _element(argument))][1:]
            return ["mrow", _element(function), ["mo", "("], *parts, ["mo", ")"]]
    raise TypeError(f"{ast.dump(node)} has no MathML")


def _operand(node: ast.expr, operator: ast.operator) -> Tree:
    """Return an operand, in brackets if it is a sum inside a product."""
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub))
    if is_sum and isinstance(operator, (ast.Mult, ast.MatMult)):
        return ["mrow", ["mo", "("], _element(node), ["mo", ")"]]
    return _element(node)
