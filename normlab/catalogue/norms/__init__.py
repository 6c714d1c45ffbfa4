"""Norms, each with its options; `base` has the contract and the registry."""
