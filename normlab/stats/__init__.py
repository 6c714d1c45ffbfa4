"""What is measured inside a run: each statistic in one place, and how its values leave the step. See `statistic`."""
