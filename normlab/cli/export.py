"""`normlab export`."""

from typing import Annotated

from typer import Argument, Option

from normlab.cli.app import At, ResultsDir, RunArgument, Trust, app, echo


@app.command()
def export(
    run: RunArgument,
    output: Annotated[str, Option("--output", "-o", metavar="FOLDER", help="The new folder.")],
    factors: Annotated[
        list[str] | None, Argument(metavar="FACTORS", help="Of a sweep, the run with these: 'depth=8,seed=0'.")
    ] = None,
    at: At = None,
    trust: Trust = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Write the model of a run as a folder that transformers loads.

    It holds the weights, config.json, the tokenizer and a card. Models that GPT2LMHeadModel, LlamaForCausalLM,
    Qwen3ForCausalLM, Olmo2ForCausalLM or Gemma2ForCausalLM to Gemma4ForCausalLM computes can be exported.

    Example: normlab train model=llama_tiny run.name=mine, then normlab export mine -o model
    """
    from pathlib import Path

    from normlab.hf.export import export as export_run
    from normlab.loaded.run import load
    from normlab.training.machine import limit_threads

    limit_threads()
    native = export_run(load(run, results_dir, where=",".join(factors or ()), at=at, trust=trust), Path(output))
    echo(f"{native.name}: AutoModelForCausalLM.from_pretrained({output!r})")
    echo(output)
