"""The parts of `scripts/prove/mutate_catalogue.py`: mutants, and the checks that detect them."""
