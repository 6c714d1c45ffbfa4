"""What is shown while a sweep runs: one live table on a terminal, a line for each event elsewhere. On stderr."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from normlab.store.plans import FAILURES, FINISHED, End, Pack, Plan
from normlab.sweep.standing import Standing, standing
from normlab.tracking.console import Unbreakable, clock

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

REFRESH_S = 0.5
"""Least time between two drawings of the table."""
PLAIN_EVERY_S = 60.0
"""Time between two lines that say how far it is, where there is no terminal."""
MOST_LINES = 30
"""With more packs than this only those are shown that run, failed, diverged, regressed or are stuck."""
WAITING, RUNNING, STOPPED = "waiting", "running", "stopped"


class Progress:
    """Shows a sweep on stderr, from the folders of its runs.

    Args:
        folder: The sweep's.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._plan: Plan | None = None
        self._packs: list[Pack] = []
        self._before = 0
        self._state: dict[int, str] = {}
        self._seen: dict[int, Standing] = {}
        self._share_at_start: dict[int, float] = {}
        self._started: dict[int, float] = {}
        self._begun = self._drawn = time.monotonic()
        self._live: Live | None = None
        self._stream = Unbreakable(sys.stderr)

    # What the supervisor tells.

    def begin(self, plan: Plan, waiting: Sequence[Pack], done: int, failed: Sequence[End]) -> None:
        """Take down what there is to do, and put up the table where there is a terminal."""
        self._plan, self._before = plan, done
        failures = {end.pack: end.cause for end in failed}
        self._packs = [pack for pack in plan.packs if pack in waiting or pack.number in failures]
        for pack in self._packs:
            self._state[pack.number] = failures.get(pack.number, WAITING)
            self._look_at(pack)
        if waiting and self._stream.is_terminal():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(self._table(), console=Console(file=cast("TextIO", self._stream)), auto_refresh=False)
            self._live.start()
        elif waiting:
            self.say(self._counts())

    def started(self, pack: Pack) -> None:
        """Note that a pack runs."""
        number = pack.number
        self._state[number] = RUNNING
        self._started[number] = time.monotonic()
        self._look_at(pack)
        self._share_at_start[number] = self._seen[number].share

    def ended(self, pack: Pack, end: End, halves: Sequence[Pack]) -> None:
        """Note how a pack ended; without a terminal, in a line."""
        self._state[pack.number] = end.cause if end.cause in (FINISHED, *FAILURES) else STOPPED
        self._look_at(pack)
        if halves:
            self._packs = [one for one in self._packs if one != pack] + list(halves)
            for half in halves:
                self._state[half.number] = WAITING
                self._look_at(half)
        if self._live is None or halves:
            how = self._told(pack) + (f": {end.detail}" if end.detail else "")
            into = f"; goes on as packs {' and '.join(str(half.number) for half in halves)}" if halves else ""
            self.say(f"pack {pack.number} {self._label(pack)}: {how}{into}")

    def look(self) -> None:
        """Draw the table, or say in a line how far it is, where it is time to."""
        now = time.monotonic()
        if now - self._drawn < (PLAIN_EVERY_S if self._live is None else REFRESH_S):
            return
        self._drawn = now
        for pack in self._packs:
            if self._state[pack.number] == RUNNING:
                self._look_at(pack)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            running = [pack for pack in self._packs if self._state[pack.number] == RUNNING]
            self.say("; ".join([self._counts(), *(f"{self._label(pack)} {self._told(pack)}" for pack in running)]))

    def say(self, line: str) -> None:
        """A line of its own; above the table, where there is one."""
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
        else:
            self._stream.write(f"normlab: {line}\n")
            self._stream.flush()

    def finish(self) -> None:
        """Draw the last state and take the table down."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
            self._live = None

    # What is shown.

    def _look_at(self, pack: Pack) -> None:
        assert self._plan is not None
        self._seen[pack.number] = standing(self._folder, [self._plan.jobs[index] for index in pack.jobs])

    def _table(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, 2, 0, 0), caption=Text(self._counts()), caption_justify="left")
        for heading in ("pack", "runs", "", "how far", "left"):
            table.add_column(heading, no_wrap=heading != "runs")
        for pack in self._packs:
            seen, state = self._seen[pack.number], self._state[pack.number]
            if len(self._packs) > MOST_LINES and state in (WAITING, FINISHED, STOPPED) and not _remarkable(seen):
                continue
            bar = ProgressBar(total=1.0, completed=seen.share, width=20)
            left = self._left_of(pack) if state == RUNNING else ""
            table.add_row(str(pack.number), Text(self._label(pack)), bar, Text(self._told(pack)), left)
        return table

    def _label(self, pack: Pack) -> str:
        assert self._plan is not None
        first = self._plan.jobs[pack.jobs[0]]
        more = f" and {len(pack.jobs) - 1} more" if len(pack.jobs) > 1 else ""
        return (" ".join(first.words) or first.run_id) + more

    def _told(self, pack: Pack) -> str:
        """How a pack stands, in a few words."""
        seen, state = self._seen[pack.number], self._state[pack.number]
        parts = [FAILURES.get(state, state)]
        if len(pack.jobs) == 1:
            parts = list(_remarkable(seen)) or parts
        else:
            parts += [f"{count} of {len(pack.jobs)} {outcome}" for outcome, count in _remarkable(seen).items()]
        if state not in (WAITING, FINISHED):
            parts.append(f"step {seen.step:.0f}/{seen.steps}")
        if state == FINISHED and seen.loss is not None:
            parts.append(f"val {seen.loss:.4f}")
        return "  ".join(parts)

    def _counts(self) -> str:
        states = [self._state[pack.number] for pack in self._packs]
        counts = {
            "done": self._before + states.count(FINISHED),
            "running": states.count(RUNNING),
            "failed": sum(state in FAILURES for state in states),
            "stopped": states.count(STOPPED),
            "waiting": states.count(WAITING),
        }
        outcomes = sum((Counter(_remarkable(self._seen[pack.number])) for pack in self._packs), Counter[str]())
        told = [f"{count} {name}" for name, count in counts.items() if count]
        told += [f"{count} {'run' if count == 1 else 'runs'} {outcome}" for outcome, count in outcomes.items()]
        packs = self._before + len(self._packs)
        return f"{packs} {'pack' if packs == 1 else 'packs'}: " + ", ".join(told) + self._left()

    def _left_of(self, pack: Pack) -> str:
        gained = self._seen[pack.number].share - self._share_at_start[pack.number]
        if gained <= 0:
            return ""
        elapsed = time.monotonic() - self._started[pack.number]
        return clock((1 - self._seen[pack.number].share) * elapsed / gained)

    def _left(self) -> str:
        """The time that all of it takes still, at the pace since the beginning."""
        gained = left = 0.0
        for pack in self._packs:
            seen, state = self._seen[pack.number], self._state[pack.number]
            gained += (seen.share - self._share_at_start.get(pack.number, seen.share)) * seen.work
            left += (1 - seen.share) * seen.work if state in (WAITING, RUNNING) else 0.0
        if not gained or not left:
            return ""
        return f"; left {clock(left * (time.monotonic() - self._begun) / gained)}"


def _remarkable(seen: Standing) -> dict[str, int]:
    """How many runs of a pack have an outcome other than finished, by outcome."""
    return {outcome: count for outcome, count in seen.outcomes.items() if outcome != FINISHED}
