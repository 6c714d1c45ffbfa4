"""The configuration of runs and sweeps: its schema, and its composition by Hydra."""
