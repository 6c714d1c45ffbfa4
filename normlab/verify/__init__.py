"""The checks of `normlab verify`: norms, placements and init rules compute what their sources define.

Every check computes in float64 on the CPU, on small models. Training does not use this package.
"""
