"""Studies: claims of the field, tested with a criterion that is on record; `base` has the contract."""
