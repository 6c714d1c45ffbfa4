"""`normlab compare`: one self-contained page that shows runs side by side."""
