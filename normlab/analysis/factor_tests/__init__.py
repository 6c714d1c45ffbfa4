"""The tests over the factors of a table, for `normlab summarize --test`: one class each."""
