"""What every package uses: errors, options, parsing, plugins. Imports no package of normlab."""
