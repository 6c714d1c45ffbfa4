"""The command line: one file per command. A command imports heavy modules only when it runs."""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import sys
from importlib import import_module
from pathlib import Path

import typer

from normlab.base.errors import NormlabError, is_out_of_memory, one_line
from normlab.base.plugins import files_in_use, plugin_line
from normlab.cli.app import app, discard_output, open_closed_outputs, replace_interrupt_handler
from normlab.system.openmp import limit_spinning

for _module in ("train", "summarize", "compare", "figure", "list", "verify", "explain", "inspect"):
    import_module(f"normlab.cli.{_module}")  # in the order of `normlab --help`
for _module in ("sample", "eval", "export", "share", "rm", "study", "sync", "doctor"):
    import_module(f"normlab.cli.{_module}")


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with 0, 1 (failed runs or checks), 2 (wrong input) or 128 + signal."""
    limit_spinning()
    open_closed_outputs()
    arguments = sys.argv[1:] if arguments is None else arguments
    # Until a run starts, Ctrl-C ends the process: Python can lose a KeyboardInterrupt that is raised during an import.
    replace_interrupt_handler(signal.default_int_handler, signal.SIG_DFL)
    try:
        # --debug may stand behind a command, where typer does not know it.
        kept = [argument for argument in arguments if argument != "--debug"]
        code = app(args=kept, prog_name="normlab", standalone_mode=False)
    except BrokenPipeError:
        discard_output()
        sys.exit(1)
    except typer.Abort:
        sys.exit(130)
    except (Exception, SystemExit) as error:  # a plugin that exits would look like a command that has succeeded
        message = _message_of(error)
        if "--debug" in arguments or message is None:
            raise
        # Standard output failed, and Python would report that again when it flushes the rest at exit.
        if isinstance(error, OSError) and error.filename is None:
            discard_output()
        with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone
            print(f"error: {one_line(message)}", file=sys.stderr, flush=True)
        sys.exit(2)
    else:
        sys.exit(code if isinstance(code, int) else 0)
    finally:
        replace_interrupt_handler(signal.SIG_DFL, signal.default_int_handler)


def _message_of(error: Exception | SystemExit) -> str | None:
    """Return the message for an error that the user can fix, or None for any other error."""
    if isinstance(error, SystemExit):
        where = plugin_line(error)
        if where is None:
            return None
        return f"plugins: {where}: SystemExit: {error}; fix the file (--debug prints the traceback)"
    if isinstance(error, NormlabError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        from normlab.store.files import io_error

        return str(io_error(Path(str(error.filename)), "opened", error))
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # without a file name: standard output
        return f"the output cannot be written ({error.strerror}); free some space, or redirect it"
    if hasattr(error, "format_message"):  # typer's errors about arguments, whose class is not public
        text = error.format_message().rstrip(".").replace("Value error, ", "")  # pyright: ignore[reportAttributeAccessIssue]
        # The phrases of pydantic, by which typer converts values.
        text = re.sub(r"Input should be a valid number\b.*", "must be a number", text)
        text = re.sub(
            r"(Input should be a valid|Unable to parse input string as an) integer\b.*", "must be a whole number", text
        )
        text = re.sub(r"\.? Did you mean (.*\?)$", r" (did you mean \1)", text[:1].lower() + text[1:])
        return f"{text}; --help lists the commands and options"
    if isinstance(error, MemoryError | ImportError) and is_out_of_memory(error):
        return f"there is not enough memory to load the libraries ({error}); free some, or raise the limit (ulimit -v)"
    where = plugin_line(error)
    if where is not None:
        return f"plugins: {where}: {type(error).__name__}: {error}; fix the file (--debug prints the traceback)"
    files = files_in_use()
    if files:
        # A norm that returns a wrong shape or nothing makes the code after it fail, where no line of the file is.
        return (
            f"plugins: {type(error).__name__}: {error}; {' or '.join(files)} may cause it: fix the file, which "
            "`normlab verify` checks (--debug prints the traceback)"
        )
    return None
