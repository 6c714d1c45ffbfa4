"""The version of normlab."""

__version__ = "0.1.0"
