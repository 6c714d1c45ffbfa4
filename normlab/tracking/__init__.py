"""Sinks: where a run's numbers go. The local record is the source of truth; W&B and the console mirror it."""
