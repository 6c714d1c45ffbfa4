"""`normlab compare`: runs made into a page that answers which is better, and why."""
