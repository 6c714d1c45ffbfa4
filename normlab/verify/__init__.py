"""The checks of `normlab verify`, which compare the trained computation with its sources.

Every check computes with small models in float64 on the CPU, except that of the compiled block (`compiled.py`), which
compares the device of a run with float64. Training does not use this package.
"""
