"""The language of the formulas of placements (`Placement.formula`): its functions and names, each defined once.

`normlab verify` executes a formula with these functions (`formula_functions.py` computes them), `normlab explain` draws
them with their labels, and `normlab list formulas` prints them. Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a formula may call."""

    call: str
    """Its name and its arguments."""
    meaning: str
    """What it computes, or a formula."""
    label: str = ""
    """The text of its node in a block diagram; empty if only factors on a stream have it."""

    @property
    def name(self) -> str:
        return self.call.partition("(")[0]


OF_BLOCK = (
    Function("A(x)", "attention: W_out(heads(x))", label="attention"),
    Function("M(x)", "the MLP: W_down(hidden(x))", label="MLP"),
    Function("F(x)", "A, and in a second run of the whole formula M"),
    Function("N(x)", "the next norm of the block, in the order of calls; each is used once", label="norm"),
    Function(
        "N_streams(x)", "N of each of n streams, whose norms are the next n of the block, in order", label="norms"
    ),
    Function("A_qkv(x)", "attention with norms inside: W_out(heads_qkv(x))", label="attention"),
    Function("heads(x)", "the joined outputs of the heads", label="heads"),
    Function("heads_qkv(x)", "heads with a norm on the q, k and v of each", label="heads"),
    Function("heads_scaled(x)", "heads with a learned factor on the output of each", label="scaled heads"),
    Function("W_out(y)", "the output projection of attention", label="projection"),
    Function("hidden(x)", "the hidden activations of the MLP", label="MLP, hidden"),
    Function("W_down(h)", "the down projection of the MLP", label="down projection"),
)
"""The parts of the sub-layers, and the norms: each block has its own."""
SUB_LAYERS = {"A": "attn", "A_qkv": "attn", "W_out": "attn", "M": "mlp", "W_down": "mlp", "F": ""}
"""The functions that end a sub-layer, with the module of this sub-layer; F is either."""
OF_NUMBERS = (
    Function("sqrt(a)", "the square root; of a tensor, that of each element"),
    Function("ln(a)", "the natural logarithm; of a tensor, that of each element"),
    Function("min(a, b)", "the smaller one; of tensors, element by element"),
    Function("max(a, b)", "the larger one; of tensors, element by element"),
)
OF_TENSORS = (
    Function("abs(t)", "|t|"),
    Function("silu(t)", "t / (1 + exp(-t))"),
    Function("softplus(t)", "ln(1 + exp(t))"),
    Function("sigmoid(t)", "1 / (1 + exp(-t))"),
    Function("tanh(t)", "1 - 2 / (exp(2t) + 1)"),
    Function("stop(t)", "t, without a gradient", label="no gradient"),
    Function("norm2(t)", "the L2 norm over the channels"),
)
OF_STREAMS = (
    Function("copies(n, x)", "n streams, each x", label="copies"),
    Function("read(a, x)", "sum over i of a_i x_i", label="weighted sum"),
    Function("write(b, y)", "y b_i in stream i", label="to each stream"),
    Function("mix(c, x)", "sum over i of c_ij x_i in stream j", label="mixed streams"),
    Function("ones(n)", "n ones"),
    Function("rms(t)", "t / sqrt(mean(t^2) + 1e-6), over the last axis; another number with eps="),
    Function("rms_eps_outside(t)", "t / (sqrt(mean(t^2)) + 1e-6), over the last axis"),
    Function(
        "sinkhorn(t, k)",
        "u_i K_ij v_j, whose rows and columns nearly sum to 1 after k iterations; K: the softmax of each row plus "
        "1e-6, or with of_sigmoid=True the sigmoid plus 1e-6",
    ),
    Function(
        "permutations(t, n)",
        "sum over k of softmax(t)_k P_k, P_k the permutation matrices of n streams in lexicographic order: row i has "
        "its 1 in the column to which the permutation maps i",
    ),
    Function(
        "kronecker(t)",
        "the Kronecker product of [[p, 1 - p], [1 - p, p]], p = sigmoid(t_1 - t_2), over each two neighbouring numbers",
    ),
)
OF_STATES = (
    Function("states(x)", "no states", label="no states"),
    Function("store(s, x)", "the states s, and x after them", label="store"),
    Function(
        "recall(q, s, x)",
        "the average of the states s and x, weighted by exp(q . state / its root mean square)",
        label="average over depth",
    ),
)
TABLES = {
    "the block": OF_BLOCK, "numbers": OF_NUMBERS, "tensors": OF_TENSORS, "streams": OF_STREAMS, "states": OF_STATES,
}  # fmt: skip
"""The functions by what they are of; only placements of several streams, or with stored states, need the last two."""
LABELS: dict[str, str] = {}
"""The labels of the functions that are nodes of a block diagram, by name."""
KIND_OF: dict[str, str] = {}
"""The key in `TABLES` of each function, by name."""
for _kind, _table in TABLES.items():
    for _function in _table:
        KIND_OF[_function.name] = _kind
        if _function.label:
            LABELS[_function.name] = _function.label

SIZES = {"L": "the number of blocks", "l": "the number of this block, from 1", "D": "the width"}
SHAPE_METHODS = ("mT", "flatten", "unflatten")
"""What a formula may use of a tensor: its shape. Other methods would add over the batch in silence, as sum does."""
NAMES = SIZES | {
    "x": "the stream; a name that the formula assigns is another stream, or a temporary variable",
    "t": "the number of updates, if the wiring counts them",
    "an option": "an option of the placement, by its name",
    "a parameter": "a learned parameter of the wiring: its dotted name with _ for .; in a formula with F, its name in "
    "the module of that sub-layer",
    ", ".join(
        f".{method}" for method in SHAPE_METHODS
    ): "the shape of a tensor; no other method of torch, since x.sum() adds over the batch",
}
INSIDE = {
    "q": "each query and key after RoPE", "a": "the products q.k; without a statement they are divided by sqrt(K)",
    "h": "W_up x and W_gate x", "z": "the logits", "K": "the width of a head", "scale": "a learned parameter",
}  # fmt: skip
"""The names of the statements in `Placement.inside`."""


def runs_twice(formula: str) -> bool:
    """Return whether a formula is that of any sub-layer F: it is executed with A, and then again with M."""
    return "F(" in formula


def rows() -> Iterator[dict[str, str]]:
    """Yield the functions and the names, each with its meaning, for `normlab list formulas`."""
    for kind, table in TABLES.items():
        for function in table:
            yield {"name": function.call, "kind": f"function of {kind}", "meaning": function.meaning}
    for name, meaning in NAMES.items():
        yield {"name": name, "kind": "name", "meaning": meaning}
    for name, meaning in INSIDE.items():
        yield {"name": name, "kind": "name inside of the sub-layers", "meaning": meaning}
