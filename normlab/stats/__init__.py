"""The statistics that a run measures: their definitions (`registry`), their arrays and their computation."""
