"""`normlab explain`: one page that shows what each norm does to a matrix, and where each placement puts its norms."""
