"""Signal propagation at initialisation: its measurement, and its table and page."""
