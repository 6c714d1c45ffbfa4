"""Set how long the threads of torch's CPU kernels spin at a barrier, before torch is imported."""

import os

SPIN_COUNT = 2000
"""Iterations that a thread spins at a barrier before it sleeps: some tens of microseconds.

libgomp's default, 300,000, is milliseconds. On a busy machine, spinning threads then occupy the core that the thread
they wait for needs. A smaller count costs time on an idle machine.
"""

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""Environment variables that set how threads wait; libgomp reads them once, when it is loaded."""


def limit_spinning() -> None:
    """Set `GOMP_SPINCOUNT`, unless the environment already sets how threads wait.

    Child processes inherit the setting. The setting has no effect after torch is loaded, or with another OpenMP library
    than libgomp.
    """
    if not any(name in os.environ for name in VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


def wait_policy() -> str:
    """Return the setting in the environment as `NAME=value`, or "default" if there is none."""
    return " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ) or "default"
