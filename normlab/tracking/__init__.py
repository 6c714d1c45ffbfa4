"""The console, which prints the numbers of a run, and the process that sends its record to W&B."""
