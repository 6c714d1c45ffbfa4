"""A pack that is tried: so many runs side by side, a few steps, and how long they took. Leaves nothing.

In a process of its own, `python -m normlab.sweep.trial`, which reads the runs' configs and writes what it found: it may
run out of memory, and what it compiled goes with it, but for the compiler's own cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from normlab.config import RunConfig
from normlab.options import plain_tree
from normlab.sweep.process import environment

WARM_UP = 2
"""Steps that are not timed: one that looks inside and one that does not, each of which is compiled by itself."""
AT_LEAST = 5
SECONDS = 2.0
"""Steps that are timed, and for how long at least."""
PATIENCE_S = 600.0
"""A trial that takes so long has failed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was measured of a pack of so many runs."""

    runs: int
    first_s: float = 0.0
    """Seconds from the start of the process to the first step that was timed: imports, models, what is compiled."""
    step_s: float = 0.0
    """Seconds a step of the whole pack, the median of those timed."""
    peak_bytes: int | None = None
    """Most memory that it held."""
    error: str = ""
    """Why there are no such numbers."""

    @property
    def seconds(self) -> float:
        """What it took to try, nearly."""
        return self.first_s + max(SECONDS, AT_LEAST * self.step_s)


def try_pack(configs: Sequence[RunConfig], threads: int | None) -> Trial:
    """Try these runs as one pack.

    Args:
        configs: The runs, which may train together.
        threads: As for a pack's process (`process.environment`).
    """
    begun = time.monotonic()
    try:
        code, out, err = _run(json.dumps([plain_tree(config) for config in configs]), threads)
    except subprocess.TimeoutExpired:
        return Trial(len(configs), error=f"took longer than {PATIENCE_S:.0f} s")
    if code:
        words = err.strip().splitlines() or [f"exit code {code}"]
        return Trial(len(configs), error=words[-1].removeprefix("error: "))
    found = json.loads(out.splitlines()[-1])
    first_s = time.monotonic() - begun - found.pop("timed_s")
    return Trial(len(configs), first_s=first_s, **found)


def _run(configs: str, threads: int | None) -> tuple[int, str, str]:
    """Run the process to its end: its exit code and what it printed. It goes when this one does.

    Raises:
        subprocess.TimeoutExpired: It took too long, and was ended.
    """
    theirs, ours = os.pipe()  # theirs comes to its end when nobody holds ours any more
    try:
        done = subprocess.run(
            [sys.executable, "-m", "normlab.sweep.trial", str(theirs)],
            input=configs,
            capture_output=True,
            text=True,
            env=environment(threads),
            pass_fds=(theirs,),
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return done.returncode, done.stdout, done.stderr


def _end_with_the_parent(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(1)


def measured(configs: Sequence[RunConfig]) -> dict[str, Any]:
    """Build a pack and take its first steps, in this process."""
    from normlab.data.corpus import open_corpus
    from normlab.store.runs import RunFolder
    from normlab.train.loop import Loop, peak_memory
    from normlab.train.member import Member
    from normlab.train.resolve import apply, resolve

    resolved, corpus = resolve(configs[0]), open_corpus(configs[0].data)
    apply(resolved)
    loop = Loop([Member(config, RunFolder(Path(os.devnull))) for config in configs], resolved, corpus)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < WARM_UP + AT_LEAST or sum(times[WARM_UP:]) < SECONDS:
        loop.one_step(len(times) % configs[0].train.steps).loss.cpu()  # there once it is there to be read
        now = time.perf_counter()
        times.append(now - begun)
        begun = now
    timed = times[WARM_UP:]
    return {"step_s": median(timed), "timed_s": sum(timed), "peak_bytes": peak_memory(resolved.device)}


def main(pipe: int) -> int:
    """Read configs, print numbers; on an error its last line, and 1. Ends as soon as the pipe does."""
    from normlab.config import config_of_record
    from normlab.errors import one_line
    from normlab.norms import base as norms
    from normlab.placements import base as placements
    from normlab.source import load_plugins
    from normlab.sweep.worker import be_the_first_to_go

    threading.Thread(target=_end_with_the_parent, args=(pipe,), name="normlab parent", daemon=True).start()
    be_the_first_to_go()
    trees = json.load(sys.stdin)
    try:
        norms.load_all()
        placements.load_all()
        load_plugins(trees[0]["plugins"])
        print(json.dumps(measured([config_of_record(tree) for tree in trees])))
    except Exception as error:
        print(f"error: {one_line(str(error)) or type(error).__name__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
