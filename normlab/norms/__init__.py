"""Norms, one file each; `base` has the contract and the registry."""
