"""`normlab compare`: everything that is known of some runs, side by side, in one page that stands alone."""
