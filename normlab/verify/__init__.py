"""The proof that what is trained is what is defined: the checks behind `normlab verify`.

Everything here computes in float64 on the CPU, on models so small that the whole catalogue takes a minute or two.
Nothing here is part of a run's numbers.
"""
