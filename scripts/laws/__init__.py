"""What `scripts/init_laws.py` measures, the laws that it holds against that, and the claims that it compares."""
