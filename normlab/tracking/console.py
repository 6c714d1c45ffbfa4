"""Console output of a run: a header, one moving line on a terminal or plain lines elsewhere, and the outcome.

The output goes to stderr, because stdout is for results. `log` redraws the line at most four times a second; there is
no thread.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TextIO

from normlab.base.errors import counted, printable
from normlab.catalogue.corpora import DATA, HubData
from normlab.store.format import DIVERGED, FINISHED
from normlab.store.outcome import explain_loss, format_loss
from normlab.store.run_json import RecordedCorpus, Run
from normlab.store.status import Status
from normlab.store.throughput import Compute, format_mfu, format_tflops

REFRESH_SECONDS = 0.25
"""Shortest time between two drawings of the moving line."""
PLAIN_LINES = 20
"""Progress lines of a run without a terminal; each evaluation adds a line."""

MetricsRow = Mapping[str, Any]
"""A row of the metrics: `kind` (train, eval or pace), `step`, and numbers by name."""


class Tracker(Protocol):
    """Receives the start of a run, its rows in order, and its end."""

    def start(self, run: Run, first_step: int) -> None:
        """Receive the run and the step from which it resumes, or 0."""
        ...

    def log(self, rows: Sequence[MetricsRow]) -> None:
        """Receive rows, in order."""
        ...

    def finish(self, status: Status) -> None:
        """Receive the last status."""
        ...


class Console:
    """Receives the start of a run, its rows in order, and its end, and prints to `stream` (default stderr)."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = SafeStream(stream or sys.stderr)
        self._is_terminal = self._stream.is_terminal()
        self._latest: dict[str, float] = {}
        self._step = self._steps = self._evals_every = 0
        self._corpus: RecordedCorpus | None = None
        self._compute = Compute(0.0, None, 1)
        self._printed_step: int | None = None
        self._drawn_at = -math.inf
        self._pace_start: tuple[int, float] | None = None
        """Step and time at the first training rows: the time to compile and to read data is not in the time left."""

    def start(self, run: Run, first_step: int) -> None:
        """Print the header of a run; `first_step` is the step from which it resumes, or 0."""
        self._step, self._steps = first_step, run.config["train"]["steps"]
        self._evals_every = run.config["eval"]["every"]
        self._corpus, self._compute = run.corpus, run.compute
        for label, text in _header(run, first_step):
            self._print(f"{label:8}{text}")

    def log(self, rows: Sequence[MetricsRow]) -> None:
        """Store the latest numbers, and print them if a line or a drawing is due."""
        now = time.monotonic()
        for row in rows:
            self._step = row["step"]
            if row["kind"] == "train":
                self._latest |= {"loss": row["loss"], "lr": row["lr"]}
            elif row["kind"] == "pace":
                self._set_speed(row["tokens_per_s"])
            else:
                for name, key in _LOSSES.items():
                    if key in row:
                        self._latest[name] = row[key]
                # A terminal has no line of its own for an evaluation: the moving line shows it.
                if not self._is_terminal:
                    self._print_line(now)
        if self._pace_start is None and "loss" in self._latest:
            self._pace_start = (self._step, now)
        if self._is_terminal and now - self._drawn_at >= REFRESH_SECONDS:
            self._draw(now)
        elif not self._is_terminal and self._is_due():
            self._print_line(now)

    def _set_speed(self, tokens_per_s: float) -> None:
        """Store the speed in each unit in which it is known."""
        speeds = {
            "tok/s": tokens_per_s,
            "flop/s": self._compute.flops(tokens_per_s),
            "mfu": self._compute.mfu(tokens_per_s),
        }
        for name, speed in speeds.items():
            if speed is not None:
                self._latest[name] = speed

    def finish(self, status: Status) -> None:
        """Print the outcome of a run, with its last loss and what that means."""
        if self._is_terminal:
            self._draw(time.monotonic(), end="\n")
        outcome, loss = status.outcome, status.val_loss
        step = status.step if status.diverged is None else status.diverged.step
        line = f"{outcome or status.state} at step {step}/{status.steps}"
        if loss is not None:
            # Of a run that is stopped, the last evaluation may be many steps old.
            line += "  val" if status.state == FINISHED else "  last val"
            line += f" {format_loss(loss)}"
        if loss is not None and status.state != DIVERGED and self._corpus is not None:
            references = self._corpus.references(status.initial_val_loss)
            meaning = explain_loss(outcome, loss, status.best_val_loss, references)
            if meaning and math.isfinite(loss):
                line += f", {meaning}"
        self._print(line)

    def _draw(self, now: float, end: str = "\r") -> None:
        """Replace the line of the terminal; text that other code writes then starts at its first column."""
        self._drawn_at = now
        line = printable(self._line(now))[: shutil.get_terminal_size().columns - 1]
        self._stream.write(f"\r\x1b[K{line}{end}")
        self._stream.flush()

    def _is_due(self) -> bool:
        """Whether a plain line is due; an evaluation of the same step prints its own, with both losses."""
        every = max(1, self._steps // PLAIN_LINES)
        is_evaluated = self._step == self._steps or (self._evals_every > 0 and self._step % self._evals_every == 0)
        return not is_evaluated and (self._printed_step is None or self._step // every > self._printed_step // every)

    def _print_line(self, now: float) -> None:
        self._printed_step = self._step
        self._print(self._line(now))
        for name in _LOSSES:  # plain lines print each validation loss once; the moving line keeps the latest
            self._latest.pop(name, None)

    def _line(self, now: float) -> str:
        numbers = dict(self._latest)
        if self._pace_start and self._step > self._pace_start[0]:
            # The remaining steps take as long as those since the first rows.
            first_step, first_time = self._pace_start
            numbers["left"] = (self._steps - self._step) * (now - first_time) / (self._step - first_step)
        parts = [form(numbers[name]) for name, form in _FORMS.items() if name in numbers]
        return "  ".join([f"step {self._step}/{self._steps}", *parts])

    def _print(self, line: str) -> None:
        self._stream.write(printable(line) + "\n")
        self._stream.flush()


class SafeStream:
    """A stream that ignores write errors, so that a run survives `normlab train ... 2>&1 | head`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        # A closed file raises ValueError.
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def is_terminal(self) -> bool:
        """Whether the stream can redraw a line."""
        return self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def format_duration(seconds: float) -> str:
    """Return a duration as `45 s`, `17 min 2 s` or, from one hour on, `2 h 5 min`."""
    minutes, seconds = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{seconds} s"
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


_LOSSES = {"val": "loss", "ema": "loss_ema"}
"""The losses of an evaluation in a line, by their keys."""
_FORMS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {format_loss(value)}",
    "val": lambda value: f"val {format_loss(value)}",
    "ema": lambda value: f"ema {format_loss(value)}",
    "lr": lambda value: f"lr {value:.1e}",
    "tok/s": lambda value: f"{value:,.0f} tok/s",
    "left": lambda value: f"left {format_duration(value)}",
    "flop/s": lambda value: f"{format_tflops(value)} TFLOP/s",
    "mfu": lambda value: f"MFU {format_mfu(value)}",
}
"""The numbers of a line; a narrow terminal cuts the last ones off."""


def _header(run: Run, first_step: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of the header, each with its label."""
    machine, corpus = run.resolved, run.corpus
    norm, model, placement = (run.config[group] for group in ("norm", "model", "placement"))
    title = run.run_id
    if run.name != run.run_id:
        title += f" ({run.name})"
    yield "run", title
    yield "norm", f"{norm['preset'] or norm['name']}, placement {placement['name']}"
    device = f"{machine.device} {machine.precision}"
    if machine.devices > 1:
        device = f"{machine.devices} x {device}"
    yield "model", f"depth {model['depth']} x width {model['width']}, {device}"
    losses = corpus.baselines
    baselines = f"uniform {losses.uniform:.4f}, unigram {losses.unigram:.4f}, bigram {losses.bigram:.4f}"
    yield "corpus", f"{corpus.name}: {baselines} nats/token"
    read = corpus.read
    # The text of the standard library is always the same, so only a user's text is described.
    if DATA.get(corpus.name, HubData).counts_documents and read.documents:
        text = counted(read.documents, "document", ",")
        removed: list[str] = []
        for kind, count in (("empty", read.empty), ("null", read.null)):
            if count:
                removed.append(f"{count:,} {kind}")
        if removed:
            text += f", without {', '.join(removed)}"
        yield "text", text
    if first_step:
        yield "resumes", f"from step {first_step}"
