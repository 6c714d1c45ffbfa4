"""The command line. Imports what a command needs when the command is called."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from normlab import __version__
from normlab.errors import ConfigError, NormlabError, one_line, unknown
from normlab.openmp import limit_spinning
from normlab.plugins import load_plugins, plugin_line

if TYPE_CHECKING:
    from normlab.config import RunConfig

ResultsDir = Annotated[str, typer.Option(help="Folder of the results.")]
Run = Annotated[str, typer.Argument(help="A run: its folder, id, beginning of the id, or name.")]
Trust = Annotated[bool, typer.Option("--trust", help="Execute the plugins in the run's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Where = Annotated[
    list[str] | None,
    typer.Option("--where", help="Select runs: 'model.depth>=8,norm!=none'. Operators: = != < <= > >="),
]


def _overrides(help: str) -> Any:
    return typer.Argument(metavar="OVERRIDE", help=help)


class _HydraCommand(TyperCommand):
    """A command that takes Hydra's flags. Short ones are spelt out, since click reads -cd=x as -c -d -= -x."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        long = {"-cd": "--config-dir", "-cn": "--config-name", "-c": "--cfg", "-p": "--package", "-i": "--info"}
        parts = [argument.partition("=") for argument in args]
        return super().parse_args(ctx, [long.get(flag, flag) + equals + value for flag, equals, value in parts])


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


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
def train(
    overrides: Annotated[list[str] | None, _overrides("norm=rmsnorm placement=pre model.depth=8")] = None,
) -> None:
    """Train a run, or resume it.

    The same command resumes an interrupted run. Every Hydra flag works: --help, --cfg job, --multirun.

    Example: normlab train norm=rmsnorm placement=pre model.depth=8
    """
    # Hydra prints through logging, which would report a pipe that its reader closed (`| head`).
    logging.raiseExceptions = False
    from normlab.compose import run_job

    run_job(overrides or [], _train)


def _train(config: RunConfig) -> None:
    """Train one run and print its outcome; exit if a signal stopped it, so that a --multirun stops too."""
    from normlab.store.outcome import describe_divergence, final_losses, format_loss, outcome_of
    from normlab.train.run import train

    _replace_interrupt_handler(signal.SIG_DFL, signal.default_int_handler)  # train stops at a signal by itself
    outcome = train(config, ends_process=True)
    status = outcome.status
    if outcome.already_ended:
        name = outcome_of(outcome.folder.run(), outcome.state, status) or outcome.state
        loss, _ = final_losses(name, status)
        ending = "" if loss is None else f", validation loss {format_loss(loss)}"
        _echo(f"{name} at step {status.get('step')}{ending}: nothing to do (run.fresh=true starts another run)")
    if outcome.state == "diverged":
        _echo(f"diverged at step {status['diverged']['step']}: {describe_divergence(status['diverged'])}")
    if outcome.state == "interrupted":
        _echo(f"interrupted at step {status['step']}: the same command resumes it")
    _echo(os.path.relpath(outcome.folder.path))
    if outcome.signal:
        sys.exit(128 + outcome.signal)


@app.command(cls=_HydraCommand, context_settings={"ignore_unknown_options": True})
def sweep(
    overrides: Annotated[list[str] | None, _overrides("A grid: norm=rmsnorm,dyt 'seed=range(3)'")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan without training.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Train failed runs again.")] = False,
) -> int:
    """Train a grid of runs, or resume it.

    The same command resumes the sweep. Exit code 1 if a run failed; a diverged run is an outcome.

    Runs that differ only in numbers train stacked, in packs of sweep.pack runs, one process a pack. sweep.pack=auto: 1
    on a CPU in fp32, 16 in bf16 at width 128 or less; on a GPU 8 up to width 512, 4 up to 1024. The bits of a run
    depend on the size and members of its pack, which the plan records.

    Example: normlab sweep norm=rmsnorm,dyt 'seed=range(3)'
    """
    from normlab.compose import compose_sweep, show_config
    from normlab.report.render import render
    from normlab.sweep import plan_text
    from normlab.sweep.plan import make_plan
    from normlab.sweep.progress import ProgressDisplay
    from normlab.sweep.supervisor import supervise

    if show_config(overrides or []):
        return 0
    options, runs = compose_sweep(overrides or [], _show_progress)
    planned = make_plan(options, runs, _show_progress)
    for warning in planned.warnings:
        _warn(warning)
    plan, folder = planned.plan, planned.folder
    for line in plan_text.plan_lines(plan, folder):
        _echo(line)
    if dry_run:
        if rows := plan_text.pack_rows(plan, folder):
            _echo(render(rows))
        return 0

    outcome = supervise(folder, plan, options, ProgressDisplay(folder), retry_failed=retry_failed)
    _echo(render(plan_text.run_rows(outcome.plan, folder, outcome.failed)))
    for line in plan_text.result_lines(outcome.plan, folder, outcome.failed):
        _echo(line)
    return outcome.code


def _show_progress(text: str) -> None:
    """Replace the current line of a terminal; an empty text clears it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\r\x1b[K" if not text else "", file=sys.stderr, flush=True)


@app.command()
def summarize(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="SWEEP|RUN", help="A sweep, run or results folder: its folder, name, id, or beginning of the id."
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="table, json, csv or markdown.")] = "table",
    by: Annotated[
        str | None, typer.Option("--by", help="Group runs into cells by these options: norm,placement,model.depth.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="With --by: difference to this baseline, as norm=layernorm.")
    ] = None,
    where: Where = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="With --by: a learning rate at which to compare all cells too.")
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="With --by: steps and seconds to this validation loss.")
    ] = None,
    spikes: Annotated[
        bool, typer.Option("--spikes", help="With --by: count loss spikes of runs that have not counted them.")
    ] = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Print outcome, losses and speed of each run or cell.

    With --by, the runs that agree in these options form a cell, shown with means and intervals over seeds. A cell is
    shown at its best learning rate, selected on the same validation loss, and at a learning rate that all cells share.

    Outcomes: a run is stuck if its final loss is within 5 % of the corpus's unigram entropy and no evaluation was
    lower. It has regressed if an evaluation was below this band and the last one is not, if one was in it and the last
    is above, or if the last is more than 5 % above both ln V and the initial loss. It has diverged if the loss is not
    finite, or more than 1 nat/token above both ln V and the initial loss. A diverged run is counted, ranks worse than
    every finite loss, and loses its pair.
    """
    from normlab.report.render import render
    from normlab.report.summary import summarize as rows_of

    if by is None:
        given = {"--against": against, "--lr": lr, "--target": target, "--spikes": spikes or None}
        if unused := [option for option, value in given.items() if value is not None]:
            raise ConfigError(f"{', '.join(unused)}: has no effect without --by; add, for example, --by norm,placement")
        return typer.echo(render(rows_of(path or results_dir, where or (), results_dir), format))
    from normlab.report.by import Options, summarize_by
    from normlab.report.by_text import render_report

    options = Options(where=where or (), against=against, lr=lr, target=target, spikes=spikes)
    report = summarize_by(path or results_dir, [option.strip() for option in by.split(",")], options, results_dir)
    typer.echo(render_report(report, format))
    for warning in report.warnings:
        typer.echo(f"normlab: {one_line(warning)}", err=True)


@app.command()
def compare(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SWEEP|RUN",
            help="Sweeps, runs or results folders: folder, name, id, or beginning of the id. Default: --results-dir.",
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="Options that define a cell. Default: those that differ between runs.")
    ] = None,
    where: Where = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="HTML file to write. Default: compare.html in the sweep's folder."),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="html, or png to write the figures too.")] = "html",
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Write an HTML page that compares runs.

    The page shows which cell is best, with intervals and tests, and the statistics of its runs. It needs no other
    files. The command prints a summary and the page's path. Damaged records are named and left out.
    """
    from normlab.report.compare.write import Options, write_compare

    page = None if output is None else Path(output)
    options = Options(
        by=by, where=where or (), output=page, format=format, open=open, results_dir=results_dir, version=__version__
    )
    written = write_compare(paths or [], options)
    for line in written.summary:
        typer.echo(one_line(line))
    for path in written.paths:
        typer.echo(path)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="norms, placements, models, data, optim, init, stats or runs.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME|plugins=[FILE]", help="An entry to describe; for runs, their folder."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every option.")] = False,
) -> None:
    """List norms, placements, models, runs and more.

    With plugins=[my_norm.py] the list includes what your own files register.
    """
    from normlab.report.catalogue import ENTRIES, ROWS
    from normlab.report.entry import entry_text, one_entry
    from normlab.report.listing import list_runs
    from normlab.report.render import render

    plugins = [argument for argument in arguments or [] if argument.startswith("plugins=")]
    names = [argument for argument in arguments or [] if argument not in plugins]
    if len(names) > 1:
        raise ConfigError(f"list {what} {' '.join(names)}: too many names; choose one")
    name = names[0] if names else None
    load_plugins([])
    if plugins:
        from normlab.compose import register_plugins

        register_plugins(plugins)
    kinds = {"runs": lambda: list_runs(name or "results"), **(ENTRIES if json else ROWS)}
    if what not in kinds:
        raise ConfigError(unknown("list", what, kinds))
    if what != "runs" and name is not None:
        width = shutil.get_terminal_size((100, 24)).columns
        return typer.echo(render([one_entry(what, name)], "json") if json else entry_text(what, name, width))
    typer.echo(render(kinds[what](), "json" if json else "table"))


@app.command(cls=_HydraCommand, context_settings={"ignore_unknown_options": True})
def verify(
    overrides: Annotated[list[str] | None, _overrides("norm=rmsnorm placement=pre, as for train.")] = None,
    json: Json = False,
) -> int:
    """Check norms and placements against references.

    Checks the block of a run, or without overrides the complete catalogue, against reference implementations,
    identities and closed-form laws. With plugins=[FILE] alone, checks everything that the plugins register. Exit code
    1 if a check fails.
    """
    import torch

    from normlab.compose import compose_run, norm_presets, overrides_in, show_config
    from normlab.report.render import render
    from normlab.verify.run import checks_of_catalogue, select_checks, verdict

    if show_config(overrides or []):
        return 0
    torch.set_num_threads(1)  # the tensors are small, and more threads would wait for each other
    results, config = [], compose_run(overrides) if overrides else None
    presets = norm_presets(None if config is None else [config.norm.preset])
    if config is None:
        checks = checks_of_catalogue(presets)
    else:
        checks = select_checks(config, overrides_in(overrides or []), presets)
    for warning in () if config is None else config.warnings():
        _warn(warning)
    for check in checks:
        results.append(check)
        if not json:
            _echo(str(check))
    _echo(render([check.row() for check in results], "json") if json else verdict(results))
    return int(not all(check.passed for check in results))


@app.command(cls=_HydraCommand, context_settings={"ignore_unknown_options": True})
def probe(
    overrides: Annotated[list[str] | None, _overrides("A grid: placement=pre,post model.depth=6,12")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of initialisations and batches to average over.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with all profiles over depth.")] = False,
    page: Annotated[str | None, typer.Option("--page", "-o", help="HTML file to write the profiles to.")] = None,
) -> None:
    """Measure signal propagation at initialisation.

    Prints profiles over depth of the stream, the branches, the gradient and the first update, without training.
    """
    from normlab import probe as profiles
    from normlab.compose import compose_grid, show_config
    from normlab.report.pages.shell import check_page
    from normlab.report.render import render

    if show_config(overrides or []):
        return
    if page is not None:
        check_page(Path(page), "--page")
    rows = list(profiles.probe(compose_grid(overrides or []), seeds, _show_progress))
    typer.echo(render(rows if json else [profiles.table_row(row) for row in rows], "json" if json else "table"))
    if not json:
        for law in profiles.power_laws(rows):
            typer.echo(law)
    if page is not None:
        profiles.write_page(rows, Path(page))


@app.command()
def explain(
    output: Annotated[str, typer.Option("--output", "-o", help="HTML file to write.")] = "explain.html",
    open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write an HTML page that explains norms and placements.

    The page shows what each norm makes of a matrix that you edit, and a diagram of each placement.
    """
    from normlab.report.pages.shell import check_page

    path = Path(output)
    check_page(path, "-o")
    from normlab.explain import page

    page.write(path)
    typer.echo(path)
    if open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


@app.command()
def inspect(
    run: Run,
    statistic: Annotated[str | None, typer.Argument(help="One of `normlab list stats`, or spikes.")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Measure its checkpoints now, for example curvature.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every step and layer.")] = False,
    trust: Trust = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Print the statistics measured in a run.

    These are statistics of activations, gradients, norms and updates, by depth and over training.
    """
    from normlab.report import inspect as statistics
    from normlab.report.render import render
    from normlab.store.query import examine, resolve_run

    folder = resolve_run(run, results_dir)
    statistics.check_statistic(statistic, probe=probe)
    if trust and not probe:
        raise ConfigError("--trust: has no effect without --probe, since only --probe builds the model; leave it out")
    if not probe and (problem := examine(folder).problem):
        typer.echo(f"normlab: {one_line(problem)}", err=True)
    if statistic == statistics.SPIKES:
        spikes = statistics.spike_rows(folder)
        return typer.echo(render(spikes, "json") if json else render(statistics.spike_table(spikes)))
    if probe:
        from normlab.train.load import LoadedRun
        from normlab.train.probing import probe_checkpoints

        probed = list(probe_checkpoints(LoadedRun(folder, trust=trust), statistic))
        rows = statistics.rows_of(probed, statistic)
    else:
        rows = statistics.inspect(folder, statistic)
    if json:
        return typer.echo(render(rows, "json"))
    if statistic is None:
        typer.echo(render(statistics.overview_rows(rows)))
        if steps := statistics.overview_steps(rows):
            typer.echo(steps)
        command = f"normlab inspect RUN STATISTIC{' --probe' if probe else ''}"
        return typer.echo(f"{command} shows a statistic in full; normlab list stats lists them")
    typer.echo(statistics.heading(statistic))
    typer.echo(render(statistics.table_rows(rows)))
    for note in statistics.notes(rows):
        typer.echo(note)
    if more := statistics.left_out(rows):
        typer.echo(more)


@app.command()
def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(help="Number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    trust: Trust = False,
    results_dir: ResultsDir = "results",
) -> None:
    """Continue a text with a run's model."""
    from normlab.train.load import load

    loaded = load(run, results_dir, trust=trust)
    typer.echo(loaded.sample(prompt, tokens=tokens, temperature=temperature, seed=seed))


@app.command()
def doctor(results_dir: ResultsDir = "results", json: Json = False) -> int:
    """Check this machine for training.

    Prints how to fix what is missing. Exit code 1 if a run would fail.
    """
    from normlab import doctor as machine
    from normlab.report.render import render

    results = []
    for check in machine.checks(results_dir):
        results.append(check)
        if not json:
            typer.echo(machine.line(check))
    if json:
        typer.echo(render(results, "json"))
    return int(any(check["state"] == machine.BAD for check in results))


@app.command()
def completion(shell: Annotated[str, typer.Argument(help="bash or zsh.")]) -> None:
    """Print a script for tab completion.

    Add to ~/.bashrc: eval "$(normlab completion bash)". For zsh, add the same with zsh to ~/.zshrc.
    """
    from normlab.completion import SCRIPTS

    if shell not in SCRIPTS:
        raise ConfigError(unknown("shell", shell, SCRIPTS))
    typer.echo(SCRIPTS[shell], nl=False)


@app.command(hidden=True)
def complete(line: str) -> None:
    """Print the completions of a command line, for the scripts of `normlab completion`."""
    from normlab.completion import candidates

    command = typer.main.get_command(app)
    flags = {
        name: [flag for parameter in each.params for flag in parameter.opts if flag.startswith("--")]
        for name, each in command.commands.items()  # pyright: ignore[reportAttributeAccessIssue]
        if not each.hidden
    }
    typer.echo("\n".join(candidates(line, flags)))


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit: 0 success, 1 failed runs or checks, 2 an error in the input, 128 + n on signal n."""
    limit_spinning()
    _replace_closed_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    # Until a run starts Ctrl-C ends the process: Python could lose an exception that is raised during an import.
    _replace_interrupt_handler(signal.default_int_handler, signal.SIG_DFL)
    try:
        arguments = [argument for argument in arguments if argument != "--debug"]
        code = app(args=arguments, prog_name="normlab", standalone_mode=False)
    except BrokenPipeError:
        _discard_output()
        sys.exit(1)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        message = _message_of(error)
        if debug or message is None:
            raise
        if isinstance(error, OSError) and error.filename is None:
            _discard_output()
        print(f"error: {one_line(message)}", file=sys.stderr)
        sys.exit(2)
    else:
        sys.exit(code if isinstance(code, int) else 0)
    finally:
        _replace_interrupt_handler(signal.SIG_DFL, signal.default_int_handler)


def _message_of(error: Exception) -> str | None:
    """Return what to print about an error of the user's input, files or plugins; None for any other error."""
    if isinstance(error, NormlabError):
        return str(error)
    if isinstance(error, OSError):
        if error.filename is not None:
            from normlab.store.files import io_error

            return str(io_error(Path(str(error.filename)), "opened", error))
        if error.errno == errno.ENOSPC:  # without a file name: standard output
            return f"the output cannot be written ({error.strerror}); free some space, or redirect it"
        return None
    if hasattr(error, "format_message"):  # typer's errors about arguments, whose class is not public
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "normlab"
        return f"{error.format_message().rstrip('.')}; {command} --help lists the options"  # pyright: ignore[reportAttributeAccessIssue]
    if (where := plugin_line(error)) is not None:
        return f"plugins: {where}: {type(error).__name__}: {error}; fix the file (--debug prints the traceback)"
    return None


def _replace_closed_streams() -> None:
    """Open the null device for a stream that was closed at the start (`>&-`): Python has None for it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="replace"))  # noqa: SIM115


def _replace_interrupt_handler(old: Any, new: Any) -> None:
    """Replace Python's own handler only: a caller's handler stays, and a background job still ignores Ctrl-C."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


def _echo(line: str) -> None:
    """Print a line; a reader that has closed the pipe does not make the run fail."""
    try:
        typer.echo(line)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    """Send standard output to the null device, so that Python does not complain about it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warn(message: object) -> None:
    typer.echo(f"warning: {one_line(message)}", err=True)
