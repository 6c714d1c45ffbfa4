"""The command-line application: arguments, flags, output and warnings that several commands share."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from normlab.config.flags import FLAGS, TRAIN_ONLY
from normlab.errors import printable
from normlab.version import __version__

ResultsDir = Annotated[str, typer.Option(metavar="FOLDER", help="Folder of the results.")]
Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run: its folder, id, beginning of the id, or name; or a sweep.")
]
Factors = Annotated[
    list[str] | None,
    typer.Argument(metavar="FACTORS", help="Of a sweep, the run with these factors: 'placement=post,depth=8,seed=0'."),
]
Trust = Annotated[bool, typer.Option("--trust", help="Allow execution of the plugins in the run's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where", metavar="FILTER", help="Select runs: 'model.depth>=8,norm!=none'. Operators: = != < <= > >="
    ),
]

By = Annotated[
    str | None,
    typer.Option("--by", metavar="OPTIONS", help="The factors. Default: the options in which the runs differ."),
]
X = Annotated[str | None, typer.Option("--x", metavar="OPTION", help="The factor on the x axis.")]
Color = Annotated[str | None, typer.Option("--color", metavar="OPTION", help="The factor with the colours.")]
Style = Annotated[str | None, typer.Option("--style", metavar="OPTION", help="The factor with the line styles.")]
Panel = Annotated[
    str | None, typer.Option("--panel", metavar="OPTIONS", help="The factors with one panel for each level.")
]


def split_names(text: str | None) -> list[str] | None:
    """Return the names of an option with commas between them."""
    return None if text is None else [name.strip() for name in text.split(",")]


def overrides_argument(help: str) -> Any:
    """Return the argument of a command that takes overrides."""
    return typer.Argument(metavar="OVERRIDE", help=help)


class HydraCommand(TyperCommand):
    """A command that takes Hydra's flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments with long flags, because click reads -cd=x as -c -d -= -x."""
        long = {short[0]: name for name, *short in FLAGS if short}
        parts = [argument.partition("=") for argument in args]
        return super().parse_args(ctx, [long.get(flag, flag) + equals + value for flag, equals, value in parts])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write Hydra's flags below the options of the command."""
        with formatter.section("Flags shared with train"):
            formatter.write_dl(
                [
                    (f"{', '.join(names)} {settings.get('metavar', '')}".rstrip(), settings["help"])
                    for names, settings in FLAGS.items()
                    if names[0] not in ("--help", *TRAIN_ONLY)
                ]
            )


app = typer.Typer(
    name="normlab",
    help="Train transformers with different norms and placements, and compare them.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback on errors.")] = False,
) -> None:
    if version:
        typer.echo(f"normlab {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def show_progress(text: str) -> None:
    """Replace the current line of a terminal with a text; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\r\x1b[K" if not text else "", file=sys.stderr, flush=True)


def echo(text: object, keep: str = "") -> None:
    """Print a line, with controls but those in `keep` escaped; discard all output once the reader of a pipe closed it.

    For a text of several lines, `keep` has the newline, and the texts of a record in it are escaped before.
    """
    try:
        typer.echo(printable(str(text), keep))
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    """Redirect stdout to the null device, so that Python reports no broken pipe at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def replace_interrupt_handler(old: Any, new: Any) -> None:
    """Replace the handler of SIGINT if it is `old`, not one of a caller or background job."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)
