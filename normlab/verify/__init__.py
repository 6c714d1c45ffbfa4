"""The checks of `normlab verify`, which compare the trained computation with its sources.

The checks compute on small models, on the CPU, and compare with float64; that of the compiled block (`compiled.py`) runs
on the device of a run. Training does not use this package.
"""
