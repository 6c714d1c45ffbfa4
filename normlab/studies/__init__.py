"""Studies: claims of the field, tested with a criterion that is fixed before the runs; `base` has the contract."""
