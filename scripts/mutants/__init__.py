"""Mutants of the catalogue and the checks that detect them: the parts of `scripts/mutate_catalogue.py`."""
