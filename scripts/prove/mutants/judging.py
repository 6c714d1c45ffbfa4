"""Run each mutant in a process of its own, and summarise which mutants the checks detect."""

import multiprocessing
import os
import resource
import signal
import time
from multiprocessing.connection import wait
from typing import Any

import torch

from mutants.equivalent import EQUIVALENT
from mutants.mutant import UNCHANGED, Checks, Mutant

TIMEOUT_S = 60
"""The time limit of a mutant's checks, in CPU seconds of its process, so that a busy machine does
not count as a detection."""
WAIT_S = 20 * TIMEOUT_S
"""The time limit of a process that may wait for something, by the clock."""
NO_ANSWER, DIED = "no answer", "its process ended"
"""Detection texts of a mutant whose process exceeds a time limit (`NO_ANSWER` and the limit) or dies."""
ERRORS = {
    "survivors": "SURVIVES",
    "stale": "UNUSED REASON in mutants/equivalent.py:",
    "unsound": "FALSE ALARM on the unchanged entry:",
}
"""Keys of a summary that are errors, and their labels in the table."""


def detect(mutant: Mutant, checks: Checks) -> str:
    """Return the failed check or the exception that detects the mutant, or an empty text.

    The mutant stays in this process's catalogue.
    """
    try:
        mutant.apply()
        failed = next((check for check in checks() if not check.passed), None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{failed.claim}: {failed.result}" if failed else ""


def judge(cases: list[tuple[Mutant, Checks]], workers: int = 2) -> list[str]:
    """Return the detection text of each mutant; each mutant runs in a process of its own."""
    context = multiprocessing.get_context("fork")
    detections = [""] * len(cases)
    waiting = list(enumerate(cases))[::-1]
    running: dict[Any, tuple[int, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            number, (mutant, checks) = waiting.pop()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_detect_in_child, args=(sender, mutant, checks))
            process.start()
            sender.close()
            running[receiver] = number, process, time.monotonic() + WAIT_S
        ready = wait(list(running), timeout=1)
        for pipe, (number, process, deadline) in list(running.items()):
            if pipe in ready:
                try:
                    detections[number] = pipe.recv()
                except EOFError:
                    process.join()
                    has_no_time = process.exitcode == -signal.SIGXCPU
                    detections[number] = f"{NO_ANSWER} in {TIMEOUT_S} s" if has_no_time else DIED
            elif time.monotonic() > deadline:
                process.kill()
                detections[number] = f"{NO_ANSWER} in {WAIT_S} s"
            else:
                continue
            process.join()
            pipe.close()
            del running[pipe]
    return detections


def _detect_in_child(pipe: Any, mutant: Mutant, checks: Checks) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (TIMEOUT_S, TIMEOUT_S + 1))
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
        torch.set_num_threads(1)
        pipe.send(detect(mutant, checks))


def summarise(entry: str, mutants: list[Mutant], detections: list[str]) -> dict[str, Any]:
    """Return counts, and errors by the keys of `ERRORS`."""
    pairs = list(zip(mutants, detections, strict=True))
    alive = [mutant.text for mutant, detection in pairs if not detection and mutant.text != UNCHANGED]
    reasons = [text for owner, text in EQUIVALENT if owner == entry]
    survivors = [text for text in alive if text not in reasons]
    count = sum(mutant.text != UNCHANGED for mutant in mutants)
    return {
        "entry": entry, "mutants": count, "killed": count - len(alive),
        "no_answer": sum(detection.startswith(NO_ANSWER) for detection in detections), "died": detections.count(DIED),
        "survived": len(survivors), "equivalent": len(alive) - len(survivors), "survivors": survivors,
        "unsound": [detection for mutant, detection in pairs if detection and mutant.text == UNCHANGED],
        "stale": [text for text in reasons if text not in alive],
    }  # fmt: skip


def table_line(summary: dict[str, Any]) -> str:
    counts = f"{summary['mutants']:>8} {summary['killed']:>8} {summary['survived']:>8} {summary['equivalent']:>10}"
    errors = [f"  {label} {text}" for key, label in ERRORS.items() for text in summary.get(key, ())]
    by_process = summary["no_answer"], summary["died"]
    if any(by_process) or "survivors" not in summary:  # the sum always has these numbers
        counts += f"  (killed by a timeout of {TIMEOUT_S} s: {by_process[0]}, by a dead process: {by_process[1]})"
    return "\n".join([f"{summary['entry']:<28} {counts}", *errors])
