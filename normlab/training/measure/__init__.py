"""The computation of statistics, in a training step and in passes between steps."""
