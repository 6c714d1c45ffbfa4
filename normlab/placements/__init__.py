"""Placements: where the norms stand, and how a sub-layer's output joins the residual stream."""
