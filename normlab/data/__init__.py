"""Text, tokens and batches. A batch is a pure function of (data.seed, step)."""
