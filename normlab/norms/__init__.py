"""Norms, one file each. `base` holds the contract and the registry; nothing is imported here."""
