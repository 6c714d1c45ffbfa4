"""The command line. Hands `train`'s words on untouched; imports what a command needs when it is called."""

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
from normlab.source import load_plugins, plugin_line

if TYPE_CHECKING:
    from normlab.config import RunConfig

TRUST = typer.Option("--trust", help="Execute the code (plugins) that lies in the run's folder.")


class _HydraCommand(TyperCommand):
    """A command that hands Hydra's flags on. In their long form: click reads -cd=home as -c -d -= -h."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with Hydra's short flags of two letters or with a value spelt out."""
        spelt = {"-cd": "--config-dir", "-cn": "--config-name", "-c": "--cfg", "-p": "--package", "-i": "--info"}
        parts = [word.partition("=") for word in args]
        return super().parse_args(ctx, [spelt.get(flag, flag) + equals + value for flag, equals, value in parts])


app = typer.Typer(
    name="normlab",
    help="A laboratory for normalisation in transformers.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
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
    words: Annotated[list[str] | None, typer.Argument(help="norm=... placement=... model.depth=...")] = None,
) -> None:
    """Train a run: normlab train norm=rmsnorm placement=pre model.depth=8.

    The same words again go on with it. Every Hydra flag works: --help, --cfg job, --multirun.
    """
    # A reader that closes the pipe (`| head`) is no error; Hydra prints through logging.
    logging.raiseExceptions = False
    from normlab.launch import main as launch

    launch(words or [], _train)


def _train(config: RunConfig) -> None:
    """Train one run and say how it ended; a signal that stopped it stops a whole --multirun."""
    from normlab.store.outcome import divergence, final_losses, outcome_of, shown
    from normlab.train.start import train

    _let_signals_be_handled()
    outcome = train(config, ends_process=True)
    where = os.path.relpath(outcome.folder.path)
    status = outcome.status
    if outcome.already:
        ended = outcome_of(outcome.folder.run(), outcome.state, status) or outcome.state
        loss, _ = final_losses(ended, status)
        ending = "" if loss is None else f", validation loss {shown(loss)}"
        _echo(f"{ended} at step {status.get('step')}{ending}: nothing to do (run.fresh=true starts another)")
    if outcome.state == "diverged":
        _echo(f"diverged at step {status['diverged']['step']}: {divergence(status['diverged'])}")
    if outcome.state == "interrupted":
        _echo(f"interrupted at step {status['step']}: the same command goes on from there")
    _echo(where)
    if outcome.signal:
        sys.exit(128 + outcome.signal)


def _replace_closed_streams() -> None:
    """Python has None for a stream that was closed before it began (`>&-`); what is said there goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8", errors="replace"))


def _let_signals_end_it() -> None:
    """Until a run begins Ctrl-C ends the process: an exception in the middle of an import may be lost there."""
    _replace_handler(signal.default_int_handler, signal.SIG_DFL)


def _let_signals_be_handled() -> None:
    _replace_handler(signal.SIG_DFL, signal.default_int_handler)


def _replace_handler(old: Any, new: Any) -> None:
    """Python's own handlers only: a caller's, and a background job's order to ignore it, stay as they are."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


def _echo(line: str) -> None:
    """Print a line of a run's end; a reader that has gone does not make a failure of the run."""
    try:
        typer.echo(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@app.command()
def summarize(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[SWEEP|RUN]", help="A sweep, a run or a results folder: by folder, name, id or its beginning."
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="table, json, csv or markdown.")] = "table",
    by: Annotated[
        str | None, typer.Option("--by", help="One line a cell of these words: norm,placement,model.depth.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="With --by: each cell less this baseline, as norm=layernorm.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option("--where", help="Only these runs: 'model.depth>=8,norm!=none'. = != < <= > >=")
    ] = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="With --by: the learning rate that all cells are also shown at.")
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="With --by: steps and seconds to this validation loss.")
    ] = None,
    spikes: Annotated[
        bool, typer.Option("--spikes", help="With --by: count spikes of runs whose status has no count of them.")
    ] = False,
    results_dir: Annotated[str, typer.Option(help="Where the runs are.")] = "results",
) -> None:
    """One line a run: how it ended, its losses, its speed. With --by one line a cell: means over seeds, intervals.

    A cell is shown at its own best learning rate, selected by the same validation loss, and at one that all share. A
    diverged run is an outcome: it is counted, it is worse than every number, and a pair with it is lost. Stuck: the
    final loss is in the band of 5 % around the corpus's unigram entropy, and no evaluation was below. Regressed: an
    evaluation was below the band and the last is not, or one was in it and the last is above, or the last is above
    the initial loss. Diverged: not finite, or more than 1 nat above both ln V and the initial loss.
    """
    from normlab.report.render import render
    from normlab.report.summary import summarize as rows_of

    if by is None:
        given = {"--against": against, "--lr": lr, "--target": target, "--spikes": spikes or None}
        if idle := [option for option, value in given.items() if value is not None]:
            raise ConfigError(f"{', '.join(idle)}: has no effect without --by; add --by norm,placement, for one")
        return typer.echo(render(rows_of(path or results_dir, where or (), results_dir), format))
    from normlab.report.by import Options, summarize_by
    from normlab.report.by_text import render_report

    asked = Options(where=where or (), against=against, lr=lr, target=target, spikes=spikes)
    report = summarize_by(path or results_dir, [word.strip() for word in by.split(",")], asked, results_dir)
    typer.echo(render_report(report, format))
    for warning in report.warnings:
        typer.echo(f"normlab: {one_line(warning)}", err=True)


@app.command()
def compare(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEP|RUN]...",
            help="Sweeps, runs, results folders: by folder, name, id or its beginning; all of --results-dir if none.",
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="One cell for each choice of these words; those that differ if not set.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option("--where", help="Only these runs: 'model.depth>=8,norm!=none'. = != < <= > >=")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="The page (HTML); compare.html in the sweep's folder if not set."),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="html, or png: its figures too, beside the page.")] = "html",
    open: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
    results_dir: Annotated[str, typer.Option(help="Where the runs are.")] = "results",
) -> None:
    """Runs side by side on one page that stands alone: which is best, how surely, and what happened inside.

    Prints the answer and the page's path. Reads the records only; what is damaged is named and left out.
    """
    from normlab.report.compare.write import Options, write_compare

    page = None if output is None else Path(output)
    asked = Options(
        by=by, where=where or (), output=page, format=format, open=open, results_dir=results_dir, version=__version__
    )
    written = write_compare(words or [], asked)
    for line in written.answer:
        typer.echo(one_line(line))
    for path in written.paths:
        typer.echo(path)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="norms, placements, models, data, optim, init, stats or runs.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME] [plugins=[FILE]]", help="One of them, whole; for runs, where they are."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every option and its meaning.")] = False,
) -> None:
    """What there is to choose from, and what was run; with plugins=[my_norm.py] what your own files register too."""
    from normlab.report.catalogue import ENTRIES, ROWS
    from normlab.report.entry import entry_text, one_entry
    from normlab.report.listing import list_runs
    from normlab.report.render import render

    plugins = [word for word in words or [] if word.startswith("plugins=")]
    names = [word for word in words or [] if word not in plugins]
    if len(names) > 1:
        raise ConfigError(f"list {what} {' '.join(names)}: takes one name; leave out the others")
    name = names[0] if names else None
    load_plugins([])
    if plugins:
        from normlab.launch import register_plugins

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
    words: Annotated[list[str] | None, typer.Argument(help="norm=... placement=..., as for train.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Prove that the block of a run, or with no words the whole catalogue, is what it is said to be.

    Of words that are plugins alone, everything that they register. Exit code 1 where a check fails.
    """
    import torch

    from normlab.launch import compose_run, norm_presets, overrides_in, show_config
    from normlab.report.render import render
    from normlab.verify.run import of_catalogue, verdict
    from normlab.verify.words import checks_of

    if show_config(words or []):
        return 0
    torch.set_num_threads(1)  # what is checked is small: threads would wait for each other
    found, config = [], compose_run(words) if words else None
    presets = norm_presets(None if config is None else [config.norm.preset])
    checks = checks_of(config, overrides_in(words or []), presets) if config is not None else of_catalogue(presets)
    for doubt in config.doubts() if config is not None else ():
        typer.echo(f"warning: {one_line(doubt)}", err=True)
    for check in checks:
        found.append(check)
        if not json:
            _echo(f"{'ok  ' if check.passed else 'FAIL'}  {check.of}: {check.check}  {check.seen}".rstrip())
    _echo(render([check.row() for check in found], "json") if json else verdict(found))
    return int(not all(check.passed for check in found))


@app.command(cls=_HydraCommand, context_settings={"ignore_unknown_options": True})
def probe(
    words: Annotated[list[str] | None, typer.Argument(help="placement=pre,post model.depth=6,12: a grid.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many initial weights and batches to average over.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with the profiles whole.")] = False,
    page: Annotated[str | None, typer.Option("--page", "-o", help="Write the profiles as a page (HTML).")] = None,
) -> None:
    """Signal propagation at initialisation: stream, gradient and update, block by block, without training."""
    from normlab import probe as look
    from normlab.launch import compose_grid, show_config
    from normlab.report.pages.shell import check_page
    from normlab.report.render import render

    if show_config(words or []):
        return
    if page is not None:
        check_page(Path(page), "--page")
    rows = list(look.probe(compose_grid(words or []), seeds, _progress_line))
    typer.echo(render(rows if json else [look.table_row(row) for row in rows], "json" if json else "table"))
    if not json:
        for law in look.laws(rows):
            typer.echo(law)
    if page is not None:
        look.write_page(rows, Path(page))


@app.command()
def explain(
    output: Annotated[str, typer.Option("--output", "-o", help="The page to write (HTML).")] = "explain.html",
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write a page that teaches: a matrix to edit, what each norm makes of it, and every placement drawn."""
    from normlab.report.pages.shell import check_page

    path = Path(output)
    check_page(path, "-o")
    from normlab.explain import page

    page.write(path)
    typer.echo(path)
    if open_it:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


@app.command(cls=_HydraCommand, context_settings={"ignore_unknown_options": True})
def sweep(
    words: Annotated[list[str] | None, typer.Argument(help="norm=rmsnorm,dyt 'seed=range(3)': a grid.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; train nothing, leave nothing.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try again what failed before.")] = False,
) -> int:
    """Train a grid of runs, each in a process that can end alone: normlab sweep norm=rmsnorm,dyt 'seed=range(3)'.

    The same command resumes it. Exit code 1 where a run failed; one that diverged is an outcome. Runs that differ only
    in numbers train in packs of sweep.pack runs; auto: 1 on a CPU in fp32, 16 in bf16 at width 128 or less; on a GPU 8
    up to width 512, 4 up to 1024. A run's bits depend on the size and the members of its pack, which the plan names.
    """
    from normlab.launch import compose_sweep, show_config
    from normlab.report.render import render
    from normlab.sweep import show
    from normlab.sweep.plan import make_plan
    from normlab.sweep.progress import Progress
    from normlab.sweep.supervisor import supervise

    if show_config(words or []):
        return 0
    options, asked = compose_sweep(words or [], _progress_line)
    planned = make_plan(options, asked, _progress_line)
    for doubt in planned.doubts:
        typer.echo(f"warning: {one_line(doubt)}", err=True)
    plan, folder = planned.plan, planned.folder
    for line in show.plan_lines(plan, folder):
        _echo(line)
    if dry_run:
        if rows := show.pack_rows(plan, folder):
            _echo(render(rows))
        return 0

    outcome = supervise(folder, plan, options, Progress(folder), retry_failed=retry_failed)
    _echo(render(show.end_rows(outcome.plan, folder, outcome.failed)))
    for line in show.closing_lines(outcome.plan, folder, outcome.failed):
        _echo(line)
    return outcome.code


def _progress_line(text: str) -> None:
    """One moving line, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="\r\x1b[K" if not text else "", file=sys.stderr, flush=True)


@app.command()
def inspect(
    run: Annotated[str, typer.Argument(help="A run: its folder, its id, the beginning of it, or its name.")],
    statistic: Annotated[str | None, typer.Argument(help="One of `normlab list stats`, or spikes.")] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Probe its checkpoints now: curvature and the like.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every step and place.")] = False,
    trust: Annotated[bool, TRUST] = False,
    results_dir: Annotated[str, typer.Option(help="Where the runs are.")] = "results",
) -> None:
    """What happened inside a run: activations, gradients, norms and updates, by depth and over training."""
    from normlab.report import inspect as look
    from normlab.report.render import render
    from normlab.store.query import examine, resolve_run

    folder = resolve_run(run, results_dir)
    look.check(statistic, probe=probe)
    if trust and not probe:
        raise ConfigError("--trust: has no effect without --probe, which alone builds the model; leave it out")
    if not probe and (problem := examine(folder).problem):
        typer.echo(f"normlab: {one_line(problem)}", err=True)
    if statistic == look.SPIKES:
        found = look.spike_rows(folder)
        return typer.echo(render(found, "json") if json else render(look.spike_table(found)))
    if probe:
        from normlab.train.load import LoadedRun
        from normlab.train.probed import probe_checkpoints

        rows = look.rows_of(list(probe_checkpoints(LoadedRun(folder, trust=trust), statistic)), statistic)
    else:
        rows = look.inspect(folder, statistic)
    if json:
        return typer.echo(render(rows, "json"))
    if statistic is None:
        typer.echo(render(look.overview_rows(rows)))
        if steps := look.overview_steps(rows):
            typer.echo(steps)
        one = f"normlab inspect RUN STATISTIC{' --probe' if probe else ''}"
        return typer.echo(f"{one} shows one of them whole; normlab list stats names them all")
    typer.echo(look.heading(statistic))
    typer.echo(render(look.table_rows(rows)))
    for note in look.notes(rows):
        typer.echo(note)
    if more := look.left_out(rows):
        typer.echo(more)


@app.command()
def sample(
    run: Annotated[str, typer.Argument(help="A run: its folder, its id, the beginning of it, or its name.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(help="How many tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest.")] = 0.8,
    seed: Annotated[int, typer.Option(help="The same seed, the same text.")] = 0,
    trust: Annotated[bool, TRUST] = False,
    results_dir: Annotated[str, typer.Option(help="Where the runs are.")] = "results",
) -> None:
    """Continue a text with a run's model."""
    from normlab.train.load import load

    loaded = load(run, results_dir, trust=trust)
    typer.echo(loaded.sample(prompt, tokens=tokens, temperature=temperature, seed=seed))


@app.command()
def doctor(
    results_dir: Annotated[str, typer.Option(help="Where runs would be kept.")] = "results",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """What this machine has for training, and what to do about what is missing; exit code 1 where a run would fail."""
    from normlab import doctor as look
    from normlab.report.render import render

    found = []
    for check in look.checks(results_dir):
        found.append(check)
        if not json:
            typer.echo(look.line(check))
    if json:
        typer.echo(render(found, "json"))
    return int(any(check["state"] == look.BAD for check in found))


@app.command()
def completion(shell: Annotated[str, typer.Argument(help="bash or zsh.")]) -> None:
    """Tab completion: eval "$(normlab completion bash)" in ~/.bashrc; zsh likewise."""
    from normlab.completion import SCRIPTS

    if shell not in SCRIPTS:
        raise ConfigError(unknown("shell", shell, SCRIPTS))
    typer.echo(SCRIPTS[shell], nl=False)


@app.command(hidden=True)
def complete(line: str) -> None:
    """What the last word of a command line could go on as: for the shells' scripts."""
    from normlab.completion import candidates

    command = typer.main.get_command(app)
    flags = {
        name: [flag for parameter in each.params for flag in parameter.opts if flag.startswith("--")]
        for name, each in command.commands.items()  # pyright: ignore[reportAttributeAccessIssue]
        if not each.hidden
    }
    typer.echo("\n".join(candidates(line, flags)))


def main(arguments: list[str] | None = None) -> None:
    """The entry point: 0 done, 1 a failure of ours, 2 a mistake in the words, 128 + n stopped by signal n."""
    limit_spinning()
    _replace_closed_streams()
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    _let_signals_end_it()
    words = [word for word in words if word != "--debug"]
    try:
        code = app(args=words, prog_name="normlab", standalone_mode=False)
    except NormlabError as error:
        if debug:
            raise
        _fail(str(error))
    except BrokenPipeError:
        # Whoever read our output has gone; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if debug:
            raise
        if error.filename is not None:
            from normlab.store.files import refusal

            _fail(refusal(Path(str(error.filename)), "opened", error))
        if error.errno != errno.ENOSPC:
            raise
        # Where the output goes; what a run writes is spoken of by name.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"the output cannot be written ({error.strerror}); make room, or send it elsewhere")
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        # Typer's own errors for words that it does not know; it keeps their class to itself.
        if not hasattr(error, "format_message"):
            where = None if debug else plugin_line(error)
            if where is None:
                raise
            _fail(f"plugins: {where}: {type(error).__name__}: {error}; mend the file (--debug shows how it got there)")
        context = getattr(error, "ctx", None)
        helped = context.command_path if context else "normlab"
        _fail(f"{error.format_message().rstrip('.')}; {helped} --help lists what there is")  # pyright: ignore[reportAttributeAccessIssue]
    else:
        sys.exit(code if isinstance(code, int) else 0)
    finally:
        _let_signals_be_handled()


def _fail(message: Any) -> None:
    print(f"error: {one_line(message)}", file=sys.stderr)
    sys.exit(2)
