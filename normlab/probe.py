"""Signal propagation at initialisation: `normlab probe`. One pass forward and back, one update, no training.

For each choice of norm, placement and depth the profile over the blocks of: the stream's RMS, what each sub-layer adds
over what its block is given, the gradient, and the size of the optimiser's first update; the mean over seeds of each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from normlab.config import RunConfig
from normlab.options import leaves
from normlab.report.bars import bars
from normlab.report.pages import shell as pages
from normlab.train.optim import Optimizer, hyperparameters_at, is_decayed
from normlab.verify.signal import measure, slope

Row = dict[str, Any]

PROFILES = {
    "stream": "RMS of the stream after each block",
    "attn_ratio": "RMS of what attention adds to the stream, over the RMS of the stream that enters the block",
    "mlp_ratio": "RMS of what the MLP adds to the stream, over the RMS of the stream that enters the block",
    "gradient": "L2 norm of the gradient of each block's mlp.down.weight",
    "block_gradient": "L2 norm of the gradient of all of a block's parameters",
    "update": "L2 norm of the first update of a block's matrices at the peak learning rate, over theirs",
}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def probe(configs: Sequence[RunConfig], seeds: int, progress: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """A row for each config: what it is, and its profiles; what is not finite is None.

    Args:
        configs: What to look at. Corpus, steps and schedule have no effect.
        seeds: How many initial weights and batches to average over, from the config's seed on.
        progress: Is told of each row before it is measured.
    """
    for config, words in zip(configs, _telling_words(configs), strict=True):
        progress(f"{config.norm.label} {config.placement.name} depth {config.model.depth}")
        seen = [_once(dataclasses.replace(config, seed=config.seed + number)) for number in range(seeds)]
        yield {
            "norm": config.norm.label,
            "placement": config.placement.name,
            "depth": config.model.depth,
            "width": config.model.width,
            "init": config.init_rule,
            "words": words,
            "seeds": seeds,
            "loss": _mean([one["loss"] for one in seen]),
            "embedded": _mean([one["embedded"] for one in seen]),
            **{name: [_mean(values) for values in zip(*(one[name] for one in seen), strict=True)] for name in PROFILES},
        }


def _telling_words(configs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """For each config the options that tell it from others of its norm, placement and init, besides the depth.

    An option that tells no more apart than those before it, as one that was derived from them, is not among them.
    """
    flat = [leaves(config) for config in configs]
    told: list[tuple[Any, ...]] = [(one.norm.label, one.placement.name, one.init_rule) for one in configs]
    words: list[str] = []
    for word in {word: None for tree in flat for word in tree if word not in ("init", "model.depth", "data.seed")}:
        further = [(*known, repr(tree.get(word))) for known, tree in zip(told, flat, strict=True)]
        if len(set(further)) > len(set(told)):
            words.append(word)
            told = further
    return [{word: tree.get(word) for word in words} for tree in flat]


def table_row(row: Row) -> Row:
    """A row as a person reads it: the ends of the profiles, and the shape of two."""
    first, last = row["gradient"][0], row["gradient"][-1]
    return {
        **{name: row[name] for name in ("norm", "placement", "depth")},
        **{word: str(value) for word, value in row["words"].items()},
        **{name: row[name] for name in ("init", "seeds")},
        "loss": _number(row["loss"], ".3f"),
        "stream": _number(row["stream"][-1]),
        "its profile": _bars(row["stream"]),
        "attn/stream, last": _number(row["attn_ratio"][-1]),
        "mlp/stream, last": _number(row["mlp_ratio"][-1]),
        "grad, first": _number(first),
        "grad, last": _number(last),
        "last/first": _number(last / first) if first and last is not None else "",
        "grad profile": _bars(row["gradient"]),
        "update, last": _number(row["update"][-1]),
    }


def _number(value: float | None, digits: str = ".3g") -> str:
    return "not finite" if value is None else f"{value:{digits}}"


def _bars(profile: Sequence[float | None]) -> str:
    return bars([math.nan if value is None else value for value in profile])


def laws(rows: Sequence[Row]) -> Iterator[str]:
    """The powers of L by which things grow, for what was seen at several depths; and where a row stops being finite."""
    for row in rows:
        for name in PROFILES:
            if None in row[name]:
                block = row[name].index(None) + 1
                yield f"{_called(row)}, L = {row['depth']}: the {name} of block {block} is the first that is not finite"
                break
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_called(row), []).append(row)
    for called, group in groups.items():
        depths = [row["depth"] for row in group]
        if len(set(depths)) < 2:
            continue
        powers = []
        for name, at, said in (
            ("stream", -1, "stream"), ("gradient", 0, "first gradient"), ("gradient", -1, "last gradient")
        ):  # fmt: skip
            values = [row[name][at] for row in group]
            if all(value is not None and value > 0 for value in values):
                powers.append(f"{said} ~ L^{slope(depths, values):.2f}")
        if powers:
            yield f"{called}, L = {', '.join(map(str, depths))}: {', '.join(powers)}"


def _called(row: Row) -> str:
    """What a row has in common with those of other depths, and with no others."""
    words = "".join(f" {word}={value}" for word, value in row["words"].items())
    return f"{row['norm']} {row['placement']}{words} (init {row['init']})"


def write_page(rows: Sequence[Row], path: Path) -> None:
    """One HTML file that needs nothing else: each profile over depth, a line a row, colour for kind and dash for depth.

    Raises:
        StoreError: It cannot be written.
    """
    import plotly.graph_objects as go
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=len(PROFILES), cols=1, subplot_titles=list(PROFILES.values()), vertical_spacing=0.06)
    colours = qualitative.Safe  # told apart by the colour-blind
    kinds = list(dict.fromkeys(_called(row) for row in rows))
    depths = sorted({row["depth"] for row in rows})
    for row in rows:
        words = {"L": row["depth"], "init": row["init"], **row["words"]}
        label = f"{row['norm']} {row['placement']} " + " ".join(f"{word}={value}" for word, value in words.items())
        style = {
            "color": colours[kinds.index(_called(row)) % len(colours)],
            "dash": DASHES[depths.index(row["depth"]) % len(DASHES)],
        }
        at = [(block + 1) / row["depth"] for block in range(row["depth"])]
        for place, name in enumerate(PROFILES, start=1):
            line = go.Scatter(
                x=at, y=row[name], name=label, legendgroup=label, showlegend=place == 1, mode="lines+markers",
                line=style, marker={"size": 4},
            )  # fmt: skip
            figure.add_trace(line, row=place, col=1)
    figure.update_yaxes(type="log", exponentformat="power")
    figure.update_xaxes(title_text="block / depth", row=len(PROFILES), col=1)
    seeds = rows[0]["seeds"]
    title = "At initialisation, " + ("one seed" if seeds == 1 else f"the mean of {seeds} seeds")
    figure.update_layout(height=340 * len(PROFILES), template="plotly_white", title=title)
    pages.write_page(path, figure.to_html(include_plotlyjs=True, full_html=True))


def _once(config: RunConfig) -> Row:
    signal, model, grads = measure(config)
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    before = {name: parameter.clone() for name, parameter in params.items()}
    decayed = [name for name, parameter in params.items() if is_decayed(config.optim, parameter)]
    optimizer = Optimizer(config.optim, params, decayed)
    peak = hyperparameters_at(config.optim, config.train.steps, config.optim.warmup_steps or 0)
    with torch.no_grad():
        optimizer.update(params, grads, peak, torch.tensor(True))
        config.placement.project(params)
    update = []
    for layer in range(config.model.depth):
        names = [name for name in params if name.startswith(f"blocks.{layer}.") and params[name].dim() == 2]
        moved = sum((params[name] - before[name]).double().square().sum().item() for name in names)
        size = sum(before[name].double().square().sum().item() for name in names)
        update.append((moved / size) ** 0.5 if size else math.inf)  # of weights that start at 0 no step is small
    return {**dataclasses.asdict(signal), "update": update}


def _mean(values: Sequence[float]) -> float | None:
    """Nothing where it is not finite, which JSON has no number for."""
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None
