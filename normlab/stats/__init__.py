"""The statistics that a run measures: what each is, and how its values leave the step. Start at `registry`."""
