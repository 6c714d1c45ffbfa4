"""Pages that stand alone: one HTML file that opens from a disk, and asks nothing of any network."""
