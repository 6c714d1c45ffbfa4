"""`python -m normlab`."""

from normlab.cli import main

main()
