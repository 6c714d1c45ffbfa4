"""Checks that the trained computation is the defined one: what `normlab verify` runs.

Every check computes in float64 on the CPU, on small models. No run imports this package for its numbers; a run only
stores the fingerprint of its block.
"""
