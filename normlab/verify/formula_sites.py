"""The site of each norm in a formula, from the formula alone.

A wiring says at which site it makes each norm, and `norm.at` changes the norm there. What it says is compared with this
second statement: `x = x + N(A(N(x)))` has a norm on the output of attention, and one on its input.
"""

import ast
from collections.abc import Iterator, Mapping

from normlab.catalogue.sites import of_sub_layer

SUB_LAYER_OF = {
    **dict.fromkeys(("A", "A_qkv", "heads", "heads_qkv", "heads_scaled", "W_out"), "attn"),
    **dict.fromkeys(("M", "hidden", "W_down"), "mlp"),
}
"""The sub-layer that each function of a formula belongs to; F belongs to either."""
FIRST_PARTS = ("A", "A_qkv", "heads", "heads_qkv", "heads_scaled", "M", "hidden", "F")
"""The functions that read the input of a sub-layer."""
LAST_PARTS = ("W_out", "W_down")
"""The functions that only end a sub-layer."""
ENDS = ("A", "A_qkv", "M", "F", *LAST_PARTS)
"""The functions that return the output of a sub-layer."""
NORMS = ("N", "N_streams")
"""The functions that apply norms: one, or one to each stream."""
UNREAD = "streams"
"""The site of a norm that no sub-layer reads, and that reads none."""


class WithSites(ast.NodeTransformer):
    """Gives each call N(x) or N_streams(x) of a block's formula its site as a second argument: N(x, 'input_attn')."""

    def __init__(self, formula: ast.Module, sub_layer: str):
        """Prepare a formula for a run in which F is the `sub_layer`, `attn` or `mlp`."""
        self.sub_layers = {**SUB_LAYER_OF, "F": sub_layer}
        self.sites = dict(self._sites(formula))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        site = self.sites.get(id(node))
        self.generic_visit(node)
        if site is not None:
            node.args.append(ast.Constant(site))
        return node

    def _sites(self, formula: ast.Module) -> Iterator[tuple[int, str]]:
        outputs: dict[str, str] = {}
        """The names that hold the output of a sub-layer, such as f in `f = F(x)`, with its name."""
        statements = [node for node in formula.body if isinstance(node, ast.Assign)]
        for number, statement in enumerate(statements):
            parents = {child: node for node in ast.walk(statement) for child in ast.iter_child_nodes(node)}
            for node in ast.walk(statement.value):
                if isinstance(node, ast.Call) and _is_call(node, NORMS):
                    yield id(node), self._site(node, parents, outputs, statements[number + 1 :])
            name = _assigned(statement)
            outputs.pop(name, None)
            if _is_call(statement.value, ENDS):
                outputs[name] = self._function(statement.value)

    def _site(
        self,
        norm: ast.Call,
        parents: Mapping[ast.AST, ast.AST],
        outputs: Mapping[str, str],
        later: list[ast.Assign],
    ) -> str:
        argument = norm.args[0]
        # A norm behind a sub-layer is on its output, or on the sum with it.
        for node in ast.walk(argument):
            sub_layer = ""
            if _is_call(node, ENDS):
                sub_layer = self._function(node)
            elif isinstance(node, ast.Name):
                sub_layer = outputs.get(node.id, "")
            if sub_layer:
                return of_sub_layer("residual" if _holds_sum(argument, node) else "output", sub_layer)
        # A norm in the argument of a sub-layer is on its input, unless another norm is between them.
        reader = parents.get(norm)
        while reader is not None and not _is_call(reader, (*FIRST_PARTS, *LAST_PARTS, *NORMS)):
            reader = parents.get(reader)
        if reader is not None:
            return self._site_of_reader(reader)
        # A norm with a name is on the input of the sub-layers that read this name.
        read_by = self._readers(parents.get(norm), later)
        if len(read_by) == 1:
            return of_sub_layer("input", read_by.pop())
        return "input" if read_by else UNREAD

    def _site_of_reader(self, reader: ast.AST) -> str:
        if _is_call(reader, LAST_PARTS):
            return of_sub_layer("inner", self._function(reader))
        if _is_call(reader, FIRST_PARTS):
            return of_sub_layer("input", self._function(reader))
        return UNREAD

    def _readers(self, statement: ast.AST | None, later: list[ast.Assign]) -> set[str]:
        """Return the sub-layers whose argument has the name that a statement assigns, with no norm between them."""
        if not isinstance(statement, ast.Assign):
            return set()
        name = _assigned(statement)
        sub_layers: set[str] = set()
        for later_statement in later:
            for node in ast.walk(later_statement.value):
                if isinstance(node, ast.Call) and _is_call(node, FIRST_PARTS):
                    if name in _names_outside_norms(node.args[0]):
                        sub_layers.add(self._function(node))
            if _assigned(later_statement) == name:
                break
        return sub_layers

    def _function(self, call: ast.AST) -> str:
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        return self.sub_layers[call.func.id]


def _assigned(statement: ast.Assign) -> str:
    (target,) = statement.targets
    return target.id if isinstance(target, ast.Name) else ""


def _is_call(node: ast.AST, functions: tuple[str, ...]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions


def _names_outside_norms(tree: ast.AST) -> set[str]:
    """Return the names in an expression that are not in the argument of a norm."""
    if isinstance(tree, ast.Call) and _is_call(tree, NORMS):
        return set()
    names = {tree.id} if isinstance(tree, ast.Name) else set[str]()
    for child in ast.iter_child_nodes(tree):
        names |= _names_outside_norms(child)
    return names


def _holds_sum(tree: ast.AST, part: ast.AST) -> bool:
    """Return whether an expression adds something to a part of it, outside of other norms."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            if any(child is part for child in ast.walk(node)):
                return True
    return False
