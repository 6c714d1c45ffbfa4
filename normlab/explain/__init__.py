"""`normlab explain`: a page that applies each norm to an editable matrix and draws each placement's block."""
