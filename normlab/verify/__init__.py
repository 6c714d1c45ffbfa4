"""The checks of `normlab verify`, which compare the trained computation with its sources.

Every check computes in float64 on the CPU, on small models. Training does not use this package.
"""
