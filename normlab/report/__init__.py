"""What is made of the record: summaries and comparisons. Reads the store and nothing else."""
