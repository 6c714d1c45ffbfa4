"""`normlab eval`."""

from typing import Annotated

from typer import Argument, Option

from normlab.cli.app import At, Json, ResultsDir, Run, Trust, app, echo

LEGEND = """loss: nats/token
changed: at least this share of the characters is changed by the tokenizer (case, blanks, unknown ones)
bits/byte compares models with different tokenizers only where changed is 0"""


@app.command("eval")
def evaluate(
    run: Run,
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
    from pathlib import Path

    from normlab.base.errors import ConfigError
    from normlab.config.compose import compose_run, quote
    from normlab.data.files import FilesText
    from normlab.loaded.run import load
    from normlab.report.tables import render
    from normlab.training.machine import limit_threads

    if not data:
        raise ConfigError("--data: names no text; add --data FILE")
    texts = [(name, FilesText(compose_run(["data=files", f"data.path=[{quote(name)}]"]).data)) for name in data]
    limit_threads()
    loaded = load(run, results_dir, where=",".join(factors or ()), at=at, trust=trust)
    documents = [(name, list(text.documents(Path()))) for name, text in texts]
    if empty := [name for name, found in documents if not any(found)]:
        raise ConfigError(f"--data {empty[0]}: has no text; leave it out")
    losses = [(name, loaded.evaluate(*found)) for name, found in documents]
    if json:
        rows = [
            {
                "data": name,
                "loss": each.loss,
                "bits_per_byte": each.bits_per_byte,
                "tokens": each.tokens,
                "bytes": each.bytes,
                "changed": each.changed_share,
            }
            for name, each in losses
        ]
        return echo(render(rows, "json"), keep="\n")
    rows = [
        {
            "data": name,
            "loss": f"{each.loss:.4f}",
            "bits/byte": f"{each.bits_per_byte:.4f}",
            "tokens": f"{each.tokens:,}",
            "changed": f"{each.changed_share:.2%}",
        }
        for name, each in losses
    ]
    echo(f"{render(rows, fixed=('data',))}\n\n{LEGEND}", keep="\n")
