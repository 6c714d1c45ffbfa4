"""`normlab eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from normlab.base.errors import ConfigError
from normlab.cli.app import At, Json, ResultsDir, RunArgument, Trust, app, echo

if TYPE_CHECKING:
    from normlab.data.files import FilesText
    from normlab.loaded.sampling import TextLoss

LEGEND = """loss: nats/token
changed: at least this share of the characters is changed by the tokenizer (case, blanks, unknown ones)
bits/byte compares models with different tokenizers only where changed is 0"""


@app.command("eval")
def evaluate(
    run: RunArgument,
    factors: Annotated[
        list[str] | None, Argument(metavar="FACTORS", help="Of a sweep, the run with these: 'depth=8,seed=0'.")
    ] = None,
    data: Annotated[list[str] | None, Option(metavar="FILE", help="A file or folder of text; several times.")] = None,
    json: Json = False,
    at: At = None,
    trust: Trust = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Print the loss of a run's model on other text.

    Each file is a document, which is read in windows of the model's context; every token counts once. Bits per byte
    compare models with different tokenizers if no tokenizer changes the text. Uses the GPU, if there is one, unless the
    run has device=cpu.

    Example: normlab eval outside --data README.md
    """
    from normlab.loaded.run import load
    from normlab.report.tables import render
    from normlab.training.machine import limit_threads

    if not data:
        raise ConfigError("--data: names no text; add --data FILE")
    # A wrong file is an error before the run is loaded, which takes longer.
    files = [(name, _text_of(name)) for name in data]
    limit_threads()
    loaded = load(run, results_dir, where=",".join(factors or ()), at=at, trust=trust)
    documents = [(name, list(file.documents(Path()))) for name, file in files]
    for name, texts in documents:
        if not any(texts):
            raise ConfigError(f"--data {name}: has no text; leave it out")
    losses = [(name, loaded.evaluate(*texts)) for name, texts in documents]
    if json:
        return echo(render([_json_row(name, loss) for name, loss in losses], "json"), keep="\n")
    table = render([_text_row(name, loss) for name, loss in losses], fixed=("data",))
    echo(f"{table}\n\n{LEGEND}", keep="\n")


def _text_of(name: str) -> FilesText:
    """Return the text in a file or folder, as data=files reads it."""
    from normlab.config.compose import compose_run, quote
    from normlab.data.files import FilesText

    return FilesText(compose_run(["data=files", f"data.path=[{quote(name)}]"]).data)


def _json_row(name: str, loss: TextLoss) -> dict[str, Any]:
    """Return the exact numbers about a text."""
    return {
        "data": name,
        "loss": loss.loss,
        "bits_per_byte": loss.bits_per_byte,
        "tokens": loss.tokens,
        "bytes": loss.bytes,
        "changed": loss.changed_share,
    }


def _text_row(name: str, loss: TextLoss) -> dict[str, str]:
    """Return the numbers about a text as the table shows them."""
    return {
        "data": name,
        "loss": f"{loss.loss:.4f}",
        "bits/byte": f"{loss.bits_per_byte:.4f}",
        "tokens": f"{loss.tokens:,}",
        "changed": f"{loss.changed_share:.2%}",
    }
