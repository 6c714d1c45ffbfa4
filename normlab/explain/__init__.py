"""`normlab explain`: a page with all norms, an editable matrix and the block diagrams."""
