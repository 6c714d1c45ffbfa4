"""Placements: the sites of the norms, and how sub-layers are added to the residual stream."""
