"""The command-line application: arguments, flags, output and warnings that several commands share."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from normlab.base.errors import ConfigError, printable, warn
from normlab.base.version import __version__

if TYPE_CHECKING:
    from normlab.config.compose import UserConfigs
    from normlab.config.schema import RunConfig

ResultsDir = Annotated[str, Option(metavar="FOLDER", help="Folder of the results.")]
RunArgument = Annotated[
    str, Argument(metavar="RUN", help="A run: its folder, id, beginning of the id, or name; or a sweep.")
]
Paths = Annotated[
    list[str] | None,
    Argument(metavar="SWEEP|RUN", help="Sweeps, runs or results folders, by folder, name or id. Default: all."),
]
At = Annotated[int | None, Option(metavar="STEP", help="The step of the model, of which train.keep kept the weights.")]
Trust = Annotated[bool, Option("--trust", help="Allow execution of the plugins in the run's folder.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the plan without training.")]
OnDevice = Annotated[
    str | None, Option("--on", metavar="GPU", help="As --dry-run, and estimate the time on a measured GPU: h200.")
]
RetryFailed = Annotated[bool, Option("--retry-failed", help="Train failed runs again.")]
Where = Annotated[
    list[str] | None,
    Option(metavar="FILTER", help="Select runs: 'model.depth>=8,norm!=none'. Operators: = != < <= > >="),
]
By = Annotated[
    str | None, Option(metavar="OPTIONS", help="The factors. Default: the options in which the runs differ.")
]
X = Annotated[str | None, Option(metavar="OPTION", help="The factor on the x axis.")]
Color = Annotated[str | None, Option(metavar="OPTION", help="The factor with the colours.")]
Style = Annotated[str | None, Option(metavar="OPTION", help="The factor with the line styles.")]
Panel = Annotated[str | None, Option(metavar="OPTIONS", help="The factors with one panel for each level.")]


def _complete(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from normlab.cli.completion import complete_override

    return list(complete_override(context, incomplete))


Overrides = Annotated[
    list[str] | None,
    Argument(metavar="OVERRIDE", help="norm=rmsnorm placement=pre model.depth=8", autocompletion=_complete),
]
ConfigDir = Annotated[
    str | None, Option("--config-dir", "-cd", metavar="DIR", help="Folder of your own configs, after normlab's.")
]
ConfigName = Annotated[str, Option("--config-name", "-cn", metavar="NAME", help="Name of the primary config.")]
Cfg = Annotated[
    Literal["job", "optim"] | None,
    Option(
        "--cfg", "-c", help="Print the config of each run (job), or how each parameter is updated (optim), and exit."
    ),
]


def read_arguments(
    overrides: Sequence[str] | None, cfg: object, config_dir: str | None, config_name: str
) -> tuple[list[str], UserConfigs]:
    """Return the overrides and the configs of a command; print what --cfg asks for.

    Raises:
        SystemExit: It is printed.
    """
    from normlab.config.compose import UserConfigs, config_texts

    texts, configs = list(overrides or ()), UserConfigs(config_dir, config_name)
    if cfg:
        warn_of_replaced(texts)
        # The config is printed as Hydra composed it, valid or not, because it shows where a wrong value comes from.
        printed = config_texts(texts, configs) if cfg == "job" else _update_texts(texts, configs)
        echo("\n---\n".join(printed), keep="\n")
        sys.exit(0)
    return texts, configs


def warn_of_replaced(overrides: Sequence[str]) -> None:
    """Warn of overrides that have no effect, because a later one sets the same option.

    This is no error, because a script may append the user's arguments to its own overrides, as scripts/demo does.
    """
    from normlab.config.arms import PREFIX

    typed: dict[str, list[str]] = {}
    for override in overrides:
        if override.startswith(PREFIX):
            continue  # two lists of arms are an error
        option = override.lstrip("+").partition("=")[0]
        typed.setdefault(option, []).append(override)
    warnings: list[str] = []
    for *earlier, last in typed.values():
        for text in dict.fromkeys(earlier):
            if text != last:
                warnings.append(f"{text}: has no effect, because {last} comes later; leave {text} out")
    if warnings and _are_overrides(overrides):
        for warning in warnings:
            warn(warning)


def _are_overrides(texts: Sequence[str]) -> bool:
    """Return whether all texts are well-formed; the command reports one that is not, which no order explains."""
    from normlab.config.arms import read_arms
    from normlab.config.overrides import parse
    from normlab.config.searches import read_searches, read_until

    try:
        _, others = read_searches(texts)
        _, others = read_until(others)
        _, shared = read_arms(others)
        for text in shared:
            parse(text)
    except ConfigError:
        return False
    return True


def _update_texts(overrides: Sequence[str], configs: UserConfigs) -> Iterator[str]:
    """Yield for each run of a grid how each of its parameters is updated, as a table."""
    from normlab.config import memory
    from normlab.config.compose import compose_sweep
    from normlab.config.override_errors import naming_run
    from normlab.model.groups import check_parameters, parameter_rows
    from normlab.model.init import build_model, notify_of_depth
    from normlab.report.tables import render

    for varied, config in compose_sweep(overrides, configs)[1]:
        with naming_run(varied):
            check_parameters(config)
            # The table is read from the model itself, so that its weights in float32 must fit.
            weights = 4 * memory.num_weights(config, vocab_size=0)
            memory.check_fits(
                config, memory.MemoryEstimate(weights, 0, weights), memory.available_bytes(), "this machine"
            )
        notify_of_depth(config.model.depth)
        rows = [row.cells for row in parameter_rows(config, build_model(config, vocab_size=0))]
        lines = [render(rows, fixed=rows[0].keys()), "", _decay_note(config)]
        if config.model.scaling != "none":
            lines.append(_scaling_note(config))
        if varied:
            lines.insert(0, f"# {' '.join(varied)}")
        yield "\n".join(lines)


def _decay_note(config: RunConfig) -> str:
    """Return what the learning rates and the decays of the table mean."""
    mode = config.optim.decay_mode
    decay = "this per step, whatever lr is" if mode == "independent" else "lr times this per step"
    if mode == "cautious":
        decay += ", cautiously"
    return f"lr: at the peak; decay: {decay}"


def _scaling_note(config: RunConfig) -> str:
    """Return the factors of a rule of transfer in the forward pass."""
    model = config.model
    return (
        f"forward, by model.scaling={model.scaling}: each sub-layer times {1 / model.depth_ratio:g}, logits "
        f"times {1 / model.width_ratio:g}, q k of attention over {model.width // model.heads}, "
        "not over its root"
    )


def split_names(text: str | None) -> list[str] | None:
    """Return the names in an option's text, which commas separate; None without the option."""
    if text is None:
        return None
    return [name.strip() for name in text.split(",")]


app = typer.Typer(
    name="normlab",
    help="Train transformers with different norms and placements, and compare them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    debug: Annotated[bool, Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    if version:
        typer.echo(f"normlab {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def show_progress(text: str) -> None:
    """Replace the current line of a terminal with a text; an empty text clears the line."""
    if sys.stderr.isatty():
        clear_line = "\r\x1b[K"
        print(f"{clear_line}{text}", end="" if text else clear_line, file=sys.stderr, flush=True)


def echo(text: object, keep: str = "") -> None:
    """Print a line, with controls but those in `keep` escaped; discard all output once the reader of a pipe closed it.

    For a text of several lines, `keep` has the newline, and the texts of a record in it are escaped before.
    """
    try:
        typer.echo(printable(str(text), keep))
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def open_closed_outputs() -> None:
    """Replace a closed stdout or stderr (`>&-`) by the null device.

    Without this, the next file that is opened would get the free descriptor, and libraries would print into that file.
    """
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_WRONLY)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            stream = os.fdopen(descriptor, "w")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def discard_output() -> None:
    """Redirect stdout to the null device, so that Python reports no broken pipe at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def replace_interrupt_handler(old: Any, new: Any) -> None:
    """Replace the handler of SIGINT if it is `old`, not one of a caller or background job."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)
