"""The record: one folder per run, with one writer. Reading needs neither torch nor W&B."""
