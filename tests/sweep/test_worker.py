"""One process for several packs: the record of a run is the one that a new process writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_runs import differences

from normlab.catalogue.norms.base import NORMS, load_all
from normlab.config.compose import compose_sweep
from normlab.store.plans import Pack, run_of
from normlab.sweeps.files import log_of, write_plan
from normlab.sweeps.plan import PlannedSweep, make_plan
from normlab.sweeps.process import WorkerProcess, process_options


def keeps_state(name: str) -> bool:
    """Whether a forward pass changes a buffer of a norm."""
    kind: Any = NORMS[name]
    norm = kind().build(16).train()
    before = {buffer: value.clone() for buffer, value in norm.named_buffers()}
    norm(torch.linspace(-3, 5, 4 * 8 * 16).reshape(4, 8, 16))
    return any(not torch.equal(before[buffer], value) for buffer, value in norm.named_buffers())


load_all()
STATEFUL = [name for name in NORMS if keeps_state(name)]


@contextmanager
def started(planned: PlannedSweep, pack: Pack) -> Iterator[WorkerProcess]:
    """A new process for packs of a plan."""
    log = log_of(planned.folder, pack.number)
    worker = WorkerProcess(planned.folder, process_options(planned.plan, pack), 1, (), log)
    try:
        yield worker
    finally:
        worker.end()


def train(planned: PlannedSweep, worker: WorkerProcess, pack: Pack) -> bool:
    """Train a pack; return whether the process can train another."""
    worker.train(pack.number)
    wait([worker.connection])
    answer = worker.answer()
    assert answer is not None, log_of(planned.folder, pack.number).read_text()
    assert (answer.cause, answer.detail) == ("finished", "")
    return answer.can_continue


def planned_in(results: Path, overrides: Sequence[str], *grid: str) -> PlannedSweep:
    planned = make_plan(*compose_sweep([*overrides, *grid, "sweep.name=x", f"results_dir={results}"]))
    (planned.folder / "logs").mkdir(parents=True)
    write_plan(planned.folder, planned.plan)
    return planned


@pytest.mark.process
@pytest.mark.parametrize(
    "grid",
    [
        [f"norm={','.join(STATEFUL)}", "seed=0,1,2"],
        ["norm=batchnorm", "compile=on", "seed=range(4)", "stats=off", "model.depth=1", "eval.every=0"],
    ],
    ids=["eager", "compiled"],
)
def test_used_process_gives_the_bits_of_a_new_one(overrides: list[str], tmp_path: Path, grid: list[str]) -> None:
    """Packs of two runs and single runs, each after packs of other norms or of the same norm."""
    used, new = (planned_in(tmp_path / name, overrides, *grid, "sweep.pack=2") for name in ("used", "new"))
    first, *others = [*used.plan.packs[::2], *used.plan.packs[1::2]]
    with started(used, first) as worker:
        assert all(train(used, worker, pack) for pack in (first, *others))
    for pack in others:
        with started(new, pack) as worker:
            train(new, worker, pack)
        for run in used.plan.runs_of(pack):
            folders = [run_of(planned.folder, run).path for planned in (used, new)]
            assert differences(*folders) == []
            assert any((folders[0] / "checkpoints").iterdir())


PLUGIN = """
from normlab.catalogue.norms.rmsnorm import RMSNormConfig
from normlab.catalogue.norms.base import register_norm
from dataclasses import dataclass

@register_norm
@dataclass(kw_only=True, slots=True)
class Mine(RMSNormConfig):
    name: str = "mine"
"""


@pytest.mark.process
def test_no_pack_follows_user_code(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    grid = [f"plugins=[{tmp_path / 'mine.py'}]", "norm=mine", "seed=0"]
    planned = planned_in(tmp_path / "results", overrides, *grid)
    (pack,) = planned.plan.packs
    with started(planned, pack) as worker:
        assert not train(planned, worker, pack)
