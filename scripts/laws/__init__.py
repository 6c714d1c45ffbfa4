"""The measurements, the laws and the earlier claims of `scripts/init_laws.py`."""
