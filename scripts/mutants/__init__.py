"""How the catalogue is broken, and what is seen of it: the parts of `scripts/mutate_catalogue.py`."""
