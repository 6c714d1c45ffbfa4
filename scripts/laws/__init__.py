"""The measurements and the laws of `scripts/init_laws.py`."""
