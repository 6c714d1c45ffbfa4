"""Sweeps: plan the runs, group them into packs, and train each pack in a separate process."""
