"""The page of `normlab explain`: every norm on a small matrix, every placement as a diagram with numbers.

The modules that train compute all numbers when the page is written.

Shapes: T = 4 tokens, D = 6 channels.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from xml.etree.ElementTree import Element, tostring

import torch
from torch import Tensor

from normlab.base.errors import ConfigError, unknown
from normlab.base.version import __version__
from normlab.catalogue import entries as catalogue
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.explain.diagram import Diagram, make
from normlab.model.init import build_model
from normlab.model.instrument import Collector, Observation
from normlab.model.modules import build_norm
from normlab.model.small import VOCAB, small_config, tokens
from normlab.report.pages.shell import page, write_output

HERE = Path(__file__).parent
# Token 2 is small, token 3 large and token 4 shifted, compared with token 1; channel 5 is large in every token.
MATRIX = (
    (0.5, -1.1, 0.2, 1.3, 6.0, -0.4), (0.1, 0.3, -0.2, 0.4, 4.5, -0.1),
    (4.0, -6.5, 2.5, 7.0, 15.0, -3.0), (3.2, 2.6, 3.5, 2.9, 9.0, 3.1),
)  # fmt: skip
MARKED = 2, 3
"""Token and channel of the value whose inputs are outlined."""
INVARIANCES = {"scale": "a group times a positive number", "shift": "a group plus a number"}


def write(path: Path, norm: str = "rmsnorm") -> None:
    """Compute and write the page, with a norm for the placements.

    Raises:
        ConfigError: The norm is unknown.
        StoreError: The file could not be written.
    """
    if norm not in load_norms():
        raise ConfigError(f"--norm {norm}: " + unknown("norm", norm, load_norms(), titles=catalogue.titles("norm")))
    # A preset of a norm has an entry too, but no class of its own.
    norms = [norm_card(entry) for entry in catalogue.norms() if entry["name"] in load_norms()]
    placements = [placement_card(entry, norm) for entry in catalogue.placements()]
    parts = {
        "matrix": [_table(torch.tensor(MATRIX))], "norms": norms, "placements": placements,
        "norms_links": _links(norms), "placements_links": _links(placements),
    }  # fmt: skip
    texts: dict[str, str] = {}
    for name, elements in parts.items():
        texts[name] = "".join(tostring(element, "unicode", "html") for element in elements)
    body = Template((HERE / "body.html").read_text(encoding="utf-8")).substitute(texts, norm=norm, version=__version__)
    write_output(path, page("What normalisation does", body, {}, [HERE / "explain.css"]).encode())


def _links(cards: Sequence[Element]) -> list[Element]:
    return [make("a", card.get("id"), href=f"#{card.get('id')}") for card in cards]


def norm_card(entry: catalogue.Entry) -> Element:
    """Return a norm with its output for the matrix, by its untrained module in float64 and in training mode."""
    kind = load_norms()[entry["name"]]
    options, sequences = kind.example_options, kind.example_sequences
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = build_norm(kind(**options), len(MATRIX[0])).double()  # pyright: ignore[reportCallIssue]
    x_TD = torch.tensor(MATRIX, dtype=torch.float64, requires_grad=True)
    y_TD = module(x_TD.unflatten(0, (sequences, -1))).flatten(0, 1)
    # The gradient shows from which values the marked output is computed.
    (gradient_TD,) = torch.autograd.grad(y_TD[MARKED], x_TD)
    shape = ""
    if sequences > 1:
        shape = f"{sequences} sequences"
    causal = "yes, also in training" if entry["causal"] else "not in training: it depends on later tokens"
    facts = {
        "options": ", ".join(f"{key}={value}" for key, value in options.items()),
        "input": shape, "parameters": entry["parameters"], "causal": causal,
        "unchanged by": "; ".join(INVARIANCES[key] for key in entry["invariant_to"]), "equals": entry["equals"],
        "source": entry["source"], "mistakes": " ".join(entry["pitfalls"] or ()),
    }  # fmt: skip
    return _card(entry, _table(y_TD.detach(), gradient_TD), facts)


def placement_card(entry: catalogue.Entry, norm: str) -> Element:
    """Return a placement with its diagrams, and with the numbers of a forward pass if it can have the norm."""
    placement = load_placements()[entry["name"]]
    diagrams = [Diagram(placement, condition_holds=True)]
    if " if " in placement.formula:
        # The formula has two kinds of blocks, and each has a diagram.
        diagrams.append(Diagram(placement, condition_holds=False))
    of_head = [formula for formula in (placement.head_weights_formula, placement.head_formula) if formula]
    facts = {
        "embeddings": placement.embedding_formula, "weights": placement.weights_formula,
        "LM head": "; ".join(of_head), "inside": placement.inside,
    }  # fmt: skip
    try:
        segments = forward(norm, placement.name)
    except ConfigError as error:
        facts["no numbers"] = str(error)
    else:
        # The first block has the first kind, and the last one, which comes before the head, the second.
        for diagram, block in zip(diagrams, (segments[1], segments[-2]), strict=False):
            diagram.set_numbers([_sizes("norm", segments[0]), _sizes("norm", block), _sizes("norm", segments[-1])])
        for kind, title in (("resid", "RMS of x"), ("attn", "attention adds"), ("mlp", "MLP adds")):
            sizes: list[str] = []
            for segment in segments:
                sizes += _sizes(kind, segment)
            facts[title] = ", ".join(sizes)
    facts |= {"init rule": entry["init"], "equals": entry["equals"], "name": entry["note"], "source": entry["source"]}
    drawings = make("div", class_="drawings")
    for diagram in diagrams:
        drawings.append(diagram.svg())
    return _card(entry, drawings, facts)


@torch.no_grad()
def forward(norm: str, placement: str) -> list[list[Observation]]:
    """Return what each segment of an initial model of four blocks observes in one forward pass.

    Raises:
        ConfigError: The norm and the placement cannot be combined.
    """
    config = small_config(load_norms()[norm](), load_placements()[placement])  # pyright: ignore[reportCallIssue]
    stream, observed = tokens(), list[list[Observation]]()
    for _, segment in build_model(config, VOCAB).train().segments():
        with Collector(dict.fromkeys(("resid", "attn", "mlp", "norm"), ())) as collector:
            stream = segment(stream)
        observed.append(collector.observations)
    return observed


def _sizes(kind: str, segment: list[Observation]) -> list[str]:
    """Return the root mean square of each observed tensor of a kind; for a norm those of its input and its output."""
    texts: list[str] = []
    for observation in segment:
        if observation.kind != kind:
            continue
        sizes: list[str] = []
        for x in observation.tensors:
            rms = x.double().square().mean().sqrt()
            sizes.append(f"{rms:.2g}")
        texts.append(" → ".join(sizes))
    return texts


def _card(entry: catalogue.Entry, figure: Element, facts: Mapping[str, str]) -> Element:
    """Return the description of an entry, with the facts that are not empty."""
    formula = make("p", make("code", entry["formula"].replace("; ", ";\n")), class_="formula")
    terms: list[Element] = []
    for name, text in facts.items():
        if text:
            terms += [make("dt", name), make("dd", text)]
    parts = make("h3", entry["name"]), formula, figure, make("dl", *terms, class_="facts")
    return make("article", *parts, class_="card", id=entry["name"])


def _table(x_TD: Tensor, gradient_TD: Tensor | None = None) -> Element:
    """Return a matrix with the mean and the RMS of its rows and columns; outline where the gradient is not 0."""
    head = make("tr", make("td"))
    for channel in range(x_TD.shape[1]):
        head.append(make("th", f"ch {channel + 1}"))
    # The root of a number's share of the largest one, so that small numbers have a colour beside the large channel.
    share_TD = 100 * (x_TD.abs() / x_TD.abs().max().clamp(min=1e-30)).sqrt()
    rows: list[Element] = []
    for token in range(len(x_TD)):
        row = make("tr", make("th", f"token {token + 1}"))
        for channel in range(x_TD.shape[1]):
            at = token, channel
            kinds = ["warm" if x_TD[at] > 0 else "cold"]
            if gradient_TD is not None and gradient_TD[at]:
                kinds.append("input")
            if gradient_TD is not None and at == MARKED:
                kinds.append("marked")
            style, value = f"--share: {share_TD[at]:.0f}%", x_TD[at].item()
            row.append(make("td", _shown(value), class_=" ".join(kinds), style=style, title=value))
        rows.append(row)
    # What a norm subtracts or divides by: of each token at the right, of each channel below.
    below: list[Element] = []
    for name, statistic in {"mean": x_TD.mean, "RMS": lambda axis: x_TD.square().mean(axis).sqrt()}.items():
        head.append(make("th", name))
        for row, value in zip(rows, statistic(1).tolist(), strict=True):
            row.append(make("td", _shown(value)))
        of_channels = make("tr", make("th", name))
        for value in statistic(0).tolist():
            of_channels.append(make("td", _shown(value)))
        below.append(of_channels)
    return make("div", make("table", head, *rows, *below, class_="matrix"), class_="scroll")


def _shown(value: float) -> str:
    return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "\N{MINUS SIGN}")
