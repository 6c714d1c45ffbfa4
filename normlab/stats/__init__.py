"""The statistics of a run: definitions (`registry`), arrays and computation (`measure`)."""
