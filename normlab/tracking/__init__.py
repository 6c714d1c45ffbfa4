"""Trackers: the console and W&B. They mirror the record of a run, which is the source of truth."""
