"""Optimisers: their options, and their updates of a single run and of stacked runs."""
