"""The studies of the package, one file each: a question, grids of runs, claims and their controls."""
