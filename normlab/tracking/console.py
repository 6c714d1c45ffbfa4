"""Console output of a run: a header, a progress bar on a terminal or plain lines elsewhere, and the outcome.

The output goes to stderr, because stdout is for results. `log` redraws the bar at most four times a second; there is no
thread.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

import msgspec

from normlab.errors import printable
from normlab.stats.profiles import Profiles
from normlab.store.format import DIVERGED
from normlab.store.outcome import explain_loss, format_loss
from normlab.store.record import Corpus, TextRead
from normlab.store.status import Status
from normlab.store.throughput import Compute, format_mfu, format_tflops
from normlab.tracking.tracker import Row

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESH_SECONDS = 0.25
"""Shortest time between two drawings of the bar; a drawing takes a few milliseconds."""
PLAIN_LINES = 20
"""Progress lines of a run without a terminal; each evaluation adds a line."""
MIN_BAR = 5
"""Fewest columns of the bar and the space after it; a line that is too long leaves out FLOP/s and MFU."""


class Console:
    """Tracker that prints to `stream` (default stderr): a bar on a terminal, plain lines elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = SafeStream(stream or sys.stderr)
        self._is_stderr = stream is None or stream is sys.stderr
        self._bar = self._make_bar() if self._stream.is_terminal() else None
        self._latest: dict[str, float] = {}
        self._step = self._steps = 0
        self._run: Mapping[str, Any] = {}
        self._compute = Compute(0.0, None, 1)
        self._printed_step: int | None = None
        self._evals_every = 0
        self._line_waits = False
        self._drawn_at = -math.inf
        self._pace_start: tuple[int, float] | None = None
        """Step and time at the first training rows."""

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Print the header and, on a terminal, start the bar."""
        self._step, self._steps = first_step, run["config"]["train"]["steps"]
        self._evals_every = run["config"]["eval"]["every"]
        self._run, self._compute = run, Compute.parse(run)
        for label, text in _header(run, first_step):
            self._print(f"{label:8}{text}")
        if self._bar is not None:
            self._bar.add_task(self._line(0.0), total=self._steps, completed=first_step)
            self._bar.start()

    def log_statistics(self, profiles: Profiles) -> None:
        """Do nothing; `normlab inspect` prints statistics."""

    def log(self, rows: Sequence[Row]) -> None:
        """Store the latest numbers, and print them if a line or a drawing is due."""
        now = time.monotonic()
        if self._line_waits and [(row["kind"], row["step"]) for row in rows[:1]] != [("eval", self._step)]:
            self._print_line(now)
        for row in rows:
            self._step = row["step"]
            if row["kind"] == "train":
                self._latest |= {"loss": row["loss"], "lr": row["lr"]}
            elif row["kind"] == "pace":
                self._latest["tokens_per_s"] = speed = row["tokens_per_s"]
                speeds = {"flops_per_s": self._compute.flops(speed), "mfu": self._compute.mfu(speed)}
                self._latest |= {name: value for name, value in speeds.items() if value is not None}
            else:
                self._latest["val"] = row["loss"]
                if self._bar is None:
                    self._print_line(now)
        # The time left is estimated from the first training rows on, without the time to compile and to read data.
        if self._pace_start is None and "loss" in self._latest:
            self._pace_start = (self._step, now)
        if self._bar is not None:
            if now - self._drawn_at >= REFRESH_SECONDS:
                self._draw(self._bar, now)
        elif self._is_due():
            # Wait for the evaluation of the same step, whose loss belongs on the same line.
            self._line_waits = self._is_evaluated()
            if not self._line_waits:
                self._print_line(now)

    def finish(self, status: Status) -> None:
        """Stop the bar, and print the outcome and the validation loss with an explanation."""
        if self._bar is not None:
            self._draw(self._bar, time.monotonic())
            self._bar.stop()
        elif self._line_waits:
            self._print_line(time.monotonic())
        outcome, loss = status.outcome, status.val_loss
        at = status.step if status.diverged is None else status.diverged.step
        line = f"{outcome or status.state} at step {at}/{status.steps}"
        if status.state == DIVERGED:
            line += "" if loss is None else f"  last val {format_loss(loss)}"
        elif loss is not None:
            references = msgspec.convert(self._run["corpus"], Corpus).references(status.initial_val_loss)
            meaning = explain_loss(outcome, loss, status.best_val_loss, references)
            line += f"  val {format_loss(loss)}" + (f", {meaning}" if meaning and math.isfinite(loss) else "")
        self._print(line)

    def _make_bar(self) -> Progress:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        return Progress(
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=MIN_BAR - 1)),
            TextColumn("{task.description}", markup=False, style="none"),
            console=RichConsole(file=cast("TextIO", self._stream), force_terminal=True),
            auto_refresh=False,
            expand=True,
            # stdout is for results; text that other code writes to stderr appears above the bar.
            redirect_stdout=False,
            redirect_stderr=self._is_stderr,
        )

    def _draw(self, bar: Progress, now: float) -> None:
        self._drawn_at = now
        line = self._line(now)
        if len(line) + MIN_BAR > bar.console.width:
            line = self._line(now, left_out=("flops_per_s", "mfu"))
        bar.update(bar.task_ids[0], completed=self._step, description=line)
        bar.refresh()

    def _is_due(self) -> bool:
        every = max(1, self._steps // PLAIN_LINES)
        return self._printed_step is None or self._step // every > self._printed_step // every

    def _is_evaluated(self) -> bool:
        return self._step == self._steps or (self._evals_every > 0 and self._step % self._evals_every == 0)

    def _print_line(self, now: float) -> None:
        self._printed_step, self._line_waits = self._step, False
        self._print(self._line(now))
        # Plain lines print each validation loss once; the bar keeps the latest.
        self._latest.pop("val", None)

    def _line(self, now: float, left_out: Collection[str] = ()) -> str:
        parts = [f"step {self._step}/{self._steps}"]
        for name, form in _FORMS.items():
            if name in self._latest and name not in left_out:
                parts.append(form(self._latest[name]))
        if self._pace_start and self._step > self._pace_start[0]:
            first_step, first_time = self._pace_start
            left = (self._steps - self._step) * (now - first_time) / (self._step - first_step)
            parts.append(f"left {format_duration(left)}")
        return "  ".join(parts)

    def _print(self, line: str) -> None:
        self._stream.write(printable(line) + "\n")
        self._stream.flush()


_FORMS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {format_loss(value)}",
    "val": lambda value: f"val {format_loss(value)}",
    "lr": lambda value: f"lr {value:.1e}",
    "tokens_per_s": lambda value: f"{value:,.0f} tok/s",
    "flops_per_s": lambda value: f"{format_tflops(value)} TFLOP/s",
    "mfu": lambda value: f"MFU {format_mfu(value)}",
}


class SafeStream:
    """A stream that ignores write errors, so that a run survives `normlab train ... 2>&1 | head`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, and ignore errors."""
        # A closed file raises ValueError.
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, and ignore errors."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def is_terminal(self) -> bool:
        """Whether the stream can redraw a line."""
        return self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _header(run: Mapping[str, Any], first_step: int) -> Iterator[tuple[str, str]]:
    config, corpus, resolved = run["config"], run["corpus"], run["resolved"]
    norm, model = config["norm"], config["model"]
    yield "run", run["run_id"] + (f" ({run['name']})" if run["name"] != run["run_id"] else "")
    yield "norm", f"{norm['preset'] or norm['name']}, placement {config['placement']['name']}"
    devices = f"{resolved['devices']} x " if resolved["devices"] > 1 else ""
    device = f"{devices}{resolved['device']} {resolved['precision']}"
    yield "model", f"depth {model['depth']} x width {model['width']}, {device}"
    baselines = ", ".join(f"{kind} {corpus['baselines'][kind]:.4f}" for kind in ("uniform", "unigram", "bigram"))
    yield "corpus", f"{corpus['name']}: {baselines} nats/token"
    read = msgspec.convert(corpus, Corpus).read
    if corpus["name"] != "stdlib" and read.formats:
        yield "text", _text_read(read)
    if first_step:
        yield "resumes", f"from step {first_step}"


def _text_read(read: TextRead) -> str:
    """Return the number and the formats of the documents, and what was left out."""

    def counted(count: int, noun: str) -> str:
        return f"{count:,} {noun if count == 1 else f'{noun}s'}"

    formats = read.formats.items()
    files = ", ".join(counted(count, name if name == "dataset" else f"{name} file") for name, count in formats)
    left_out = {"empty row": read.empty, "null row": read.null, "byte order mark": read.byte_order_marks}
    without = ", ".join([*(counted(count, noun) for noun, count in left_out.items() if count), *read.left_out])
    return f"{counted(read.documents, 'document')} ({files})" + (f", without {without}" if without else "")


def format_duration(seconds: float) -> str:
    """Return a duration as M:SS, or H:MM:SS from one hour on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
