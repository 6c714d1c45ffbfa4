"""`normlab sample`."""

from __future__ import annotations

from typing import Annotated

import typer

from normlab.cli.app import Factors, ResultsDir, Run, Trust, app


@app.command()
def sample(
    run: Run,
    factors: Factors = None,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(metavar="N", help="Number of tokens to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Sampling temperature; 0 takes the likeliest token.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    trust: Trust = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Continue a text with the model of a run."""
    from normlab.loaded_run import load

    loaded = load(run, results_dir, where=",".join(factors or ()), trust=trust)
    typer.echo(loaded.sample(prompt, tokens=tokens, temperature=temperature, seed=seed))
