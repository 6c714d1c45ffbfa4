"""The configuration of runs and sweeps: the schema, and composition by Hydra."""
