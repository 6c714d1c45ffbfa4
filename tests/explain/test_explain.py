"""The explain page: its numbers equal the references, its diagrams the formulas, and it is readable."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from xml.etree.ElementTree import Element

import numpy as np
import pytest
import torch
from playwright.sync_api import Browser

from normlab.base.errors import ConfigError
from normlab.base.plugins import plugin_file
from normlab.catalogue import entries as catalogue
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.explain import page
from normlab.explain.diagram import Diagram, Node
from support.browser import PHONE, WIDE, Theme, opened

Command = Callable[..., tuple[int, str, str]]
MATRIX = np.array(page.MATRIX)
NORMS = {entry["name"]: entry for entry in catalogue.norms() if entry["name"] in load_norms()}
PLACEMENTS = {name: each for name, each in load_placements().items() if plugin_file("placement", name) is None}


def diagrams(name: str) -> list[Diagram]:
    """Return a placement's diagram, or one for each kind of block."""
    placement = PLACEMENTS[name]
    return [Diagram(placement, holds) for holds in ((True, False) if " if " in placement.formula else (True,))]


# Norms


def values(card: Element) -> np.ndarray:
    return np.array([float(cell.get("title") or 0) for cell in card.iter("td") if "title" in cell.attrib]).reshape(4, 6)


@pytest.mark.parametrize("name", NORMS)
def test_norm_equals_its_reference(name: str) -> None:
    card = page.norm_card(NORMS[name])
    torch.manual_seed(0)
    kind = load_norms()[name]
    options = kind(**kind.example_options)  # pyright: ignore[reportCallIssue]
    state = dict(options.build(6).double().state_dict())
    x = torch.tensor(MATRIX).reshape(kind.example_sequences, -1, 6)
    expected = options.reference(x, state).reshape(4, 6).numpy()
    np.testing.assert_allclose(values(card), expected, rtol=1e-6, atol=1e-9)
    cells = [[cell.text or "" for cell in row][1:] for row in card.iter("tr")][1:]
    shown = np.array([[float(text.replace("\N{MINUS SIGN}", "-")) for text in row] for row in cells[:4]])
    statistics = np.stack([expected.mean(1), np.sqrt((expected**2).mean(1))], 1)
    np.testing.assert_allclose(shown, np.concatenate([expected, statistics], 1), atol=0.005001)
    of_columns = [expected.mean(0), np.sqrt((expected**2).mean(0))]
    below = [[float(text.replace("\N{MINUS SIGN}", "-")) for text in row] for row in cells[4:]]
    np.testing.assert_allclose(below, of_columns, atol=0.005001)


TOKEN, CHANNEL = np.indices((4, 6))
INPUTS = {
    "layernorm": TOKEN == 2,
    "batchnorm": CHANNEL == 3,
    "batchnorm_past": (CHANNEL == 3) & (TOKEN <= 2),
    "groupnorm": (TOKEN == 2) & (CHANNEL >= 3),
    "dyt": (TOKEN == 2) & (CHANNEL == 3),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_the_marked_value_are_outlined(name: str) -> None:
    cells = [cell for cell in page.norm_card(NORMS[name]).iter("td") if "title" in cell.attrib]
    kinds = np.array([(cell.get("class") or "").split() for cell in cells], dtype=object)
    np.testing.assert_array_equal(["input" in kind for kind in kinds], INPUTS[name].flatten())
    assert ["marked" in kind for kind in kinds].index(True) == 6 * page.MARKED[0] + page.MARKED[1]


# Diagrams

PARTS = {
    "A": lambda x: math.tanh(1.3 * x) + 0.2, "M": lambda x: math.sin(2 * x) + 0.4, "A_qkv": lambda x: math.cos(x) - 0.7,
    "heads": lambda x: x**2 - 0.3, "heads_scaled": lambda x: x**2 + 0.6, "hidden": lambda x: math.exp(-x),
    "W_out": lambda x: 1.7 * x + 0.1, "W_down": lambda x: 0.6 * x - 0.9, "stop": lambda x: x + 0.01,
    "norm2": lambda x: abs(x) + 0.5, "silu": lambda x: x / (1 + math.exp(-x)), "sqrt": math.sqrt, "ln": math.log,
    "abs": abs, "L": 5, "l": 3, "D": 7, "alpha": 0.8, "gate": 0.3, "scale": 1.9, "r": 1.1, "z": 0.7,
    "copies": lambda *args: 1.2 * args[-1], "read": lambda *args: args[-1] + 0.2, "write": lambda *args: 0.9 * args[-1],
    "mix": lambda *args: args[-1] - 0.6, "states": lambda x: x * x, "store": lambda s, x: 0.4 * s + x,
    "recall": lambda *args: args[-2] - 0.3 * args[-1], "attn_recall_query": 1, "mlp_recall_query": 2,
    "close_recall_query": 3, "g": 1.4, "a": 1, "b": 2, "c": 3, "streams": 4, "kept": 0.9, "added": 0.45,
}  # fmt: skip
"""Functions of a number, no two alike, in place of sub-layers."""
START = 0.65


def numbered_norms() -> Callable[[float], float]:
    """Return a norm that is another function at each call, so that the order of the calls matters."""
    number = itertools.count()
    return lambda x: x / math.sqrt(x * x + 0.5 + 0.1 * next(number))


def evaluate(diagram: Diagram) -> float:
    """Return the value at the head."""
    results: dict[int, float] = {}
    norm = numbered_norms()
    known = PARTS | {"N": norm, "N_streams": norm}

    def value_of(node: Node, inputs: list[float]) -> float:
        match node.kind:
            case "embeddings":
                return START
            case "enter" | "leave" | "head":
                return inputs[0]
            case "add":
                return inputs[0] + inputs[1]
            case "subtract":
                return inputs[0] - inputs[1]
            case "scale":
                return inputs[0] * eval(node.expression, dict(PARTS))  # noqa: S307
            case "divide":
                return inputs[0] / eval(node.expression, dict(PARTS))  # noqa: S307
            case "unit":
                return inputs[0] / PARTS["norm2"](inputs[0])
        return known[node.expression](*inputs)

    for node in diagram.nodes:
        results[id(node)] = value_of(node, [results[id(each)] for each in node.inputs])
    return results[id(diagram.nodes[-1])]


def forms(formula: str) -> list[str]:
    """Return the formula of each kind of block, from the text of `a if c else b`."""
    if " if " not in formula:
        return [formula]
    pairs = []
    for statement in formula.split("; "):
        name, _, value = statement.partition(" = ")
        first, _, rest = value.partition(" if ")
        pairs.append((f"{name} = {first}", f"{name} = {rest.partition(' else ')[2] or first}"))
    return ["; ".join(side) for side in zip(*pairs, strict=True)]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_diagram_computes_the_formula(name: str) -> None:
    placement = PLACEMENTS[name]
    for diagram, form in zip(diagrams(name), forms(placement.formula), strict=True):
        norm = numbered_norms()
        known, streams = PARTS | {"N": norm, "N_streams": norm}, {"x": START}
        # A diagram has the norms of the streams, and not the weights that are computed from them.
        of_block, of_head = (
            "; ".join(part for part in weights.split("; ") if part.startswith("h = N_streams("))
            for weights in (placement.weights_formula, placement.head_weights_formula)
        )
        exec(placement.embedding_formula, known, streams)  # noqa: S102
        for sub_layer in "AM" if "F(" in form else "A":
            exec(f"{of_block}\n{form}", known | {"F": PARTS[sub_layer]}, streams)  # noqa: S102
        exec(f"{of_head}\n{placement.head_formula}", known, streams)  # noqa: S102
        assert evaluate(diagram) == pytest.approx(streams["x"], rel=1e-12)


def test_numbers_are_those_of_the_models_tensors() -> None:
    entry = next(each for each in catalogue.placements() if each["name"] == "pre")
    card = page.placement_card(entry, "layernorm")
    titles, texts = ([each.text or "" for each in card.iter(tag)] for tag in ("dt", "dd"))
    facts = dict(zip(titles, texts, strict=True))
    stream = [float(text) for text in facts["RMS of x"].split(", ")]
    attn, mlp = ([float(text) for text in facts[name].split(", ")] for name in ("attention adds", "MLP adds"))
    assert (len(stream), len(attn), len(mlp)) == (5, 4, 4)
    numbers = [each.text or "" for each in card.iter("text") if each.get("class") == "number" and each.text]
    (first, _, last) = ([float(text) for text in number.split(" → ")] for number in numbers)
    assert (first[0], last[0]) == (stream[0], stream[-1])  # what the first and the last norm read
    assert last[1] == pytest.approx(1, abs=0.05)
    # Independent branches add in squares, to the rounding of two digits.
    assert stream[-1] == pytest.approx(math.sqrt(stream[0] ** 2 + sum(x * x for x in attn + mlp)), rel=0.1)


# The page


@pytest.mark.parametrize(("theme", "size"), [("light", WIDE), ("dark", PHONE)])
def test_page_is_readable(
    browser: Browser, run_command: Command, tmp_path: Path, theme: Theme, size: tuple[int, int]
) -> None:
    assert run_command("explain")[0] == 0
    with opened(browser, tmp_path / "explain.html", size, theme) as tab:
        assert tab.evaluate("document.documentElement.scrollWidth") == size[0]
        assert tab.locator(".norms > .card").count() == len(NORMS)
        assert tab.locator("svg.flow").count() == sum(len(diagrams(name)) for name in PLACEMENTS)


def test_command_writes_the_page_to_its_output(run_command: Command) -> None:
    assert run_command("explain", "-o", "new/page.html", "--norm", "none") == (0, "new/page.html\n", "")
    text = Path("new/page.html").read_text(encoding="utf-8")
    assert "with norm=none" in text
    assert text.count("<dt>no numbers</dt>") == sum(refuses_none(name) for name in PLACEMENTS)
    for name in (*NORMS, *PLACEMENTS):
        assert f'id="{name}"' in text


def refuses_none(name: str) -> bool:
    try:
        page.forward("none", name)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("arguments", [("-o", "x.txt"), ("-o", "."), ("--norm", "layernormm")])
def test_invalid_argument_is_refused_and_leaves_no_file(
    tmp_path: Path, run_command: Command, arguments: tuple[str, ...]
) -> None:
    code, out, err = run_command("explain", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {' '.join(arguments)}: ")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
