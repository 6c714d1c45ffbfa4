"""How the threads of torch's CPU kernels wait for each other. Must be decided before torch is loaded."""

from __future__ import annotations

import os

SPIN_COUNT = 2000
"""Turns that a thread spins at a barrier before it sleeps: some tens of microseconds.

libgomp's own 300,000 (milliseconds) keep a core from the thread that everyone waits for as soon as another process
wants a core too. Fewer turns than this cost time on an idle machine; `scripts/bench_neighbour.py` shows both.
"""

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Where a user says how threads wait; libgomp reads them once, when it is loaded."""


def limit_spinning() -> None:
    """Have threads sleep soon after they reach a barrier, unless the environment already says how they wait.

    Child processes inherit the setting. It has no effect once torch is loaded, nor on an OpenMP other than libgomp.
    """
    if not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def wait_policy() -> str:
    """Return the setting that is in the environment, as `NAME=value`; "default" if there is none."""
    return " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ) or "default"
