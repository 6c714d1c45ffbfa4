"""Pre-norm against post-norm at depth 24, told from their statistics alone: how the stream and the gradient differ.

    python scripts/signatures.py            # trains both on the default corpus: ten minutes on two CPU cores
    python scripts/signatures.py --write results/signatures.md --page signatures.html

The two runs are made by `normlab train` (a run that is finished is used again) and read from their records; no model is
looked at. Prints a table, writes a page with pictures, and exits 1 where a signature is not there:

- pre: the stream grows with every block, and more so once it trains (Xiong et al. 2020, arXiv:2002.04745); gradients
  are not larger at the top than at the bottom;
- post: the stream is its norm's gain after every block; gradients are heavy at the top, those of weights at
  initialisation already (the same), and once it trains at a learning rate that pre-norm bears they vanish below.

The stream's gradient is compared from block 2 on: what enters block 1 is the embedding, which in post-norm no norm has
scaled yet. One seed each, so that ratios at initialisation vary by a factor of two: it is their side of 1 that is told.

Shapes: S measured steps, L blocks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from normlab.report.render import render
from normlab.stats.profiles import Array, Profiles
from normlab.stats.statistic import CORE, STATISTICS, values_of
from normlab.store.files import write_atomic
from normlab.store.runs import RunFolder

PLACEMENTS = ("pre", "post")
WEIGHTS = ("grad_norm", "mlp.down.weight")
SHOWN = (("resid_rms", ""), ("dresid_rms", ""), WEIGHTS, ("adj_cos", ""))
"""Statistics and their sites."""
WORDS = ["norm=rmsnorm", "tracking.wandb=off", "optim.lr=1e-3", "eval.every=0"]


def trained(placement: str, args: argparse.Namespace) -> RunFolder:
    """The run of a placement."""
    from normlab.launch import compose_run
    from normlab.train.start import train

    words = [f"placement={placement}", f"model.depth={args.depth}", f"train.steps={args.steps}", *WORDS]
    config = compose_run([*words, f"results_dir={args.results}"])
    print(f"normlab train {' '.join(words)}", file=sys.stderr, flush=True)
    return train(config).folder


def moments(profiles: Profiles, warmup: int) -> dict[str, int]:
    """Which measured step stands for a time of the training."""
    last = len(profiles.steps) - 1
    return {"at init": 0, "after warm-up": min(int(np.searchsorted(profiles.steps, warmup)), last), "at the end": last}


def profile(profiles: Profiles, shown: tuple[str, str], index: int) -> tuple[list[int], Array]:
    """A statistic over the places that it has, at one measured step."""
    name, site = shown
    values = values_of(profiles, name)[site]
    places = np.flatnonzero(~np.isnan(values[index]))
    return places.tolist(), values[index][places]


def signatures(found: dict[str, Profiles], warmup: int) -> Iterator[tuple[str, str, float, bool]]:
    """What is claimed, what is expected, what was seen, and whether it is so."""
    pre, post = (found[name] for name in PLACEMENTS)
    init, trains, end = moments(pre, warmup).values()
    streams = profile(pre, ("resid_rms", ""), init)[1]
    least = float((streams[1:] / streams[:-1]).min())
    yield "pre, at init: the stream after a block over that before it, the least", "above 1", least, least > 1
    for when, index in (("after warm-up", trains), ("at the end", end)):
        streams = profile(pre, ("resid_rms", ""), index)[1]
        grown = float(streams[-1] / streams[0])
        yield f"pre, {when}: the stream at the head over that at block 1", "above 2", grown, grown > 2
    for when, index in (("at init", init), ("at the end", end)):
        streams = profile(post, ("resid_rms", ""), index)[1][1:]
        spread = float(streams.max() / streams.min())
        yield f"post, {when}: the largest stream after a block over the smallest", "below 1.5", spread, spread < 1.5
    for when, index, least in (("at init", init, 1), ("after warm-up", trains, 10), ("at the end", end, 10)):
        for placement, profiles in found.items():
            sizes = profile(profiles, WEIGHTS, index)[1]
            told = f"{placement}, {when}: the gradient of {WEIGHTS[1]} in the last block over the first"
            yield _heavy(told, placement, float(sizes[-1] / sizes[0]), least)
    for when, index in (("after warm-up", trains), ("at the end", end)):
        for placement, profiles in found.items():
            sizes = profile(profiles, ("dresid_rms", ""), index)[1]
            told = f"{placement}, {when}: the stream's gradient at the head over that at block 2"
            yield _heavy(told, placement, float(sizes[-1] / sizes[1]), 10)


def _heavy(claim: str, placement: str, ratio: float, least: float) -> tuple[str, str, float, bool]:
    """Post-norm's gradients are larger at the top, pre-norm's are not."""
    if placement == "post":
        return claim, f"above {least}", ratio, ratio > least
    return claim, "below 1", ratio, ratio < 1


def table(found: dict[str, Profiles], warmup: int) -> list[dict[str, Any]]:
    """Both ends and the middle of every profile."""
    rows = []
    for shown in SHOWN:
        for placement, profiles in found.items():
            for when, index in moments(profiles, warmup).items():
                places, values = profile(profiles, shown, index)
                picked = [0, (len(places) - 1) // 2, -1]
                labels = ("first", "middle", "last")
                told = {label: f"{values[at]:.3g}" for label, at in zip(labels, picked, strict=True)}
                rows.append({"statistic": " ".join(shown).strip(), "placement": placement, "when": when, **told})
    return rows


def write_page(found: dict[str, Profiles], warmup: int, path: Path) -> None:
    """One HTML file: a picture a statistic, a line a placement and time."""
    import plotly.graph_objects as go
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    titles = [f"{' '.join(shown).strip()} = {STATISTICS[shown[0]].formula}" for shown in SHOWN]
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, horizontal_spacing=0.09, vertical_spacing=0.12)
    dashes = {"at init": "dot", "after warm-up": "dash", "at the end": "solid"}
    for number, shown in enumerate(SHOWN):
        for colour, (placement, profiles) in zip(qualitative.Safe, found.items(), strict=False):
            for when, index in moments(profiles, warmup).items():
                places, values = profile(profiles, shown, index)
                line = go.Scatter(
                    x=places, y=values, name=f"{placement}, {when}", legendgroup=f"{placement}, {when}",
                    showlegend=number == 0, mode="lines", line={"color": colour, "dash": dashes[when], "width": 2},
                )  # fmt: skip
                figure.add_trace(line, row=number // 2 + 1, col=number % 2 + 1)
        scale = "linear" if shown[0] == "adj_cos" else "log"
        dtick = None if scale == "linear" else 1
        figure.update_yaxes(type=scale, dtick=dtick, exponentformat="power", row=number // 2 + 1, col=number % 2 + 1)
    depth = next(iter(found.values())).layout.depth
    figure.update_xaxes(title_text=f"block; {depth + 1} is the head")
    figure.update_layout(
        height=900, width=1400, template="plotly_white", font={"size": 13},
        title=f"pre-norm and post-norm at depth {depth}, one seed each, from their statistics alone",
        legend={"orientation": "h", "y": -0.08},
    )  # fmt: skip
    page = figure.to_html(include_plotlyjs=True, full_html=True, config={"displayModeBar": False})
    write_atomic(path, page.encode())


def header(args: argparse.Namespace, run: dict[str, Any]) -> str:
    """What made the tables."""
    words = f"model.depth={args.depth} train.steps={args.steps} {' '.join(WORDS)}"
    page = f"; {args.write.stem}.png is a picture of the page that --page writes" if args.page is not None else ""
    return f"""# Pre-norm and post-norm, by their statistics

By `scripts/signatures.py --depth {args.depth} --steps {args.steps} --write {args.write.name}`{page}.

`normlab train placement=pre {words}` and the same with `placement=post`; torch {run["versions"]["torch"]},
one seed each. `normlab inspect RUN resid_rms` draws any of these profiles in the terminal.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=24, help="at least 3")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--results", default="results", help="where the runs are kept")
    parser.add_argument("--write", type=Path, default=None, help="write the tables here too (Markdown)")
    parser.add_argument("--page", type=Path, default=None, help="write the pictures here (HTML)")
    args = parser.parse_args()
    if args.depth < 3:
        parser.error(f"--depth {args.depth}: is too shallow for a profile; choose 3 or more")
    found: dict[str, Profiles] = {}
    warmup, folder = 0, RunFolder(Path())
    for placement in PLACEMENTS:
        folder = trained(placement, args)
        warmup = folder.run()["config"]["optim"]["warmup_steps"]
        parts, damaged = folder.statistics.read(CORE)
        if len(parts) != 1 or damaged:
            print(f"{folder.path}: was gone on with under other words, or is damaged; delete it", file=sys.stderr)
            return 2
        found[placement] = parts[0]
    claims = list(signatures(found, warmup))
    rows = [
        {"claim": claim, "expected": expected, "seen": f"{seen:.3g}", "": "holds" if holds else "DOES NOT HOLD"}
        for claim, expected, seen, holds in claims
    ]
    told = f"{render(rows, 'markdown')}\n\n{render(table(found, warmup), 'markdown')}"
    print(told)
    if args.write is not None:
        write_atomic(args.write, header(args, folder.run()).encode() + told.encode() + b"\n")
    if args.page is not None:
        write_page(found, warmup, args.page)
    return int(not all(holds for *_, holds in claims))


if __name__ == "__main__":
    sys.exit(main())
