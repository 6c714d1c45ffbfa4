"""The process of one pack: `python -m normlab.sweep.worker FOLDER NUMBER`, as the supervisor starts it.

Standard input is a pipe that the supervisor holds open. Its end, however the supervisor came by its own, asks for a
stop as SIGTERM does, so that a checkpoint is written; whoever has not stopped by then is ended for good.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normlab.openmp import limit_spinning

if TYPE_CHECKING:
    from normlab.store.runs import RunFolder

PATIENCE_S = 30.0
"""How long a run may take to its checkpoint after its supervisor has gone."""
OUT_OF_MEMORY = 12
"""The exit code where the memory ran out: what the system calls ENOMEM."""
RAISED = 1
REFUSED = 2
"""Exit codes of an exception, and of an error that a user can mend. `error: ` opens the log's last line then."""
ERROR = "error: "


def main(folder: Path, number: int) -> int:
    """Train a pack of a sweep's plan; its exit code."""
    from normlab.errors import NormlabError, OutOfMemoryError, one_line

    try:
        return _train(folder, number)
    except NormlabError as error:
        code, told = OUT_OF_MEMORY if isinstance(error, OutOfMemoryError) else REFUSED, str(error)
    except Exception as error:
        traceback.print_exc()
        code = OUT_OF_MEMORY if isinstance(error, MemoryError) else RAISED
        told = f"{type(error).__name__}: {error}"
        if "randomness" in told:  # vmap's word
            told = f"it draws random numbers, which runs that train together cannot; use sweep.pack=off ({told})"
    print(f"{ERROR}{one_line(told)}", file=sys.stderr, flush=True)
    return code


def _train(folder: Path, number: int) -> int:
    from normlab.config import RunConfig, config_from_record
    from normlab.errors import ConfigError
    from normlab.norms import base as norms
    from normlab.placements import base as placements
    from normlab.source import load_plugins
    from normlab.store.plans import Job, read_plan, run_of
    from normlab.sweep.plan import Identities
    from normlab.train import start

    plan = read_plan(folder)
    pack = plan.pack_of(number)
    norms.load_all()
    placements.load_all()
    identities, results = Identities(), folder.parent.parent

    def config_of(job: Job) -> RunConfig:
        load_plugins(job.config["plugins"])
        config = config_from_record(job.config)
        if os.path.realpath(config.results_dir) != os.path.realpath(results):  # it was moved
            config.results_dir = str(results)
        if (now := identities.run_id(config)) != job.run_id:
            raise ConfigError(
                f"run {job.run_id} would be {now} now: a plugin, the corpus, the device or normlab has changed since "
                "the plan was made; put it back, or start the same words as another sweep with sweep.name=..."
            )
        return config

    configs = [config_of(job) for job in plan.members(pack)]
    _wait_for_the_one_before([run_of(folder, job) for job in plan.members(pack)])
    outcomes = start.train_pack(configs, pack={"sweep": plan.name, "number": number}, ends_process=True)
    stopped = next((outcome.signal for outcome in outcomes if outcome.signal), None)
    return 128 + stopped if stopped else 0


def _wait_for_the_one_before(runs: Sequence[RunFolder]) -> None:
    """A supervisor that was killed leaves processes that still write their checkpoints; the next one may be quick."""
    until = time.monotonic() + PATIENCE_S + 5
    while any(run.is_active() for run in runs) and time.monotonic() < until:
        time.sleep(0.1)


def _stop_with_the_parent() -> None:
    """Ask for a stop when the other end of standard input is closed, and insist."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE_S)
    if os.getpgid(0) == os.getpid():  # whatever it started besides
        os.killpg(0, signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


def be_the_first_to_go() -> None:
    """Where the machine's memory runs out, the system is to end this process and not its supervisor."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def _leave_notices_to_the_parent() -> None:
    """What Slurm announces by these it may announce to every process; whoever started this one asks for the stop."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    limit_spinning()
    _leave_notices_to_the_parent()
    threading.Thread(target=_stop_with_the_parent, name="normlab parent", daemon=True).start()
    be_the_first_to_go()
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
