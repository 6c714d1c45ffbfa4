"""The parts of `scripts/mutate_catalogue.py`: mutants, and the checks that detect them."""
