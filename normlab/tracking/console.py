"""The console: a header, one moving line on a terminal (plain lines elsewhere), and one line at the end.

Everything goes to stderr, since stdout is for results. Nothing here has a thread: the bar is redrawn from
`log`, a few times a second at most.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from normlab.stats.profiles import Profiles
from normlab.store.outcome import WHOLE_TEXT, references_of, shown, verdict
from normlab.store.schema import DIVERGED
from normlab.tracking.base import Row

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESH_SECONDS = 0.25
"""Least time between two drawings of the bar; one costs a few milliseconds."""
PLAIN_LINES = 20
"""Lines of a whole run without a terminal, besides one for each evaluation."""


class Console:
    """Shows a run on `stream` (stderr unless given): a bar where that is a terminal, else plain lines."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = Unbreakable(stream or sys.stderr)
        self._is_stderr = stream is None or stream is sys.stderr
        self._bar = self._make_bar() if self._stream.is_terminal() else None
        self._seen: dict[str, float] = {}
        self._step = 0
        self._steps = 0
        self._run: Mapping[str, Any] = {}
        self._printed: int | None = None
        self._evals_every = 0
        self._held = False
        self._drawn = -math.inf
        self._pace_from: tuple[int, float] | None = None

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Print the header and, on a terminal, put up the bar."""
        self._step, self._steps = first_step, run["config"]["train"]["steps"]
        self._evals_every = run["config"]["eval"]["every"]
        self._run = run
        for label, text in _header(run, first_step):
            self._print(f"{label:8}{text}")
        if self._bar is not None:
            self._bar.add_task(self._line(0.0), total=self._steps, completed=first_step)
            self._bar.start()

    def look(self, profiles: Profiles) -> None:
        """Nothing: `normlab inspect` shows it."""

    def log(self, rows: Sequence[Row]) -> None:
        """Take up the newest numbers and show them if it is time to."""
        now = time.monotonic()
        if self._held and [(row["kind"], row["step"]) for row in rows[:1]] != [("eval", self._step)]:
            self._print_line(now)
        for row in rows:
            self._step = row["step"]
            if row["kind"] == "train":
                self._seen |= {"loss": row["loss"], "lr": row["lr"]}
            elif row["kind"] == "pace":
                self._seen["tokens_per_s"] = row["tokens_per_s"]
            else:
                self._seen["val"] = row["loss"]
                if self._bar is None:
                    self._print_line(now)
        # The pace is counted from the first training rows on: compiling and reading data come before them.
        if self._pace_from is None and "loss" in self._seen:
            self._pace_from = (self._step, now)
        if self._bar is not None:
            if now - self._drawn >= REFRESH_SECONDS:
                self._draw(self._bar, now)
        elif self._is_due():
            # What an evaluation of the same step finds belongs on the same line.
            self._held = self._is_evaluated()
            if not self._held:
                self._print_line(now)

    def finish(self, status: Mapping[str, Any]) -> None:
        """Take the bar down and print the outcome, with what the validation loss means."""
        if self._bar is not None:
            self._draw(self._bar, time.monotonic())
            self._bar.stop()
        elif self._held:
            self._print_line(time.monotonic())
        at = status["diverged"]["step"] if status.get("diverged") else status["step"]
        outcome, loss = status.get("outcome"), status.get("val_loss")
        line = f"{outcome or status['state']} at step {at}/{status['steps']}"
        if status["state"] == DIVERGED:
            line += "" if loss is None else f"  last val {shown(loss)}"
        elif loss is not None:
            meaning = verdict(outcome, loss, status.get("best_val_loss"), references_of(self._run, status))
            line += f"  val {shown(loss)}" + (f", {meaning}" if meaning and math.isfinite(loss) else "")
        self._print(line)

    def _make_bar(self) -> Progress:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        return Progress(
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            TextColumn("{task.description}", markup=False, style="none"),
            console=RichConsole(file=cast("TextIO", self._stream), force_terminal=True),
            auto_refresh=False,
            expand=True,
            # Results on stdout stay there. What others write to stderr is shown above the bar.
            redirect_stdout=False,
            redirect_stderr=self._is_stderr,
        )

    def _draw(self, bar: Progress, now: float) -> None:
        self._drawn = now
        bar.update(bar.task_ids[0], completed=self._step, description=self._line(now))
        bar.refresh()

    def _is_due(self) -> bool:
        every = max(1, self._steps // PLAIN_LINES)
        return self._printed is None or self._step // every > self._printed // every

    def _is_evaluated(self) -> bool:
        return self._step == self._steps or (self._evals_every > 0 and self._step % self._evals_every == 0)

    def _print_line(self, now: float) -> None:
        self._printed, self._held = self._step, False
        self._print(self._line(now))
        # A plain line shows a validation loss once, where it was measured; the bar keeps it in sight.
        self._seen.pop("val", None)

    def _line(self, now: float) -> str:
        parts = [f"step {self._step}/{self._steps}"]
        for name, form in _FORMS.items():
            if name in self._seen:
                parts.append(form.format(self._seen[name]))
        if self._pace_from and self._step > self._pace_from[0]:
            since_step, since = self._pace_from
            left = (self._steps - self._step) * (now - since) / (self._step - since_step)
            parts.append(f"left {clock(left)}")
        return "  ".join(parts)

    def _print(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


_FORMS = {"loss": "loss {:.4f}", "val": "val {:.4f}", "lr": "lr {:.1e}", "tokens_per_s": "{:,.0f} tok/s"}


class Unbreakable:
    """A stream that nobody may be reading any more (`normlab train ... 2>&1 | head`): the run goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, if anybody reads."""
        # ValueError is what a closed file raises.
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if anybody reads."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def is_terminal(self) -> bool:
        """Whether what was shown can be drawn over."""
        return self._stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _header(run: Mapping[str, Any], first_step: int) -> Iterator[tuple[str, str]]:
    config, corpus, resolved = run["config"], run["corpus"], run["resolved"]
    norm, model = config["norm"], config["model"]
    name = run.get("name")
    yield "run", run["run_id"] + (f" ({name})" if name and name != run["run_id"] else "")
    yield "norm", f"{norm.get('preset') or norm['name']}, placement {config['placement']['name']}"
    yield (
        "model",
        f"depth {model['depth']} x width {model['width']}, {resolved['device']} {resolved['precision']}",
    )
    baselines = ", ".join(f"{kind} {corpus['baselines'][kind]:.4f}" for kind in ("uniform", "unigram", "bigram"))
    old = f" ({WHOLE_TEXT})" if references_of(run, {}).whole_text else ""
    yield "corpus", f"{corpus['name']}: {baselines} nats/token{old}"
    if first_step:
        yield "resumes", f"from step {first_step}"


def clock(seconds: float) -> str:
    """A time span as people read it: minutes and seconds, and hours where there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
