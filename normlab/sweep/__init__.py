"""Sweeps: a plan of runs, packed into processes, and the supervisor that sees them through."""
