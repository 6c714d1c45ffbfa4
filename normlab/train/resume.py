"""Going on with runs: from which checkpoints, with how much of the record, and what is no longer as it was."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from normlab.errors import StoreError
from normlab.store.schema import COMPLETED_STATES, DIVERGED, FINISHED, STATUS_FILE
from normlab.train import checkpoint
from normlab.train.loop import Loop
from normlab.train.member import Member, Progress


def go_to_checkpoint(loop: Loop) -> None:
    """Put the loop, and the records, at the newest step of which each run has a whole checkpoint, or at the start."""
    found = _of_one_step(loop.members)
    _keep_what_has_finished(loop.members, found)
    if found is None:
        for member in loop.members:
            if member.folder.size():
                say("this run has no checkpoint yet: it starts again from step 0")
            member.progress = Progress()
            member.folder.truncate(0)
            member.folder.statistics.truncate(0)
        return
    loop.restore(found)
    for member, saved in zip(loop.members, found, strict=True):
        folder = member.folder
        folder.truncate(saved.meta["record_bytes"])
        # What is measured after the last step is all of it that has that step's number.
        folder.statistics.truncate(saved.step + (saved.step == member.config.train.steps))
        for lost in folder.statistics.missing_warnings(saved.step):
            say(lost)
        if damaged := folder.rows().damaged:
            say(f"{folder.metrics_path}: damaged rows: {damaged}; the run itself goes on from a whole checkpoint")


def _keep_what_has_finished(members: Sequence[Member], found: Sequence[checkpoint.Checkpoint] | None) -> None:
    """A run that has finished is not taken back for the sake of another one of its pack.

    Raises:
        StoreError: It would be.
    """
    # One that is called diverged for its final loss has taken all its steps too.
    finished = [
        member
        for member, status in ((member, member.folder.status()) for member in members)
        if status["state"] == FINISHED
        or (status["state"] == DIVERGED and status.get("step") == member.config.train.steps)
    ]
    step = min((saved.step for saved in found or () if saved.meta.get("diverged") is None), default=0)
    if finished and len(members) > 1 and step < finished[0].config.train.steps:
        others = [member.folder.run_id for member in members if member.folder.status()["state"] not in COMPLETED_STATES]
        raise StoreError(
            f"run {finished[0].folder.run_id}: has finished, and would be taken back to step {step} with its pack, for "
            f"of {', '.join(others)} there is no later checkpoint; put it back, or move that run's folder away: the "
            "same command then trains it alone"
        )


def _of_one_step(members: Sequence[Member]) -> list[checkpoint.Checkpoint] | None:
    """A whole checkpoint of each run, the newest that are of one step; of one that diverged before it, its last."""
    found = [_newest(member) for member in members]
    while all(saved is not None for saved in found):
        whole = [saved for saved in found if saved is not None]
        step = min((saved.step for saved in whole if saved.meta.get("diverged") is None), default=None)
        if step is None or all(
            saved.step == step or (saved.step < step and saved.meta.get("diverged") is not None) for saved in whole
        ):
            return whole
        found = [
            saved if saved.step <= step else _newest(member, at_most=step)
            for member, saved in zip(members, whole, strict=True)
        ]
    return None


def _newest(member: Member, at_most: int | None = None) -> checkpoint.Checkpoint | None:
    """The run's newest whole checkpoint (of at most a step), if there is any; what is wrong with others is said.

    Raises:
        StoreError: There should be one, and there is none.
    """
    folder = member.folder
    status = folder.status()
    saved, problems = checkpoint.newest(folder.path / checkpoint.FOLDER, at_most)
    if at_most is None:
        for problem in problems:
            say(f"{problem}; going on from the checkpoint before it")
        last = status.get("checkpoint")
        if last is not None and not problems and (saved is None or saved.step < last):
            missing = f"{folder.path / checkpoint.FOLDER}: the checkpoint of step {last} is missing"
            if saved is None:
                raise StoreError(
                    f"{missing} and there is no other; put it back, or start another run beside it with run.fresh=true"
                )
            say(f"{missing}; going on from that of step {saved.step}")
        if saved is None and not (folder.path / STATUS_FILE).exists() and folder.rows("train").rows:
            raise StoreError(
                f"{folder.path}: the run took steps, and has neither {STATUS_FILE} nor a checkpoint; put back "
                "what there was of them, or start another run beside it with run.fresh=true"
            )
    if saved is not None and status["state"] == DIVERGED and saved.step == status["step"]:
        # It may have been written before the step that diverged.
        return replace(saved, meta={**saved.meta, "diverged": status["diverged"]})
    return saved


def note_what_differs(member: Member, begun: dict[str, Any], now: dict[str, Any]) -> None:
    """A resume with other code, or on other threads, instructions or hardware, gives other bits: say and record it."""
    was, has = (_told_of(run) for run in (begun, now))
    told = [name for name in was if was[name] is not None]  # a record of before may not hold it
    differing = [f"{name} was {was[name]} and is {has[name]}" for name in told if was[name] != has[name]]
    if differing:
        what = "; ".join(differing)
        member.progress.elsewhere.append(f"from step {member.progress.step}: {what}")
        say(f"this run goes on where {what}: its numbers will not be bit for bit the same")


def _told_of(run: dict[str, Any]) -> dict[str, Any]:
    """What a run's bits depend on beside its identity."""
    git = run["git"] or {}
    code = f"{git['commit'][:10]}{' with changes ' + git['diff'][:10] if git['diff'] else ''}" if git else "unknown"
    resolved = ("threads", "instructions", "device_name", "deterministic")
    return {
        **{name: run["resolved"].get(name) for name in resolved},
        "the size of its pack": len(run["pack"]["runs"]) if "pack" in run else 1,
        "the block's fingerprint": run.get("fingerprint"),
        "torch": run["versions"].get("torch"),
        "normlab": run["versions"].get("normlab"),
        "normlab's commit": code,
    }


def say(line: str) -> None:
    """Tell the user, on stderr."""
    print(f"normlab: {line}", file=sys.stderr)
