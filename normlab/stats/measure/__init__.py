"""The computation of statistics: in a training step, in passes between steps, and at initialisation."""
