"""Statistics: what each one computes from which tensor, and the form of their values."""
