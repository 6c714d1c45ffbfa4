"""A trained run, loaded from its folder: its model, samples of it, and its export."""
