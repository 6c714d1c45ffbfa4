"""Training: the step, the optimiser, the loop, checkpoints."""
