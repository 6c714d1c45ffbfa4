"""What sees each mutant, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import wait
from typing import Any

import torch

from mutants.mutant import Checks, Mutant

SECONDS = 60
"""A mutant's checks may take so long."""
NO_ANSWER, DIED = "no answer", "its process ended"
"""What begins the text of a mutant that no check saw, but that is not alive."""


def seen_by(mutant: Mutant, checks: Checks) -> str:
    """What sees the mutant; an empty text where nothing does. Breaks this process's catalogue."""
    try:
        mutant.apply()
        failed = next((check for check in checks() if not check.passed), None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{failed.check}: {failed.seen}" if failed else ""


def judge(cases: list[tuple[Mutant, Checks]], workers: int = 2) -> list[str]:
    """What sees each mutant, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    found = [""] * len(cases)
    waiting = list(enumerate(cases))[::-1]
    running: dict[Any, tuple[int, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            number, (mutant, checks) = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_tell, args=(theirs, mutant, checks))
            process.start()
            theirs.close()
            running[ours] = number, process, time.monotonic() + SECONDS
        ready = wait(list(running), timeout=1)
        for pipe, (number, process, deadline) in list(running.items()):
            if pipe in ready:
                try:
                    found[number] = pipe.recv()
                except EOFError:
                    found[number] = DIED
            elif time.monotonic() > deadline:
                process.kill()
                found[number] = f"{NO_ANSWER} in {SECONDS} s"
            else:
                continue
            process.join()
            pipe.close()
            del running[pipe]
    return found


def _tell(pipe: Any, mutant: Mutant, checks: Checks) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        torch.set_num_threads(1)
        pipe.send(seen_by(mutant, checks))
