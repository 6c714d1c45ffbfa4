"""The record: one folder a run, one writer. Reading it needs neither torch nor W&B."""
