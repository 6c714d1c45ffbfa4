"""Reports: tables, summaries and comparison pages. Of a run they read only its record in the store."""
