"""`normlab sample`."""

from typing import Annotated

from typer import Argument, Option

from normlab.cli.app import At, ResultsDir, RunArgument, Trust, app, echo

KEPT = "\n\t\u00a0\u00ad\u2002\u2003\u2009\u200b\u200c\u200d\u202f\u3000"
"""Spaces and joiners of ordinary texts, which Python does not count as printable."""


@app.command()
def sample(
    run: RunArgument,
    factors: Annotated[
        list[str] | None, Argument(metavar="FACTORS", help="Of a sweep, the run with these: 'depth=8,seed=0'.")
    ] = None,
    prompt: Annotated[str, Option(metavar="TEXT", help="Text to continue.")] = "def ",
    tokens: Annotated[int, Option(metavar="N", help="Number of tokens to generate.")] = 200,
    temperature: Annotated[float, Option(metavar="T", help="Temperature; 0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, Option(metavar="N", help="Random seed.")] = 0,
    at: At = None,
    trust: Trust = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Continue a text with the model of a run.

    Uses the GPU, if there is one, unless the run has device=cpu.
    """
    from normlab.loaded.run import load
    from normlab.training.machine import limit_threads

    limit_threads()
    loaded = load(run, results_dir, where=",".join(factors or ()), at=at, trust=trust)
    echo(loaded.sample(prompt, tokens=tokens, temperature=temperature, seed=seed), KEPT)
